"""Times whole models that write token by token: `mosar bench decode --model smollm2`.

All have the sizes of one model and random weights, and their caches are filled with random keys and
values; what a token costs depends on neither.

    transformers   LlamaForCausalLM with DynamicCache and SDPA
    dense          our decoder, variant rope, with the cache that keeps everything
    ours           our decoder, variant mosar, with the regime cache under sparse routing; its
                   routers run, and then drawn labels take the place of their choice

A pass of some tokens begins with all caches cropped back to where the one before began.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mosar.bench.comparison import Report, RoutedComparison, check_names
from mosar.bench.correctness import error_check
from mosar.bench.decode import Steps
from mosar.bench.labels import make_labels
from mosar.bench.problem import Case, Shape
from mosar.bench.table import MIB, Column, Verdict, verdict
from mosar.bench.timing import interleave_passes
from mosar.bench.transformers_models import build_llama
from mosar.core.outputs import RouterOutput
from mosar.geometries import AttentionConfig, LayerRouting
from mosar.model.cache import RegimeCache
from mosar.model.config import ModelConfig
from mosar.model.decoder import Decoder
from mosar.records import ErrorCheck, ModelDecodeBenchmark

_FIELDS = (
    *("vocab_size", "hidden_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "ffn_size"),
)
SIZES = {
    "smollm2": dict(zip(_FIELDS, (49152, 576, 30, 9, 3, 64, 1536), strict=True)),
    "tiny": dict(zip(_FIELDS, (64, 32, 2, 4, 2, 8, 48), strict=True)),
}
# Tokens per sample.
STEPS = 16
_CHECKED_STEPS = 4
# Targets of a whole model of these sizes against transformers, by length.
_TARGETS = {("smollm2", 16384): (2.0, 0.35)}


@dataclass(frozen=True, kw_only=True)
class ModelDecodeComparison(RoutedComparison[ModelDecodeBenchmark]):
    model: str = "smollm2"
    """A name in SIZES."""
    lengths: tuple[int, ...] = (16384,)
    """Tokens of context of the last one."""
    seconds: float = 20.0
    min_length: ClassVar[int] = STEPS + 1
    title: ClassVar[str] = "whole models, one token after another"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("model", (self.model,), SIZES)

    def cases(self) -> list[Case]:
        sizes = SIZES[self.model]
        shape = Shape(sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"])
        return self.draw_cases([shape], self.lengths)

    @torch.inference_mode()
    def measure(self, case: Case, report: Report) -> ModelDecodeBenchmark:
        report("filling caches")
        text = Text(case, self.model)
        ours = RegimeSteps(text)
        report("checking")
        check = check_steps(ours)
        build: dict[str, Callable[[Text], ModelSteps]] = {
            "transformers": TransformersSteps,
            "dense": DenseSteps,
            "ours": lambda text: ours,
        }
        competitors, missing = self.build(build, lambda name: build[name](text))
        for steps in competitors.values():
            steps()
        record = ModelDecodeBenchmark(
            model=self.model,
            sizes=dict(SIZES[self.model]),
            **case.record_fields(),
            steps=STEPS,
            parameters={name: steps.num_parameters for name, steps in competitors.items()},
            cache_bytes={name: steps.cache_bytes for name, steps in competitors.items()},
            checks={"logits": check},
            measurements=missing,
        )
        if not record.correct:
            return record
        report("timing")
        return self.with_times(record, interleave_passes(competitors, seconds=self.seconds))

    def columns(self, records: Sequence[ModelDecodeBenchmark]) -> list[Column]:
        return [
            Column("sizes of", lambda r: r.model, is_head=True),
            Column("n", lambda r: r.length, is_head=True),
            Column("tokens/s\ntransformers", lambda r: r.tokens_per_second("transformers"), ".1f"),
            Column("tokens/s\nours, dense", lambda r: r.tokens_per_second("dense"), ".1f"),
            Column("tokens/s\nours", lambda r: r.tokens_per_second("ours"), ".1f"),
            Column("speed-up ×\ntransformers", lambda r: r.speedup("transformers"), ".2f"),
            Column("speed-up ×\ndense", lambda r: r.speedup("dense"), ".2f"),
            Column(
                "cache MiB\nours / transformers",
                lambda r: tuple(map(r.cache_bytes.get, ("ours", "transformers"))),
                ".1f",
                MIB,
            ),
            Column("cache ×\ntransformers", lambda r: r.memory_ratio("transformers"), ".3f"),
        ]

    def judge(self, record: ModelDecodeBenchmark) -> list[Verdict]:
        target = _TARGETS.get((record.model, record.length))
        speedup, memory = (f("transformers") for f in (record.speedup, record.memory_ratio))
        if target is None:
            return []
        found = verdict(f"≥ {target[0]:g}×", speedup, least=target[0])
        return found + verdict(f"cache ≤ {target[1]:g}", memory, most=target[1])

    def notes(self, records: Sequence[ModelDecodeBenchmark]) -> str:
        first = records[0]
        return (
            f"Batch 1, random weights; a round is {first.steps} tokens that end at n. "
            "transformers: Llama with DynamicCache and SDPA; ours, dense: our decoder, rope, with "
            "a dense cache; ours: mosar, sparse. "
            f"Labels: {first.labels}, seed {first.seed}."
        )


class Text:
    """The input of all competitors: tokens, labels, and keys and values of earlier tokens."""

    def __init__(self, case: Case, model: str):
        self.case, self.start = case, case.length - STEPS
        self.model = ModelConfig(
            **SIZES[model],
            query_pre_attn_scalar=case.shape.head_dim,
            attn_softcap=None,
            final_softcap=None,
            max_length=case.config.max_length,
        )
        generator = torch.Generator().manual_seed(case.seed)
        self.tokens = torch.randint(0, self.model.vocab_size, (1, STEPS), generator=generator)
        # Each layer has its own labels; a file has only one set.
        self.labels = [
            make_labels(case.labels, case.length, case.seed + layer, case.config)
            for layer in range(self.model.num_layers)
        ]

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[1, Hkv, start, D] each, the same at every call."""
        generator = torch.Generator().manual_seed(self.case.seed + layer)
        shape = (1, self.model.num_kv_heads, self.start, self.model.head_dim)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        return k, v

    def decoder(self, geometry: str) -> Decoder:
        """Weights from the seed; parameters that two geometries share are equal."""
        config = self.case.config
        given = asdict(config)
        given = {name: given[name] for name in given if name not in ("max_length", "regimes")}
        attention = AttentionConfig(geometry=geometry, regimes=config.regimes, **given)
        decoder = Decoder(self.model, attention)
        decoder.init_weights(self.case.seed)
        return decoder.eval()


