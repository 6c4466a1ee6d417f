"""The KV cache that forgets exactly what can never be read again.

Under sparse routing no query reads a key of regime n farther away than max_m delta_mn. The cache
keeps post-positional keys and values, unexpanded, as one list per (row, routing group, regime) and
one of sinks, and drops a key once the next query is farther from it than that: no output changes.
One step of decoding reads one slice of each list. Under soft and top-1 routing every pair counts:
all keys are kept, in order, and the dense operators read them.

    cache.update(k, v, labels_k)         # the next token, or a chunk of any size
    out = cache.attend(q, labels_q)      # its queries over all tokens so far

A chunk is read where it stands until its queries have attended: k and v must not be changed in
place between the two calls.

Shapes: B rows, Hq query heads, Hkv key/value heads, Gr routing groups, T queries, S tokens,
D head dim, R regimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.attention import ROUTINGS, mosar_attention
from mosar.core.config import MoSARConfig, check_config
from mosar.core.inputs import DTYPES, check_scores
from mosar.core.layout import resolve_layout
from mosar.kernels.decode import IMPLEMENTATIONS
from mosar.model.cache_tokens import Tokens, check_grid, check_heads, check_labels, check_routing
from mosar.model.dense_cache import DenseKeys
from mosar.model.layer_cache import LayerCache, LayerCaches, enter_graphs
from mosar.model.sparse_keys import SparseKeys

# What may be asked of a layer's cache besides its routing.
CACHE_OPTIONS = frozenset({"evict", "crop_margin", "window", "dtype", "impl"})


class OrderedKeys(NamedTuple):
    """All tokens of a cache in the order they came, as `mosar_attention` takes them."""

    k: Tensor
    """[B, Hkv, S, D]."""
    v: Tensor
    labels: Tensor
    """[B, Gr, S] int64; a sink's may be any."""
    pi: Tensor | None
    """[B, Gr, S, R] under soft routing, else None."""
    positions: Tensor
    """[B, S]."""
    valid: Tensor
    """[B, S]."""


