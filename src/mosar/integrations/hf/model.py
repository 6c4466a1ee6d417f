"""The decoder as a causal language model of transformers.

Parameters are those of `Decoder` under `decoder.`; the embedding is also the output head, so that
there is no second tensor to tie. Routers stay in float32 whatever the dtype of the rest.

Shapes: B rows, T tokens, V vocabulary, L layers, R regimes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from mosar.attention import ROUTINGS, Routing
from mosar.core.config import MoSARConfig
from mosar.core.layout import can_check_values
from mosar.core.losses import normalized_reach_cost
from mosar.geometries import Geometry, LayerRouting
from mosar.integrations.hf.cache import MosarCache
from mosar.integrations.hf.config import MosarDecoderConfig
from mosar.integrations.hf.placement import place_tokens, starts_again
from mosar.model.decoder import Decoder
from mosar.model.norm import RMSNorm


@dataclass
class MosarCausalLMOutput(CausalLMOutputWithPast):
    """What a forward pass gives."""

    routing_cost: Tensor | None = None
    """L_cost, the expected normalized reach, without gradient; None without routers or labels."""


class MosarForCausalLM(PreTrainedModel, GenerationMixin):
    """Any of the variants, with a language-modelling loss and `generate`."""

    if TYPE_CHECKING:
        config: MosarDecoderConfig
    config_class = MosarDecoderConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["query_router", "key_router"]  # noqa: RUF012

    def __init__(self, config: MosarDecoderConfig):
        # Two models of one configuration object may use different routings.
        config = copy.deepcopy(config)
        super().__init__(config)
        self.decoder = Decoder(config.model_config, config.attention_config)
        self.gradient_checkpointing = False
        self.checkpoint_every = 1
        self.cost_step: int | None = None
        """The update that is being computed, for the warm-up of the cost; None: it is over."""
        self.post_init()

    @classmethod
    def from_decoder(cls, decoder: Decoder, **options: Any) -> MosarForCausalLM:
        """A model with the parameters of a decoder, bit for bit; options: of the configuration."""
        config = MosarDecoderConfig.from_decoder(
            decoder.model_config, decoder.attention_config, **options
        )
        with torch.device("meta"):
            model = cls(config)
        model.decoder = copy.deepcopy(decoder)
        return model.eval()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As `Decoder.init_weights`, from torch's own random numbers."""
        if isinstance(module, RMSNorm):
            nn.init.zeros_(module.weight)
        elif isinstance(module, Geometry):
            for name, parameter in module.named_parameters():
                # Loaded ones carry this mark.
                if not getattr(parameter, "_is_hf_initialized", False):
                    seed = int(torch.randint(1 << 62, ()))
                    generator = torch.Generator(parameter.device).manual_seed(seed)
                    module.init_parameter(name, parameter, generator)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embedding = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> None:
        """None: the head is the input embedding itself."""
        return None

    @property
    def routing(self) -> Routing:
        """How routers are used: "soft", "top1" or "sparse"."""
        return cast(Routing, self.config.routing)

    def set_routing(self, routing: str) -> None:
        """Changes it from the next call on; a cache that was filled under another one is refused.

        Geometries without routers take no notice, but for "fixed", whose gate ends at its reach
        under "sparse".
        """
        if routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")
        self.config.routing = routing

    def new_cache(self, **options: Any) -> MosarCache:
        """An empty cache for the present routing; options are those of `Decoder.new_cache`."""
        return MosarCache(self.decoder.new_cache(self.routing, **options))

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        **options: Any,
    ) -> None:
        """As in transformers, without `use_reentrant`: that drops the routing cost's gradient."""
        given = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if given["use_reentrant"]:
            raise ValueError("use_reentrant must be False: else the routing cost has no gradient")
        self.checkpoint_every = every_n_layers
        super().gradient_checkpointing_enable(given, **options)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MosarCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MosarCausalLMOutput:
        """input_ids [B, T], or inputs_embeds [B, T, hidden] as `get_input_embeddings` gives them.

        attention_mask [B, T], or [B, P + T] with P tokens in the cache: 0 for padding on either
        side. position_ids [B or 1, T]: as `generate` counts them; positions that start again at 0
        begin another packed text. labels [B, T]: the tokens themselves, shifted here; -100 is not
        predicted. While training, the loss includes lambda L_cost where the configuration has a
        `cost_weight`. Without gradients a cache is filled unless `use_cache` is False.
        """
        if output_attentions:
            raise ValueError("output_attentions must be False: no kernel holds the probabilities")
        x = self._embed(input_ids, inputs_embeds)
        if labels is not None and labels.shape != x.shape[:2]:
            raise ValueError(
                f"labels must be {list(x.shape[:2])} like the tokens, got {list(labels.shape)}"
            )
        if use_cache is None and attention_mask is None and position_ids is not None:
            # Packed texts are not gone on with, and there is no cache for them.
            use_cache = False if starts_again(position_ids) else None
        cache = self._cache(past_key_values, use_cache)
        if cache is not None:
            self.decoder.check_cache(cache.states)
        placement = place_tokens(x, attention_mask, position_ids, cache)
        states: list[Tensor] | None = [] if output_hidden_states else None
        hidden, routings = self.decoder.run_layers(
            x,
            placement,
            routing=self.routing,
            cache=None if cache is None else cache.states,
            run_layer=self._layer_runner(),
            states=states,
        )
        logits = self.decoder.logits(slice_logits_to_keep(hidden, logits_to_keep))
        loss = cost = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
            if routings:
                weight = self.cost_weight if self.training else 0.0
                with torch.set_grad_enabled(torch.is_grad_enabled() and weight != 0):
                    cost = expected_reach(
                        routings, self.config.mosar_config, placement.get("key_valid")
                    )
                if weight:
                    loss = loss + weight * _share(labels, **kwargs) * cost
                cost = cost.detach()
        return MosarCausalLMOutput(
            loss=loss,
            logits=cast(Any, logits),
            past_key_values=cache,
            hidden_states=None if states is None else cast(Any, (*states, hidden)),
            routing_cost=cost,
        )

    @property
    def cost_weight(self) -> float:
        """lambda in the update `cost_step`: it grows linearly over `cost_warmup` updates."""
        attention, step = self.decoder.attention_config, self.cost_step
        if step is None or step >= attention.cost_warmup:
            return attention.cost_weight
        return attention.cost_weight * step / attention.cost_warmup

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        size = self.config.hidden_size
        if input_ids is not None:
            self._check_ids(input_ids)
        embeds = self.decoder.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if embeds.dim() != 3 or embeds.shape[2] != size:
            raise ValueError(f"inputs_embeds must be [B, T, {size}], got {list(embeds.shape)}")
        return embeds * size**0.5

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dim() != 2 or not ids.shape[1]:
            raise ValueError(f"input_ids must be [B, T] with T >= 1, got {list(ids.shape)}")
        if can_check_values(ids):
            lowest, highest = (int(value) for value in ids.aminmax())
            size = self.decoder.embedding.num_embeddings
            if lowest < 0 or highest >= size:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(
                    f"input_ids must lie in 0..{size - 1}, got {wrong}: does the tokenizer belong "
                    "to the model?"
                )

    def _cache(self, given: Any, use_cache: bool | None) -> MosarCache | None:
        if given is None:
            # A cache keeps no gradient: by default there is one only where none is asked for.
            wanted = self.config.use_cache and not torch.is_grad_enabled()
            return self.new_cache() if (wanted if use_cache is None else use_cache) else None
        if not isinstance(given, MosarCache):
            raise ValueError(
                f"past_key_values must be a MosarCache, as model.new_cache() makes it, "
                f"got {type(given).__name__}"
            )
        return given

    def _layer_runner(self) -> Callable[..., Any] | None:
        """Runs every `checkpoint_every`-th layer by the checkpointing of transformers."""
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return None
        chosen = {id(layer) for layer in list(self.decoder.layers)[:: self.checkpoint_every]}

        def run(layer: nn.Module, *args: Any) -> Any:
            if id(layer) in chosen:
                return self._gradient_checkpointing_func(layer, *args)
            return layer(*args)

        return run

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Our own cache, unless the caller brings one or wants none."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation must be None: the cache follows the routing; got {kind!r}"
            )
        _check_left_padding(model_kwargs.get("attention_mask"))
        given = model_kwargs.get("past_key_values")
        if given is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.new_cache()
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()


