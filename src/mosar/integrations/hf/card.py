"""The model card of an exported run: what it is, what it learnt from, what was measured, how to use
it. Figures come from the run's own records; what was not measured is said to be missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mosar.attention import ROUTINGS
from mosar.data.manifest import Manifest
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.store import EVALUATIONS
from mosar.geometries import NATIVE
from mosar.records import EvaluationRecord, RetrievalRecord, read_records
from mosar.training.run_folder import METRICS, read_metrics
from mosar.version import __version__


def model_card(loaded: LoadedRun, manifest: Manifest | None, *, dtype: str, routing: str) -> str:
    """The card as Markdown with the head that the Hugging Face Hub reads."""
    variant = loaded.cell.variant
    sections = [
        _head(loaded),
        f"# {variant}: a {_parameters(loaded)} language model with {_geometry(loaded)}",
        _introduction(loaded, dtype, routing),
        "## Use\n\n" + _use(loaded, manifest),
        "## Training\n\n" + _training(loaded, manifest),
        "## Results\n\n" + _results(loaded),
    ]
    return "\n\n".join(sections) + "\n"


def _head(loaded: LoadedRun) -> str:
    tags = [
        "mosar",
        loaded.cell.variant,
        *(["sparse-attention"] if loaded.geometry.routed else []),
    ]
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in dict.fromkeys(tags)), "---"])


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


def _geometry(loaded: LoadedRun) -> str:
    return "learned attention geometry" if loaded.geometry.routed else "fixed attention geometry"


def _parameters(loaded: LoadedRun) -> str:
    count = sum(parameter.numel() for parameter in loaded.decoder.parameters())
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.1f} {unit} parameter"
    return f"{count} parameter"


def _use(loaded: LoadedRun, manifest: Manifest | None) -> str:
    sparse = (
        'model.set_routing("sparse")  # soft, top1 or sparse\n' if loaded.geometry.routed else ""
    )
    if manifest is None:
        body = f'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n{sparse}'
        names, note = "AutoModelForCausalLM", "It has no tokenizer: it learnt a synthetic task.\n\n"
    else:
        body = (
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
            f'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n{sparse}'
            'inputs = tokenizer("Once", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))\n"
        )
        names, note = "AutoModelForCausalLM, AutoTokenizer", ""
    return (
        f'{note}`pip install "mosar[hf]"`, then\n\n```python\n'
        f"import mosar.integrations.hf  # the Auto classes learn of it\n"
        f"from transformers import {names}\n\n{body}```"
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


def _results(loaded: LoadedRun) -> str:
    parts = []
    valid = _validation(loaded)
    if valid is not None:
        loss, step = valid
        parts.append(
            f"Validation loss at the training length after step {step:,}: {loss:.4f} "
            f"(perplexity {math.exp(min(loss, 700)):.2f})."
        )
    records = _records(loaded)
    texts = [record for record in records if isinstance(record, EvaluationRecord)]
    tasks = [record for record in records if isinstance(record, RetrievalRecord)]
    if texts:
        parts.append(_text_table(texts))
    if tasks:
        parts.append(_task_table(tasks))
    if not records:
        parts.append("This checkpoint was not evaluated; `mosar evaluate` does that.")
    return "\n\n".join(parts)


def _text_table(records: Sequence[EvaluationRecord]) -> str:
    head = ("length", "routing", "perplexity", "loss", "support density", "normalized reach")
    rows = [
        (
            f"{record.length:,}",
            record.routing,
            f"{record.perplexity:.2f}",
            f"{record.loss:.4f} ± {record.loss_stderr:.4f}",
            f"{record.density:.3f}",
            _reach(record),
        )
        for record in records
    ]
    note = "Every length predicts the same validation text; ± is the standard error of the mean."
    return f"{_table(head, rows)}\n\n{note}"


def _reach(record: EvaluationRecord) -> str:
    reach = record.reach_soft if record.routing == "soft" else record.reach_top1
    return "" if reach is None else f"{reach:.3f}"


def _task_table(records: Sequence[RetrievalRecord]) -> str:
    head = ("task", "length", "routing", "accuracy", "chance", "answers")
    rows = [
        (
            record.task,
            f"{record.length:,}",
            record.routing,
            f"{record.accuracy:.3f}",
            f"{record.chance:.3f}",
            f"{record.answers:,}",
        )
        for record in records
    ]
    return _table(head, rows)


def _validation(loaded: LoadedRun) -> tuple[float, int] | None:
    """The last validation loss up to the checkpoint, and its step."""
    if not (loaded.run / METRICS).exists():
        return None
    lines = [line for line in read_metrics(loaded.run, "valid") if line["step"] <= loaded.step]
    return (lines[-1]["lm_loss"], lines[-1]["step"]) if lines else None


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
    order = (NATIVE, *ROUTINGS)
    return sorted(ours, key=lambda record: (record.length, order.index(record.routing)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(head), ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
