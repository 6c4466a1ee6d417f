"""The decoder in transformers: a base model, a language model and a classifier on top of it.

Parameters are those of `Decoder`, in the models with a head under `decoder.`. The output head is
tied to the embedding, so that it is saved once. Routers stay in float32 whatever the dtype of the
rest.

Shapes: B rows, T tokens, V vocabulary, L layers, R regimes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from mosar.attention import ROUTINGS, Routing
from mosar.core.config import MoSARConfig
from mosar.core.layout import can_check_values
from mosar.core.losses import expected_density, normalized_reach_cost, warmed_up
from mosar.errors import ModelError
from mosar.geometries import Geometry, LayerRouting
from mosar.integrations.hf.cache import MosarCache
from mosar.integrations.hf.config import MosarDecoderConfig
from mosar.integrations.hf.placement import place_tokens, starts_again
from mosar.model.decoder import (
    Decoder,
    Layer,
    Placement,
    capped_logits,
    check_cache,
    new_cache,
)
from mosar.model.norm import RMSNorm


class MosarLayer(GradientCheckpointingLayer, Layer):
    """A layer of the decoder, which transformers can compute again in the backward pass."""

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        placement: Placement,
        past_key_values: Any = None,
    ) -> tuple[Tensor, ...]:
        """The output, and pi_Q and pi_K where there are routers, or a price where there is one.

        Flat: checkpointing with `use_reentrant` passes gradients to no tensor further inside.
        """
        x, told = Layer.forward(self, x, routing, placement, past_key_values)
        if isinstance(told, LayerRouting):
            return x, told.query.probabilities, told.key.probabilities
        return (x,) if told is None else (x, told)


@dataclass
class MosarModelOutput(BaseModelOutputWithPast):
    """What a forward pass of the base model gives."""

    routing_cost: Tensor | None = None
    """L_cost, the expected normalized reach; None without routers, or if it was not asked for."""


@dataclass
class MosarCausalLMOutput(CausalLMOutputWithPast):
    """What a forward pass of the language model gives."""

    routing_cost: Tensor | None = None
    """L_cost, the expected normalized reach, without gradient; None without routers or labels."""


class MosarPreTrainedModel(PreTrainedModel):
    """What the models have in common."""

    if TYPE_CHECKING:
        config: MosarDecoderConfig
    config_class = MosarDecoderConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _can_record_outputs = {"hidden_states": MosarLayer}  # noqa: RUF012
    _no_split_modules = ["MosarLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: MosarDecoderConfig):
        # Two models of one configuration object may use different routings.
        super().__init__(copy.deepcopy(config))
        routers = (
            ["query_router", "key_router"] if config.attention_config.geometry_class.routed else []
        )
        self._keep_in_fp32_modules_strict = cast(Any, routers)

    def post_init(self) -> None:
        # A model and its base have one configuration.
        cast(Any, self.base_model).config = self.config
        super().post_init()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Without the rule for custom code, by which a geometry would pass for initialised because
        its parameters are those of its routers. `_init_weights` heeds loaded parameters itself.
        """
        super()._initialize_weights(module, is_custom_code=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As `Decoder.init_weights`, from torch's own random numbers."""
        if isinstance(module, RMSNorm):
            nn.init.zeros_(module.weight)
        elif isinstance(module, Geometry):
            for name, parameter in module.named_parameters():
                # Loaded ones carry this mark; those left on a disk have no storage.
                if not (parameter.is_meta or getattr(parameter, "_is_hf_initialized", False)):
                    seed = int(torch.randint(1 << 62, ()))
                    generator = torch.Generator(parameter.device).manual_seed(seed)
                    module.init_parameter(name, parameter, generator)
        else:
            super()._init_weights(module)

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
        model, attention = self.config.model_config, self.config.attention_config
        routing = attention.build(model.head_shape).executed(self.routing)
        return MosarCache(new_cache(model, attention, routing, **options))


class MosarModel(MosarPreTrainedModel):
    """Any of the variants, without a head."""

    def __init__(self, config: MosarDecoderConfig):
        super().__init__(config)
        # Built once: a compiled forward pass cannot check configurations.
        model, self.attention_config = config.model_config, config.attention_config
        self.mosar_config = config.mosar_config
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(
            MosarLayer(model, self.attention_config, i) for i in range(model.num_layers)
        )
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MosarCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_routing_cost: bool = False,
        **kwargs: Any,
    ) -> MosarModelOutput:
        """input_ids [B, T], or inputs_embeds [B, T, hidden] as `get_input_embeddings` gives them.

        attention_mask [B, T], or [B, P + T] with P tokens in the cache: 0 for padding on either
        side. position_ids [B or 1, T]: as `generate` counts them; positions that start again at 0
        begin another packed text. use_cache: whether a cache is filled, by default as the
        configuration says, but not while training; no gradient passes through it to earlier calls.
        output_routing_cost: compute L_cost of the valid tokens.
        """
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise ValueError("output_attentions must be False: no kernel holds the probabilities")
        x = self._embed(input_ids, inputs_embeds)
        if use_cache is None and attention_mask is None and position_ids is not None:
            # Packed texts cannot be continued, so they need no cache.
            packed = torch.compiler.is_compiling() or starts_again(position_ids)
            use_cache = False if packed else None
        cache = self._cache(past_key_values, use_cache)
        placement = place_tokens(x, attention_mask, position_ids, cache)
        told: list[tuple[Tensor, ...]] = []
        for index, layer in enumerate(self.layers):
            x, *one = layer(
                x,
                self.routing,
                placement,
                past_key_values=None if cache is None else cache.states[index],
            )
            if one:
                told.append(tuple(one))
        cost = None
        if output_routing_cost and told:
            if self.attention_config.geometry_class.routed:
                cost = self._routing_price(told, placement)
            else:
                cost = torch.stack([price for (price,) in told]).mean()
        return MosarModelOutput(
            last_hidden_state=self.norm(x), past_key_values=cache, routing_cost=cost
        )

    def _routing_price(self, told: list[tuple[Tensor, ...]], placement: Placement) -> Tensor:
        valid, segment_ids = placement.get("key_valid"), placement.get("segment_ids")
        if self.attention_config.cost_of == "reach":
            return expected_reach(told, self.mosar_config, valid)
        layers = [
            expected_density(pi_q, pi_k, self.mosar_config, segment_ids, valid)
            for pi_q, pi_k in told
        ]
        return torch.stack(layers).mean()

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        size = self.config.hidden_size
        if input_ids is not None:
            self._check_ids(input_ids)
        embeds = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if embeds.dim() != 3 or embeds.shape[2] != size:
            raise ValueError(f"inputs_embeds must be [B, T, {size}], got {list(embeds.shape)}")
        return embeds * size**0.5

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dim() != 2 or not ids.shape[1]:
            raise ValueError(f"input_ids must be [B, T] with T >= 1, got {list(ids.shape)}")
        if can_check_values(ids):
            lowest, highest = (int(value) for value in ids.aminmax())
            size = self.embedding.num_embeddings
            if lowest < 0 or highest >= size:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(
                    f"input_ids must lie in 0..{size - 1}, got {wrong}: does the tokenizer belong "
                    "to the model?"
                )

    def _cache(self, given: Any, use_cache: bool | None) -> MosarCache | None:
        if given is None and use_cache is None:
            # An update needs none, and no graph could hold it.
            learning = self.training and torch.is_grad_enabled()
            use_cache = self.config.use_cache and not (learning or torch.compiler.is_compiling())
        if torch.compiler.is_exporting() and (use_cache or given is not None):
            raise ValueError(
                "use_cache must be False in torch.export of this model: transformers' caches are "
                "not tensors; export model.to_decoder(), whose cache is (docs/operators.md)"
            )
        if given is None:
            return self.new_cache() if use_cache else None
        if not isinstance(given, MosarCache):
            raise ValueError(
                f"past_key_values must be a MosarCache, as model.new_cache() makes it, "
                f"got {type(given).__name__}"
            )
        check_cache(given.states, self.attention_config, len(self.layers))
        return given


