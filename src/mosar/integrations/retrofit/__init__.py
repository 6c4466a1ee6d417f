"""Retrofit: routers attached to a pretrained model, which starts as it was and gets sparse.

    attached = mosar.retrofit(model)            # routers, all global: the model is what it was
    attached.set_routing("sparse")              # "dense" | "soft" | "top1" | "sparse"
    attached.save(folder)                       # the routers alone
    load_retrofitted(folder)                    # the base model and its routers

Names are loaded on first use, and transformers with them.
"""

from typing import TYPE_CHECKING

from mosar.errors import ModelError as RetrofitError
from mosar.lazy import load_on_use

if TYPE_CHECKING:
    from mosar.integrations.retrofit.adapter import load_adapter, load_retrofitted
    from mosar.integrations.retrofit.attach import Retrofit, default_config, retrofit

__all__ = [
    "Retrofit",
    "RetrofitError",
    "default_config",
    "load_adapter",
    "load_retrofitted",
    "retrofit",
]

_MODULE_OF = {
    "Retrofit": "attach",
    "default_config": "attach",
    "load_adapter": "adapter",
    "load_retrofitted": "adapter",
    "retrofit": "attach",
}

__getattr__ = load_on_use(globals(), _MODULE_OF)
