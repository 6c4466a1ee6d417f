"""Writes text with a decoder: reads the prompt, chooses a token, reads it, and so on.

    p(token) ~ exp(logit / temperature), among the top_k largest, and of those among the smallest
    set whose probabilities sum to top_p

Shapes: T tokens, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from mosar.attention import Routing
from mosar.model.decoder import Decoder
from mosar.model.label_log import LabelLog


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; None: from all."""
    top_p: float | None = None
    """Sample from the likeliest tokens that sum to this probability; None: from all."""

    def __post_init__(self) -> None:
        value = self.temperature
        if not _is_number(value) or not 0 <= value < math.inf:
            raise ValueError(f"temperature must be a number >= 0, got {value!r}")
        if self.top_k is not None and (not isinstance(self.top_k, Integral) or self.top_k < 1):
            raise ValueError(f"top_k must be an integer >= 1, got {self.top_k!r}")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be a number above 0 and at most 1, got {self.top_p!r}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits [V] -> the sampling distribution, [V] float64."""
        logits = logits.double()
        if self.temperature == 0:
            chosen = torch.zeros_like(logits)
            chosen[logits.argmax()] = 1
            return chosen
        # Shift the largest to 0, so that a tiny temperature does not overflow.
        scaled = (logits - logits.max()) / self.temperature
        order = scaled.argsort(descending=True, stable=True)
        kept = torch.softmax(scaled[order], dim=0)
        if self.top_k is not None:
            kept[self.top_k :] = 0
        if self.top_p is not None:
            kept = kept / kept.sum()
            # Keep a token if the likelier ones do not reach the probability yet.
            before = kept.cumsum(dim=0) - kept
            kept[before >= self.top_p] = 0
        return torch.zeros_like(kept).scatter_(0, order, kept / kept.sum())

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """A random token with the probabilities of logits [V]."""
        if not bool(logits.isfinite().all()):
            raise ValueError("the model's logits are not finite: there is nothing to choose from")
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))


class Reader(Protocol):
    """A model that has read some tokens and can read more."""

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads more tokens, at least one; returns logits [V] of the next, on the CPU."""
        ...


class MeasuredReader(ABC):
    """A model with its KV cache for one row, which measures memory and density."""

    num_tokens = 0
    """Tokens read so far."""

    def __init__(self, num_layers: int):
        # For each layer the labels of queries and of keys, where there are routers.
        self.label_logs = [(LabelLog(), LabelLog()) for _ in range(num_layers)]

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads more tokens; returns logits [V] of the next."""

    @abstractmethod
    def count_pairs(
        self, layer: int, labels: tuple[Tensor, Tensor] | None
    ) -> tuple[float, int] | None:
        """Pairs in a layer's support, and causal pairs, of the tokens so far; None: all pairs."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes that the cache has allocated."""

    @property
    @abstractmethod
    def dense_bytes(self) -> int:
        """Bytes of keys and values of all tokens so far."""

    @property
    def density(self) -> float:
        """The share of causal pairs inside the support, mean over the layers.

        It is also counted under soft and top-1 routing, although these evaluate every pair.
        """
        densities = []
        for layer, (queries, keys) in enumerate(self.label_logs):
            labels = (queries.labels, keys.labels) if len(queries) else None
            counted = self.count_pairs(layer, labels) if self.num_tokens else None
            densities.append(counted[0] / counted[1] if counted else 1.0)
        return sum(densities) / len(densities)


def write_tokens(
    reader: Reader,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields the tokens after the prompt; `stop` ends the text and is not yielded."""
    if not prompt:
        raise ValueError("prompt must hold at least one token")
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer >= 1, got {max_new_tokens!r}")
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(seed)
    unread: Sequence[int] = prompt
    for _ in range(max_new_tokens):
        token = sampling.choose(reader.read(unread), generator)
        if token == stop:
            return
        yield token
        unread = [token]


class DecoderReader(MeasuredReader):
    """A `Decoder` with its KV cache."""

    def __init__(self, decoder: Decoder, routing: Routing = "sparse", **cache_options: Any):
        super().__init__(len(decoder.layers))
        self.decoder, self.routing = decoder, routing
        self.cache = decoder.new_cache(routing, **cache_options)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        embedding = self.decoder.embedding
        wrong = [token for token in tokens if not 0 <= token < embedding.num_embeddings]
        if wrong:
            raise ValueError(
                f"tokens must lie in 0..{embedding.num_embeddings - 1}, got {wrong[0]}: does the "
                "tokenizer belong to the model?"
            )
        row = torch.tensor([tokens], device=embedding.weight.device)
        output = self.decoder(row, routing=self.routing, cache=self.cache)
        for logs, routed in zip(self.label_logs, output.routings, strict=False):
            for log, labels in zip(logs, routed.labels, strict=True):
                log.append(labels)
        self.num_tokens = self.cache.slots
        return self.decoder.logits(output.hidden[0, -1]).float().cpu()

    def count_pairs(
        self, layer: int, labels: tuple[Tensor, Tensor] | None
    ) -> tuple[float, int] | None:
        geometry, shape = self.decoder.geometries[layer], (1, self.num_tokens)
        return geometry.count_pairs(shape, routing=self.routing, labels=labels)

    @property
    def cache_bytes(self) -> int:
        return self.cache.allocated_bytes

    @property
    def dense_bytes(self) -> int:
        model = self.decoder.model_config
        width = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        return width * self.num_tokens * self.decoder.embedding.weight.element_size()


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
