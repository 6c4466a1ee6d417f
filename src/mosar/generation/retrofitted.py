"""A retrofitted model as a reader: the base model with its routers and a regime cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosar.attention import ROUTINGS
from mosar.core.hard_domain import build_hard_domain
from mosar.errors import ModelError
from mosar.generation.source import Source
from mosar.model.label_log import LabelLog

DENSE = "dense"


def open_retrofitted(folder: Path, routing: str | None) -> Source:
    """The model of an adapter folder; routing: by default sparse, "dense" is the base model."""
    known = (DENSE, *ROUTINGS)
    chosen = "sparse" if routing is None else routing
    if chosen not in known:
        raise ValueError(f"routing must be one of {', '.join(known)}; got {chosen!r}")
    try:
        from mosar.integrations.retrofit import load_retrofitted
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise ModelError(
            'a retrofitted model needs transformers: pip install "mosar[hf]"'
        ) from None
    try:
        attached = load_retrofitted(folder)
    except OSError as error:
        raise ModelError(" ".join(str(error).split())) from None
    tokenizer = attached.tokenizer
    if tokenizer is None:
        raise ModelError(f"the base model of {folder} has no tokenizer beside it")
    attached.set_routing(chosen)
    attached.model.eval()
    end = tokenizer.eos_token_id
    reader = RetrofitReader(attached)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return Source(reader, tokenizer.encode, decode, end, chosen)


class RetrofitReader:
    """A `Retrofit` with its KV cache, one row."""

    def __init__(self, attached: Any):
        self.attached, self.cache = attached, None
        self.num_tokens = 0
        # For each layer the labels of queries and of keys, as the routers give them.
        self._labels = [(LabelLog(), LabelLog()) for _ in attached]
        for layer, kept in zip(attached, self._labels, strict=True):
            for router, labels in zip(layer.routers, kept, strict=True):
                router.register_forward_hook(partial(_keep_labels, labels))

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads further tokens; logits [V] of the next."""
        model = self.attached.model
        row = torch.tensor([tokens], device=model.device)
        out = model(row, past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        self.num_tokens += len(tokens)
        return out.logits[0, -1].float().cpu()

    @property
    def cache_bytes(self) -> int:
        """Memory that the cache holds."""
        from mosar.integrations.transformers_cache import cache_bytes

        return cache_bytes(self.cache)

    @property
    def dense_bytes(self) -> int:
        """Keys and values of all tokens read so far."""
        width = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.attached)
        return width * self.num_tokens * self.attached.model.dtype.itemsize

    @property
    def density(self) -> float | None:
        """The share of causal pairs inside the support, mean over the layers; 1 under "dense"."""
        found = []
        for layer, (queries, keys) in zip(self.attached, self._labels, strict=True):
            if not len(queries):
                return 1.0
            domain = build_hard_domain(
                queries.labels,
                keys.labels,
                layer.config,
                window=layer.window,
                materialize=False,
            )
            found.append(domain.density)
        return sum(found) / len(found)


def _keep_labels(kept: LabelLog, module: Any, arguments: Any, output: Any) -> None:
    kept.append(output.labels)
