"""The model card of an exported run: what it is, what it learnt from, what was measured, how to use
it. Figures come from the run's own records; what was not measured is said to be missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mosar.attention import ROUTINGS
from mosar.data.manifest import Manifest
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.store import EVALUATIONS
from mosar.geometries import UNROUTED
from mosar.records import EvaluationRecord, RetrievalRecord, read_records
from mosar.version import __version__

_TEXTS: dict[str, Callable[[Any], str]] = {
    "length": lambda r: f"{r.length:,}",
    "routing": lambda r: r.routing,
    "perplexity": lambda r: f"{r.perplexity:.2f}",
    "loss": lambda r: f"{r.loss:.4f} ± {r.loss_stderr:.4f}",
    "support density": lambda r: f"{r.density:.3f}",
    "normalized reach": lambda r: _three(r.reach_soft if r.routing == "soft" else r.reach_top1),
}
_TASKS: dict[str, Callable[[Any], str]] = {
    "task": lambda r: r.task,
    "length": lambda r: f"{r.length:,}",
    "routing": lambda r: r.routing,
    "accuracy": lambda r: _three(r.accuracy),
    "chance": lambda r: _three(r.chance),
    "answers": lambda r: f"{r.answers:,}",
}
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
{tags}
---

# {variant}: a {parameters} parameter language model with {kind} attention geometry

{introduction}

## Use

{note}Install mosar with its extra `hf`, then

```python
import mosar.integrations.hf  # the Auto classes learn of it
from transformers import {names}

{code}```

## Training

{training}

## Results

{results}
"""
_LOAD = 'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'


def model_card(
    loaded: LoadedRun,
    manifest: Manifest | None,
    metrics: Iterable[dict[str, Any]],
    *,
    dtype: str,
    routing: str,
) -> str:
    """The card as Markdown with the head that the Hugging Face Hub reads.

    metrics: the last line of each split.
    """
    routed, variant = loaded.geometry.routed, loaded.cell.variant
    tags = dict.fromkeys(["mosar", variant, *(["sparse-attention"] if routed else [])])
    code = _LOAD + ('model.set_routing("sparse")  # soft, top1 or sparse\n' if routed else "")
    names, note = "AutoModelForCausalLM", "It has no tokenizer: it learnt a synthetic task.\n\n"
    if manifest is not None:
        names, note = "AutoModelForCausalLM, AutoTokenizer", ""
        code = (
            f'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n{code}'
            'inputs = tokenizer("Once", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))\n"
        )
    return _CARD.format(
        tags="\n".join(f"- {tag}" for tag in tags),
        variant=variant,
        parameters=_count(sum(parameter.numel() for parameter in loaded.decoder.parameters())),
        kind="learned" if routed else "fixed",
        introduction=_introduction(loaded, dtype, routing),
        note=note,
        names=names,
        code=code,
        training=_training(loaded, manifest),
        results=_results(loaded, metrics),
    )


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit}"
    return str(parameters)


def _introduction(loaded: LoadedRun, dtype: str, routing: str) -> str:
    model = loaded.config.model
    text = (
        f"A Gemma 2-style decoder of {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"{model.num_heads} query heads on {model.num_kv_heads} key/value heads of "
        f"{model.head_dim}, vocabulary {model.vocab_size:,}, trained at length "
        f"{model.max_length:,}. Parameters are in {dtype}"
    )
    if not loaded.geometry.routed:
        return text + "."
    text += "" if dtype == "float32" else ", routers in float32"
    regimes = ", ".join(f"{name} {reach:g}" for name, reach in loaded.geometry.reaches().items())
    return (
        f"{text}. Routers give each token a reach ({regimes} tokens); the "
        f"model starts with `{routing}` routing, `model.set_routing` changes it."
    )


def _training(loaded: LoadedRun, manifest: Manifest | None) -> str:
    config = loaded.config
    rows = {
        "variant": loaded.cell.variant,
        "preset": config.preset or "none",
        "step": f"{loaded.step:,} of {config.train.steps:,}",
        "tokens seen": f"{loaded.step * config.tokens_per_step:,}",
        "seed": str(config.train.seed),
        "precision": config.train.precision,
        "learning rate": f"{config.train.learning_rate:g} → {config.train.min_learning_rate:g}",
        "checkpoint (sha256)": f"`{loaded.checksum[:16]}…`",
    }
    if config.attention.cost_weight:
        rows["routing cost"] = f"λ = {config.attention.cost_weight:g}"
    if manifest is None:
        rows["data"] = f"the synthetic task {config.data.task}"
    else:
        rows["data"] = "; ".join(dict.fromkeys(_source(entry.source) for entry in manifest.sources))
        tokens = {name: split.tokens for name, split in manifest.splits.items()}
        rows["data tokens"] = ", ".join(f"{name} {count:,}" for name, count in tokens.items())
        rows["tokenizer"] = _source(manifest.tokenizer.origin)
    rows["made by"] = f"mosar {__version__}"
    return _table(("", ""), rows.items())


def _source(source: str) -> str:
    """A source without the folders it lay in on somebody's machine."""
    return source if source.startswith("hf:") else source.rstrip("/").rpartition("/")[2]


def _results(loaded: LoadedRun, metrics: Iterable[dict[str, Any]]) -> str:
    parts = [
        f"Validation loss at the training length after step {line['step']:,}: "
        f"{line['lm_loss']:.4f} (perplexity {math.exp(min(line['lm_loss'], 700)):.2f})."
        for line in metrics
        if line["split"] == "valid"
    ]
    records = _records(loaded)
    for kind, columns in ((EvaluationRecord, _TEXTS), (RetrievalRecord, _TASKS)):
        rows = [
            [show(record) for show in columns.values()]
            for record in records
            if isinstance(record, kind)
        ]
        if rows:
            parts.append(_table(list(columns), rows))
        if rows and columns is _TEXTS:
            parts.append(
                "Every length predicts the same validation text; ± is the standard error of the "
                "mean."
            )
    if not records:
        parts.append("This checkpoint was not evaluated; `mosar evaluate` does that.")
    return "\n\n".join(parts)


def _records(loaded: LoadedRun) -> list[EvaluationRecord | RetrievalRecord]:
    """The evaluations of these very parameters, by length; unreadable ones are left out."""
    found = []
    for path in sorted((loaded.run / EVALUATIONS).glob("*.json")):
        try:
            found += read_records(path)
        except (OSError, ValueError):
            continue
    ours = [
        record
        for record in found
        if isinstance(record, EvaluationRecord | RetrievalRecord)
        and record.inputs.get("checkpoint") == loaded.checksum
    ]
    order = (UNROUTED, *ROUTINGS)
    return sorted(ours, key=lambda record: (record.length, order.index(record.routing)))


def _three(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(head), ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
