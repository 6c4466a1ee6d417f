"""Presets: sizes and budgets of a run, as dotted keys; a variant adds the keys of `attention.`
(all but the length of the cost's warm-up, which belongs to the budget).

smoke      seconds; the tests run it
quick      one variant in two to four minutes on two cores
retrieval  two layers that learn a task from `mosar.data.tasks`, about two minutes
small      a few million parameters, 15 to 30 minutes per variant on two cores
medium     the model of small on five times the tokens, with milestones on the way: hours a variant
paper      the published setting: its "500M" are 538 million parameters without the embedding,
           800 million with it
"""

from __future__ import annotations

from typing import Any

_SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")


def _model(*sizes: int, length: int) -> dict[str, Any]:
    """A decoder of `_SIZES`, with Gemma 2's soft-caps."""
    given = dict(zip(_SIZES, sizes, strict=True)) | {"max_length": length}
    given |= {"attn_softcap": 50.0, "final_softcap": 30.0}
    given["query_pre_attn_scalar"] = float(given["head_dim"])
    return {f"model.{name}": value for name, value in given.items()}


def _train(
    rates: tuple[float, float], warmup: int, evaluate: tuple[int, int], **given: Any
) -> dict[str, Any]:
    """rates: the peak and the end. evaluate: the steps between evaluations, and their batches.

    The cost warms up five times as long as the rate, as in the paper (100 and 500).
    """
    names = ("learning_rate", "min_learning_rate", "warmup_steps", "eval_every", "eval_batches")
    values = dict(zip(names, (*rates, warmup, *evaluate), strict=True)) | given
    return {f"train.{k}": v for k, v in values.items()} | {"attention.cost_warmup": 5 * warmup}


PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        **_model(64, 2, 4, 2, 16, 192, length=64),
        **_train((3e-3, 3e-4), warmup=5, evaluate=(20, 1), steps=40, checkpoint_every=10),
        "train.micro_batch": 4,
        "train.accumulation": 2,
    },
    "quick": {
        **_model(128, 4, 4, 2, 32, 384, length=256),
        **_train((2e-3, 2e-4), warmup=40, evaluate=(100, 8), steps=600, checkpoint_every=100),
        "train.micro_batch": 8,
    },
    "small": {
        **_model(256, 6, 4, 2, 64, 768, length=512),
        **_train((1e-3, 1e-4), warmup=100, evaluate=(100, 16), steps=1600, checkpoint_every=100),
        "train.micro_batch": 4,
    },
    "medium": {
        **_model(256, 6, 4, 2, 64, 768, length=512),
        **_train((1e-3, 1e-4), warmup=100, evaluate=(100, 16), steps=8000, checkpoint_every=100),
        "train.micro_batch": 4,
        "train.keep_every": 800,
    },
    "retrieval": {
        **_model(128, 2, 4, 4, 32, 256, length=256),
        **_train((3e-3, 3e-4), warmup=50, evaluate=(100, 4), steps=1000, checkpoint_every=200),
        "data.task": "recall",
        # 1 / sqrt(hidden): with weights as small as those for text, heads hardly tell keys apart at
        # first, and recall is learnt much later.
        "model.init_std": 0.08,
        "train.micro_batch": 16,
    },
    "paper": {
        **_model(1024, 18, 8, 1, 256, 8192, length=2048),
        **_train((3e-4, 3e-5), warmup=100, evaluate=(10_000, 64), steps=610_000),
        "model.vocab_size": 256_000,
        "train.micro_batch": 1,
        "train.accumulation": 8,
        "train.precision": "auto",
        "train.loss_chunk": 256,
        "train.checkpoint_activations": True,
        "train.checkpoint_every": 10_000,
        "train.keep_every": 50_000,
        "train.log_every": 100,
    },
}
