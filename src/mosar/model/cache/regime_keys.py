"""Keys under sparse routing: lists by regime that drop keys which no later query can reach.

A single token goes straight into the lists, and one query per row reads one slice of each list. A
chunk stays outside the lists until its queries have attended; the sparse operator reads it in
place, together with the lists. Then the keys that are still in reach are added to the lists.

Shapes: B rows, Hq query heads, Hkv key/value heads, Gr routing groups, T queries, S tokens,
D head dim, R regimes, C classes (R, or R + 1 with sinks).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.layout import can_check_values
from mosar.kernels import decode
from mosar.kernels.plan import whole_reach
from mosar.model.cache.regime_lists import EVICTED, HORIZON, LAST, SEEN, RegimeLists
from mosar.model.cache.tokens import FAR, Tokens, attend_tokens, check_labels

# Below this many pairs, the dense reference is faster than tiling with torch operators.
_FEW_PAIRS = 512 * 512


class RegimeKeys:
    """The lists of one layer, the chunk that is not in them yet, and attention over both.

    margin: for how many positions a key is kept after it is out of reach; None: for ever.
    """

    def __init__(
        self,
        like: Tokens,
        config: MoSARConfig,
        *,
        window: int | None,
        margin: int | None,
        impl: str,
    ):
        self.config, self.window, self.margin, self.impl = config, window, margin, impl
        rows, heads, _, dim = like.k.shape
        kind: dict[str, Any] = {"dtype": like.k.dtype, "device": like.k.device}
        self.groups = like.labels.shape[1]
        self._native = decode.can_serve(impl, **kind)
        self._triton = _triton_serves(impl, like.k)
        self._pair_table = decode.pair_table(config)
        self._reach_RC, self._reach_C = _reach(config, window)
        classes = self._reach_RC.shape[1]
        biased = 0 if like.of_key is None else like.of_key.shape[1] // self.groups
        self.lists = RegimeLists(
            *(rows, self.groups, classes, heads // self.groups, dim), **kind, biased=biased
        )
        self.last_of_key: Tensor | None = None
        """[B, Hq], that of the newest token; None if keys have none."""
        self._chunk: Tokens | None = None
        self._placed = like.positions is not None
        self._slots = self._room = 0

    @property
    def lengths(self) -> Tensor:
        """The number of valid tokens of each row, including evicted ones, [B]."""
        seen = self.lists.progress[:, SEEN].clone()
        return seen if self._chunk is None else seen + self._chunk.all_valid.sum(dim=1).cpu()

    @property
    def allocated_bytes(self) -> int:
        waiting = () if self._chunk is None else self._chunk[:3]
        return self.lists.allocated_bytes + sum(x.nbytes for x in waiting if x is not None)

    @property
    def used_bytes(self) -> int:
        self.settle()
        return int(self.lists.counts.sum()) * self.lists.key_bytes

    @property
    def has_evicted(self) -> bool:
        """Whether a key was evicted that a query at an earlier position could read."""
        self.settle()
        return bool((self.lists.progress[:, EVICTED] >= 0).any())

    @property
    def counts(self) -> Tensor:
        """Stored keys, [B, Gr, C] int64."""
        self.settle()
        return self.lists.counts

    def append(self, tokens: Tokens) -> None:
        """Adds the next tokens; a chunk waits for its queries."""
        self.settle()
        if tokens.num_tokens == 1 and self._native:
            self._append_token(tokens)
        else:
            tokens.check_values(self.config, self.lists.progress[:, LAST])
            self._chunk = tokens
        self._slots += tokens.num_tokens
        if tokens.of_key is not None:
            self.last_of_key = tokens.of_key[:, :, -1].clone()
        if tokens.num_tokens == 1:
            self.settle()

    def _append_token(self, tokens: Tokens) -> None:
        if self._room <= 0:
            self.lists.make_room()
        try:
            self._room = decode.append_token(
                tokens.k,
                tokens.v,
                tokens.labels.flatten(1).contiguous(),
                None if tokens.positions is None else tokens.positions.contiguous(),
                None if tokens.valid is None else tokens.valid.contiguous(),
                self.lists.state,
                self._reach_C,
                slot=tokens.first_slot,
                sinks=self.config.num_sinks,
                margin=-1 if self.margin is None else self.margin,
                of_key=None if tokens.of_key is None else tokens.of_key[:, :, 0].contiguous(),
            )
        except (ValueError, RuntimeError):
            # The kernel checks values before it changes anything; this check names the argument.
            tokens.check_values(self.config, self.lists.progress[:, LAST])
            raise

    def settle(self) -> None:
        """Moves the chunk into the lists and evicts what its last query could not read."""
        chunk, lists = self._chunk, self.lists
        if chunk is None:
            return
        positions, valid = chunk.all_positions.cpu(), chunk.all_valid.cpu()
        classes = self._classes(chunk.labels.cpu(), valid)
        last = torch.where(valid, positions, -1).amax(dim=1)
        last = torch.maximum(last, lists.progress[:, LAST])
        keep = valid[:, None].expand(classes.shape)
        if self.margin is not None:
            limits, reach_C = last - self.margin, self._reach_C.long()
            lists.evict(limits, reach_C)
            out_of_reach = positions[:, None] + reach_C[classes] + 1
            dead = keep & (out_of_reach <= limits[:, None, None])
            row, _, column = dead.nonzero(as_tuple=True)
            lists.note_eviction(row, out_of_reach[dead], chunk.slots[column])
            keep = keep & ~dead
        lists.append(chunk.k, chunk.v, classes, positions, chunk.slots, keep, chunk.of_key)
        lists.progress[:, SEEN] += valid.sum(dim=1)
        lists.progress[:, LAST] = last
        # Only now, so that the chunk is still complete if memory runs out above.
        self._chunk, self._room = None, 0
        lists.shrink()

    def _classes(self, labels: Tensor, valid: Tensor) -> Tensor:
        """Labels [B, Gr, S] with the first keys of a row as sinks."""
        sinks = self.config.num_sinks
        if not sinks:
            return labels
        rank = self.lists.progress[:, SEEN, None] + valid.cumsum(dim=1)
        return labels.masked_fill((valid & (rank <= sinks))[:, None], self.config.num_regimes)

    def attend(
        self,
        q: Tensor,
        labels: Tensor,
        positions: Tensor | None,
        *,
        scale: float | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """q [B, Hq, T, D] with labels [B, Gr, T]; output and log-sum-exp."""
        alone = q.shape[2] == 1 and self._chunk is None
        on_gpu = alone and self._triton and _triton_serves(self.impl, q)
        if not on_gpu and not (alone and self._native):
            return self._attend_chunk(q, labels, positions, scale=scale, softcap=softcap)
        if positions is not None:
            positions = positions.contiguous()
        elif self._placed:
            positions = self.lists.progress[:, LAST, None].clamp_min(0)
        options: dict[str, Any] = {
            "position": max(self._slots - 1, 0),
            "scale": q.shape[-1] ** -0.5 if scale is None else scale,
            "softcap": softcap,
            "config": self.config,
            "of_key": self.last_of_key,
        }
        state, flat = self.lists.state, labels.flatten(1).contiguous()
        if on_gpu:
            from mosar.kernels.triton.decode import attend_token

            self._check_queries(labels, positions)
            return attend_token(q, flat, positions, state, window=self.window, **options)
        try:
            table = self._reach_RC, self._pair_table
            return decode.attend_token(q, flat, positions, state, *table, **options)
        except (ValueError, RuntimeError):
            # The kernel checks values too; this check names the argument.
            self._check_queries(labels, self._positions(q, positions))
            raise

    def _attend_chunk(
        self, q: Tensor, labels: Tensor, positions: Tensor | None, **scores: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention of any number of queries over lists and chunk, by the sparse operator."""
        positions = self._positions(q, positions)
        self._check_queries(labels, positions)
        chunk, groups = self._chunk, self.groups
        shape, num_queries = q.shape, q.shape[2]
        keys = chunk
        if keys is None or self.lists.counts.any():
            # Groups hold different keys, so each group becomes a row.
            keys = self._gather(chunk)
            q, labels = _fold(q, groups), labels.reshape(-1, 1, num_queries)
            positions = positions.repeat_interleave(groups, dim=0)
        impl = self.impl
        if impl == "tiled" and num_queries * keys.num_tokens <= _FEW_PAIRS:
            impl = "reference"
        options = {"routing": "sparse", "window": self.window, "impl": impl}
        out, lse = attend_tokens(q, labels, positions, keys, self.config, **options, **scores)
        if chunk is not None and num_queries >= chunk.num_tokens:
            self.settle()
        return out.reshape(shape), lse.reshape(shape[:-1])

    def _gather(self, chunk: Tokens | None) -> Tokens:
        """The keys of the lists and of the chunk, with each group as a row."""
        keys, groups = self._listed(), self.groups
        if chunk is not None:
            of_key = chunk.k.new_zeros(len(chunk.k), 0, chunk.num_tokens)
            new = (
                _fold(chunk.k, groups),
                _fold(chunk.v, groups),
                _fold(of_key if chunk.of_key is None else chunk.of_key, groups),
                chunk.labels.flatten(0, 1),
                chunk.all_positions.repeat_interleave(groups, dim=0),
                chunk.all_valid.repeat_interleave(groups, dim=0),
            )
            axes = (2, 2, 2, 1, 1, 1)
            keys = [torch.cat(pair, dim=axis) for *pair, axis in zip(keys, new, axes, strict=True)]
        k, v, of_key, labels, positions, valid = keys
        given = {"positions": positions, "valid": valid, "of_key": self._if_any(of_key)}
        return Tokens(k, v, labels[:, None], **given)

    def _if_any(self, of_key: Tensor) -> Tensor | None:
        return of_key if self.lists.biases.shape[1] else None

    def _listed(self, slots: int | None = None) -> list[Tensor]:
        """The result of `RegimeLists.gather` on one device, with labels instead of classes."""
        k, v, of_key, classes, *placement = self.lists.gather(slots)
        # Sinks come first, and their regime does not matter.
        labels = classes.clamp_max(self.config.global_index)
        return [k, v, of_key, *(x.to(k.device) for x in (labels, *placement))]

    def _positions(self, q: Tensor, positions: Tensor | None) -> Tensor:
        """The positions of the queries, [B, T]; by default they are the last tokens."""
        if positions is not None:
            return positions
        rows, _, count, _ = q.shape
        if self._chunk is not None and count <= self._chunk.num_tokens:
            return self._chunk.all_positions[:, self._chunk.num_tokens - count :]
        if count == 1 and self._placed:
            return self.lists.progress[:, LAST, None].clamp_min(0).to(q.device)
        if self._placed or count > self._slots:
            raise ValueError(
                f"the queries are the last tokens, but {count} are not known to the cache; give "
                "query_positions"
            )
        slots = torch.arange(self._slots - count, self._slots, device=q.device)
        return slots.expand(rows, -1)

    def _check_queries(self, labels: Tensor, positions: Tensor | None) -> None:
        """A ValueError for a query before the horizon, which would miss evicted keys."""
        check_labels("labels_q", labels, self.config)
        if positions is None or not can_check_values(positions):
            return
        lowest, highest = positions.amin(dim=1), int(positions.max())
        if int(lowest.min()) < 0 or highest >= FAR:
            raise ValueError(
                f"query_positions must lie in 0..2^31 - 2, got {int(lowest.min())}..{highest}"
            )
        horizon = self.lists.progress[:, HORIZON]
        if (lowest < horizon).any():
            row = int((lowest < horizon).nonzero()[0])
            raise ValueError(
                f"query_positions must be at least {int(horizon[row])} in row {row}, got "
                f"{int(lowest[row])}: keys that such a query reads have been evicted; use a larger "
                "crop_margin or evict=False"
            )

    def ordered(self) -> Tokens:
        """All tokens, sorted by slot."""
        if self.has_evicted:
            raise ValueError(
                "keys have been evicted, so the cache cannot give all of them back (evict=False "
                "keeps them)"
            )
        groups = self.groups
        k, v, of_key, labels, positions, valid = self._listed(self._slots)
        k, v, of_key = (x.unflatten(0, (-1, groups)).flatten(1, 2) for x in (k, v, of_key))
        labels = labels.unflatten(0, (-1, groups))
        # Each group has every token.
        given: dict[str, Any] = {"positions": positions[::groups], "valid": valid[::groups]}
        return Tokens(k, v, labels, of_key=self._if_any(of_key), **given)

    def check_crop(self, length: int) -> None:
        """A ValueError if the next query after the crop would miss evicted keys."""
        self.settle()
        if not length:
            # If no key is left, no evicted key can be missed.
            return
        lists = self.lists
        evicted = lists.progress[:, EVICTED]
        last = torch.full_like(evicted, length - 1)
        if self._placed:
            last = lists.last_positions(length)
        missing = (evicted >= 0) & ((last + 1 < lists.progress[:, HORIZON]) | (evicted >= length))
        if missing.any():
            raise ValueError(
                f"cannot crop {self._slots} tokens to {length}: keys that the next query reads "
                f"have been evicted; crop at most {self.margin} tokens, or use a larger "
                "crop_margin or evict=False"
            )

    def crop(self, length: int) -> None:
        """Drops the tokens from slot `length` on; call `check_crop` before."""
        self.lists.crop(length)
        self._slots, self._room = length, 0
        if self.last_of_key is not None:
            self.last_of_key = self.lists.newest_biases().reshape(self.last_of_key.shape)

    def select_rows(self, rows: Tensor) -> None:
        self.settle()
        self.lists.select_rows(rows)
        self._room = 0
        if self.last_of_key is not None:
            self.last_of_key = self.last_of_key[rows.to(self.last_of_key.device)]


def _reach(config: MoSARConfig, window: int | None) -> tuple[Tensor, Tensor]:
    """The largest integer distance per (regime, class), [R, C], and per class, [C], int32."""
    reach_RC = whole_reach(config, window)
    with torch.inference_mode(False):
        reach_C = reach_RC.amax(dim=0)
        if config.num_sinks:
            # A window also hides sinks, but it does not change which keys are sinks.
            reach_C[-1] = FAR
    return reach_RC, reach_C


def _triton_serves(impl: str, x: Tensor) -> bool:
    """Whether the GPU kernels can read lists with such a tensor; "triton" raises if they cannot."""
    if impl != "triton" and (impl != "auto" or x.device.type != "cuda"):
        return False
    from mosar.kernels.triton import obstacle

    reason = obstacle(x)
    if reason is not None and impl == "triton":
        raise ValueError(f"impl='triton' cannot serve: {reason}; use impl='auto'")
    return reason is None


def _fold(x: Tensor, groups: int) -> Tensor:
    """[B, heads, ...] to [B * Gr, heads / Gr, ...]."""
    return x.unflatten(1, (groups, -1)).flatten(0, 1)
