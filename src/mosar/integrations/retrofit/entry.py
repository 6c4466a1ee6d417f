"""`mosar.retrofit`: importing it is light, calling it loads transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mosar.core.config import MoSARConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mosar.integrations.retrofit.attach import Retrofit

DESCRIPTION = "adapter.json"
"""What a retrofitted model's folder has and no other."""


def is_retrofitted(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def retrofit(model: PreTrainedModel, config: MoSARConfig | None = None) -> Retrofit:
    """Attaches routers to a transformers model, in place; at first it computes what it did.

    config: the geometry; by default four regimes, a routing group per key/value head, four sinks.
    Returns a `Retrofit`: `set_routing`, `save`, the model as `.model`.
    """
    from mosar.integrations.retrofit.attach import retrofit as attach

    return attach(model, config)
