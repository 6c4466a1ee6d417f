"""Recognises, loads and writes a model's folder; a damaged one is refused, never half loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from mosar.errors import ModelError
from mosar.files import (
    check_folder,
    file_checksum,
    parse_json,
    rust_os_errors,
    sealed,
    staged_folder,
    unsealed,
    write_synced,
)
from mosar.integrations.hf.config import MosarDecoderConfig
from mosar.integrations.hf.model import MosarForCausalLM
from mosar.integrations.quiet import quiet

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
CHECKSUMS = "checksums.json"
# What decides the model's numbers; the card and the rest are there to be edited.
_CHECKED = (CONFIG, "*.safetensors", "tokenizer.json")
_WRITTEN = (
    *(
        CONFIG,
        CARD,
        CHECKSUMS,
        "generation_config.json",
        "*.safetensors",
        "*.safetensors.index.json",
    ),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)


def is_model_folder(folder: Path) -> bool:
    """Whether `folder` holds one of our models in the form of transformers."""
    try:
        values = parse_json((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("model_type") == MosarDecoderConfig.model_type


def load_model(folder: Path | str, *, dtype: torch.dtype | None = None) -> MosarForCausalLM:
    """The model of a folder, ready to be asked; a ModelError says what is wrong.

    dtype: of the parameters but the routers; None: as it was saved. Unlike `from_pretrained`, which
    fills what is missing with random numbers, this insists on every parameter.
    """
    folder = Path(folder)
    check_folder(folder, "folder", "mosar export")
    if not is_model_folder(folder):
        raise ModelError(
            f"{folder} is not an exported model: its {CONFIG} does not say so; make one with mosar "
            "export"
        )
    check_checksums(folder)
    try:
        with quiet():
            model, info = MosarForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                folder, dtype="auto" if dtype is None else dtype, output_loading_info=True
            )
    except (OSError, ValueError, SafetensorError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise ModelError(f"cannot load {folder}: {line}") from None
    wrong = [key for keys in info.values() for key in keys]
    if wrong:
        kinds = ", ".join(f"{len(keys)} {name}" for name, keys in info.items() if keys)
        raise ModelError(
            f"the parameters in {folder} are not those of its {CONFIG}: {kinds}, {wrong[0]} first"
        )
    return model.eval()


def write_checksums(folder: Path) -> None:
    """Writes the checksums of a model's files, which `load_model` compares."""
    paths = sorted(path for pattern in _CHECKED for path in folder.glob(pattern))
    content = sealed({"files": {path.name: file_checksum(path) for path in paths}})
    write_synced(folder / CHECKSUMS, json.dumps(content, indent=1).encode() + b"\n")


def check_checksums(folder: Path) -> None:
    """A ModelError names a file that changed since the export, if the folder has checksums."""
    path = folder / CHECKSUMS
    advice = f"export it again, or remove {CHECKSUMS} if it was changed on purpose"
    try:
        files = unsealed(parse_json(path.read_bytes()))[0]["files"]
        changed = [name for name in files if file_checksum(folder / name) != files[name]]
    except FileNotFoundError as error:
        if error.filename == str(path):
            return
        raise ModelError(f"{error.filename} is missing; {advice}") from None
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is damaged: {error}; {advice}") from None
    if changed:
        raise ModelError(
            f"{folder / changed[0]} is not what was exported: its checksum is wrong; {advice}"
        )


def _is_ours(path: Path) -> bool:
    """Whether a file is one that exporting or `save_pretrained` writes."""
    return path.is_file() and any(path.match(pattern) for pattern in _WRITTEN)


@contextmanager
def new_folder(out: Path, *, replace: bool | None = None) -> Iterator[Path]:
    """A folder to fill, which is `out` once the block has ended well.

    replace: whether an exported model in `out` may go; None: nothing is ever replaced.
    """
    try:
        with staged_folder(out, partial(_refuse, replace=replace)) as staging, rust_os_errors(out):
            yield staging
    except OSError as error:
        raise ModelError(f"{error.filename or out}: {error.strerror or error}") from None


def _refuse(out: Path, replace: bool | None) -> None:
    if not out.is_dir():
        raise ModelError(f"{out} is a file; choose another --out")
    if replace is None:
        raise ModelError(f"{out} is not empty; choose another --out")
    if not is_model_folder(out):
        raise ModelError(f"{out} is not empty and is not an exported model; choose another --out")
    foreign = sorted(path.name for path in out.iterdir() if not _is_ours(path))
    if foreign:
        raise ModelError(
            f"{out} holds {foreign[0]}, which no export wrote and replacing would delete; move "
            "it, or choose another --out"
        )
    if not replace:
        raise ModelError(
            f"{out} holds an exported model already; --force replaces it, or choose another --out"
        )
