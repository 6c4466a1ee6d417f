"""Our models in transformers: `import mosar.integrations.hf`, and the Auto classes know them.

import mosar.integrations.hf
model = AutoModelForCausalLM.from_pretrained(folder)
model.set_routing("sparse")
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ModuleNotFoundError(
        'this needs transformers, which is not installed: pip install "mosar[hf]"', name=error.name
    ) from None

from mosar.integrations.hf.cache import MosarCache
from mosar.integrations.hf.config import MosarDecoderConfig
from mosar.integrations.hf.model import MosarCausalLMOutput, MosarForCausalLM
from mosar.integrations.hf.training import RoutingCostWarmup

__all__ = [
    "MosarCache",
    "MosarCausalLMOutput",
    "MosarDecoderConfig",
    "MosarForCausalLM",
    "RoutingCostWarmup",
]

AutoConfig.register(MosarDecoderConfig.model_type, MosarDecoderConfig, exist_ok=True)
AutoModelForCausalLM.register(MosarDecoderConfig, MosarForCausalLM, exist_ok=True)
# By this table Trainer knows whose labels it must shift itself, when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(
    MosarDecoderConfig.model_type, MosarForCausalLM.__name__
)