def _check_left_padding(mask: Tensor | None) -> None:
    """New tokens follow the last column, so that every row must end with a token."""
    if mask is None or mask.dim() != 2:
        return
    rows = (mask[:, -1] == 0).nonzero()[:, 0].tolist()
    if rows:
        raise ValueError(
            f"generate needs padding on the left: rows {rows} of attention_mask end with padding; "
            'use tokenizer.padding_side = "left"'
        )


def expected_reach(
    routings: Sequence[LayerRouting], config: MoSARConfig, valid: Tensor | None = None
) -> Tensor:
    """L_cost over batch, layers and the valid tokens [B, T]: a scalar."""
    means = []
    for role in ("query", "key"):
        layers = []
        for routing in routings:
            pi = getattr(routing, role).probabilities
            # [B, T, R], or [B, Gr, T, R]
            chosen = pi if valid is None else pi.movedim(-2, 1)[valid]
            layers.append(chosen.flatten(0, -2).mean(dim=0))
        means.append(torch.stack(layers))
    # The cost is linear in the probabilities: that of their means is the mean of all.
    return normalized_reach_cost(means[0], means[1], config)


def _share(
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor | float:
    """The part of an update's tokens that this pass predicts, as the loss counts them."""
    if num_items_in_batch is None:
        return 1.0
    targets = labels[..., 1:] if shift_labels is None else shift_labels
    return (targets != ignore_index).sum() / num_items_in_batch
