"""Attaches routers to a loaded transformers model.

The attention layers of the model get a query and a key router, read by an attention function of
ours (hf_attention.py) that is switched on and off by name. Local layers with a short window stay as
they are. With routing "dense" the model calls its own attention function and is what it was, bit
for bit; with fresh routers every token is global, and "soft", "top1" and "sparse" compute the same
numbers with our kernels.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from mosar.attention import ROUTINGS
from mosar.core.config import MoSARConfig, Regime, check_config
from mosar.errors import ModelError
from mosar.integrations.retrofit.base_model import context_length
from mosar.integrations.retrofit.cache import RegimeCacheLayer, adopt_cache
from mosar.integrations.retrofit.hf_attention import ATTRIBUTE
from mosar.integrations.retrofit.layer import (
    NAME,
    AttentionLayer,
    LocalLayer,
    Observer,
    OutputProjection,
    RoutedLayer,
)

DENSE = "dense"
_REACHES = (("S", 64), ("M", 256), ("L", 1024))
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "gpt_neox"),
)
"""Model types that tests compare with the base model; others with this structure may work."""


def default_config(model: PreTrainedModel, **changes: Any) -> MoSARConfig:
    """The geometry for a pretrained model: steps (no decay inside a reach), by the shorter reach.

    Reaches 64, 256, 1024 and all, one routing group per key/value head, four sinks.
    """
    text = model.config.get_text_config(decoder=True)
    # The global regime must reach farther than the others, however short the model's context.
    length = max(context_length(model) or 8192, 2048)
    settings: dict[str, Any] = {
        "max_length": length,
        "regimes": tuple(Regime(name, reach, 1.0) for name, reach in (*_REACHES, ("G", length))),
        "composition": "min",
        "routing_groups": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "num_sinks": 4,
    }
    return MoSARConfig(**settings | changes)


def retrofit(
    model: PreTrainedModel,
    config: MoSARConfig | None = None,
    *,
    lora: int = 0,
    layers: Collection[int] | None = None,
) -> Retrofit:
    """Attaches routers to `model`, in place, and freezes its own parameters.

    config: the geometry, `default_config(model)` by default. lora: the rank of changes to the
    projections of q, k and the output in layers with routers; 0: none. layers: those that get
    routers, see `layers_to_route` for the default. The routing is "dense" at first. A ModelError
    says why a model cannot be retrofitted.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"model must be a transformers model, got {type(model).__name__}")
    modules = _attention_modules(model)
    config = default_config(model) if config is None else config
    check_config(config)
    if any(ATTRIBUTE in module.__dict__ for module in modules):
        raise ModelError("the model already has routers; detach() them first")
    blocks = _decoder(model).layers
    routed = layers_to_route(modules, config) if layers is None else layers
    if not routed or not set(routed) <= set(range(len(modules))):
        raise ValueError(f"layers must be some of 0..{len(modules) - 1}, got {sorted(routed)}")
    _check_rank(lora, [modules[index] for index in routed])
    made = [
        _layer(module, block, index, config, has_routers=index in routed, lora=lora)
        for index, (module, block) in enumerate(zip(modules, blocks, strict=True))
    ]
    _own_config(model)
    model.requires_grad_(False)
    return Retrofit(model, config, modules, made)


def layers_to_route(modules: list[Any], config: MoSARConfig) -> list[int]:
    """All layers but the local ones whose window is no longer than the longest reach below global.

    There the global regime would read what that reach reads, and little is left to choose (Gemma 3:
    windows of 512 and 1,024 tokens). A wider window is worth routers (Gemma 2: 4,096 of 8,192). A
    model without any other layer gets routers everywhere.
    """
    reaches = [regime.reach for regime in config.regimes]
    routed = []
    for index, module in enumerate(modules):
        types = getattr(module.config, "layer_types", None) or ()
        local = index < len(types) and types[index] == "sliding_attention"
        window = getattr(module.config, "sliding_window", None) if local else None
        if not window or len(reaches) < 2 or window - 1 > reaches[-2]:
            routed.append(index)
    return routed or list(range(len(modules)))


