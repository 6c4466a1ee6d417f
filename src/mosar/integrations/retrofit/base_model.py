"""The base model: where it is loaded from, and what tells it from another."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mosar.errors import ModelError
from mosar.integrations.quiet import quiet
from mosar.lazy import install_line, pip_line
from mosar.training.precision import check_cpu_bfloat16

_PYPI = "pypi:"
WEIGHTS = ("float32", "bfloat16", "auto")
"""Names for the dtype of a base model's weights."""


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """What an adapter says about the model it belongs to."""

    source: str
    """A folder, a GGUF file, "pypi:PACKAGE" or a name on the hub; "": it was not loaded."""
    model_type: str
    architecture: str
    parameters: int
    checksum: str
    """Of all parameters, rounded to bfloat16: the same in float32 and in bfloat16."""

    @classmethod
    def of(cls, model: PreTrainedModel, source: str | None = None) -> BaseIdentity:
        return cls(
            source=model.config._name_or_path if source is None else source,
            model_type=model.config.model_type,
            architecture=type(model).__name__,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            checksum=weights_checksum(model),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def weights_checksum(model: PreTrainedModel) -> str:
    """sha256 over the names, shapes and bfloat16 values of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta:
            raise ModelError(
                f"cannot identify the base model by its weights: {name} is not in memory; load the "
                "model without offloading, or load the adapter with check=False"
            )
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        values = parameter.detach().cpu().to(torch.bfloat16).contiguous()
        digest.update(values.view(torch.int16).numpy().data)
    return digest.hexdigest()


def weights_dtype(name: str) -> torch.dtype:
    """The dtype of a name in `WEIGHTS`; "auto": bfloat16 where the CPU multiplies in it."""
    if name not in WEIGHTS:
        raise ValueError(f"dtype must be one of {', '.join(WEIGHTS)}; got {name!r}")
    if name == "auto":
        # Older versions of torch do not say.
        found = getattr(torch.cpu, "get_capabilities", dict)()
        multiplies = any(there for feature, there in found.items() if "bf16" in feature)
        name = "bfloat16" if multiplies else "float32"
    if name == "float32":
        return torch.float32
    check_cpu_bfloat16("dtype=float32")
    return torch.bfloat16


def context_length(model: PreTrainedModel) -> int | None:
    """How many positions the model was made for, its rope scaling included; None: no limit."""
    text = model.config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    # These scale what the configuration names; elsewhere it names what has been scaled.
    if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        unscaled = rope.get("original_max_position_embeddings") or positions
        return max(int(positions), int(unscaled * (rope.get("factor") or 1)))
    return int(positions)


def check_length(model: PreTrainedModel, length: int) -> None:
    """A ModelError where windows of so many tokens are longer than the model's context."""
    most = context_length(model)
    if most is not None and length > most:
        raise ModelError(
            f"length must not exceed the {most} tokens that the base model reads, got {length}; "
            f"give --length {most} or less"
        )


def load_base(
    source: str, *, dtype: torch.dtype = torch.float32, tokenizer: bool = True
) -> tuple[PreTrainedModel, Any]:
    """A causal language model and its tokenizer: from a folder, a GGUF file or the hub.

    "pypi:PACKAGE" is the GGUF file that an installed package holds. Code that a model brings is
    never run. A ModelError says in one line why there is none.
    """
    if source.startswith("hf:"):
        raise ModelError(
            f"cannot load {source}: hf: names a dataset; write a model on the hub as "
            f"{source.removeprefix('hf:')}"
        )
    path = _in_package(source) if source.startswith(_PYPI) else Path(source)
    # Without it transformers asks on the terminal whether a model's own code may run.
    options: dict[str, Any] = {"trust_remote_code": False}
    name = str(path) if source.startswith(_PYPI) else source
    if path.suffix == ".gguf" and path.is_file():
        name, options["gguf_file"] = str(path.parent), path.name
    elif path.is_dir() and not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelError(
                f"{source} holds no config.json and {len(files)} GGUF files; name a model's "
                "folder, one GGUF file or a name on the hub"
            )
        options["gguf_file"] = files[0]
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
            reader = AutoTokenizer.from_pretrained(name, **options) if tokenizer else None
    except ImportError as error:
        advice = f"; {install_line('gguf')}" if "gguf_file" in options else ""
        raise ModelError(f"cannot load {source}: {_one_line(error)}{advice}") from None
    # Whatever the hub, a file format or a configuration can raise: there is no common class.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"cannot load {source}: it needs its own code, which mosar never runs; give a "
                "model whose code is in transformers"
            ) from None
        found = "" if path.exists() else "there is no such file or folder here; from the hub: "
        raise ModelError(
            f"cannot load {source}: {found}{type(error).__name__}: {_one_line(error)}"
        ) from None
    return model.eval(), reader


def _in_package(source: str) -> Path:
    """The folder of the installed package that "pypi:PACKAGE" names."""
    package = source.removeprefix(_PYPI)
    found = find_spec(package.replace("-", "_"))
    if found is None or found.origin is None:
        raise ModelError(
            f"the base model is in the package {package}, which is not installed: "
            f"{pip_line(package, alone=True)}; or give the model itself"
        )
    return Path(found.origin).parent


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
