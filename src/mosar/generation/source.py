"""Models that can write text, with their tokenizers: a run folder, an export, a retrofit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosar.data.manifest import TOKENIZER
from mosar.data.tokenizer import read_tokenizer
from mosar.errors import ModelError
from mosar.evaluation.choices import check_routings
from mosar.evaluation.loaded_run import LoadedRun
from mosar.files import check_folder, parse_json
from mosar.geometries import Geometry, operator_routing
from mosar.model.decoder import Decoder
from mosar.model.generation import DecoderReader, MeasuredReader

CONFIG, ADAPTER = "config.json", "adapter.json"


@dataclass(frozen=True)
class Source:
    """A model ready to write."""

    reader: MeasuredReader
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end_of_text: int | None
    """The token that ends a text."""
    routing: str
    """"native" where there are no routers."""


def open_source(
    folder: Path | None,
    *,
    adapter: str | None = None,
    routing: str | None = None,
    step: int | None = None,
    data: Path | None = None,
    dtype: str | None = None,
) -> Source:
    """The model in `folder`, which may be any of the three kinds; a ModelError says why not.

    adapter: routers in a folder of their own, or the name of ready ones; `folder` is then their
    base model, None: the one they name. routing: by default sparse where there are routers. step
    and data are for run folders: which checkpoint, and where the dataset (it has the tokenizer)
    lies now. dtype is for retrofitted models: that of the weights, by default float32.
    """
    if adapter is not None:
        _refuse_run_options(step, data, adapter)
        from mosar.generation.retrofitted import open_retrofitted

        base = None if folder is None else str(folder)
        return open_retrofitted(adapter, routing, base, dtype=dtype or "float32")
    if folder is None:
        raise ValueError("name a model's folder, or a ready adapter with --adapter")
    check_folder(folder, "folder", "mosar train, export or retrofit")
    retrofitted = (folder / ADAPTER).exists()
    if dtype is not None and not retrofitted:
        raise ValueError(f"--dtype {dtype} is for retrofitted models, and {folder} holds none")
    values = {} if retrofitted else _read_config(folder)
    # A run folder's configuration carries its schema, those of transformers a model_type.
    if "schema" in values:
        return _open_run(folder, routing, step, data)
    _refuse_run_options(step, data, folder)
    if retrofitted:
        from mosar.generation.retrofitted import open_retrofitted

        return open_retrofitted(folder, routing, dtype=dtype or "float32")
    if values.get("model_type") == "mosar":
        return _open_exported(folder, routing)
    raise ModelError(
        f"{folder} holds a model of type {values.get('model_type')!r} without routers; mosar "
        "retrofit makes some for it"
    )


def _refuse_run_options(step: int | None, data: Path | None, model: Path | str) -> None:
    for option, given in (("--step", step), ("--data", data)):
        if given is not None:
            raise ValueError(f"{option} is only for run folders of mosar train, got {model}")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{folder} holds no model: it has no {CONFIG}; give a run folder of mosar train, a "
            "folder of mosar export, or a retrofitted model"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ModelError(f"{path} is damaged: it is not a JSON object")
    return values


def _open_run(folder: Path, routing: str | None, step: int | None, data: Path | None) -> Source:
    loaded = LoadedRun.open(folder, step)
    config = loaded.config
    if config.data.task != "text":
        raise ModelError(
            f"{folder} learnt the task {config.data.task}, not text; use mosar evaluate"
        )
    _, tokenizer = loaded.open_tokenizer(data)
    return _source(loaded.decoder, tokenizer, routing, loaded.cell.variant)


def _open_exported(folder: Path, routing: str | None) -> Source:
    try:
        from mosar.integrations.hf.folders import load_model
    except ModuleNotFoundError as error:
        raise ModelError(str(error)) from None
    model = load_model(folder)
    if not (folder / TOKENIZER).exists():
        raise ModelError(
            f"{folder} has no {TOKENIZER}: a model that learnt a task cannot read text"
        )
    tokenizer = read_tokenizer(folder, _end_of_text(folder))
    decoder = model.to_decoder().requires_grad_(False)
    return _source(decoder, tokenizer, routing, decoder.attention_config.geometry)


def _end_of_text(folder: Path) -> str | None:
    """How the tokenizer of an exported model spells end-of-text; None: one of the usual ways."""
    try:
        token = parse_json((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token if isinstance(token, str) else None


def _source(decoder: Decoder, tokenizer: Any, routing: str | None, variant: str) -> Source:
    chosen = choose_routing(routing, decoder.geometries[0], variant)
    reader = DecoderReader(decoder, operator_routing(chosen))
    return Source(reader, tokenizer.encode, tokenizer.decode, tokenizer.end_of_text, chosen)


def choose_routing(routing: str | None, geometry: Geometry, variant: str) -> str:
    """The routing asked for, by default sparse where there are routers; or a ValueError."""
    default = geometry.routings[-1 if geometry.routed else 0]
    (chosen,) = check_routings([default if routing is None else routing], geometry, variant)
    return chosen
