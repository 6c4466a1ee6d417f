"""Evaluates a retrofitted model into its folder: perplexity, speed, needles, fixed windows.

RUN/evaluations/retrofit.jsonl   one record per length and routing, and one of speed per length
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from mosar.evaluation.choices import parse_lengths
from mosar.evaluation.progress import length_progress
from mosar.integrations.retrofit.adapter import load_retrofitted, read_description
from mosar.integrations.retrofit.attach import DENSE, Retrofit
from mosar.integrations.retrofit.base_model import context_length, weights_dtype
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.evaluate import (
    ROUTINGS,
    WINDOW,
    evaluate_retrofit,
    evaluate_window,
    fixed_window,
    text_fingerprint,
)
from mosar.integrations.retrofit.needles import ROOM, TASKS, evaluate_needles, window_of_density
from mosar.integrations.retrofit.speed import time_retrofit
from mosar.integrations.retrofit.windows import read_beginnings, read_windows
from mosar.records import (
    Record,
    RetrofitEvaluation,
    RetrofitNeedles,
    RetrofitSpeed,
    append_record,
    read_records,
)

RECORDS = Path("evaluations", "retrofit.jsonl")
ROUNDS = 3
"""Rounds of timing by default."""


def evaluate_folder(
    folder: Path,
    *,
    lengths: Sequence[str | int] = ("1x",),
    routings: Sequence[str] | None = None,
    data: Path | None = None,
    tokens: int | None = None,
    documents: int | None = None,
    skip_documents: int = 0,
    windows: Sequence[int] = (),
    rounds: int = ROUNDS,
    speed_lengths: Sequence[int] = (),
    speed_batches: Sequence[int] = (1,),
    speed_dtype: str = "float32",
    needles: int = 0,
    needle_tasks: Sequence[str] = TASKS,
    force: bool = False,
    progress: bool = True,
) -> list[Record]:
    """The new records of an adapter's folder; records that exist are not made again.

    lengths: "2x" of the length of training, or tokens. data: text or a dataset, by default what
    the routers were trained with, whose first windows they did not see. tokens: predicted at the
    longest length, by default those of the validation windows. documents: read the beginnings of so
    many documents that are long enough instead, without the first `skip_documents` of them.
    windows: reaches of fixed windows to compare with. rounds: of timing; 0: none. speed_lengths:
    more prompts to time, beyond the model's context too. speed_batches: prompts that are timed side
    by side. speed_dtype: of the weights that are timed, a name in `WEIGHTS`. needles: texts for
    each of `needle_tasks`; 0: none.
    """
    notes = read_description(folder)["notes"]
    settings = RetrofitSettings.from_dict(notes.get("settings", {}))
    sources = notes.get("data") if data is None else [str(data)]
    if not sources:
        raise ValueError(f"{folder} does not say which text it was trained with; give --data")
    if tokens is not None and documents is not None:
        raise ValueError("--tokens and --documents both say how much is read; give one")
    if skip_documents and documents is None:
        raise ValueError(f"--skip-documents {skip_documents} needs --documents")
    unknown = [task for task in needle_tasks if task not in TASKS]
    if unknown:
        raise ValueError(f"--needle-tasks must be some of {', '.join(TASKS)}, got {unknown}")
    sizes = parse_lengths(lengths, settings.length)
    chosen = ROUTINGS if routings is None else tuple(routings)
    unknown = [routing for routing in chosen if routing not in ROUTINGS]
    if unknown:
        raise ValueError(f"routing must be some of {', '.join(ROUTINGS)}, got {unknown}")
    if not speed_batches or min(speed_batches) < 1:
        raise ValueError(f"--speed-batch must be positive numbers, got {list(speed_batches)}")
    timed = weights_dtype(speed_dtype)
    attached = load_retrofitted(folder)
    sizes = _within_context(attached, sizes)
    longest = max(sizes) + 1
    options = {"text_field": notes.get("text_field", "text")}
    if documents is not None:
        text = read_beginnings(
            sources, attached.tokenizer, longest, documents, skip=skip_documents, **options
        )
    else:
        number = settings.valid_windows if tokens is None else max(tokens // (longest - 1), 1)
        found = read_windows(sources, attached.tokenizer, longest, train=0, valid=number, **options)
        text = found.valid
    evaluator = Evaluator(attached, folder, text, sizes, progress, force=force)
    evaluator.routings(chosen)
    evaluator.speed(rounds, speed_lengths, speed_batches, timed)
    evaluator.needles(needles, needle_tasks)
    # Last: they take the routers off.
    evaluator.windows(windows)
    evaluator.needles_of_windows(needles)
    return evaluator.made


class Evaluator:
    """Evaluates one model on one text and writes the records that are missing."""

    def __init__(
        self,
        attached: Retrofit,
        folder: Path,
        text: Tensor,
        lengths: Sequence[int],
        progress: bool,
        *,
        force: bool = False,
    ):
        description = read_description(folder)
        self.attached, self.text, self.lengths, self.progress = attached, text, lengths, progress
        source = description["base"]["source"]
        self.base = Path(source).name if Path(source).exists() else source
        self.adapter = description["weights_sha256"]
        self.folder, self.name, self.file = folder, folder.name, folder / RECORDS
        self.file.parent.mkdir(exist_ok=True)
        self.known = [] if force or not self.file.exists() else read_records(self.file)
        self.made: list[Record] = []

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
                            layers=self._routed,
                            base=self.base,
                            advance=advance,
                        )
                    )

    def speed(
        self,
        rounds: int,
        more: Sequence[int] = (),
        batches: Sequence[int] = (1,),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """At the lengths of the evaluation and at `more`; the text begins again where it ends."""
        there = {
            r.setting
            for r in self.known
            if isinstance(r, RetrofitSpeed) and r.adapter == self.adapter
        }
        name = str(dtype).removeprefix("torch.")
        lengths = sorted({*self.lengths, *more})
        wanted = [(batch, name, length) for batch in batches for length in lengths]
        missing = [setting for setting in wanted if setting not in there]
        if not rounds or not missing:
            return
        model = self.attached
        if dtype != model.model.dtype:
            # Weights that were rounded once cannot be restored, so this is another copy.
            model = load_retrofitted(self.folder, dtype=dtype)
        names = {"base": self.base, "adapter": self.adapter}
        for batch, _, length in missing:
            text = self.text[0].repeat(length // self.text.shape[1] + 1)
            options = {"rounds": rounds, "batch": batch, **names}
            self._keep(time_retrofit(model, text, [length], **options))

    def needles(self, contexts: int, tasks: Sequence[str] = TASKS) -> None:
        """`tasks` of the dense model, at every length; sparse only those that it can do."""
        for routing in (DENSE, "sparse") if contexts else ():
            self.attached.set_routing(routing)
            for length in self.lengths:
                self._find_needles(self.attached, length, contexts, routing, tasks=tasks)

    def needles_of_windows(self, contexts: int) -> None:
        """A fixed window that reads as many pairs as the routers did, on the same tasks."""
        for length in self.lengths if contexts else ():
            read = [r.density for r in self._needles(length, "sparse", contexts)]
            if not read:
                continue
            sinks = self.attached.config.num_sinks
            reach = window_of_density(sum(read) / len(read), length - ROOM, sinks)
            with fixed_window(self.attached.detach(), reach, sinks, self._routed) as window:
                self._find_needles(window, length, contexts, WINDOW, reach)

    def _find_needles(
        self,
        attached: Retrofit,
        length: int,
        contexts: int,
        routing: str,
        reach: int | None = None,
        tasks: Sequence[str] = TASKS,
    ) -> None:
        if routing != DENSE:
            solved = [r.task for r in self._needles(length, DENSE, contexts) if r.is_solved]
            tasks = [task for task in tasks if task in solved]
        there = {r.task for r in self._needles(length, routing, contexts) if r.reach == reach}
        missing = [task for task in tasks if task not in there]
        label = f"{self.name}: needles in {length} tokens, {routing}"
        number = contexts * len(missing)
        with length_progress(label, number, enabled=self.progress and number > 0) as advance:
            self._keep(
                evaluate_needles(
                    attached,
                    self.attached.tokenizer,
                    length,
                    contexts,
                    tasks=missing,
                    routing=routing,
                    reach=reach,
                    base=self.base,
                    adapter=self.adapter if routing == "sparse" else "",
                    advance=advance,
                )
            )

    def _needles(self, length: int, routing: str, contexts: int) -> list[RetrofitNeedles]:
        """The records that exist, of the present routers."""
        return [
            r
            for r in (*self.known, *self.made)
            if isinstance(r, RetrofitNeedles)
            and (r.length, r.routing, r.contexts) == (length, routing, contexts)
            and r.adapter in ("", self.adapter)
        ]

    @property
    def _routed(self) -> list[int]:
        """The layers with routers."""
        return [layer.index for layer in self.attached]

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
        self.made += records

    def _advancing(self, what: str) -> AbstractContextManager[Any]:
        label = f"{self.name}: {max(self.lengths)} tokens, {what}"
        return length_progress(label, len(self.text), enabled=self.progress)


def _within_context(attached: Retrofit, lengths: Sequence[int]) -> list[int]:
    """The lengths that the base model was made for; those beyond are named and left out."""
    most = context_length(attached.model) or max(lengths)
    kept = [length for length in lengths if length <= most]
    if not kept:
        raise ValueError(f"the base model reads at most {most} tokens, got lengths {list(lengths)}")
    if len(kept) < len(lengths):
        beyond = ", ".join(str(length) for length in lengths if length > most)
        message = f"left out {beyond}: the base model reads at most {most} tokens"
        Console(stderr=True).print(message, highlight=False)
    return kept
