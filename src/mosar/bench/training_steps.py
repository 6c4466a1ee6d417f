"""Training steps of the same size, ours and others': what `mosar bench train` times.

    rope, mosar        our loop's own step: objective, clipping, AdamW
    gemma2-eager       transformers' Gemma2ForCausalLM with the weights of our rope
    gemma2-sdpa        the same through torch's attention, which knows no soft-cap
    nanogpt            the plain loop in benchmarks/, which knows no soft-cap either

All see the same tokens, in float32, with fused AdamW and a clipped gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.bench.comparison import Unavailable
from mosar.bench.transformers_models import build_gemma2
from mosar.training.batches import Batch, Batches
from mosar.training.config import RunConfig, resolve_config
from mosar.training.learner import Learner, update

OURS = ("rope", "mosar")
OTHERS = ("gemma2-eager", "gemma2-sdpa", "nanogpt")
CAPPED, PLAIN = "capped", "plain"
SETTINGS = (CAPPED, PLAIN)
# Who computes logits without a soft-cap only.
_UNCAPPED_ONLY = ("gemma2-sdpa", "nanogpt")
_BASELINE = Path(__file__).parents[3] / "benchmarks" / "nanogpt_baseline.py"

Step = Callable[[], float]
"""One update; returns the loss before it."""


@dataclass(frozen=True)
class TrainingCase:
    """One row: a model of the preset's size at a length, with or without soft-caps."""

    length: int
    setting: str
    preset: str = "small"
    vocab_size: int = 4096
    tokens_per_step: int = 2048
    """At least one window is taken."""

    def __str__(self) -> str:
        return f"n = {self.length}, {self.setting}"

    @property
    def batch(self) -> int:
        return max(1, self.tokens_per_step // self.length)

    def config(self, variant: str) -> RunConfig:
        changes = [f"model.max_length={self.length}", f"train.micro_batch={self.batch}"]
        changes.append("train.accumulation=1")
        if self.setting == PLAIN:
            changes += ["model.attn_softcap=none", "model.final_softcap=none"]
        return resolve_config(
            variant=variant,
            preset=self.preset,
            data="data",
            changes=changes,
            vocab_size=self.vocab_size,
        )

    def competitors(self) -> tuple[str, ...]:
        """Who computes the same thing in this setting."""
        if self.setting == CAPPED:
            return (*OURS, *(name for name in OTHERS if name not in _UNCAPPED_ONLY))
        return (*OURS, *OTHERS)

    def tokens(self) -> Tensor:
        """[batch, length + 1]"""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (self.batch, self.length + 1), generator=generator)


def build_step(case: TrainingCase, name: str) -> tuple[Step, int]:
    """A competitor's step and the number of its parameters; Unavailable says why not."""
    if name in OURS:
        return _our_step(case, name)
    if name == "nanogpt":
        return _nanogpt_step(case)
    return _gemma2_step(case, name.removeprefix("gemma2-"))


class _SameBatch:
    """Stands in for a run's data: the same tokens at every step."""

    def __init__(self, tokens: Tensor):
        self.tokens = tokens

    def of_step(self, step: int) -> Iterator[Batch]:
        yield self.tokens, None


def _our_step(case: TrainingCase, variant: str) -> tuple[Step, int]:
    batches = cast(Batches, _SameBatch(case.tokens()))
    learner = Learner.build(case.config(variant), batches)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        line = update(learner, number)
        assert line is not None
        return line["lm_loss"]

    return step, sum(parameter.numel() for parameter in learner.names)


def _gemma2_step(case: TrainingCase, attention: str) -> tuple[Step, int]:
    model = build_gemma2(case.config("rope"), attention)
    tokens, train = case.tokens(), case.config("rope").train
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=train.betas, fused=True)

    def step() -> float:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, train.grad_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, sum(parameter.numel() for parameter in parameters)


def _nanogpt_step(case: TrainingCase) -> tuple[Step, int]:
    baseline, model = _nanogpt_module(), case.config("rope").model
    if model.hidden_size % model.num_heads:
        raise Unavailable(f"its heads must divide its width, {model.hidden_size}")
    # With MHA and two matrices in its MLP, this width gives a layer as many parameters as ours.
    query, key = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    ours = 2 * model.hidden_size * (query + key) + 3 * model.hidden_size * model.ffn_size
    mlp_width = (ours - 4 * model.hidden_size**2) // (2 * model.hidden_size)
    config = baseline.GPTConfig(
        vocab_size=case.vocab_size,
        length=case.length,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        width=model.hidden_size,
        mlp_width=mlp_width,
    )
    return baseline.build_step(config, case.tokens())


@lru_cache(maxsize=1)
def _nanogpt_module() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("nanogpt_baseline", _BASELINE)
    if spec is None or spec.loader is None or not _BASELINE.is_file():
        raise Unavailable("benchmarks/nanogpt_baseline.py is in the source tree only")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
