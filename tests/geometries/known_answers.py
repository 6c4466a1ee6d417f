"""What public implementations answer to small inputs, recorded so that tests do not need them.

    pip install -e '.[rivals]'
    PYTHONPATH=tests python -m geometries.known_answers

writes known_answers.json beside this file, and `pytest -m rivals` asks the packages again. Inputs
are sines: they need no generator.

Shapes: B batch, T tokens, H query heads, K key/value heads, D head dim.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F

from core.test_positional import rotate_by_definition
from mosar.geometries.reformer import hash_rotations

FILE = Path(__file__).with_name("known_answers.json")
LENGTH, HEADS, DIM = 6, 2, 8
# Where keys are chosen.
LONG, SCALE, BLOCK, TOP = 16, 0.7, 2, 4
HIDDEN, PROFILES, EXTENT, POSITIONS, WINDOW, BUCKETS = 5, 3, 9, 4, 4, 4


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


def long_heads():
    """q [1, T, 2, D] and k, v [1, T, 1, D] of more tokens."""
    sizes = ((HEADS, 1.3), (1, 2.1), (1, 0.7))
    return [2 * sines(1, LONG, heads, DIM, speed=speed) for heads, speed in sizes]


def hidden():
    """[1, T, C]."""
    return sines(1, LONG, HIDDEN, speed=1.9)


def indexer():
    """Weights of DSA's queries [H, E, C], keys [E, C] and heads [H, C], so that no scores tie."""
    sizes = ((HEADS, DIM, HIDDEN), (DIM, HIDDEN), (HEADS, HIDDEN))
    return [sines(*size, speed=speed) for size, speed in zip(sizes, (0.1, 0.2, 1.3), strict=True)]


def curves():
    """Inkling's mixture [H R, C] and profiles [R, E]; CoPE's embedding [P, D]."""
    mixture = sines(HEADS * PROFILES, HIDDEN, speed=1.7)
    return mixture, sines(PROFILES, EXTENT, speed=0.9), sines(POSITIONS, DIM, speed=1.5)


