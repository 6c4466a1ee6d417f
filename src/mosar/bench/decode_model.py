"""Whole models writing token by token: `mosar bench decode --model smollm2`.

All have the sizes of one model and random weights, and their caches are filled with random keys and
values; what a token costs depends on neither.

    transformers   LlamaForCausalLM with DynamicCache and SDPA
    dense          our decoder, variant rope, with the cache that keeps everything
    ours           our decoder, variant mosar, with the regime cache under sparse routing; its
                   routers run, and then drawn labels take the place of their choice

Per row: check ours against float64, time passes of some tokens, interleaved; a pass begins with all
caches cropped back to where the one before began.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mosar.bench.correctness import error_check
from mosar.bench.decode import interleave_passes
from mosar.bench.labels import DRAWN, make_labels
from mosar.core.config import MoSARConfig
from mosar.core.outputs import RouterOutput
from mosar.geometries import AttentionConfig, LayerRouting
from mosar.model.config import ModelConfig
from mosar.model.decoder import Decoder
from mosar.model.regime_cache import RegimeCache
from mosar.records import ErrorCheck, Measurement, ModelDecodeBenchmark

SIZES = {
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "ffn_size": 1536,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 48,
    },
}
# Tokens that are timed in one go.
STEPS = 16
_CHECKED_STEPS = 4

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ModelDecodeSettings:
    """Which rows are measured and how; checks itself."""

    model: str = "smollm2"
    """A name in SIZES."""
    lengths: tuple[int, ...] = (16384,)
    """Tokens of context of the last one."""
    labels: str = "independent"
    """One of labels.DRAWN or a file."""
    seed: int = 0
    seconds: float = 20.0
    """About how long a row is timed."""
    config: MoSARConfig = field(default_factory=MoSARConfig)

    def __post_init__(self) -> None:
        if self.model not in SIZES:
            raise ValueError(f"model must be one of {list(SIZES)}, got {self.model!r}")
        if not self.lengths or min(self.lengths) <= STEPS:
            raise ValueError(f"lengths must be above {STEPS}, got {self.lengths}")
        if self.labels not in DRAWN and not self.labels.endswith(".npz"):
            raise ValueError(f"labels must be one of {DRAWN} or FILE.npz, got {self.labels!r}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be more than 0, got {self.seconds}")

    @property
    def model_config(self) -> ModelConfig:
        sizes = SIZES[self.model]
        return ModelConfig(
            **sizes,
            query_pre_attn_scalar=sizes["head_dim"],
            attn_softcap=None,
            final_softcap=None,
            max_length=self.config.max_length,
        )


def run_model_decode_benchmark(
    settings: ModelDecodeSettings, report: Report = lambda step: None
) -> Iterator[ModelDecodeBenchmark]:
    """Measures row by row; `report` is told what is being done."""
    for length in settings.lengths:
        yield _measure(settings, length, report)


@torch.inference_mode()
def _measure(settings: ModelDecodeSettings, length: int, report: Report) -> ModelDecodeBenchmark:
    row = f"{settings.model}, n = {length}"
    report(f"{row}: filling caches")
    text = Text(settings, length)
    ours = RegimeSteps(text)
    report(f"{row}: checking")
    check = check_steps(ours)
    dense = DenseSteps(text)
    competitors: dict[str, Steps] = {"dense": dense, "ours": ours}
    missing: dict[str, Measurement] = {}
    try:
        competitors = {"transformers": TransformersSteps(text)} | competitors
    except ImportError as error:
        reason = f'needs transformers ({error}): pip install "mosar[hf]"'
        missing["transformers"] = Measurement(unavailable=reason)
    for steps in competitors.values():
        steps()
    record = ModelDecodeBenchmark(
        model=settings.model,
        sizes=dict(SIZES[settings.model]),
        length=length,
        steps=STEPS,
        labels=settings.labels.rpartition("/")[2],
        seed=settings.seed,
        parameters={name: steps.num_parameters for name, steps in competitors.items()},
        cache_bytes={name: steps.cache_bytes for name, steps in competitors.items()},
        checks={"logits": check},
        measurements=missing,
    )
    if not record.correct:
        return record
    report(f"{row}: timing")
    samples = interleave_passes(competitors, STEPS, seconds=settings.seconds)
    measured = {name: Measurement(samples_ms=times) for name, times in samples.items()}
    return replace(record, measurements=missing | measured)


class Text:
    """What all competitors are given: tokens, labels, and keys and values of the tokens before."""

    def __init__(self, settings: ModelDecodeSettings, length: int):
        self.settings, self.model, self.length = settings, settings.model_config, length
        self.start = length - STEPS
        generator = torch.Generator().manual_seed(settings.seed)
        self.tokens = torch.randint(0, self.model.vocab_size, (1, STEPS), generator=generator)
        # Each layer has labels of its own; those of a file are all there is.
        self.labels = [
            make_labels(settings.labels, length, settings.seed + layer, settings.config)
            for layer in range(self.model.num_layers)
        ]

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[1, Hkv, start, D] each, the same at every call."""
        generator = torch.Generator().manual_seed(self.settings.seed + layer)
        shape = (1, self.model.num_kv_heads, self.start, self.model.head_dim)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        return k, v

    def decoder(self, geometry: str) -> Decoder:
        """The weights of the seed; what two geometries share is equal."""
        given = asdict(self.settings.config)
        given = {name: given[name] for name in given if name not in ("max_length", "regimes")}
        attention = AttentionConfig(
            geometry=geometry, regimes=self.settings.config.regimes, **given
        )
        decoder = Decoder(self.model, attention)
        decoder.init_weights(self.settings.seed)
        return decoder.eval()


