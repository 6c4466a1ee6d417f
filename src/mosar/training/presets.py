"""Presets: sizes and budgets of a run, as dotted keys; a variant adds the keys of `attention.`
(all but the length of the cost's warm-up, which belongs to the budget).

smoke      seconds; the tests run it
quick      one variant in less than two minutes on two cores
retrieval  two layers that learn a task from `mosar.data.tasks`, about two minutes
small      a few million parameters, 10 to 20 minutes a variant on two cores
paper      the published setting: its "500M" are 538 million parameters without the embedding,
           800 million with it
"""

from __future__ import annotations

from typing import Any

# Gemma 2's.
_SOFTCAPS = {"model.attn_softcap": 50.0, "model.final_softcap": 30.0}


def _warmup(steps: int) -> dict[str, Any]:
    """The rate's warm-up, and the cost's: five times as long, as in the paper (100 and 500)."""
    return {"train.warmup_steps": steps, "attention.cost_warmup": 5 * steps}


PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        **_SOFTCAPS,
        "model.hidden_size": 64,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 16,
        "model.ffn_size": 192,
        "model.query_pre_attn_scalar": 16.0,
        "model.max_length": 64,
        "train.steps": 40,
        "train.micro_batch": 4,
        "train.accumulation": 2,
        "train.learning_rate": 3e-3,
        "train.min_learning_rate": 3e-4,
        **_warmup(5),
        "train.eval_every": 20,
        "train.eval_batches": 1,
        "train.checkpoint_every": 10,
    },
    "quick": {
        **_SOFTCAPS,
        "model.hidden_size": 128,
        "model.num_layers": 4,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 32,
        "model.ffn_size": 384,
        "model.query_pre_attn_scalar": 32.0,
        "model.max_length": 256,
        "train.steps": 600,
        "train.micro_batch": 8,
        "train.learning_rate": 2e-3,
        "train.min_learning_rate": 2e-4,
        **_warmup(40),
        "train.eval_every": 100,
        "train.eval_batches": 8,
        "train.checkpoint_every": 100,
    },
    "small": {
        **_SOFTCAPS,
        "model.hidden_size": 256,
        "model.num_layers": 6,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 64,
        "model.ffn_size": 768,
        "model.query_pre_attn_scalar": 64.0,
        "model.max_length": 512,
        "train.steps": 1600,
        "train.micro_batch": 4,
        "train.learning_rate": 1e-3,
        "train.min_learning_rate": 1e-4,
        **_warmup(100),
        "train.eval_every": 100,
        "train.eval_batches": 16,
        "train.checkpoint_every": 100,
    },
    "retrieval": {
        **_SOFTCAPS,
        "data.task": "recall",
        "model.hidden_size": 128,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "model.head_dim": 32,
        "model.ffn_size": 256,
        "model.query_pre_attn_scalar": 32.0,
        "model.max_length": 256,
        # 1 / sqrt(hidden): with weights as small as those for text, heads hardly tell keys apart at
        # first, and recall is learnt much later.
        "model.init_std": 0.08,
        "train.steps": 1000,
        "train.micro_batch": 16,
        "train.learning_rate": 3e-3,
        "train.min_learning_rate": 3e-4,
        **_warmup(50),
        "train.eval_every": 100,
        "train.eval_batches": 4,
        "train.checkpoint_every": 200,
    },
    "paper": {
        **_SOFTCAPS,
        "model.vocab_size": 256_000,
        "model.hidden_size": 1024,
        "model.num_layers": 18,
        "model.num_heads": 8,
        "model.num_kv_heads": 1,
        "model.head_dim": 256,
        "model.ffn_size": 8192,
        "model.query_pre_attn_scalar": 256.0,
        "model.max_length": 2048,
        "train.steps": 610_000,
        "train.micro_batch": 1,
        "train.accumulation": 8,
        "train.learning_rate": 3e-4,
        "train.min_learning_rate": 3e-5,
        **_warmup(100),
        "train.precision": "auto",
        "train.loss_chunk": 256,
        "train.checkpoint_activations": True,
        "train.eval_every": 10_000,
        "train.eval_batches": 64,
        "train.checkpoint_every": 10_000,
        "train.keep_every": 50_000,
        "train.log_every": 100,
    },
}
