"""The adapter: the routers, low-rank changes if any, and the model they belong to.

    FOLDER/adapter.safetensors   parameters of the routers, "0.query_router.weight1" and so on, and
                                 of low-rank changes, "0.lora.q_proj.down" and so on
    FOLDER/adapter.json          written last: geometry, base model, checksums; "layers": those with
                                 routers, where some have none; "lora": the rank, where there is one

An adapter.json is refused if it was altered, or if its weights are missing or others. Adapters of
earlier versions have no checksum of their own and are still read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import PreTrainedModel

from mosar.core.config import MoSARConfig
from mosar.errors import ModelError
from mosar.files import parse_json, replace_synced, sealed, unsealed
from mosar.integrations.retrofit.attach import Retrofit, retrofit
from mosar.integrations.retrofit.base_model import BaseIdentity, load_base
from mosar.integrations.retrofit.entry import DESCRIPTION, find_adapter, ready_adapters
from mosar.version import __version__

SCHEMA_VERSION = 1
WEIGHTS = "adapter.safetensors"


def save_adapter(
    attached: Retrofit,
    folder: Path | str,
    notes: Mapping[str, Any] | None = None,
    *,
    base: BaseIdentity | None = None,
    half: bool = False,
) -> Path:
    """Writes the routers into `folder`, made if need be; `notes` are kept beside them.

    base: the identity of the model, if it is already known (computing it reads every weight).
    half: the first matrices, nearly all of the file, are rounded to float16.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: parameter.detach().cpu().float().contiguous()
            for name, parameter in attached.named_parameters().items()
        }
        if half:
            first = {name: x.half() for name, x in tensors.items() if name.endswith("weight1")}
            tensors |= first
        weights = save(tensors)
        description = {
            "schema": SCHEMA_VERSION,
            "mosar": __version__,
            "base": (base or BaseIdentity.of(attached.model)).to_dict(),
            "geometry": attached.config.to_dict(),
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
            "notes": dict(notes or {}),
        }
        if len(attached) < len(attached.layers):
            description["layers"] = [layer.index for layer in attached]
        if attached.lora:
            description["lora"] = attached.lora
        replace_synced(folder / WEIGHTS, weights)
        text = json.dumps(sealed(description), indent=1)
        replace_synced(folder / DESCRIPTION, text.encode() + b"\n")
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from None
    return folder


def read_description(folder: Path | str) -> dict[str, Any]:
    """What an adapter says about itself; a ModelError where there is none."""
    path = find_adapter(folder) / DESCRIPTION
    try:
        sealed_values = parse_json(path.read_bytes())
        try:
            values, _ = unsealed(sealed_values)
        except ValueError as error:
            raise ModelError(
                f"{path}: {error}; copy the adapter again, or train it again"
            ) from None
        if values["schema"] != SCHEMA_VERSION:
            raise ModelError(
                f"{path} has schema {values['schema']!r}, and this version reads {SCHEMA_VERSION}"
            )
        BaseIdentity(**values["base"])
        MoSARConfig.from_dict(values["geometry"])
    except FileNotFoundError:
        raise ModelError(
            f"{folder} holds no adapter: there is no {DESCRIPTION}; make one with mosar retrofit, "
            f"or name one of this package: {', '.join(ready_adapters())}"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not an adapter: {type(error).__name__}: {error}") from None
    return values


def load_adapter(model: PreTrainedModel, adapter: Path | str, *, check: bool = True) -> Retrofit:
    """Attaches the routers of an adapter to their base model, under "sparse" routing.

    adapter: a folder, or the name of one that comes with the package. Another model is refused with
    a ModelError; check=False compares its kind and size only, and does not read every weight.
    """
    folder = find_adapter(adapter)
    description = read_description(folder)
    _check_base(model, BaseIdentity(**description["base"]), folder, check)
    tensors = _read_weights(folder, description["weights_sha256"])
    geometry = MoSARConfig.from_dict(description["geometry"])
    try:
        attached = retrofit(
            model, geometry, lora=description.get("lora", 0), layers=_layers_of(tensors)
        )
    except ValueError as error:
        raise ModelError(
            f"{folder / WEIGHTS} holds other routers than {DESCRIPTION}: {error}"
        ) from None
    own = attached.named_parameters()
    if {n: p.shape for n, p in own.items()} != {n: t.shape for n, t in tensors.items()}:
        attached.detach()
        raise ModelError(f"{folder / WEIGHTS} holds routers of another shape than {DESCRIPTION}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    for parameter in own.values():
        parameter.requires_grad_(False)
    attached.set_routing("sparse")
    return attached


def copy_routers(attached: Retrofit, folder: Path | str, base: BaseIdentity) -> dict[str, Any]:
    """Gives `attached`, a model of identity `base`, the routers in `folder`; its description.

    Low-rank changes begin at no change where the folder has none.
    """
    folder = find_adapter(folder)
    description = read_description(folder)
    if description["base"]["checksum"] != base.checksum:
        raise ModelError(f"the routers in {folder} belong to another base model")
    if MoSARConfig.from_dict(description["geometry"]) != attached.config:
        raise ModelError(f"the routers in {folder} have another geometry than this run's")
    tensors = _read_weights(folder, description["weights_sha256"])
    if _layers_of(tensors) != (here := {layer.index for layer in attached}):
        raise ModelError(f"the routers in {folder} are on other layers than {sorted(here)}")
    rank = description.get("lora", 0)
    if rank not in (0, attached.lora):
        raise ModelError(f"the adapter in {folder} has lora {rank}, and this run {attached.lora}")
    with torch.no_grad():
        for name, parameter in attached.named_parameters().items():
            if name in tensors:
                parameter.copy_(tensors[name])
    return description


def load_retrofitted(
    adapter: Path | str,
    model: PreTrainedModel | str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    check: bool = True,
) -> Retrofit:
    """The model of an adapter with its routers, under "sparse" routing.

    adapter: a folder, or the name of one that comes with the package. model: the base model, or
    where to load it from; by default from where it came from. Loading brings its tokenizer along.
    """
    tokenizer = None
    if model is None:
        model = str(read_description(adapter)["base"]["source"])
        if not model:
            raise ModelError(f"{adapter} does not say where its base model is; give model=")
    if isinstance(model, str):
        model, tokenizer = load_base(model, dtype=dtype)
    attached = load_adapter(model, adapter, check=check)
    attached.tokenizer = tokenizer
    return attached


def _check_base(model: PreTrainedModel, base: BaseIdentity, folder: Path, check: bool) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"model must be a transformers model, got {type(model).__name__}")
    expected = f"{base.architecture} with {base.parameters:,} parameters ({base.source or 'local'})"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if (type(model).__name__, parameters) != (base.architecture, base.parameters):
        raise ModelError(
            f"the adapter in {folder} belongs to {expected}, and this is a "
            f"{type(model).__name__} with {parameters:,}"
        )
    if check and (found := BaseIdentity.of(model).checksum) != base.checksum:
        raise ModelError(
            f"the adapter in {folder} belongs to {expected}, and the weights of this model are "
            f"different (checksum {found[:12]}, not {base.checksum[:12]})"
        )


def _layers_of(tensors: Mapping[str, torch.Tensor]) -> set[int]:
    """The layers that have routers, by the names of their parameters."""
    return {int(name.partition(".")[0]) for name in tensors}


def _read_weights(folder: Path, checksum: str) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != checksum:
        raise ModelError(f"{path} was truncated or altered, or belongs to another {DESCRIPTION}")
    try:
        return load(content)
    except SafetensorError as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from None
