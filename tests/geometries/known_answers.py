"""What public implementations answer to small inputs, recorded so that tests do not need them.

    pip install --no-deps rotary-embedding-torch fla-core einops
    python tests/geometries/known_answers.py

writes known_answers.json beside this file. Inputs are sines: they need no generator.
"""

import json
from pathlib import Path

import torch

FILE = Path(__file__).with_name("known_answers.json")
LENGTH, HEADS, DIM = 6, 2, 8


def sines(*shape, speed):
    """Numbers in [-1, 1], the same everywhere."""
    count = torch.Size(shape).numel()
    return torch.sin(speed * torch.arange(1, count + 1, dtype=torch.float64)).reshape(shape)


def heads():
    """q, k, v [1, T, H, D]."""
    return [sines(1, LENGTH, HEADS, DIM, speed=speed) for speed in (1.3, 2.1, 0.7)]


def gates():
    """Logits of forget gates [1, T, H]."""
    return 2 * sines(1, LENGTH, HEADS, speed=0.9)


def interleaved(x):
    """Halves of a head (x_i, x_{i + D/2}) as neighbours (x_2i, x_2i+1)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def record() -> dict:
    from fla.ops.forgetting_attn.naive import naive_forgetting_attn
    from rotary_embedding_torch import RotaryEmbedding
    from transformers.models.t5.modeling_t5 import T5Attention

    q, k, v = (x.float() for x in heads())
    rotary = RotaryEmbedding(DIM, use_xpos=True, xpos_scale_base=4, cache_if_possible=False)
    turned = rotary.rotate_queries_and_keys(*(interleaved(x).transpose(1, 2) for x in (q, k)))
    bucket = T5Attention._relative_position_bucket
    forgotten = naive_forgetting_attn(q, k, v, torch.nn.functional.logsigmoid(gates().float()))
    return {
        **rescaled_frequencies(),
        "xpos_scores": torch.einsum("bhtd,bhsd->bhts", *turned).tolist(),
        "t5_buckets": bucket(-torch.arange(300), False, 32, 128).tolist(),
        "fox": forgotten.tolist(),
    }


def rescaled_frequencies() -> dict:
    """Of D = 64 trained at 512, for 2,048 tokens; the factor of q and k is the last number."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = {}
    for name, kind, factor in (
        ("pi", "linear", 4.0),
        ("ntk", "dynamic", 1.0),
        ("yarn", "yarn", 4.0),
    ):
        rope = {"rope_type": kind, "factor": factor, "rope_theta": 10000.0}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = 512
        config = LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=512,
            rope_parameters=rope,
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=2048)
        found[name] = [*frequencies.tolist(), scale]
    return found


def rounded(value):
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.7g}")


if __name__ == "__main__":
    answers = {name: rounded(value) for name, value in record().items()}
    FILE.write_text(json.dumps(answers) + "\n")
