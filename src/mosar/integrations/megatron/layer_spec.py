"""A layer spec of Megatron with its core attention replaced by MoSAR; the rest stays as it is."""

# Megatron is an extra.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mosar.core.config import MoSARConfig
from mosar.integrations.megatron.core_attention import MoSARCoreAttention

Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules)


def mosar_layer_spec(
    spec: Spec, config: TransformerConfig, mosar: MoSARConfig, **options: Any
) -> Spec:
    """`spec` of a layer (or of a block of layers), a copy with MoSAR in its self-attention.

    `config` is the one the model is built from. The options are those of `MoSARCoreAttention`:
    softcap, query_pre_attn_scalar, routing, router_queries, start_regimes, start_logit and impl.
    """
    num_kv_heads = config.num_query_groups
    assert num_kv_heads is not None, "TransformerConfig sets it"
    params = {"mosar": mosar, "num_kv_heads": num_kv_heads, **options}
    core = ModuleSpec(module=MoSARCoreAttention, params=params)
    if isinstance(spec, TransformerBlockSubmodules):
        return replace(spec, layer_specs=[_with_core(s, core) for s in spec.layer_specs or []])
    return _with_core(spec, core)


def _with_core(spec: Any, core: ModuleSpec) -> Any:
    attention = getattr(getattr(spec, "submodules", None), "self_attention", None)
    if not hasattr(getattr(attention, "submodules", None), "core_attention"):
        raise ValueError(
            "spec must be a layer with self_attention.core_attention, as "
            f"get_gpt_layer_local_spec gives it, got {type(spec).__name__}"
        )
    assert attention is not None
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    return replace(spec, submodules=replace(spec.submodules, self_attention=attention))