def interleaved(x):
    """Halves of a head (x_i, x_{i + D/2}) as neighbours (x_2i, x_2i+1)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def weighed(logits, v):
    """softmax over logits [1, H, T, S], and v [1, S, 1, D] -> [1, T, H, D]."""
    return torch.einsum("bhts,bsd->bthd", torch.softmax(logits, dim=-1), v[:, :, 0])


def causal_scores():
    """[1, H, T, S] float64, so low above the diagonal that nothing is read."""
    q, k, _ = long_heads()
    scores = SCALE * torch.einsum("bthd,bsd->bhts", q, k[:, :, 0])
    return scores.masked_fill(torch.ones(LONG, LONG).triu(1).bool(), -1e300)


def xpos_scores():
    from rotary_embedding_torch import RotaryEmbedding

    q, k, _ = (interleaved(x.float()) for x in heads())
    rotary = RotaryEmbedding(DIM, use_xpos=True, xpos_scale_base=4, cache_if_possible=False)
    turned = rotary.rotate_queries_and_keys(*(x.transpose(1, 2) for x in (q, k)))
    return torch.einsum("bhtd,bhsd->bhts", *turned)


def t5_buckets():
    from transformers.models.t5.modeling_t5 import T5Attention

    return T5Attention._relative_position_bucket(-torch.arange(300), False, 32, 128)


def fox():
    from fla.ops.forgetting_attn.naive import naive_forgetting_attn

    q, k, v = (x.float() for x in heads())
    return naive_forgetting_attn(q, k, v, F.logsigmoid(gates().float()))


def selective():
    from x_transformers.attend import selective_attn

    return weighed(selective_attn(causal_scores()), long_heads()[2])


def cope():
    from x_transformers.x_transformers import CoPE

    module, scores = CoPE(DIM, HEADS, POSITIONS).double(), causal_scores()
    with torch.no_grad():
        module.pos_emb.copy_(curves()[2])
        bias = module(long_heads()[0].transpose(1, 2), scores)
    return weighed(scores + bias, long_heads()[2])


def inkling():
    from x_transformers.x_transformers import RelativeProjPositionalBias

    module = RelativeProjPositionalBias(HIDDEN, HEADS, PROFILES, EXTENT).double()
    mixture, profiles, _ = curves()
    with torch.no_grad():
        module.to_distance_weights[0].weight.copy_(mixture)
        module.to_distance_weights[0].bias.zero_()
        module.distance_bank.copy_(profiles)
        return weighed(causal_scores() + module(hidden()), long_heads()[2])


def window():
    """A band of distances up to `WINDOW`, as in Longformer."""
    from local_attention import LocalAttention

    local = LocalAttention(
        WINDOW,
        causal=True,
        exact_windowsize=True,
        autopad=True,
        scale=SCALE,
        use_rotary_pos_emb=False,
    )
    q, k, v = (x.float().transpose(1, 2) for x in long_heads())
    return local(q, *(x.expand(q.shape) for x in (k, v))).transpose(1, 2)


def gemma3_mask():
    """Keys of each query where the window is `WINDOW`, and which layers have one."""
    from transformers import Gemma3TextConfig
    from transformers.masking_utils import sliding_window_causal_mask_function

    config = Gemma3TextConfig(num_hidden_layers=LONG)
    # Theirs counts the query itself.
    exists = sliding_window_causal_mask_function(WINDOW + 1)
    at = torch.arange(LONG)
    keys = exists(0, 0, at[:, None], at).int().tolist()
    return [*keys, [int(kind == "sliding_attention") for kind in config.layer_types]]


def reformer():
    from reformer_pytorch import LSHAttention

    rotations = hash_rotations(0, 1, BUCKETS // 2, DIM)[0]

    class Hashed(LSHAttention):
        def hash_vectors(self, n_buckets, vecs, **options):
            assert n_buckets == BUCKETS
            angles = vecs @ rotations.T
            return torch.cat([angles, -angles], dim=-1).argmax(dim=-1)

    q, _, v = (x[0].transpose(0, 1) for x in long_heads())
    sizes = {"bucket_size": LONG // BUCKETS, "n_hashes": 1}
    lsh = Hashed(**sizes, causal=True, attend_across_buckets=False)
    # Theirs has a fixed scale; keys are unit vectors whatever the queries' length is.
    return lsh(SCALE * DIM**0.5 * q, v.expand(q.shape))[0].transpose(0, 1)[None]


def pooled():
    """Means of `BLOCK` tokens of k and v."""
    return [x.unflatten(1, (-1, BLOCK)).mean(dim=2) for x in long_heads()[1:]]


def nsa_compression():
    from fla.ops.nsa.naive import naive_nsa_compression

    return naive_nsa_compression(long_heads()[0], *pooled(), BLOCK, SCALE)[0]


def nsa_selection():
    from fla.ops.nsa.naive import naive_nsa_selection, naive_nsa_topk

    q, k, v = long_heads()
    chosen = naive_nsa_topk(q, pooled()[0], TOP, BLOCK, SCALE)
    return naive_nsa_selection(q, k, v, chosen, BLOCK, SCALE)


def dsa():
    from fla.ops.dsa.naive import naive_dsa

    query, key, weight = indexer()
    at = torch.arange(LONG)[None]

    def turned(x):
        half = DIM // 2
        return torch.cat([rotate_by_definition(x[..., :half], at), x[..., half:]], dim=-1)

    q_index = turned(torch.einsum("btc,hec->bthe", hidden(), query))
    k_index = turned(torch.einsum("btc,ec->bte", hidden(), key)[:, :, None])[:, :, 0]
    weights = hidden() @ weight.T
    return naive_dsa(*long_heads(), q_index, k_index, weights, topk=TOP, scale=SCALE)


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


PACKAGES = {
    "rescaled": rescaled_frequencies,
    "xpos_scores": xpos_scores,
    "t5_buckets": t5_buckets,
    "fox": fox,
    "selective": selective,
    "cope": cope,
    "inkling": inkling,
    "window": window,
    "gemma3_mask": gemma3_mask,
    "reformer": reformer,
    "nsa_compression": nsa_compression,
    "nsa_selection": nsa_selection,
    "dsa": dsa,
}
"""By the name in known_answers.json."""


def answer(name: str):
    """What the package says, as JSON holds it."""
    found = PACKAGES[name]()
    return rounded(found.tolist() if isinstance(found, torch.Tensor) else found)


def rounded(value):
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return value if isinstance(value, int) else float(f"{value:.7g}")


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(answer(name))}" for name in PACKAGES]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