class Steps(ABC):
    """One competitor; a call gives the seconds of its steps, from the same start every time."""

    text: Text
    model: torch.nn.Module

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Allocated for keys, values and bookkeeping."""

    @abstractmethod
    def rewind(self) -> None:
        """Back to the first step."""

    @abstractmethod
    def step(self, token: Tensor) -> Tensor:
        """token [1, 1] to logits [1, 1, vocab]."""

    def outputs(self, count: int) -> Tensor:
        """Logits of the first steps, [1, count, vocab]."""
        self.rewind()
        return torch.cat([self.step(token) for token in self.text.tokens.split(1, 1)[:count]], 1)

    def __call__(self) -> float:
        self.rewind()
        tokens = self.text.tokens.split(1, dim=1)
        begin = time.perf_counter()
        for token in tokens:
            self.step(token)
        return time.perf_counter() - begin


class DecoderSteps(Steps):
    """Our decoder with one of its caches."""

    model: Decoder
    cache: Any

    @property
    def cache_bytes(self) -> int:
        return self.cache.allocated_bytes

    def rewind(self) -> None:
        self.cache.crop(self.text.start)

    def step(self, token: Tensor) -> Tensor:
        output = self.model(token, routing="sparse", cache=self.cache)
        return self.model.logits(output.hidden)


class DenseSteps(DecoderSteps):
    """Variant rope and the cache that keeps everything."""

    def __init__(self, text: Text):
        self.text, self.model = text, text.decoder("rope")
        self.cache = self.model.new_cache()
        for layer, cache in enumerate(self.cache):
            cache.update(*text.keys_and_values(layer))


class RegimeSteps(DecoderSteps):
    """Variant mosar and the regime cache, which keeps a pass longer what the rewind needs."""

    def __init__(self, text: Text, dtype: torch.dtype = torch.float32, impl: str = "auto"):
        self.text, self.model = text, text.decoder("mosar").to(dtype)
        self.cache: RegimeCache = self.model.new_cache(crop_margin=STEPS, impl=impl)  # pyright: ignore[reportAttributeAccessIssue]
        positions = torch.arange(text.start)[None]
        for index, cache in enumerate(self.cache):
            layer: Any = self.model.layers[index]
            geometry = layer.attention.geometry
            geometry.route = DrawnRoutes(geometry.route, cache, text.labels[index])
            k, v = (x.to(dtype) for x in text.keys_and_values(index))
            groups = text.settings.config.routing_groups
            labels = text.labels[index][1][None, None, : text.start].expand(1, groups, -1)
            cache.update(k, v, labels, key_positions=positions)
            cache.settle()


class DrawnRoutes:
    """Runs the routers of a layer, and chooses what was drawn."""

    def __init__(self, route: Callable[..., LayerRouting], cache: Any, labels: tuple[Tensor, ...]):
        self.route, self.cache, self.labels = route, cache, labels

    def __call__(self, q: Tensor, k: Tensor) -> LayerRouting:
        routed, at = self.route(q, k), self.cache.slots
        drawn = []
        for output, labels in zip(routed, self.labels, strict=True):
            label = int(labels[at])
            # Some logits that the label is the largest of.
            logits = output.logits.clamp(-1, 1)
            logits[..., label] = 2
            drawn.append(RouterOutput(logits, output.probabilities))
        return LayerRouting(*drawn)


class TransformersSteps(Steps):
    """transformers' Llama of the same sizes, and the cache it uses when nothing is said."""

    def __init__(self, text: Text):
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        model = text.model
        sizes: dict[str, Any] = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.ffn_size,
            "max_position_embeddings": text.length,
            "tie_word_embeddings": True,
            "attn_implementation": "sdpa",
        }
        self.text, self.model = text, LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        self.cache: Any = DynamicCache()
        for layer in range(model.num_layers):
            self.cache.update(*text.keys_and_values(layer), layer)

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def rewind(self) -> None:
        self.cache.crop(self.text.start - self.cache.get_seq_length())

    def step(self, token: Tensor) -> Tensor:
        return self.model(
            input_ids=token, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits


def check_steps(ours: RegimeSteps) -> ErrorCheck:
    """Logits of the first steps against the same in float64 with torch operators."""
    plain = RegimeSteps(ours.text, impl="torch").outputs(_CHECKED_STEPS)
    exact = RegimeSteps(ours.text, torch.float64, "torch").outputs(_CHECKED_STEPS)
    return error_check(ours.outputs(_CHECKED_STEPS), plain, exact)