class MosarForCausalLM(MosarPreTrainedModel, GenerationMixin):
    """Any of the variants, with a language-modelling loss and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "decoder.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: MosarDecoderConfig):
        super().__init__(config)
        self.decoder = MosarModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.cost_step: int | None = None
        """The update that is being computed, for the warm-up of the cost; None: it is over."""
        self.post_init()

    @classmethod
    def from_decoder(cls, decoder: Decoder, **options: Any) -> MosarForCausalLM:
        """A model with the parameters of a decoder, bit for bit; options: of the configuration."""
        attention = decoder.geometries[0].settings_now
        config = MosarDecoderConfig.from_decoder(decoder.model_config, attention, **options)
        with torch.device("meta"):
            model = cls(config)
        model.decoder.load_state_dict(copy.deepcopy(decoder.state_dict()), assign=True)
        model.tie_weights()
        return model.eval()

    def to_decoder(self) -> Decoder:
        """The model as our own `Decoder`; the parameters of both are the same memory."""
        if not self.config.tie_word_embeddings:
            raise ModelError(
                "tie_word_embeddings must be True: a decoder has no output head but its embedding"
            )
        with torch.device("meta"):
            decoder = Decoder(self.config.model_config, self.config.attention_config)
        decoder.load_state_dict(self.decoder.state_dict(), assign=True)
        return decoder.train(self.training)

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
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MosarCausalLMOutput:
        """As `MosarModel`. labels [B, T]: the tokens themselves, shifted here; -100 is not
        predicted. While training, the loss includes lambda L_cost where the configuration has a
        `cost_weight`.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and tokens is not None and labels.shape != tokens.shape[:2]:
            raise ValueError(
                f"labels must be {list(tokens.shape[:2])} like the tokens, got {list(labels.shape)}"
            )
        mass_weight = self.decoder.attention_config.mass_weight
        if mass_weight and self.training and labels is not None:
            raise ValueError(
                "the discarded mass is a loss of mosar train alone: to train here set "
                f"attention['mass_weight'] to 0 in the configuration, got {mass_weight:g}"
            )
        outputs = self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_routing_cost=labels is not None,
            **kwargs,
        )
        hidden = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = capped_logits(self.lm_head, hidden, self.config.final_logit_softcapping)
        loss, cost = None, outputs.routing_cost
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
            if cost is not None and self.training and self.cost_weight:
                loss = loss + self.cost_weight * _share(labels, **kwargs) * cost
        return MosarCausalLMOutput(
            loss=loss,
            logits=cast(Any, logits),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            routing_cost=None if cost is None else cost.detach(),
        )

    @property
    def cost_weight(self) -> float:
        """lambda in the update `cost_step`: it grows linearly over `cost_warmup` updates."""
        attention = self.decoder.attention_config
        return warmed_up(attention.cost_weight, attention.cost_warmup, self.cost_step)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Our own cache, unless the caller passes one or switches it off."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation must be None, got {kind!r}: the cache follows the routing. "
                'Under "sparse" routing it is bounded; model.new_cache(dtype=torch.bfloat16), as '
                "past_key_values, halves it"
            )
        _check_left_padding(model_kwargs.get("attention_mask"))
        given = model_kwargs.get("past_key_values")
        if given is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.new_cache()
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused here, so that requests do not fail one by one."""
        raise ValueError(
            "continuous batching needs keys in pages, and ours are kept by their routing: call "
            "generate with a batch, padded on the left"
        )


class MosarForSequenceClassification(GenericForSequenceClassification, MosarPreTrainedModel):
    """A class for each text, read off its last token; the loss has no routing cost."""

    base_model_prefix = MosarPreTrainedModel.base_model_prefix


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
    routings: Sequence[tuple[Tensor, ...]], config: MoSARConfig, valid: Tensor | None = None
) -> Tensor:
    """L_cost of (pi_Q, pi_K) over batch, layers and the valid tokens [B, T]: a scalar."""
    means = []
    for role in zip(*routings, strict=True):
        pi_BTR = [pi.mean(dim=1) if pi.dim() == 4 else pi for pi in role]
        if valid is None:
            layers = [pi.mean(dim=(0, 1)) for pi in pi_BTR]
        else:
            # Not chosen by index: how many there are is unknown while being compiled.
            share_BT = valid / valid.sum()
            layers = [torch.einsum("bt,btr->r", share_BT, pi) for pi in pi_BTR]
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
