"""A retrofitted model as a reader: the base model with its routers and a regime cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosar.attention import ROUTINGS
from mosar.core.hard_domain import build_hard_domain
from mosar.errors import ModelError, needing
from mosar.generation.source import Source
from mosar.lazy import install_line
from mosar.model.generation import MeasuredReader
from mosar.model.label_log import LabelLog

DENSE = "dense"


def open_retrofitted(
    adapter: Path | str, routing: str | None, base: str | None = None, *, dtype: str = "float32"
) -> Source:
    """The model of an adapter, a folder or a ready one's name, with its routers.

    routing: by default sparse, "dense" is the base model. base: where to load that from, by default
    from where it came from. dtype: of its weights; "auto": bfloat16 where the CPU multiplies in it.
    """
    known = (DENSE, *ROUTINGS)
    chosen = "sparse" if routing is None else routing
    if chosen not in known:
        raise ValueError(f"routing must be one of {', '.join(known)}; got {chosen!r}")
    with needing("transformers", f"a retrofitted model needs transformers: {install_line('hf')}"):
        from mosar.integrations.retrofit import load_retrofitted
        from mosar.integrations.retrofit.base_model import weights_dtype
    weights = weights_dtype(dtype)
    try:
        attached = load_retrofitted(adapter, base, dtype=weights)
    except OSError as error:
        raise ModelError(" ".join(str(error).split())) from None
    tokenizer = attached.tokenizer
    if tokenizer is None:
        raise ModelError(f"the base model of {adapter} has no tokenizer beside it")
    attached.set_routing(chosen)
    attached.model.eval()
    end = tokenizer.eos_token_id
    reader = RetrofitReader(attached)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return Source(reader, tokenizer.encode, decode, end, chosen)


def dense_twin(source: Source) -> Source:
    """The same model with its own attention; `source` must not read on afterwards."""
    if not isinstance(source.reader, RetrofitReader):
        raise ValueError("--compare is for retrofitted models, which have a dense model in them")
    attached = source.reader.attached
    attached.set_routing(DENSE)
    return replace(source, reader=RetrofitReader(attached), routing=DENSE)


class RetrofitReader(MeasuredReader):
    """A `Retrofit` with its KV cache."""

    def __init__(self, attached: Any):
        super().__init__(len(attached))
        self.attached, self.cache = attached, None
        # The logits of a long prompt would take more memory than its cache.
        takes = signature(attached.model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        for layer, logs in zip(attached, self.label_logs, strict=True):
            for router, log in zip(layer.routers, logs, strict=True):
                router.register_forward_hook(partial(_keep_labels, log))

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        model = self.attached.model
        row = torch.tensor([tokens], device=model.device)
        out = model(row, past_key_values=self.cache, use_cache=True, **self._last_only)
        self.cache = out.past_key_values
        self.num_tokens += len(tokens)
        return out.logits[0, -1].float().cpu()

    def count_pairs(
        self, layer: int, labels: tuple[Tensor, Tensor] | None
    ) -> tuple[float, int] | None:
        if labels is None:
            return None
        routed = list(self.attached)[layer]
        domain = build_hard_domain(*labels, routed.config, window=routed.window, materialize=False)
        return domain.count, domain.causal_count

    @property
    def cache_bytes(self) -> int:
        from mosar.integrations.transformers_cache import cache_bytes

        return cache_bytes(self.cache)

    @property
    def dense_bytes(self) -> int:
        width = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.attached.layers)
        return width * self.num_tokens * self.attached.model.dtype.itemsize


def _keep_labels(log: LabelLog, module: Any, arguments: Any, output: Any) -> None:
    log.append(output.labels)
