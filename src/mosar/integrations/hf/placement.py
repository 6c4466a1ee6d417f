"""What transformers says about tokens (mask, positions, packing), in the words of a geometry.

Shapes: B rows, T new tokens, P tokens in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosar.core.layout import can_check_values
from mosar.integrations.hf.cache import MosarCache
from mosar.model.decoder import Placement, count_positions


def place_tokens(
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: MosarCache | None,
) -> Placement:
    """Positions, validity and segments of new tokens [B, T, ...].

    attention_mask [B, T] or [B, P + T], nonzero for tokens: by default all. position_ids [B or 1,
    T]: by default tokens of a row are counted, those in the cache first. Where nothing is masked
    and nothing cached, positions that start again begin another text, as when texts are packed.
    """
    rows, count = tokens.shape[:2]
    valid = _valid(tokens, attention_mask, cache)
    if position_ids is None:
        if valid is None and cache is None:
            return {}
        positions = count_positions(tokens, valid, None if cache is None else cache.states)
        return {"key_positions": positions, "key_valid": valid}
    if position_ids.dim() != 2 or tuple(position_ids.shape) not in ((rows, count), (1, count)):
        raise ValueError(
            f"position_ids must be [{rows}, {count}] like the tokens, "
            f"got {list(position_ids.shape)}"
        )
    positions = position_ids.expand(rows, -1).long().to(tokens.device)
    if valid is None and cache is not None:
        if starts_again(positions):
            raise ValueError(
                "position_ids start again within a row: packed texts cannot be cached; pass "
                "use_cache=False"
            )
        return {"key_positions": positions}
    if valid is None:
        return _place_texts(positions)
    return {"key_positions": positions.masked_fill(~valid, 0), "key_valid": valid}


def starts_again(positions: Tensor) -> bool:
    """Whether positions [B, T] go back within a row, as when texts are packed."""
    return not torch.compiler.is_compiling() and bool((positions.diff(dim=1) < 0).any())


def _valid(tokens: Tensor, mask: Tensor | None, cache: MosarCache | None) -> Tensor | None:
    """Which new tokens are not padding, [B, T]; None: all."""
    if mask is None:
        return None
    rows, count = tokens.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    if mask.dim() != 2 or tuple(mask.shape) not in ((rows, count), (rows, past + count)):
        whole = f" or [{rows}, {past + count}] with the cached ones" if past else ""
        raise ValueError(
            f"attention_mask must be [{rows}, {count}]{whole}, nonzero for tokens: which pairs "
            f"attend is the geometry's choice; got {list(mask.shape)}"
        )
    mask = mask.to(tokens.device).bool()
    if past and mask.shape[1] == past + count and can_check_values(mask):
        assert cache is not None
        told, stored = mask[:, :past].sum(dim=1).cpu(), cache.states.lengths
        if not torch.equal(told, stored):
            raise ValueError(
                "attention_mask must be 0 for the padding that the cache was filled with and for "
                f"no other token: it has {told.tolist()} tokens per row, but the cache has "
                f"{stored.tolist()}"
            )
    valid = mask[:, -count:]
    # Without padding the kernels have less to look at.
    return None if can_check_values(valid) and bool(valid.all()) else valid


def _place_texts(positions: Tensor) -> Placement:
    """Rows without padding: one text, or several that each count from 0."""
    if torch.compiler.is_compiling():
        return {"key_positions": positions, "segment_ids": (positions == 0).cumsum(dim=1)}
    steps = positions.diff(dim=1)
    if bool((positions[:, :1] == 0).all()):
        if bool((steps == 1).all()):
            return {}
        starts = steps != 1
        if bool((positions[:, 1:][starts] == 0).all()):
            return {"segment_ids": torch.nn.functional.pad(starts.cumsum(dim=1), (1, 0))}
    if bool((steps >= 0).all()):
        return {"key_positions": positions}
    row = int((steps < 0).any(dim=1).nonzero()[0])
    raise ValueError(
        "position_ids must not decrease along a row, except to 0 where a new text starts and all "
        f"before count in ones; got {positions[row].tolist()[:20]} in row {row}"
    )
