"""A decoder-only language model in the style of Gemma 2; variants differ only in the geometry.

    x = sqrt(hidden) E[tokens]
    x = x + norm(attention(norm(x)));   x = x + norm(W_d(gelu(W_g norm(x)) * W_u norm(x)))
    logits = cap(norm(x) E^T),          cap(s) = c tanh(s / c)

Every norm is RMSNorm with weight 1 + w in float32. Names and arithmetic follow transformers'
Gemma2ForCausalLM, so that its weights give the same logits (tests/model/test_gemma2.py).

Shapes: B batch, T tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mosar.attention import ROUTINGS, Routing
from mosar.core.layout import can_check_values
from mosar.geometries import Attended, AttentionConfig, Geometry, LayerRouting
from mosar.kernels.elementwise import geglu
from mosar.model.cache import DenseCache, RegimeCache
from mosar.model.cache.regime import CACHE_OPTIONS
from mosar.model.config import ModelConfig
from mosar.model.norm import RMSNorm

# Positions, padding and segments of a call, as arguments of a geometry.
Placement = dict[str, Tensor | None]


class DecoderOutput(NamedTuple):
    """The result of a forward pass."""

    hidden: Tensor
    """[B, T, hidden] after the final norm; `Decoder.logits` reads it."""
    routings: list[LayerRouting]
    """One per layer; empty if the geometry has no routers."""
    prices: list[Tensor]
    """One per layer of a geometry without routers that has a price; see `Geometry.price`."""


class Decoder(nn.Module):
    """Tokens to hidden states, and hidden states to logits.

    The weights have torch's own initial values until `init_weights` or a checkpoint sets them.
    Build a large model under `torch.device("meta")`, then call `to_empty`.
    """

    def __init__(self, model: ModelConfig, attention: AttentionConfig):
        super().__init__()
        self.model_config, self.attention_config = model, attention
        self.embedding = TiedEmbedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model, attention, i) for i in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)

    def forward(
        self,
        tokens: Tensor,
        *,
        segment_ids: Tensor | None = None,
        valid: Tensor | None = None,
        routing: Routing = "soft",
        checkpoint_activations: bool = False,
        cache: RegimeCache | DenseCache | None = None,
    ) -> DecoderOutput:
        """tokens [B, T] of any length.

        segment_ids [B, T], runs of equal ids: tokens of different segments do not see each other,
        and positions restart in each segment. valid [B, T]: False for padding. No token sees
        padding, positions do not count it, and its own outputs are meaningless. routing: see
        `mosar_attention`; geometries without regimes ignore it. checkpoint_activations: store only
        the layers' inputs and recompute the rest in the backward pass. cache: from `new_cache`; the
        tokens follow those in the cache and are added to it; it carries no gradient.
        """
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"tokens must be integers [B, T], got {list(tokens.shape)} of {tokens.dtype}"
            )
        if segment_ids is not None:
            _check_segments(segment_ids, tokens)
        if cache is not None:
            check_cache(cache, self.attention_config, len(self.layers))
        if routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")
        x = self.embedding(tokens) * self.model_config.hidden_size**0.5
        placement = _placement(tokens, segment_ids, valid, cache)
        recompute = checkpoint_activations and torch.is_grad_enabled() and cache is None
        told = []
        for index, layer in enumerate(self.layers):
            run = partial(_recomputed, layer) if recompute else layer
            x, one = run(x, routing, placement, None if cache is None else cache[index])
            if one is not None:
                told.append(one)
        routed = self.attention_config.geometry_class.routed
        return DecoderOutput(self.norm(x), told if routed else [], [] if routed else told)

    def new_cache(self, routing: Routing = "sparse", **options: Any) -> RegimeCache | DenseCache:
        """An empty KV cache for `forward`; options are those of `RegimeLayerCache`.

        Geometries without regimes store every key; they take no routing and no options.
        """
        geometry = self.geometries[0]
        routing = geometry.executed(routing)
        return new_cache(self.model_config, geometry.settings_now, routing, **options)

    def begin_step(self, step: int, steps: int) -> None:
        """Sets the training step of all layers: the next one, or that of a checkpoint."""
        for geometry in self.geometries:
            geometry.begin_step(step, steps)

    @property
    def geometries(self) -> list[Geometry]:
        """One per layer."""
        return [cast(Any, layer).attention.geometry for layer in self.layers]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden_size] -> [..., vocab], by the embedding matrix, soft-capped."""
        project = partial(self.embedding, project=True)
        return capped_logits(project, hidden, self.model_config.final_softcap)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal weights and zero norms; each parameter has its own generator.

        A parameter's numbers depend only on the seed and its name, so the parameters that two
        variants share are equal to the bit.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"{name} has no storage yet: call to_empty(device=...) first")
            self.init_parameter(name, parameter, seed)

    @torch.no_grad()
    def init_parameter(self, name: str, values: Tensor, seed: int) -> None:
        """Fills `values` as `init_weights` fills the whole parameter of that name."""
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(values.device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        layer, found, own_name = name.partition(".geometry.")
        if found:
            geometry = self.get_submodule(f"{layer}.geometry")
            geometry.init_parameter(own_name, values, generator)  # pyright: ignore[reportCallIssue]
        elif values.dim() == 1:
            values.zero_()
        else:
            values.normal_(std=self.model_config.init_std, generator=generator)


class TiedEmbedding(nn.Embedding):
    """The token embedding, and the output head that is tied to it.

    Both uses go through `forward`, so that hooks that load a weight from another device or from
    disk work for both.
    """

    def forward(self, input: Tensor, project: bool = False) -> Tensor:
        """Tokens [...] -> [..., hidden]; with `project` hidden states [..., hidden] -> [..., V]."""
        return F.linear(input, self.weight) if project else super().forward(input)


class Layer(nn.Module):
    """Attention and feed-forward, each between two norms, each added to the stream."""

    def __init__(self, model: ModelConfig, attention: AttentionConfig, index: int = 0):
        super().__init__()
        size, eps = model.hidden_size, model.norm_eps
        self.pre_attention_norm = RMSNorm(size, eps)
        self.attention = Attention(model, attention, index)
        self.post_attention_norm = RMSNorm(size, eps)
        self.pre_ffn_norm = RMSNorm(size, eps)
        self.ffn = FeedForward(size, model.ffn_size)
        self.post_ffn_norm = RMSNorm(size, eps)

    def forward(
        self, x: Tensor, routing: Routing, placement: Placement, cache: Any = None
    ) -> Attended:
        attended, told = self.attention(self.pre_attention_norm(x), routing, placement, cache)
        x = x + self.post_attention_norm(attended)
        x = x + self.post_ffn_norm(self.ffn(self.pre_ffn_norm(x)))
        return x, told


class Attention(nn.Module):
    """Projections around a geometry."""

    def __init__(self, model: ModelConfig, attention: AttentionConfig, index: int = 0):
        super().__init__()
        self.head_dim = model.head_dim
        self.scale = model.query_pre_attn_scalar**-0.5
        self.softcap = model.attn_softcap
        query_size, key_size = (
            count * model.head_dim for count in (model.num_heads, model.num_kv_heads)
        )
        self.q_proj = nn.Linear(model.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, model.hidden_size, bias=False)
        self.geometry = attention.geometry_class(attention, model.head_shape._replace(layer=index))

    def forward(
        self, x: Tensor, routing: Routing, placement: Placement, cache: Any = None
    ) -> Attended:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, told = self.geometry(
            q,
            k,
            v,
            scale=self.scale,
            softcap=self.softcap,
            routing=routing,
            cache=cache,
            hidden=x,
            **placement,
        )
        return self.o_proj(out.flatten(-2)), told


class FeedForward(nn.Module):
    """GeGLU: a gated feed-forward with the tanh form of GELU."""

    def __init__(self, hidden_size: int, ffn_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


def new_cache(
    model: ModelConfig, attention: AttentionConfig, routing: Routing = "sparse", **options: Any
) -> RegimeCache | DenseCache:
    """See `Decoder.new_cache`."""
    if attention.geometry_class.routed:
        unknown = sorted(options.keys() - CACHE_OPTIONS)
        if unknown:
            raise ValueError(
                f"options of a cache are {', '.join(sorted(CACHE_OPTIONS))}; got {unknown[0]!r}"
            )
        config = attention.mosar_config(model.max_length)
        return RegimeCache(config, model.num_layers, routing=routing, **options)
    if options:
        raise ValueError(f"a cache without regimes has no options, got {sorted(options)}")
    return DenseCache(model.num_layers)


def check_cache(
    cache: RegimeCache | DenseCache, attention: AttentionConfig, num_layers: int
) -> None:
    """A ValueError for a cache of another model, or one whose layers disagree."""
    kind = RegimeCache if attention.geometry_class.routed else DenseCache
    if not isinstance(cache, kind) or len(cache) != num_layers:
        raise ValueError(
            f"cache must be a {kind.__name__} of {num_layers} layers, as new_cache makes "
            f"it, got {type(cache).__name__}"
            + (f" of {len(cache)}" if isinstance(cache, (RegimeCache, DenseCache)) else "")
        )
    if any(layer.slots != cache.slots for layer in cache):
        raise ValueError(
            "the layers of the cache have been given different tokens (was a forward pass "
            "interrupted?); reset() it"
        )


def capped_logits(project: Callable[[Tensor], Tensor], hidden: Tensor, cap: float | None) -> Tensor:
    """c tanh(project(hidden) / c); without a cap, the projection."""
    if cap is None:
        return project(hidden)
    # Divide the few hidden numbers instead of the many logits.
    return cap * torch.tanh(project(hidden / cap))


def _recomputed(layer: nn.Module, *args: Any) -> Attended:
    """A layer that keeps only its input and recomputes the rest in the backward pass."""
    return cast(Any, checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False))


def _placement(
    tokens: Tensor,
    segment_ids: Tensor | None,
    valid: Tensor | None,
    cache: RegimeCache | DenseCache | None,
) -> Placement:
    if segment_ids is not None:
        other = "a cache" if cache is not None else "valid" if valid is not None else None
        if other is not None:
            raise ValueError(f"segment_ids cannot be given with {other}: a row is then one text")
        return {"segment_ids": segment_ids}
    if valid is None and cache is None:
        return {}
    if valid is not None and (valid.shape != tokens.shape or valid.dtype != torch.bool):
        raise ValueError(
            f"valid must be bool {list(tokens.shape)} like tokens, "
            f"got {list(valid.shape)} of {valid.dtype}"
        )
    return {"key_positions": count_positions(tokens, valid, cache), "key_valid": valid}


def count_positions(
    tokens: Tensor, valid: Tensor | None, cache: RegimeCache | DenseCache | None
) -> Tensor:
    """Positions of tokens [B, T, ...] that count only valid tokens, from those in the cache on.

    Padding at the start of a row has the position of the row's first token.
    """
    ones = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    positions = (ones if valid is None else valid).cumsum(dim=1) - 1
    if cache is not None and cache.batch_size == len(tokens):
        positions = positions + cache.lengths.to(tokens.device)[:, None]
    return positions.clamp_min(0)


def _check_segments(segment_ids: Tensor, tokens: Tensor) -> None:
    if segment_ids.shape != tokens.shape:
        raise ValueError(
            f"segment_ids must have the shape of tokens, {list(tokens.shape)}, "
            f"got {list(segment_ids.shape)}"
        )
    if can_check_values(segment_ids):
        runs, segments = (
            (ids[:, 1:] != ids[:, :-1]).sum(dim=1)
            for ids in (segment_ids, segment_ids.sort(dim=1).values)
        )
        if not torch.equal(runs, segments):
            row = int((runs != segments).nonzero()[0])
            raise ValueError(
                f"each id in segment_ids must be one run, but in row {row} one comes back"
            )
