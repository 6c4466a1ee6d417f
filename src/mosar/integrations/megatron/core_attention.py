"""MoSAR as Megatron's `core_attention`: q, k, v after RoPE in, the heads' output out.

    routers read q and k of all ranks -> pi, the same on every rank -> this rank's heads attend

Shapes: T queries, S keys, B batch, H query heads and K key heads of this rank, D head dim.
"""

# Megatron is an extra.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from mosar.attention import ROUTINGS, attend
from mosar.core.bias import LabelBias, MixtureBias
from mosar.core.checks import check_counts
from mosar.core.choice_gradient import sample_queries
from mosar.core.config import MoSARConfig, check_config
from mosar.core.layout import can_check_values
from mosar.core.losses import expected_density, normalized_reach_cost
from mosar.core.outputs import LayerRouting, RouterOutput
from mosar.integrations.megatron.collectives import sum_gradients
from mosar.integrations.megatron.objective import MoSARObjectiveState
from mosar.integrations.megatron.parallel_router import ParallelRouter, local_groups, route

Routing = Literal["soft", "top1", "sparse", "hard"]
"""Those of the operators; "hard" executes "sparse", and its routers learn what other choices would
have changed."""


class MoSARCoreAttention(MegatronModule):
    """Causal self-attention with routed geometry; `mosar_layer_spec` puts it into a layer."""

    has_reach_cost = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        mosar: MoSARConfig,
        num_kv_heads: int,
        softcap: float | None = None,
        query_pre_attn_scalar: float | None = None,
        routing: Routing = "soft",
        router_queries: int | None = None,
        start_regimes: Sequence[str] = (),
        start_logit: float = 1.0,
        impl: str = "auto",
    ):
        """The first arguments are Megatron's.

        num_kv_heads: key/value heads of the whole layer. Megatron's own config does not say it here
        where there are fewer than ranks. softcap: c of c tanh(s/c), Gemma 2 has 50.
        query_pre_attn_scalar: scores are divided by its square root; by default Megatron's
        `softmax_scale` holds. routing, impl: see `mosar_attention`; "hard" trains on what "sparse"
        executes, with the routers' gradient from `router_queries` of a sequence (None: all) once
        the layer has a `MoSARObjectiveState`, which knows the step. start_regimes: the regime that
        each routing group starts in, in turn, by `start_logit`; (): routing starts uniform.
        """
        super().__init__(config=config)
        check_config(mosar)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse_unsupported(config, attention_type, attn_mask_type, dropout)
        self._check_kv_heads(num_kv_heads)
        head_dim = config.kv_channels
        assert head_dim is not None
        self.layer_number, self.mosar = max(1, layer_number), mosar
        self.softcap, self.impl, self.router_queries = softcap, impl, router_queries
        if router_queries is not None:
            check_counts(self, {"router_queries": 1})
        self.set_routing(routing)
        if query_pre_attn_scalar is not None:
            self.scale = float(query_pre_attn_scalar) ** -0.5
        else:
            self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.window = _window(config, self.layer_number)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        if config.init_model_with_meta_device:
            device = "meta"
        options = {"device": device, "dtype": config.params_dtype}
        options |= {"starts": start_regimes, "start_logit": start_logit}
        heads = config.num_attention_heads
        self.query_router = ParallelRouter(heads, head_dim, mosar, self.tp_group, **options)
        self.key_router = ParallelRouter(num_kv_heads, head_dim, mosar, self.tp_group, **options)
        self.objective: MoSARObjectiveState | None = None
        self.last_routing: tuple[RouterOutput, RouterOutput] | None = None
        """What queries and keys chose in the last pass, detached; the same on all ranks."""

    def _check_kv_heads(self, num_kv_heads: int) -> None:
        ranks, groups = self.tp_group.size(), self.config.num_query_groups
        if groups != (num_kv_heads if num_kv_heads >= ranks else ranks):
            raise ValueError(
                f"num_kv_heads must be num_query_groups of the model's config, got {num_kv_heads} "
                f"where a layer has {groups} on {ranks} tensor-parallel ranks"
            )

    def set_routing(self, routing: Routing) -> None:
        """ "soft", "top1", "sparse" or "hard", from the next pass on."""
        known = (*ROUTINGS, "hard")
        if routing not in known:
            raise ValueError(f"routing must be one of {known}, got {routing!r}")
        self.routing: Routing = routing

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [T, B, H, D], key and value [S, B, K, D], after RoPE -> [T, B, H * D].

        Fewer queries than keys are the last ones. Packed sequences ("thd") are [T, H, D] each.
        `attention_mask` must be None or causal: which pairs attend is the routing's choice.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported: the bias is that of the regimes")
        segment_ids = None
        packed = packed_seq_params is not None
        if packed:
            segment_ids = _segments(packed_seq_params, len(query))
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        else:
            _check_mask(attention_mask, attn_mask_type, len(query), len(key))
        routed_q, routed_k = route(self.query_router, self.key_router, query, key)
        self.last_routing = _detached(routed_q), _detached(routed_k)
        # Each rank's heads add to the gradient of what all ranks share.
        bias = self._bias(LayerRouting(routed_q, routed_k)).through(
            lambda of_q, of_k: sum_gradients((of_q, of_k), self.tp_group)
        )
        if self.mosar.routing_groups > 1:
            bias = bias.of_groups(local_groups(self.key_router.groups_of_heads))
        q_BHTD, k_BKSD, v_BKSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out_BHTD = attend(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            bias,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            segment_ids=segment_ids,
            impl=self.impl,
        )
        out = out_BHTD.permute(2, 0, 1, 3).flatten(2)
        if self.objective is not None and len(query) == len(key):
            pi_q, pi_k = routed_q.probabilities, routed_k.probabilities
            if self.objective.cost_of == "pairs":
                cost = expected_density(
                    *(pi_q, pi_k, self.mosar), segment_ids=segment_ids, window=self.window
                )
            else:
                cost = normalized_reach_cost(pi_q, pi_k, self.mosar)
            out = self.objective.collect(out, cost, self.layer_number)
        return out.squeeze(1) if packed else out

    def _bias(self, routed: LayerRouting) -> LabelBias | MixtureBias:
        """What the operators add to the scores; under "hard", the routers learn if they can."""
        if self.routing != "hard":
            return routed.bias(self.mosar, self.routing)
        if not (torch.is_grad_enabled() and routed.query.probabilities.requires_grad):
            return routed.bias(self.mosar, "sparse")
        queries, length = None, routed.query.probabilities.shape[-2]
        if self.objective is not None:
            # The same on every rank, and where activations are recomputed.
            step, layer = self.objective.step, self.layer_number
            queries = sample_queries(self.router_queries, length, step=step, layer=layer)
        if queries is not None:
            queries = queries.to(routed.query.probabilities.device)
        return routed.learned_bias(self.mosar, queries)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict[str, Any]:
        """Router weights for `dist_checkpointing`: W1 is split by heads, the rest is the same.

        A checkpoint of one tensor-parallel size loads at any other.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        dp_cp_group = metadata["dp_cp_group"]
        sharded: dict[str, Any] = {}
        for name, router in (("query_router", self.query_router), ("key_router", self.key_router)):
            weights = dict(router.state_dict(prefix="", keep_vars=True))
            weight1 = weights.pop("weight1")
            key = f"{prefix}{name}."
            sharded |= make_sharded_tensors_for_checkpoint(
                weights,
                key,
                sharded_offsets=sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=dp_cp_group,
            )
            sharded[f"{key}weight1"] = ShardedTensor.from_rank_offsets(
                f"{key}weight1",
                weight1,
                *sharded_offsets,
                (len(sharded_offsets), router.shard, router.shards),
                replica_id=(0, router.copy, dp_cp_group.rank()),
                prepend_axis_num=len(sharded_offsets),
            )
        return sharded


def _refuse_unsupported(
    config: TransformerConfig, attention_type: str, mask_type: AttnMaskType, dropout: float
) -> None:
    """What would change the numbers silently is refused before the first weight is made."""
    for wrong, what, remedy in (
        (attention_type != "self", f"{attention_type} attention", "use it for self-attention"),
        (mask_type != AttnMaskType.causal, f"attn_mask_type {mask_type.name}", "use causal"),
        (bool(dropout), f"attention_dropout={dropout}", "set it to 0"),
        (config.context_parallel_size > 1, "context parallelism", "set context_parallel_size=1"),
        (isinstance(config, MLATransformerConfig), "multi-latent attention", "use GQA or MHA"),
        (
            getattr(config, "softmax_type", "vanilla") != "vanilla",
            f"softmax_type={getattr(config, 'softmax_type', None)!r}",
            "set it to 'vanilla'",
        ),
        (getattr(config, "qk_clip", False), "qk_clip", "set it to False"),
        # It would replace this module at inference.
        (getattr(config, "flash_decode", False), "flash_decode", "set it to False"),
    ):
        if wrong:
            raise ValueError(f"MoSAR does not support {what}: {remedy}")


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """The largest distance that a layer with a sliding window sees; None without one."""
    skip = getattr(config, "window_attn_skip_freq", None)
    size = getattr(config, "window_size", None)
    if not is_layer_window_attention(size, skip, layer_number):  # pyright: ignore[reportArgumentType]
        return None
    assert size is not None
    return None if size[0] < 0 else size[0]


def _check_mask(
    mask: Tensor | None, mask_type: AttnMaskType | None, queries: int, keys: int
) -> None:
    """The causal mask is the only one; Megatron gives none to a single query at inference."""
    if mask_type not in (None, AttnMaskType.causal) and not (
        mask_type == AttnMaskType.no_mask and queries == 1
    ):
        raise ValueError(f"attn_mask_type must be causal, got {mask_type.name}")
    if mask is None or queries == 1 or not can_check_values(mask):
        return
    causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device)
    causal = causal.triu(keys - queries + 1)
    if mask.shape[-2:] != causal.shape or not bool((mask == causal).all()):
        raise ValueError(
            "attention_mask must be None or causal (True above the diagonal); for several texts in "
            "a row use packed_seq_params"
        )


def _segments(packed: Any, length: int) -> Tensor:
    """Which sequence each of the packed tokens belongs to, [1, T]."""
    if packed.qkv_format != "thd":
        raise ValueError(f"packed_seq_params.qkv_format must be 'thd', got {packed.qkv_format!r}")
    ends = packed.cu_seqlens_q
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        other = getattr(packed, name)
        if other is not None and not torch.equal(other, ends):
            raise ValueError(f"packed_seq_params.{name} must be None or equal to cu_seqlens_q")
    positions = torch.arange(length, device=ends.device)
    return torch.bucketize(positions, ends[1:].long(), right=True)[None]


def _detached(routed: RouterOutput) -> RouterOutput:
    return RouterOutput(routed.logits.detach(), routed.probabilities.detach())
