"""What `mosar retrofit` does: load, attach, train, evaluate; and `mosar evaluate` of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from mosar.core.config import MoSARConfig
from mosar.evaluation.choices import parse_lengths
from mosar.evaluation.progress import length_progress
from mosar.integrations.retrofit.adapter import DESCRIPTION, load_retrofitted, read_description
from mosar.integrations.retrofit.attach import Retrofit, default_config, retrofit
from mosar.integrations.retrofit.base_model import (
    BaseIdentity,
    check_length,
    context_length,
    load_base,
)
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.evaluate import (
    ROUTINGS,
    WINDOW,
    evaluate_retrofit,
    evaluate_window,
    text_fingerprint,
)
from mosar.integrations.retrofit.speed import time_retrofit
from mosar.integrations.retrofit.train import train_retrofit
from mosar.integrations.retrofit.windows import read_beginnings, read_windows
from mosar.records import Record, RetrofitEvaluation, RetrofitSpeed, append_record, read_records

EVALUATIONS, RECORDS = "evaluations", "retrofit.jsonl"


def is_retrofitted(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def resolve_settings(
    target_density: float | None, length: int | None, steps: int | None, changes: Sequence[str]
) -> dict[str, Any]:
    """The settings that the options name; a ValueError says what is wrong."""
    given = {"target_density": target_density, "length": length, "steps": steps}
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    known = {item.name: item.type for item in fields(RetrofitSettings)}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in known:
            raise ValueError(
                f"--set takes KEY=VALUE with KEY one of {sorted(known)}, got {change!r}"
            )
        try:
            values[key] = int(text) if known[key] == "int" else float(text)
        except ValueError:
            raise ValueError(f"--set {key} takes a number, got {text!r}") from None
    RetrofitSettings(**values)
    return values


def run_retrofit_command(
    model: str,
    data: Sequence[str],
    out: Path,
    *,
    named: Mapping[str, Any],
    geometry: MoSARConfig | None,
    start_from: Path | None = None,
    text_field: str,
    evaluate: bool,
    progress: bool,
) -> None:
    """Trains routers for `model` into `out`; prints a line, and tables with `evaluate`.

    named: the settings that are not the defaults. Windows are by default no longer than the model's
    context.
    """
    base_model, tokenizer = load_base(model)
    settings = _settings_for(base_model, named)
    identity = BaseIdentity.of(base_model, _absolute(model))
    windows = read_windows(
        data,
        tokenizer,
        settings.length,
        train=settings.steps,
        valid=settings.valid_windows,
        text_field=text_field,
    )
    if geometry is None and start_from is not None:
        geometry = MoSARConfig.from_dict(read_description(start_from)["geometry"])
    attached = retrofit(base_model, geometry or default_config(base_model))
    notes = {"data": [_absolute(source) for source in data], "text_field": text_field}
    result = train_retrofit(
        attached,
        windows,
        settings,
        out,
        base=identity,
        start_from=start_from,
        notes=notes,
        progress=progress,
    )
    print(
        f"{out}: density {result.density:.3f} (target {settings.target_density:g}) and "
        f"{100 * result.lost:.1f} % of the attention lost at {settings.length} tokens"
    )
    if evaluate:
        evaluator = _Evaluator(attached, out, windows.valid, [settings.length - 1], progress)
        evaluator.routings(ROUTINGS)
        evaluator.speed(3)


def run_evaluate_retrofitted(
    folder: Path,
    *,
    lengths: Sequence[str | int] = ("1x",),
    routings: Sequence[str] | None = None,
    data: Path | None = None,
    tokens: int | None = None,
    documents: int | None = None,
    windows: Sequence[int] = (),
    rounds: int = 3,
    force: bool = False,
    json: Path | None = None,
    progress: bool = True,
) -> None:
    """Evaluates an adapter's folder; records go into it, and what it has already is not made again.

    lengths: "2x" of the length of training, or tokens. data: text or a dataset, by default what
    the routers were trained with, whose first windows they did not see. tokens: predicted at the
    longest length, by default those of the validation windows. documents: read the beginnings of so
    many documents that are long enough instead. windows: reaches of fixed windows to compare with.
    rounds: of timing; 0: none. json: a file that gets the new records too.
    """
    notes = read_description(folder)["notes"]
    settings = RetrofitSettings.from_dict(notes.get("settings", {}))
    sources = notes.get("data") if data is None else [str(data)]
    if not sources:
        raise ValueError(f"{folder} does not say which text it was trained with; give --data")
    if json is not None and not json.absolute().parent.is_dir():
        raise ValueError(f"cannot write {json}: its folder does not exist")
    if tokens is not None and documents is not None:
        raise ValueError("--tokens and --documents both say how much is read; give one")
    sizes = parse_lengths(lengths, settings.length)
    chosen = ROUTINGS if routings is None else tuple(routings)
    unknown = [routing for routing in chosen if routing not in ROUTINGS]
    if unknown:
        raise ValueError(f"routing must be some of {', '.join(ROUTINGS)}, got {unknown}")
    attached = load_retrofitted(folder)
    sizes = _within_context(attached, sizes)
    longest = max(sizes) + 1
    options = {"text_field": notes.get("text_field", "text")}
    if documents is not None:
        text = read_beginnings(sources, attached.tokenizer, longest, documents, **options)
    else:
        number = settings.valid_windows if tokens is None else max(tokens // (longest - 1), 1)
        found = read_windows(sources, attached.tokenizer, longest, train=0, valid=number, **options)
        text = found.valid
    evaluator = _Evaluator(attached, folder, text, sizes, progress, force=force, json_file=json)
    evaluator.routings(chosen)
    evaluator.speed(rounds)
    # Last: they take the routers off.
    evaluator.windows(windows)


class _Evaluator:
    """Evaluates one model on one text and writes down what is not there yet."""

    def __init__(
        self,
        attached: Retrofit,
        folder: Path,
        text: Tensor,
        lengths: Sequence[int],
        progress: bool,
        *,
        force: bool = False,
        json_file: Path | None = None,
    ):
        description = read_description(folder)
        self.attached, self.text, self.lengths = attached, text, lengths
        self.progress, self.json_file = progress, json_file
        source = description["base"]["source"]
        self.base = Path(source).name if Path(source).exists() else source
        self.adapter = description["weights_sha256"]
        self.name, self.file = folder.name, folder / EVALUATIONS / RECORDS
        self.file.parent.mkdir(exist_ok=True)
        self.known = [] if force or not self.file.exists() else read_records(self.file)

    def routings(self, routings: Sequence[str]) -> None:
        """A routing's records are written once it has been through the whole text."""
        for routing in routings:
            if not self._has(routing, {}):
                with self._advancing(routing) as advance:
                    self._keep(
                        evaluate_retrofit(
                            self.attached,
                            self.text,
                            self.lengths,
                            (routing,),
                            base=self.base,
                            adapter=self.adapter,
                            advance=advance,
                        )
                    )

    def windows(self, reaches: Sequence[int]) -> None:
        model = self.attached.detach()
        for reach in reaches:
            if not self._has(WINDOW, {"S": float(reach)}):
                with self._advancing(f"window {reach}") as advance:
                    self._keep(
                        evaluate_window(
                            model,
                            self.text,
                            self.lengths,
                            reach,
                            num_sinks=self.attached.config.num_sinks,
                            base=self.base,
                            advance=advance,
                        )
                    )

    def speed(self, rounds: int) -> None:
        there = {
            r.length
            for r in self.known
            if isinstance(r, RetrofitSpeed) and r.adapter == self.adapter
        }
        names = {"base": self.base, "adapter": self.adapter}
        for length in self.lengths:
            if rounds and length not in there:
                self._keep(
                    time_retrofit(self.attached, self.text[0], [length], rounds=rounds, **names)
                )

    def _has(self, routing: str, regimes: dict[str, float]) -> bool:
        text = text_fingerprint(self.text[:, : max(self.lengths) + 1])
        there = {
            r.length
            for r in self.known
            if isinstance(r, RetrofitEvaluation)
            and (r.routing, r.text) == (routing, text)
            and r.adapter in ("", self.adapter)
            and (routing != WINDOW or r.regimes == regimes)
        }
        return there.issuperset(self.lengths)

    def _keep(self, records: Sequence[Record]) -> None:
        for record in records:
            append_record(self.file, record)
            if self.json_file is not None:
                append_record(self.json_file, record)

    def _advancing(self, what: str) -> Any:
        label = f"{self.name}: {max(self.lengths)} tokens, {what}"
        return length_progress(label, len(self.text), enabled=self.progress)


def _settings_for(model: PreTrainedModel, named: Mapping[str, Any]) -> RetrofitSettings:
    most = context_length(model)
    if "length" in named or most is None or most >= RetrofitSettings.length:
        settings = RetrofitSettings(**named)
        check_length(model, settings.length)
        return settings
    _say(f"windows of {most} tokens: the base model reads no more")
    return RetrofitSettings(**named, length=most)


def _within_context(attached: Retrofit, lengths: Sequence[int]) -> list[int]:
    """The lengths that the base model was made for; those beyond are named and left out."""
    most = context_length(attached.model) or max(lengths)
    kept = [length for length in lengths if length <= most]
    if not kept:
        raise ValueError(f"the base model reads at most {most} tokens, got lengths {list(lengths)}")
    if len(kept) < len(lengths):
        beyond = ", ".join(str(length) for length in lengths if length > most)
        _say(f"left out {beyond}: the base model reads at most {most} tokens")
    return kept


def _say(message: str) -> None:
    Console(stderr=True).print(message, highlight=False)


def _absolute(model: str) -> str:
    """A path that holds from anywhere; a name on the hub stays what it is."""
    path = Path(model)
    return str(path.absolute()) if path.exists() else model
