"""`mosar.look`: one pass of a text through a routed model, and everything its routers decided."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.errors import ModelError
from mosar.evaluation.discarded_mass import watching_attention
from mosar.files import replace_synced
from mosar.generation.source import Source, open_source
from mosar.geometries import LayerRouting, MoSAR
from mosar.microscope.attention import LayerView, view_layer
from mosar.microscope.summary import Ranking, Savings, rank_choosers, sum_savings
from mosar.microscope.text import read_text
from mosar.model.decoder import Decoder

if TYPE_CHECKING:
    from mosar.integrations.retrofit.attach import Retrofit

MOST_TOKENS = 4096
# A distance has 16 bits in the page.
LARGEST_TEXT = 1 << 16


@dataclass(frozen=True)
class Look:
    """What every token of a text chose; `save` writes the page, a notebook shows it."""

    name: str
    """What the model is called."""
    tokens: list[int]
    pieces: list[str]
    """The text, token by token; "" where a token is a part of a character, or special."""
    notes: list[str]
    config: MoSARConfig
    views: list[LayerView]
    """One per layer."""
    rankings: dict[str, Ranking]
    """ "query" and "key"."""
    savings: Savings
    gated: bool
    """False: attention is the base model's own, and routers were attached to it."""
    hard: bool
    """Whether it was trained with hard routing and never reads outside of the support."""

    @property
    def labels(self) -> Tensor:
        """[L, 2, Gr, T] uint8: of queries and of keys."""
        return torch.stack([view.labels for view in self.views])

    def to_html(self) -> str:
        """The page: one file that needs nothing else."""
        from mosar.microscope.page import render_look

        return render_look(self)

    def save(self, path: Path | str) -> Path:
        """Writes the page, at once."""
        replace_synced(Path(path), self.to_html().encode())
        return Path(path)

    def _repr_html_(self) -> str:
        page = html.escape(self.to_html())
        size = "width: 100%; height: 900px; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{size}" srcdoc="{page}"></iframe>'


def look(
    model: Any,
    text: str | bytes,
    *,
    tokenizer: Any = None,
    name: str = "",
    max_tokens: int = MOST_TOKENS,
    advance: Callable[[], None] = lambda: None,
) -> Look:
    """What each token of `text` chooses in `model`, reads and leaves out.

    model: the folder of a run, an exported or a retrofitted model; a `Source`; or a `Decoder`, an
    exported model of transformers or a `Retrofit` with its `tokenizer` (encode and decode).
    max_tokens: a longer text is cut, and `notes` says so. advance: called after each layer.
    """
    if isinstance(max_tokens, bool) or not 1 <= max_tokens <= LARGEST_TEXT:
        raise ValueError(f"max_tokens must lie in 1..{LARGEST_TEXT}, got {max_tokens!r}")
    subject, encode, decode = _open(model, tokenizer)
    read = read_text(text, encode, decode, most=min(max_tokens, subject.longest or max_tokens))
    views = subject.view(read.tokens, advance)
    labels = torch.stack([view.labels for view in views])
    return Look(
        name=name or (Path(model).name if isinstance(model, str | Path) else type(model).__name__),
        tokens=read.tokens,
        pieces=read.pieces,
        notes=read.notes + subject.notes,
        config=subject.config,
        views=views,
        rankings=rank_choosers(labels, read.pieces, subject.config),
        savings=sum_savings(views, subject.config),
        gated=subject.gated,
        hard=subject.hard,
    )


class _DecoderSubject:
    """A decoder of ours."""

    gated, longest = True, None

    def __init__(self, decoder: Decoder):
        geometry = decoder.geometries[0]
        if not isinstance(geometry, MoSAR):
            raise ModelError(
                f"the model has no routers: its geometry is {decoder.attention_config.geometry}; "
                "give a variant with routers, such as mosar"
            )
        self.decoder, self.config = decoder, geometry.config
        self.notes, self.hard = [], geometry.is_hard
        if self.hard:
            self.notes.append(
                "The model was trained with hard routing and never reads outside of the support. "
                "The shares outside are what such pairs would get if they kept the floor of their "
                "gates."
            )

    @torch.inference_mode()
    def view(self, tokens: Sequence[int], advance: Callable[[], None]) -> list[LayerView]:
        views: list[LayerView] = []

        def watch(
            geometry: MoSAR, q: Tensor, k: Tensor, v: Tensor, routed: LayerRouting, options: Any
        ) -> None:
            of_key = geometry.key_bias(options.get("notes"), options["key_valid"])
            options = options | {"of_key": None if of_key is None else of_key[0]}
            views.append(_view(q, k, routed, geometry.config, gated=True, options=options))
            advance()

        row = torch.tensor([tokens], device=self.decoder.embedding.weight.device)
        geometries: Any = self.decoder.geometries
        with watching_attention(geometries, watch):
            self.decoder(row, routing="sparse")
        return views


class _RetrofitSubject:
    """A model of others with routers of ours."""

    gated, hard = False, False

    def __init__(self, attached: Retrofit):
        from mosar.integrations.retrofit.base_model import context_length

        self.attached, self.config = attached, attached.config
        self.longest, self.notes = context_length(attached.model), []

    @torch.inference_mode()
    def view(self, tokens: Sequence[int], advance: Callable[[], None]) -> list[LayerView]:
        views: list[LayerView] = []

        def watch(layer: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
            routed = layer.route(q, k)
            views.append(_view(q, k, routed, layer.config, gated=False, options=options))
            advance()

        attached, model = self.attached, self.attached.model
        before = attached.routing
        row = torch.tensor([tokens], device=model.device)
        try:
            attached.set_routing("sparse")
            attached.observe(watch)
            model.base_model(input_ids=row, use_cache=False)
        finally:
            attached.observe(None)
            attached.set_routing(before)
        return views


def _view(
    q: Tensor, k: Tensor, routed: LayerRouting, config: MoSARConfig, *, gated: bool, options: Any
) -> LayerView:
    labels_q, labels_k = (x[0] if x.dim() == 3 else x for x in routed.labels)
    kept = {name: options.get(name) for name in ("scale", "softcap", "window", "of_key")}
    return view_layer(q[0], k[0], (labels_q, labels_k), config, gated=gated, **kept)


def _open(model: Any, tokenizer: Any) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """The model as one of the two kinds, and how it reads and writes text."""
    if isinstance(model, str | Path):
        model = open_source(Path(model))
    if isinstance(model, Source):
        reader: Any = model.reader
        inside = getattr(reader, "decoder", None) or reader.attached
        return _subject(inside), model.encode, model.decode
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    subject = _subject(model)
    if tokenizer is None:
        raise ValueError("tokenizer must be given with a model that is already in memory")
    return subject, tokenizer.encode, tokenizer.decode


def _subject(model: Any) -> Any:
    if isinstance(model, Decoder):
        return _DecoderSubject(model)
    if hasattr(model, "to_decoder"):
        return _DecoderSubject(model.to_decoder())
    if hasattr(model, "set_routing") and hasattr(model, "observe"):
        return _RetrofitSubject(model)
    raise ModelError(
        f"a {type(model).__name__} has no routers to look at; mosar retrofit adds them to a "
        "transformers model"
    )