class RegimeLayerCache(LayerCache[SparseKeys | DenseKeys]):
    """The cache of one attention layer; rows, heads, groups and dtype are as the first tokens'.

    routing: "sparse" keeps lists by regime; "soft" and "top1" keep everything in order.
    evict: under sparse routing, drop what is out of reach. crop_margin: keep it that many positions
    longer, so that `crop` can go back as far. window: as in `mosar_attention`. dtype: of storage;
    None: that of the first keys. impl: "auto" | "native" (CPU; float32, bfloat16, float16) |
    "triton" (GPU; the same) | "torch"; under soft and top-1 routing the operators choose by the
    same rule.
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
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
        self.config, self.routing, self.impl = config, routing, impl
        self.evict, self.crop_margin, self.dtype = bool(evict), crop_margin, dtype
        self.window = resolve_layout(1, 1, 1, window=window).window
        super().__init__()

    def reset(self) -> None:
        """Forgets everything, also how many rows there were."""
        super().reset()
        # Hkv, D, Gr
        self._shape: tuple[int, int, int] | None = None
        self._stored_dtype, self._device = self.dtype, None
        self._placed: bool | None = None
        self._checked_tokens = self._checked_queries = ()

    @property
    def regime_counts(self) -> dict[str, Tensor]:
        """How many keys are stored of each regime and, where there are any, "sinks", [B, Gr]."""
        names = [regime.name for regime in self.config.regimes]
        names += ["sinks"] if self.config.num_sinks else []
        if isinstance(self._store, SparseKeys):
            counts = self._store.counts
        elif self._store is not None and self._store.length:
            labels, valid = self._store["labels"].clone(), self._store["valid"]
            sinks = valid & (valid.cumsum(dim=1) <= self.config.num_sinks)
            labels[sinks[:, None].expand_as(labels)] = self.config.num_regimes
            one_hot = F.one_hot(labels, self.config.num_regimes + 1) * valid[:, None, :, None]
            counts = one_hot.sum(dim=2)[..., : len(names)].cpu()
        else:
            counts = torch.zeros(self.batch_size, 1, len(names), dtype=torch.int64)
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
    ) -> None:
        """Appends k, v [B, Hkv, S, D] with labels_k [B, S] or [B, Gr, S].

        pi_k [B, S, R] or [B, Gr, S, R] is for soft routing, where labels_k may be left out.
        key_positions [B, S]: by default tokens count 0, 1, 2, ... over all calls; given once, they
        must be given always. key_valid [B, S]: False for padding.
        """
        given = (k, v, labels_k, pi_k, key_positions, key_valid)
        if (traits := (self._rows, *_traits(given))) != self._checked_tokens:
            self._check_tokens(*given)
        tokens = self._tokens(*given)
        store = self._store
        if store is None:
            margin = self.crop_margin if self.evict else None
            # Lists grow and shrink as labels fall: what is exported keeps every key, in order.
            store = (
                SparseKeys(tokens, self.config, window=self.window, margin=margin, impl=self.impl)
                if self.routing == "sparse" and not torch.compiler.is_exporting()
                else DenseKeys()
            )
        if isinstance(store, SparseKeys):
            store.append(tokens)
        else:
            before = store.last_positions if self._store else torch.full((k.shape[0],), -1)
            tokens.check_values(self.config, before)
            routed = {} if tokens.pi is None else {"pi": tokens.pi}
            store.append(
                k=tokens.k,
                v=tokens.v,
                labels=tokens.labels,
                positions=tokens.all_positions,
                valid=tokens.all_valid,
                **routed,
            )
        self._store, self._placed = store, key_positions is not None
        self._rows, self._shape = k.shape[0], (k.shape[1], k.shape[3], tokens.labels.shape[1])
        self._stored_dtype, self._device = tokens.k.dtype, k.device
        self._slots, self._tensors = self._slots + k.shape[2], None
        self._checked_tokens = traits

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
        if self._store is None or self._shape is None:
            raise ValueError("the cache is empty: call update before attend")
        given = (q, labels_q, pi_q, query_positions, scale, softcap)
        if (traits := (self._rows, *_traits(given))) != self._checked_queries:
            self._check_queries(*given)
            self._checked_queries = traits
        if query_positions is not None:
            query_positions = query_positions.long()
        options = {"scale": scale, "softcap": softcap}
        if isinstance(self._store, SparseKeys):
            labels = _grouped(labels_q)
            out, lse = self._store.attend(q, labels, query_positions, **options)
        else:
            out, lse = self._attend_dense(q, labels_q, pi_q, query_positions, **options)
        return (out, lse) if return_lse else out

    def _attend_dense(
        self,
        q: Tensor,
        labels_q: Tensor | None,
        pi_q: Tensor | None,
        positions: Tensor | None,
        **options: Any,
    ) -> Any:
        length = q.shape[2]
        keys, regimes = self.ordered(), self.config.num_regimes
        wide = torch.promote_types(q.dtype, torch.float32)
        if self.routing == "soft":
            pi_q, pi_k = _grouped(pi_q, 4), keys.pi
        else:
            labels = _grouped(labels_q)
            check_labels("labels_q", labels, self.config)
            pi_q, pi_k = (F.one_hot(x, regimes).to(wide) for x in (labels, keys.labels))
        if positions is None:
            if length > self._slots:
                raise ValueError(
                    f"the queries are the last of {self._slots} tokens, but there are {length}; "
                    "give query_positions"
                )
            positions = keys.positions[:, self._slots - length :]
        return mosar_attention(
            q,
            keys.k.to(q.dtype),
            keys.v.to(q.dtype),
            pi_q,
            pi_k,  # pyright: ignore[reportArgumentType]
            self.config,
            routing=self.routing,  # pyright: ignore[reportArgumentType]
            window=self.window,
            query_positions=positions,
            key_positions=keys.positions,
            key_valid=keys.valid,
            return_lse=True,
            impl="tiled" if self.impl == "torch" else self.impl,
            **options,
        )

    def _ordered_tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.ordered()._asdict().items() if x is not None}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.reset()
        k = tensors["k"]
        self._store, self._placed = DenseKeys.of(tensors), True
        self._rows, heads, self._slots, dim = k.shape
        self._shape = (heads, dim, tensors["labels"].shape[1])
        self._stored_dtype, self._device = k.dtype, k.device

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

    def settle(self) -> None:
        """Stores a chunk that nobody will attend from; else `attend` and `update` see to it."""
        if isinstance(self._store, SparseKeys):
            self._store.settle()

    def ordered(self) -> OrderedKeys:
        """All tokens in the order they came; a ValueError where keys have been evicted."""
        store = self._store
        if store is None:
            raise ValueError("the cache is empty")
        if isinstance(store, SparseKeys):
            return OrderedKeys(*store.ordered())
        return OrderedKeys(
            k=store["k"],
            v=store["v"],
            labels=store["labels"],
            pi=store.get("pi"),
            positions=store["positions"],
            valid=store["valid"],
        )

    def set_routing(self, routing: str) -> None:
        """Goes on under another routing with the tokens so far; a ValueError where it cannot."""
        self.check_set_routing(routing)
        if self._store is None or routing == self.routing:
            self.routing = routing
            return
        keys, placed = self.ordered(), self._placed
        self.reset()
        self.routing = routing
        self.update(
            keys.k,
            keys.v,
            keys.labels,
            key_positions=keys.positions if placed else None,
            key_valid=keys.valid,
        )

    def check_set_routing(self, routing: str) -> None:
        """A ValueError where the tokens so far do not serve the routing."""
        _check_routing(routing)
        if self._store is None or routing == self.routing:
            return
        obstacle = None
        if routing == "soft":
            obstacle = "the cache has labels, and soft routing needs probabilities"
        elif isinstance(self._store, SparseKeys) and self._store.has_evicted:
            obstacle = "keys have been evicted, and every other routing reads all keys"
        if obstacle is not None:
            raise ValueError(
                f"cannot go on from {self.routing} to {routing} routing: {obstacle}; reset() the "
                "cache, or build it for that routing (evict=False keeps all keys)"
            )

    def _check_tokens(
        self,
        k: Tensor,
        v: Tensor,
        labels: Tensor | None,
        pi: Tensor | None,
        positions: Tensor | None,
        valid: Tensor | None,
    ) -> None:
        heads, dim, groups = self._shape or (None, None, None)
        check_heads("k", k, self._rows or None, heads, dim, self._device)
        check_heads("v", v, k.shape[0], k.shape[1], k.shape[3], k.device)
        if v.shape != k.shape or v.dtype != k.dtype:
            raise ValueError(
                f"v must be as k, {list(k.shape)} {k.dtype}, got {list(v.shape)} {v.dtype}"
            )
        if self.routing == "soft":
            check_routing("pi_k", pi, k, groups, self.config.num_regimes)
        if self.routing != "soft" or labels is not None:
            check_routing("labels_k", labels, k, groups)
        check_grid("key_positions", positions, k)
        check_grid("key_valid", valid, k, of_bool=True)
        if self._placed is not None and self._placed != (positions is not None):
            raise ValueError(
                "key_positions must be given always or never, and the earlier tokens of this cache "
                f"had {'theirs' if self._placed else 'none'}"
            )

    def _tokens(
        self,
        k: Tensor,
        v: Tensor,
        labels: Tensor | None,
        pi: Tensor | None,
        positions: Tensor | None,
        valid: Tensor | None,
    ) -> Tokens:
        dtype = self._stored_dtype
        if dtype is not None and dtype != k.dtype:
            k, v = k.to(dtype), v.to(dtype)
        if self.routing == "soft":
            pi = _grouped(pi, 4)
            labels = pi.argmax(dim=-1) if labels is None else labels
        else:
            pi = None
        if positions is not None:
            positions = positions.long()
        return Tokens(k, v, _grouped(labels), pi, positions, valid, self._slots)

    def _check_queries(
        self,
        q: Tensor,
        labels: Tensor | None,
        pi: Tensor | None,
        positions: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> None:
        assert self._shape is not None
        heads, dim, groups = self._shape
        check_heads("q", q, self._rows, None, dim, self._device)
        if q.shape[1] % heads:
            raise ValueError(f"the {q.shape[1]} heads of q must be a multiple of the {heads} of k")
        if self.routing == "soft":
            check_routing("pi_q", pi, q, groups, self.config.num_regimes)
        else:
            check_routing("labels_q", labels, q, groups)
        check_grid("query_positions", positions, q)
        check_scores(scale, softcap)


class RegimeCache(LayerCaches[RegimeLayerCache]):
    """One `RegimeLayerCache` per layer."""

    def __init__(
        self,
        configs: MoSARConfig | Sequence[MoSARConfig],
        num_layers: int | None = None,
        *,
        windows: Sequence[float | None] | None = None,
        **options: Any,
    ):
        """configs: one per layer, or one for `num_layers`; windows: likewise, None: none.

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
            [
                RegimeLayerCache(config, window=window, **options)
                for config, window in zip(configs, windows, strict=True)
            ]
        )

    def set_routing(self, routing: str) -> None:
        """All layers or none."""
        for layer in self.layers:
            layer.check_set_routing(routing)
        for layer in self.layers:
            layer.set_routing(routing)

    @classmethod
    def from_settings(cls, settings: Sequence[dict[str, Any]]) -> RegimeCache:
        configs = [MoSARConfig.from_dict(layer["config"]) for layer in settings]
        windows = [layer["window"] for layer in settings]
        options = {name: settings[0][name] for name in CACHE_OPTIONS - {"window"}}
        if options["dtype"] is not None:
            options["dtype"] = getattr(torch, options["dtype"])
        routing = settings[0]["routing"]
        return cls(configs, windows=windows, routing=routing, **options)


enter_graphs(RegimeCache)


def _check_routing(routing: str) -> None:
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")


def _traits(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that is checked about arguments but their values: equal ones need no second check."""
    return tuple(
        (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x for x in given
    )


def _grouped(routing: Any, dims: int = 3) -> Tensor:
    """Labels [B, Gr, length], or probabilities [B, Gr, length, R], also where Gr was left out."""
    grouped = routing if routing.dim() == dims else routing[:, None]
    return grouped.long() if dims == 3 else grouped
