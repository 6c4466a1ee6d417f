"""Experiment folders with made-up but plausible records: the shapes, sizes and signs of real ones.

Everything follows from the seeds; nothing here is a result.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmark_records import make_benchmark
from mosar.records import (
    Cell,
    DecodeBenchmark,
    ErrorCheck,
    EvaluationRecord,
    Measurement,
    RetrievalRecord,
    TrainingBenchmark,
    TrainingRecord,
    append_record,
)
from mosar.report.comparison import Comparison
from mosar.report.drawing import draw_pictures
from mosar.report.experiment import load_experiment
from mosar.report.page import render_page
from mosar.report.sections import all_items, make_sections

ALL = ("rope", "alibi", "p-rope", "fixed-s", "fixed-m", "rope-m-mask", "mosar", "mosar-cost")
ROUTED = ("mosar", "mosar-cost")
LENGTH, LAYERS, STEPS = 512, 6, 1600
FACTORS = (1, 2, 4)
REACHES = {"S": LENGTH / 16, "M": LENGTH / 4, "G": float(LENGTH)}
ENVIRONMENT = {
    "mosar": "0.1.0",
    "torch": "2.13.0+cpu",
    "python": "3.11.7",
    "cpu": "An Imaginary Processor",
    "cpu_capability": "AVX512",
    "threads": 2,
    "platform": "Linux-x86_64",
    "commit": "0123456789abcdef0123456789abcdef01234567",
}
CREATED = "2026-01-02T03:04:05+00:00"
# Perplexity relative to that of rope at its training length, at 1x, 2x and 4x.
_QUALITY = {
    "rope": (1.0, 1.06, 1.42),
    "alibi": (0.992, 0.962, 0.958),
    "p-rope": (0.993, 1.21, 2.6),
    "fixed-s": (0.988, 0.964, 0.967),
    "fixed-m": (0.981, 0.955, 0.964),
    "rope-m-mask": (1.012, 0.985, 0.991),
    "mosar": (0.979, 0.949, 0.9565),
    "mosar-cost": (0.994, 0.966, 0.998),
}
_BASE = 34.0
_SHARES = {
    "mosar": {"query": (0.70, 0.18, 0.12), "key": (0.62, 0.20, 0.18)},
    "mosar-cost": {"query": (0.93, 0.05, 0.02), "key": (0.88, 0.09, 0.03)},
}


def write_experiment(
    folder: Path,
    *,
    variants: Sequence[str] = ALL,
    seeds: Iterable[int] | dict[str, Iterable[int]] = (0, 1, 2),
    factors: Sequence[int] = FACTORS,
    grid: dict[str, Sequence[Any]] | None = None,
    grid_variants: Sequence[str] = ("mosar",),
    retrieval: bool = True,
    benchmarks: bool = True,
    failures: Sequence[str] = (),
    asked: bool = True,
) -> Path:
    """An experiment folder; `seeds` for all variants or by variant."""
    (folder / "records").mkdir(parents=True, exist_ok=True)
    for variant in variants:
        for seed in seeds.get(variant, (0,)) if isinstance(seeds, dict) else seeds:
            cell = Cell(variant=variant, preset="small", seed=seed)
            write_cell(folder, cell, factors=factors, retrieval=retrieval)
    for key, values in (grid or {}).items():
        for variant in grid_variants:
            for value in values:
                # As it was written on the command line.
                cell = Cell(variant=variant, preset="small", seed=0, grid={key: str(value)})
                write_cell(folder, cell, factors=factors, retrieval=False)
    if benchmarks:
        (folder / "benchmarks").mkdir(exist_ok=True)
        for record in (*make_benchmarks(), *make_other_benchmarks()):
            append_record(folder / "benchmarks" / "all.jsonl", record)
    for name in failures:
        (folder / "failures").mkdir(exist_ok=True)
        values = {"cell": name, "error": "loss is not finite at step 17", "when": CREATED}
        (folder / "failures" / f"{name}.json").write_text(json.dumps(values))
    if asked:
        wanted = {
            "preset": "small",
            "lengths": [f"{factor}x" for factor in factors],
            "data": "articles",
            "cells": [path.stem for path in sorted((folder / "records").glob("*.jsonl"))],
        }
        (folder / "experiment.json").write_text(json.dumps(wanted))
    return folder


def compare(folder: Path, **changes: Any) -> Comparison:
    """Of an experiment without retrieval and benchmarks, unless they are asked for."""
    options = {"retrieval": False, "benchmarks": False} | changes
    return Comparison(load_experiment(write_experiment(folder, **options)))


RIVALS = ("fox", "t5", "kerple", "xpos", "nsa", "longformer")


def compare_many(folder: Path) -> Comparison:
    """Those of the paper and rivals of every family; fox is the best, longformer the worst."""
    write_experiment(folder, seeds=(0,), factors=(1, 4), benchmarks=False)
    for place, name in enumerate(RIVALS):
        rope = Cell(variant="rope", preset="small", seed=0)
        for record in make_evaluations(rope, (1, 4)):
            cell, loss = replace(rope, variant=name), record.loss - 2 + place / 2
            append_record(
                folder / "records" / f"{name}.jsonl", replace(record, cell=cell, loss=loss)
            )
    return Comparison(load_experiment(folder))


def render(c: Comparison) -> str:
    """The page."""
    sections = make_sections(c)
    return render_page(c, sections, draw_pictures(all_items(sections)))


def write_cell(
    folder: Path, cell: Cell, *, factors: Sequence[int] = FACTORS, retrieval: bool = False
) -> None:
    path = folder / "records" / f"{cell.name}.jsonl"
    records = [make_training(cell), *make_evaluations(cell, factors)]
    for record in records + (make_retrievals(cell) if retrieval else []):
        append_record(path, record)


def _random(cell: Cell, *more: object) -> random.Random:
    return random.Random(f"{cell.name} {more}")


def _shift(cell: Cell) -> float:
    """What a seed does to every variant alike, and a little to each."""
    common = random.Random(f"seed {cell.seed}").gauss(0, 0.01)
    return common + _random(cell).gauss(0, 0.0025)


def _barrier(cell: Cell) -> float:
    return float(cell.grid.get("attention.barrier", 6.0))


def perplexity(cell: Cell, factor: float) -> float:
    """Interpolated between the known factors, worse the farther the barrier is from 6."""
    known = _QUALITY.get(cell.variant, (1.0, 1.0, 1.0))
    place = min(max(math.log2(factor), 0.0), 2.0)
    low = min(int(place), 1)
    quality = known[low] + (known[low + 1] - known[low]) * (place - low)
    off = 1 + 0.002 * abs(_barrier(cell) - 6)
    return _BASE * quality * off * math.exp(_shift(cell))


def make_config(cell: Cell) -> dict[str, Any]:
    geometry = {
        "p-rope": "p-rope",
        "alibi": "alibi",
        "rope": "rope",
        "rope-m-mask": "rope-mask",
        "fixed-s": "fixed",
        "fixed-m": "fixed",
    }.get(cell.variant, "mosar" if cell.variant in ROUTED else cell.variant)
    regime = {"fixed-s": "S", "fixed-m": "M", "rope-m-mask": "M"}.get(cell.variant)
    config: dict[str, Any] = {
        "model": {
            "vocab_size": 4096,
            "hidden_size": 256,
            "num_layers": LAYERS,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "ffn_size": 768,
            "attn_softcap": 50.0,
            "final_softcap": 30.0,
            "max_length": LENGTH,
        },
        "attention": {
            "geometry": geometry,
            "rope_theta": 10000.0,
            "rope_fraction": 0.75 if cell.variant == "p-rope" else 1.0,
            "regime": regime,
            "regimes": None,
            "router_hidden": 64,
            "temperature": 1.0,
            "barrier": 6.0,
            "exponent": 2.0,
            "epsilon": 1e-6,
            "composition": "mean",
            "routing_groups": 1,
            "num_sinks": 0,
            "cost_weight": 0.01 if cell.variant == "mosar-cost" else 0.0,
            "cost_warmup": 500,
        },
        "data": {"folder": "articles", "task": "text", "seed": cell.seed},
        "train": {
            "steps": STEPS,
            "micro_batch": 4,
            "learning_rate": 1e-3,
            "betas": [0.9, 0.95],
            "seed": cell.seed,
            "precision": "fp32",
            "device": "cpu",
        },
    }
    for key, value in cell.grid.items():
        section, _, name = key.partition(".")
        try:
            config[section][name] = json.loads(value)
        except ValueError:
            config[section][name] = value
    return config


def make_training(cell: Cell) -> TrainingRecord:
    final = math.log(perplexity(cell, 1))
    noise = _random(cell, "curve")
    steps = range(0, STEPS + 1, 100)
    valid = [
        [step, final + 4.8 * math.exp(-step / 190) * (1 - step / STEPS) + noise.gauss(0, 0.002)]
        for step in steps
    ]
    routed = cell.variant in ROUTED
    return TrainingRecord(
        created=CREATED,
        environment=ENVIRONMENT,
        cell=cell,
        config=make_config(cell),
        data={
            "name": "articles",
            "tokenizer": "bpe:4096",
            "vocab_size": 4096,
            "tokens": {"train": 23_571_658, "valid": 734_751},
            "documents": {"train": 2677, "valid": 74},
            "fingerprint": "279f30bb4bc2319a",
        },
        parameters=6_100_000 + (200_000 if routed else 0),
        step=STEPS,
        tokens=STEPS * 4 * LENGTH,
        seconds=900.0 + 10 * cell.seed + (350 if routed else 0),
        train_curve=[[step, loss + 0.02] for step, loss in valid[1:]],
        valid_curve=valid,
        reach_curve=[[step, 0.44 - 0.2 * step / STEPS] for step in steps] if routed else [],
    )


def make_evaluations(cell: Cell, factors: Sequence[int] = FACTORS) -> list[EvaluationRecord]:
    routings = ("soft", "top1", "sparse") if cell.variant in ROUTED else ("native",)
    return [make_evaluation(cell, factor, routing) for factor in factors for routing in routings]


def make_evaluation(cell: Cell, factor: float, routing: str = "native") -> EvaluationRecord:
    length = round(LENGTH * factor)
    loss = math.log(perplexity(cell, factor))
    if routing in ("top1", "sparse"):
        loss += 0.03 + 0.006 * factor + (0.002 * factor if routing == "sparse" else 0)
        loss += _random(cell, factor, "gap").gauss(0, 0.002)
        loss += 0.008 if cell.variant == "mosar-cost" else 0
    record = EvaluationRecord(
        created=CREATED,
        environment=ENVIRONMENT,
        cell=cell,
        step=STEPS,
        train_length=LENGTH,
        length=length,
        routing=routing,
        windows=round(256 / factor),
        tokens=131_072,
        loss=loss,
        loss_stderr=0.01,
        buckets=_buckets(cell, factor, loss),
        seconds={"native": 9.0, "soft": 22.0, "top1": 14.0}.get(routing, 9.5 / factor**0.4)
        * (1 + _random(cell, factor, routing).random() * 0.05)
        * factor**0.5,
        density={"rope-m-mask": 0.44 / factor}.get(cell.variant, 1.0),
        layer_density=[],
        reach_soft=None,
        reach_top1=None,
        discarded_mass=[],
        shares_soft={},
        shares_top1={},
        regimes=[],
        example_labels={},
    )
    return _with_routing(record, factor) if cell.variant in ROUTED else record


def _buckets(cell: Cell, factor: float, loss: float) -> list[list[float]]:
    """Eight spans of a window; worse at its start, and beyond N where the variant cannot."""
    count, length = 8, round(LENGTH * factor)
    broken = {"rope": 0.25, "p-rope": 1.1}.get(cell.variant, 0.0)
    rows = []
    for i in range(count):
        start, end = i * length / count, (i + 1) * length / count
        early = 0.35 * math.exp(-(start + end) / LENGTH)
        late = broken * max((start + end) / 2 / LENGTH - 1, 0) / 3
        rows.append([start, end, loss + early - 0.05 + late, 131_072 / count])
    return rows


def _with_routing(record: EvaluationRecord, factor: float) -> EvaluationRecord:
    cell = record.cell
    noise = _random(cell, "routing")
    soft: dict[str, list[list[float]]] = {"query": [], "key": []}
    for side, moves in (("query", 0.004), ("key", 0.02)):
        for layer in range(LAYERS):
            short, _, wide = _SHARES[cell.variant][side]
            short += 0.12 * math.sin(layer + (side == "key")) + noise.gauss(0, 0.01)
            short = min(max(short - moves * math.log2(factor), 0.02), 0.97)
            wide = min(wide * (1 + 0.3 * math.cos(layer)) + noise.gauss(0, 0.004), 1 - short)
            wide = max(wide, 0.005)
            soft[side].append([short, 1 - short - wide, wide])
    top1 = {side: [_sharpened(row) for row in rows] for side, rows in soft.items()}
    dense = 0.46 if cell.variant == "mosar" else 0.24
    densities = [dense / factor**0.8 * (1 + 0.2 * math.cos(i)) for i in range(LAYERS)]
    scale = (
        (0.02 if cell.variant == "mosar" else 0.034)
        * math.exp(-0.35 * (_barrier(cell) - 6))
        * factor**0.4
    )
    mass = [scale * (1 + 0.6 * math.sin(i)) for i in range(LAYERS)]
    return replace(
        record,
        density=sum(densities) / LAYERS if record.routing != "soft" else 1.0,
        layer_density=densities if record.routing != "soft" else [],
        reach_soft=_reach(soft, factor),
        reach_top1=_reach(top1, factor),
        discarded_mass=[{"mean": m, "p95": min(m * 3, 1.0), "worst": min(m * 9, 1.0)} for m in mass]
        if record.routing == "top1"
        else [],
        shares_soft=soft,
        shares_top1=top1,
        regimes=["S", "M", "G"],
        example_labels={
            side: [_labels(cell, side, layer, rows[layer]) for layer in range(LAYERS)]
            for side, rows in top1.items()
        },
    )


def _sharpened(row: Sequence[float]) -> list[float]:
    powers = [value**1.5 for value in row]
    return [value / sum(powers) for value in powers]


def _reach(shares: dict[str, list[list[float]]], factor: float) -> float:
    costs = [min(reach / (LENGTH * factor), 1.0) for reach in REACHES.values()]
    costs[-1] = 1.0
    rows = [row for side in shares.values() for row in side]
    return sum(sum(p * c for p, c in zip(row, costs, strict=True)) for row in rows) / len(rows)


def _labels(cell: Cell, side: str, layer: int, row: Sequence[float]) -> str:
    """Runs of a regime, as text has them."""
    draw = _random(cell, side, layer)
    letters: list[str] = []
    while len(letters) < LENGTH:
        letters += draw.choices("SMG", row)[0] * draw.randint(1, 6)
    return "".join(letters[:LENGTH])


def make_retrievals(cell: Cell) -> list[RetrievalRecord]:
    routings = ("soft", "sparse") if cell.variant in ROUTED else ("native",)
    return [make_retrieval(cell, task, r) for task in ("passkey", "recall") for r in routings]


def make_retrieval(cell: Cell, task: str, routing: str) -> RetrievalRecord:
    """Found up to where the geometry can see, by chance beyond."""
    limit = {"fixed-s": 40, "fixed-m": 150, "rope-m-mask": 130, "rope": 700, "p-rope": 500}
    sight, chance = limit.get(cell.variant, 2200), 0.01 if task == "passkey" else 0.05
    noise = _random(cell, task, routing)
    rows = []
    edges = [2**k + 1 for k in range(3, 12)]
    for start, end in pairwise(edges):
        seen = 1 / (1 + math.exp(6 * (math.log2(start * 1.4) - math.log2(sight))))
        top = (0.97 if task == "passkey" else 0.88) - (0.02 if routing == "sparse" else 0)
        accuracy = chance + (top - chance) * seen + noise.gauss(0, 0.01)
        rows.append([start, end, min(max(accuracy, 0.0), 1.0), 64])
    return RetrievalRecord(
        created=CREATED,
        environment=ENVIRONMENT,
        cell=cell,
        step=STEPS,
        task=task,
        train_length=LENGTH,
        length=4 * LENGTH,
        routing=routing,
        answers=64 * len(rows),
        accuracy=sum(row[2] for row in rows) / len(rows),
        by_distance=rows,
        reaches=_marked(cell.variant),
        chance=chance,
        density=None if cell.seed else 0.25,
    )


def _marked(variant: str) -> dict[str, float]:
    """Reaches of the regimes that a variant has."""
    one = {"fixed-s": "S", "fixed-m": "M", "rope-m-mask": "M"}.get(variant)
    if one is not None:
        return {one: REACHES[one]}
    return REACHES if variant in ROUTED else {}


def make_benchmarks():
    for heads, kv_heads, head_dim, part in ((8, 1, 256, 0.9), (8, 8, 64, 0.7), (9, 3, 64, 0.8)):
        for length, density in ((1024, 0.55), (2048, 0.36), (4096, 0.21), (8192, 0.12)):
            causal = length * (length + 1) // 2
            times = {
                "sdpa": Measurement(samples_ms=(length / 100,)),
                "ours": Measurement(samples_ms=(length / 100 * density / part,)),
            }
            yield make_benchmark(
                created=CREATED,
                environment=ENVIRONMENT,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                length=length,
                pairs=round(causal * density),
                causal_pairs=causal,
                measurements=times,
            )


def make_other_benchmarks():
    """Of decoding and of training."""
    common = {"created": CREATED, "environment": ENVIRONMENT}
    check = {"out": ErrorCheck(error=1e-7, budget=1e-6)}
    for length in (2048, 8192, 32768):
        yield DecodeBenchmark(
            **common,
            heads=8,
            kv_heads=1,
            head_dim=256,
            length=length,
            steps=16,
            labels="independent",
            seed=0,
            keys_read=1400.0,
            allocated_bytes=2_000_000,
            used_bytes=1_500_000,
            dense_bytes=2048 * length,
            dense_form="grouped",
            checks=check,
            measurements={
                "sdpa": Measurement(samples_ms=(length / 4000,)),
                "ours": Measurement(samples_ms=(0.4,)),
            },
        )
    yield TrainingBenchmark(
        **common,
        preset="small",
        setting="capped",
        length=512,
        batch=4,
        parameters={"rope": 6_000_000, "mosar": 6_200_000},
        gemm_gflops=180.0,
        checks=check,
        measurements={
            "rope": Measurement(samples_ms=(500.0,)),
            "mosar": Measurement(samples_ms=(600.0,)),
        },
    )