class ModelSteps(Steps):
    """Tokens [1, 1] to logits [1, 1, vocab]."""

    text: Text
    model: torch.nn.Module

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Allocated for keys, values and bookkeeping."""

    def inputs(self) -> list[tuple]:
        return [(token,) for token in self.text.tokens.split(1, dim=1)]


class DecoderSteps(ModelSteps):
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
    """Variant rope with the cache that keeps everything."""

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
            geometry.route = partial(route_as_drawn, geometry.route, cache, text.labels[index])
            k, v = (x.to(dtype) for x in text.keys_and_values(index))
            groups = text.case.config.routing_groups
            labels = text.labels[index][1][None, None, : text.start].expand(1, groups, -1)
            cache.update(k, v, labels, key_positions=positions)
            cache.settle()


def route_as_drawn(
    route: Callable[..., LayerRouting], cache: Any, drawn: tuple[Tensor, ...], q: Tensor, k: Tensor
) -> LayerRouting:
    """Runs the routers of a layer, but chooses the drawn labels."""
    outputs = []
    routed = route(q, k)
    for output, labels in zip((routed.query, routed.key), drawn, strict=True):
        # Logits whose largest entry is the label.
        logits = output.logits.clamp(-1, 1)
        logits[..., int(labels[cache.slots])] = 2
        outputs.append(RouterOutput(logits, output.probabilities))
    return LayerRouting(*outputs)


class TransformersSteps(ModelSteps):
    """transformers' Llama of the same sizes with its default cache."""

    def __init__(self, text: Text):
        self.text = text
        self.model, self.cache = build_llama(text.model, text.case.length)
        for layer in range(text.model.num_layers):
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
    """Compares the logits of the first steps with float64 on torch operators."""
    plain = RegimeSteps(ours.text, impl="tiled").outputs(_CHECKED_STEPS)
    exact = RegimeSteps(ours.text, torch.float64, "tiled").outputs(_CHECKED_STEPS)
    return error_check(ours.outputs(_CHECKED_STEPS), plain, exact)
