"""The KV cache that drops exactly the keys that no later query can read.

Under sparse routing, no query reads a key of regime n farther away than max_m delta_mn. The cache
stores post-positional keys and values, unexpanded, in one list per (row, routing group, regime),
and one more list for sinks. It drops a key when the next query is farther away than that, so no
output changes. One step of decoding reads one slice of each list. Under soft and top-1 routing
every pair counts: all keys are stored in order, and the dense operators read them.

    cache.update(k, v, labels_k)         # the next token, or a chunk of any size
    out = cache.attend(q, labels_q)      # its queries over all tokens so far

A chunk is not copied until its queries have attended: k and v must not be changed in place between
the two calls.

Shapes: B rows, Hq query heads, Hkv key/value heads, Gr routing groups, T queries, S tokens,
D head dim, R regimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mosar.attention import ROUTINGS
from mosar.core.config import MoSARConfig, check_config
from mosar.core.inputs import DTYPES, check_scores
from mosar.core.layout import resolve_layout
from mosar.geometries import LayerRouting
from mosar.kernels.decode import IMPLEMENTATIONS
from mosar.model.cache.layer import LayerCache, ModelCache, enter_graphs
from mosar.model.cache.ordered_keys import OrderedKeys
from mosar.model.cache.regime_keys import RegimeKeys
from mosar.model.cache.tokens import Tokens, check_grid, check_heads, check_routing

# The options of a layer's cache besides its routing.
CACHE_OPTIONS = frozenset({"evict", "crop_margin", "window", "dtype", "impl"})


class RegimeLayerCache(LayerCache):
    """The cache of one attention layer; the first tokens set rows, heads, groups and dtype.

    routing: "sparse" stores lists by regime; "soft" and "top1" store all keys in order.
    evict: under sparse routing, drop keys that are out of reach. crop_margin: keep them for this
    many more positions, so that `crop` can go back as far. window: as in `mosar_attention`. dtype:
    of storage; None: that of the first keys. impl: "auto" | "native" (CPU; float32, bfloat16,
    float16) | "triton" (GPU; the same) | "tiled" (torch operators; formerly "torch"); under soft
    and top-1 routing the operators choose by the same rule.
    """

    def __init__(
        self,
        config: MoSARConfig,
        *,
        routing: str = "sparse",
        evict: bool = True,
        crop_margin: int = 0,
        window: float | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ):
        check_config(config)
        _check_routing(routing)
        if isinstance(crop_margin, bool) or not isinstance(crop_margin, int) or crop_margin < 0:
            raise ValueError(f"crop_margin must be an integer >= 0, got {crop_margin!r}")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {[str(d) for d in DTYPES]}, got {dtype}")
        impl = "tiled" if impl == "torch" else impl
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
        self.config, self.routing, self.impl = config, routing, impl
        self.evict, self.crop_margin, self.dtype = bool(evict), crop_margin, dtype
        self.window = resolve_layout(1, 1, 1, window=window).window
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._stored_dtype = self.dtype
        # Whether positions were given for the tokens so far.
        self._placed: bool | None = None
        self._checked_tokens = self._checked_queries = ()

    @property
    def regime_counts(self) -> dict[str, Tensor]:
        """The number of stored keys of each regime and, if there are any, of "sinks", [B, Gr]."""
        names = [regime.name for regime in self.config.regimes]
        names += ["sinks"] if self.config.num_sinks else []
        if self._store is None:
            counts = torch.zeros(0, 1, len(names), dtype=torch.int64)
        else:
            counts = self._store.counts
        return dict(zip(names, counts.unbind(dim=-1), strict=True))

    def update(
        self,
        k: Tensor,
        v: Tensor,
        labels_k: Tensor | None = None,
        *,
        pi_k: Tensor | None = None,
        key_positions: Tensor | None = None,
        key_valid: Tensor | None = None,
        of_key: Tensor | None = None,
    ) -> None:
        """Appends k, v [B, Hkv, S, D] with labels_k [B, S] or [B, Gr, S].

        pi_k [B, S, R] or [B, Gr, S, R] is for soft routing, where labels_k may be left out.
        key_positions [B, S]: by default 0, 1, 2, ... over all calls; give them in all calls or in
        none. key_valid [B, S]: False for padding. of_key [B, Hq, S] float64: what is added to every
        pair of a key, for sparse routing; always or never, and where it is a running sum, from
        `last_of_key` on.
        """
        pi_k = pi_k if self.routing == "soft" else None
        given = Tokens(k, v, labels_k, pi_k, key_positions, key_valid, of_key=of_key)
        if (traits := (self._rows, *_traits(given))) != self._checked_tokens:
            self._check_given(given)
        dtype = self._stored_dtype or k.dtype
        if dtype != k.dtype:
            k, v = k.to(dtype), v.to(dtype)
        if pi_k is not None:
            pi_k = _grouped(pi_k, 4)
            labels_k = pi_k.argmax(dim=-1) if labels_k is None else labels_k
        positions = None if key_positions is None else key_positions.long()
        labels = _grouped(labels_k).long()
        self._append(Tokens(k, v, labels, pi_k, positions, key_valid, self._slots, None, of_key))
        self._placed, self._stored_dtype = key_positions is not None, dtype
        self._checked_tokens = traits

    @property
    def last_of_key(self) -> Tensor | None:
        """[B, Hq], what is added to the pairs of the newest key; None: nothing so far."""
        return None if self._store is None else self._store.last_of_key

    def attend(
        self,
        q: Tensor,
        labels_q: Tensor | None = None,
        query_positions: Tensor | None = None,
        *,
        pi_q: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of q [B, Hq, T, D] over all tokens so far, as `mosar_attention` defines it.

        labels_q [B, T] or [B, Gr, T]; under soft routing pi_q [B, T, R] or [B, Gr, T, R].
        query_positions [B, T]: by default those of the last T tokens. Returns [B, Hq, T, D] in the
        dtype of q and, with `return_lse`, the log-sum-exp [B, Hq, T].
        """
        if self._store is None:
            raise ValueError("the cache is empty: call update before attend")
        given = (q, labels_q, pi_q, query_positions, scale, softcap)
        if (traits := (self._rows, *_traits(given))) != self._checked_queries:
            self._check_queries(*given)
            self._checked_queries = traits
        choice = _grouped(pi_q, 4) if self.routing == "soft" else _grouped(labels_q).long()
        positions = None if query_positions is None else query_positions.long()
        out, lse = self._store.attend(q, choice, positions, scale=scale, softcap=softcap)
        return (out, lse) if return_lse else out

    def attend_routed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        routed: LayerRouting,
        *,
        key_positions: Tensor | None = None,
        key_valid: Tensor | None = None,
        of_key: Tensor | None = None,
        **scores: Any,
    ) -> Any:
        """Adds new tokens with their routing, and attends with their queries."""
        placement = {"key_positions": key_positions, "key_valid": key_valid}
        self.update_routed(k, v, routed, of_key=of_key, **placement)
        pi_q = routed.query.probabilities if self.routing == "soft" else None
        return self.attend(q, routed.query.labels, key_positions, pi_q=pi_q, **scores)

    def update_routed(self, k: Tensor, v: Tensor, routed: LayerRouting, **placement: Any) -> None:
        """`update` with the output of the key router."""
        pi_k = routed.key.probabilities.detach() if self.routing == "soft" else None
        self.update(k, v, routed.key.labels, pi_k=pi_k, **placement)

    def settings(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "routing": self.routing,
            "evict": self.evict,
            "crop_margin": self.crop_margin,
            "window": self.window,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "impl": self.impl,
        }

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> RegimeLayerCache:
        config, dtype = MoSARConfig.from_dict(settings["config"]), settings["dtype"]
        dtype = None if dtype is None else getattr(torch, dtype)
        return cls(**settings | {"config": config, "dtype": dtype})

    def settle(self) -> None:
        """Stores a chunk whose queries will not attend; else `attend` or `update` stores it."""
        if self._store is not None:
            self._store.settle()

    def set_routing(self, routing: str) -> None:
        """Switches to another routing and keeps the tokens so far; a ValueError if it cannot."""
        self.check_set_routing(routing)
        if self._store is None or routing == self.routing:
            self.routing = routing
            return
        keys, placed = self.ordered(), self._placed
        self.reset()
        self.routing = routing
        positions = keys.positions if placed else None
        placement = {"key_positions": positions, "key_valid": keys.valid}
        self.update(keys.k, keys.v, keys.labels, of_key=keys.of_key, **placement)

    def check_set_routing(self, routing: str) -> None:
        """A ValueError if the tokens so far cannot be used under this routing."""
        _check_routing(routing)
        if self._store is None or routing == self.routing:
            return
        obstacle = None
        if routing == "soft":
            obstacle = "the cache has labels, and soft routing needs probabilities"
        elif self._store.has_evicted:
            obstacle = "keys have been evicted, and every other routing reads all keys"
        if obstacle is not None:
            raise ValueError(
                f"cannot switch from {self.routing} to {routing} routing: {obstacle}; reset() the "
                "cache, or build it for that routing (evict=False keeps all keys)"
            )

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self._placed, self._stored_dtype = True, tensors["k"].dtype

    def _new_store(self, tokens: Tokens, in_order: bool = False) -> OrderedKeys | RegimeKeys:
        options: dict[str, Any] = {"window": self.window, "impl": self.impl}
        # The sizes of lists depend on the labels, so an exported cache stores every key in order.
        if in_order or self.routing != "sparse" or torch.compiler.is_exporting():
            return OrderedKeys(self.config, routing=self.routing, **options)
        margin = self.crop_margin if self.evict else None
        return RegimeKeys(tokens, self.config, margin=margin, **options)

    def _check_given(self, given: Tokens) -> None:
        self._check_tokens(given.k, given.v, given.positions, given.valid)
        groups = None if self._sizes is None else self._sizes[2]
        if self.routing == "soft":
            check_routing("pi_k", given.pi, given.k, groups, self.config.num_regimes)
        if self.routing != "soft" or given.labels is not None:
            check_routing("labels_k", given.labels, given.k, groups)
        self._check_of_key(given)
        if self._placed is not None and self._placed != (given.positions is not None):
            raise ValueError(
                "key_positions must be given always or never, and the earlier tokens of this cache "
                f"had {'theirs' if self._placed else 'none'}"
            )

    def _check_of_key(self, given: Tokens) -> None:
        of_key, (rows, heads, length, _) = given.of_key, given.k.shape
        if self._store is not None and (of_key is None) != (self.last_of_key is None):
            raise ValueError("of_key must be given always or never")
        if of_key is None:
            return
        if self.routing != "sparse":
            raise ValueError(f"of_key is for sparse routing, and the cache is for {self.routing}")
        if not isinstance(of_key, Tensor):
            raise ValueError(f"of_key must be a tensor, got {type(of_key).__name__}")
        shape = tuple(of_key.shape)
        fits = len(shape) == 3 and (shape[0], shape[2]) == (rows, length) and not shape[1] % heads
        if not fits or of_key.dtype != torch.float64 or of_key.device != given.k.device:
            raise ValueError(
                f"of_key must be [{rows}, a multiple of {heads}, {length}] float64 on "
                f"{given.k.device}, got {list(shape)} {of_key.dtype} on {of_key.device}"
            )

    def _check_queries(
        self,
        q: Tensor,
        labels: Tensor | None,
        pi: Tensor | None,
        positions: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> None:
        assert self._sizes is not None
        heads, dim, groups = self._sizes
        check_heads("q", q, (self._rows, None, None, dim), self._device)
        if q.shape[1] % heads:
            raise ValueError(f"the {q.shape[1]} heads of q must be a multiple of the {heads} of k")
        if self.routing == "soft":
            check_routing("pi_q", pi, q, groups, self.config.num_regimes)
        else:
            check_routing("labels_q", labels, q, groups)
        check_grid("query_positions", positions, q)
        check_scores(scale, softcap)


class RegimeCache(ModelCache[RegimeLayerCache]):
    """One `RegimeLayerCache` per layer."""

    layer_class = RegimeLayerCache

    def __init__(
        self,
        configs: MoSARConfig | Sequence[MoSARConfig],
        num_layers: int | None = None,
        *,
        windows: Sequence[float | None] | None = None,
        **options: Any,
    ):
        """configs: one per layer, or one for `num_layers` layers; windows: the same, None: none.

        options: those of `RegimeLayerCache`.
        """
        if isinstance(configs, MoSARConfig):
            if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
                raise ValueError(f"num_layers must be an integer >= 1, got {num_layers!r}")
            configs = [configs] * num_layers
        if num_layers not in (None, len(configs)):
            raise ValueError(f"num_layers is {num_layers}, but there are {len(configs)} configs")
        if windows is None:
            windows = [options.pop("window", None)] * len(configs)
        if len(windows) != len(configs):
            raise ValueError(
                f"windows must have one entry per layer, {len(configs)}, got {windows}"
            )
        super().__init__(
            RegimeLayerCache(config, window=window, **options)
            for config, window in zip(configs, windows, strict=True)
        )

    def set_routing(self, routing: str) -> None:
        """Switches all layers or none."""
        for layer in self.layers:
            layer.check_set_routing(routing)
        for layer in self.layers:
            layer.set_routing(routing)


enter_graphs(RegimeCache, "mosar.model.regime_cache.RegimeCache")


def _check_routing(routing: str) -> None:
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")


def _traits(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Everything that is checked except values; if it is equal, the checks need not run again."""
    return tuple(
        (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x for x in given
    )


def _grouped(routing: Any, dims: int = 3) -> Tensor:
    """Labels [B, Gr, length] or probabilities [B, Gr, length, R], also if Gr was left out."""
    return routing if routing.dim() == dims else routing[:, None]
