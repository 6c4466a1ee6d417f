"""Our models in transformers: `import mosar.integrations.hf`, and the Auto classes know them.

import mosar.integrations.hf
model = AutoModelForCausalLM.from_pretrained(folder)
model.set_routing("sparse")
"""

from contextlib import suppress
from importlib import import_module

from mosar.lazy import install_line

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ModuleNotFoundError(
        f"this needs transformers, which is not installed: {install_line('hf')}", name=error.name
    ) from None

from mosar.integrations.hf.cache import MosarCache
from mosar.integrations.hf.config import MosarDecoderConfig
from mosar.integrations.hf.model import (
    MosarCausalLMOutput,
    MosarForCausalLM,
    MosarForSequenceClassification,
    MosarModel,
)
from mosar.integrations.hf.training import RoutingCostWarmup

__all__ = [
    "MosarCache",
    "MosarCausalLMOutput",
    "MosarDecoderConfig",
    "MosarForCausalLM",
    "MosarForSequenceClassification",
    "MosarModel",
    "RoutingCostWarmup",
]

AutoConfig.register(MosarDecoderConfig.model_type, MosarDecoderConfig, exist_ok=True)
for auto_class, model_class in (
    (AutoModel, MosarModel),
    (AutoModelForCausalLM, MosarForCausalLM),
    (AutoModelForSequenceClassification, MosarForSequenceClassification),
):
    auto_class.register(MosarDecoderConfig, model_class, exist_ok=True)
# By this table Trainer knows whose labels it must shift itself, when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(
    MosarDecoderConfig.model_type, MosarForCausalLM.__name__
)
# Our projections have the names of Gemma 2's, and so PEFT adapts the same where none are named.
with suppress(ImportError):
    for name, targets in vars(import_module("peft.utils.constants")).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and "gemma2" in targets:
            targets.setdefault(MosarDecoderConfig.model_type, targets["gemma2"])
