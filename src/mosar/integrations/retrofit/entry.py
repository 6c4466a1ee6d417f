"""`mosar.retrofit` and `mosar.load_adapter`: light to import, a call loads transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mosar.core.config import MoSARConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mosar.integrations.retrofit.attach import Retrofit

DESCRIPTION = "adapter.json"
"""What a retrofitted model's folder has and no other."""


READY = Path(__file__).parent / "ready"
"""Adapters that come with the package, a folder each."""


def is_retrofitted(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def ready_adapters() -> list[str]:
    """The names of the adapters that come with the package."""
    return sorted(path.parent.name for path in READY.glob(f"*/{DESCRIPTION}"))


def find_adapter(adapter: Path | str) -> Path:
    """The folder of an adapter: the folder itself, or that of a ready one by its name."""
    folder = Path(adapter)
    if not folder.exists() and str(adapter) in ready_adapters():
        return READY / str(adapter)
    return folder


def retrofit(
    model: PreTrainedModel, config: MoSARConfig | None = None, *, lora: int = 0
) -> Retrofit:
    """Attaches routers to a transformers model, in place; at first it computes what it did.

    config: the geometry; by default four regimes, a routing group per key/value head, four sinks.
    lora: the rank of changes to the projections of q, k and the output; 0: none. Returns a
    `Retrofit`: `set_routing`, `save`, the model as `.model`.
    """
    from mosar.integrations.retrofit.attach import retrofit as attach

    return attach(model, config, lora=lora)


def load_adapter(model: PreTrainedModel, adapter: Path | str, *, check: bool = True) -> Retrofit:
    """Attaches trained routers to their base model, in place, under "sparse" routing.

    adapter: a folder, or the name of one that comes with the package, like "smollm2-135m". Another
    base model is refused; check=False compares its kind and size only, and reads no weights.
    """
    from mosar.integrations.retrofit.adapter import load_adapter as load

    return load(model, adapter, check=check)
