"""Tells the model which update `Trainer` is in, for the warm-up of the routing cost."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mosar.integrations.hf.model import MosarForCausalLM


class RoutingCostWarmup(TrainerCallback):
    """Lets lambda grow over `cost_warmup` updates, as `mosar train` does.

    Trainer(model, args, callbacks=[RoutingCostWarmup()], ...). Without it lambda is whole at once.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        model = _unwrapped(given["model"])
        if args.label_smoothing_factor and model.decoder.attention_config.cost_weight:
            raise ValueError(
                "label_smoothing_factor must be 0 with a cost_weight: Trainer then computes the "
                f"loss without the routing cost; got {args.label_smoothing_factor}"
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        _unwrapped(given["model"]).cost_step = state.global_step + 1

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        _unwrapped(given["model"]).cost_step = None


def _unwrapped(model: Any) -> Any:
    """The model without the wrappers of distributed training or of an adapter."""
    return next((part for part in model.modules() if isinstance(part, MosarForCausalLM)), model)