class Retrofit:
    """A model with routers: their routing, their parameters, their file."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: MoSARConfig,
        modules: list[nn.Module],
        layers: list[AttentionLayer],
    ):
        self.model, self.config = model, config
        self.layers = nn.ModuleList(layers)
        """All layers in order; iterating over a `Retrofit` gives those with routers."""
        self.tokenizer: Any = None
        """Where a loader found it."""
        self._modules = modules
        self._configs = _configs(model, modules)
        self._implementations = [c._attn_implementation for c in self._configs]
        self._hooks = []
        decoder = _decoder(model)
        self._signature = inspect.signature(decoder.forward)
        before: list[tuple[nn.Module, Any]] = [(decoder, self._prepare_cache)]
        for block, module, layer in zip(decoder.layers, modules, layers, strict=True):
            # Not as a submodule: the state dict of the model stays its own.
            module.__dict__[ATTRIBUTE] = layer
            before.append((module, layer.begin_pass))
            if isinstance(layer, RoutedLayer):
                before.append((block, layer.keep_residual))
                for name in layer.lora:
                    hook = partial(layer.adapt, name)
                    self._hooks.append(getattr(module, name).register_forward_hook(hook))
            self._hooks.append(module.register_forward_hook(layer.check_attended))
        for module, hook in before:
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __iter__(self) -> Iterator[RoutedLayer]:
        return (layer for layer in self.layers if isinstance(layer, RoutedLayer))

    def __len__(self) -> int:
        """The number of layers with routers."""
        return sum(1 for _ in self)

    @property
    def routing(self) -> str:
        """How all layers attend now; see `set_routing`."""
        return next(iter(self)).routing

    def set_routing(self, routing: str) -> None:
        """ "dense" (the model's own attention), "soft", "top1" or "sparse", for every layer."""
        known = (DENSE, *ROUTINGS)
        if routing not in known:
            raise ValueError(f"routing must be one of {known}, got {routing!r}")
        for layer in self._all():
            layer.routing = routing
        self._use(None if routing == DENSE else NAME)

    def observe(self, observer: Observer | None) -> None:
        """Calls `observer` with q, k and v of each layer with routers as it attends; None: stops.

        Under "dense" routing attention is then computed by our own dense operator.
        """
        for layer in self:
            layer.observer, layer.residual = observer, None
        self._use(None if observer is None and self.routing == DENSE else NAME)

    @property
    def lora(self) -> int:
        """The rank of the low-rank changes; 0: there are none."""
        return next(iter(self)).rank

    def parameters(self) -> list[nn.Parameter]:
        """Those of the routers and of low-rank changes, layer by layer."""
        return list(self.layers.parameters())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """By the names they are saved under, "0.query_router.weight1" and so on."""
        return dict(self.layers.named_parameters())

    def save(self, folder: Path | str, **notes: Any) -> Path:
        """Writes the routers and what they belong to; `notes` go along into the description."""
        from mosar.integrations.retrofit.adapter import save_adapter

        return save_adapter(self, folder, notes)

    def detach(self) -> PreTrainedModel:
        """Takes off all that was attached; the model is as it was, its parameters still frozen."""
        self.set_routing(DENSE)
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module.__dict__.pop(ATTRIBUTE, None)
        self._hooks = []
        return self.model

    def _all(self) -> list[AttentionLayer]:
        return list(self.layers)  # pyright: ignore[reportReturnType]

    def _use(self, implementation: str | None) -> None:
        for config, own in zip(self._configs, self._implementations, strict=True):
            config._attn_implementation_internal = implementation or own

    def _prepare_cache(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Before a pass of the decoder: its cache keeps regimes, or an error says why not."""
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})

        def wanted(name: str) -> Any:
            value = given.get(name)
            return getattr(module.config, name, False) if value is None else value

        if wanted("output_attentions") and module.config._attn_implementation == NAME:
            raise ValueError(
                "output_attentions must be False: no kernel holds the probabilities; "
                'set_routing("dense") gives the model its own attention'
            )
        cache = given.get("past_key_values")
        if self.routing == DENSE:
            if isinstance(cache, Cache) and any(
                isinstance(layer, RegimeCacheLayer) for layer in cache.layers
            ):
                raise ModelError("the cache keeps regimes; start with a new one under dense")
            return None
        if cache is None:
            # A pass that is to be differentiated has nothing to decode afterwards.
            if not wanted("use_cache") or torch.is_grad_enabled():
                return args, kwargs | {"use_cache": False}
            cache = DynamicCache()
            kwargs = kwargs | {"past_key_values": cache}
        adopt_cache(cache, self._all())
        return args, kwargs


def _decoder(model: PreTrainedModel) -> Any:
    """The stack of layers, which takes the cache."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model.base_model if found is None else found


# The linear maps of the attention modules that are known: those to q, k and v, and the output's.
_PROJECTIONS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("qkv_proj",), "o_proj"),
    (("query_key_value",), "dense"),
)


def _projections(module: Any) -> dict[str, Any]:
    """The maps to q, k and v and last the output's; none, if the form is not a known one."""
    for inputs, output in _PROJECTIONS:
        found = {name: getattr(module, name, None) for name in (*inputs, output)}
        if all(hasattr(part, "weight") for part in found.values()):
            return found
    return {}


def _sizes_to_adapt(module: Any) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the projections that may change: q, k (v where they are one), output."""
    return {
        name: (part.in_features, part.out_features)
        for name, part in _projections(module).items()
        if name != "v_proj"
    }


def _check_rank(lora: int, modules: list[Any]) -> None:
    if isinstance(lora, bool) or not isinstance(lora, int) or lora < 0:
        raise ValueError(f"lora must be a rank, an integer >= 0, got {lora!r}")
    if lora:
        most = min(min(size) for module in modules for size in _sizes_to_adapt(module).values())
        if lora > most:
            raise ValueError(
                f"lora must not exceed {most}, the smaller side of a projection, got {lora}"
            )


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The self-attention modules in the order of their layers; a ModelError says why not."""
    needed = ("layer_idx", "is_causal", "config")
    found: list[Any] = [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in needed) and _projections(module)
    ]
    layers = getattr(_decoder(model), "layers", None)
    why = None
    if not getattr(model, "_supports_attention_backend", False):
        why = "its code does not call transformers' attention function"
    elif layers is None:
        why = "it has no list of decoder layers"
    elif [module.layer_idx for module in found] != list(range(len(layers))):
        why = (
            f"{len(found)} attention modules of a known form for {len(layers)} layers (known: "
            f"{', '.join('/'.join((*inputs, out)) for inputs, out in _PROJECTIONS)})"
        )
    elif not all(module.is_causal for module in found):
        why = "its attention is not causal"
    if why is not None:
        family = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(
            f"cannot retrofit a model of type {family!r}: {why}; tested families: "
            f"{', '.join(FAMILIES)}"
        )
    return found


def _layer(
    module: Any, block: Any, index: int, config: MoSARConfig, *, has_routers: bool, lora: int
) -> AttentionLayer:
    own = module.config
    # Gemma 2 and OLMo 2 norm what attention gives; elsewhere the norm of this name is the MLP's.
    normed = hasattr(block, "post_feedforward_layernorm")
    norm = block.post_attention_layernorm if normed else None
    norm = getattr(block, "post_self_attn_layernorm", norm)
    first, *_, output = _projections(module).values()
    head_dim = output.weight.shape[-1] // own.num_attention_heads
    kv_heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
    if hasattr(module, "query_key_value"):
        # GPT-NeoX: as many keys as queries, whatever its configuration carries along.
        kv_heads = own.num_attention_heads
    sizes = {
        "index": index,
        "num_heads": own.num_attention_heads,
        "num_kv_heads": kv_heads,
        "head_dim": getattr(module, "head_dim", head_dim),
    }
    if not has_routers:
        return LocalLayer(config, **sizes)
    with torch.device("cpu"):
        layer = RoutedLayer(
            config,
            **sizes,
            project=OutputProjection(output, norm),
            lora=lora,
            projections=_sizes_to_adapt(module) if lora else None,
        )
    device = first.weight.device
    # Offloaded weights are on the meta device, where routers would lose their values.
    return layer if device.type == "meta" else layer.to(device)


def _own_config(model: PreTrainedModel) -> None:
    """Two models of one configuration object would switch their attention together."""
    old = model.config
    new = copy.deepcopy(old)
    new._attn_implementation_internal = old._attn_implementation
    swaps = {id(old): new}
    for name in getattr(old, "sub_configs", {}):
        part, copied = getattr(old, name, None), getattr(new, name, None)
        if part is not None and copied is not None:
            copied._attn_implementation_internal = part._attn_implementation
            swaps[id(part)] = copied
    for module in model.modules():
        found = module.__dict__.get("config")
        if found is not None and id(found) in swaps:
            module.__dict__["config"] = swaps[id(found)]


def _configs(model: PreTrainedModel, modules: list[nn.Module]) -> list[Any]:
    """The configurations that say which attention function is called, each once."""
    found = [model.config, _decoder(model).config, *(module.config for module in modules)]
    return list({id(config): config for config in found}.values())
