"""What public implementations answer to small inputs, recorded so that tests do not need them.

    pip install -e '.[rivals]'
    PYTHONPATH=tests python -m geometries.known_answers

writes known_answers.json beside this file, and `pytest -m rivals` asks the packages again. Inputs
are sines: they need no generator. Some authors have a repository but no package (`REPOSITORIES`).
With the folder of their module on the path,

    PYTHONPATH=tests:FOLDER python -m geometries.known_answers moba

records that answer alone.

Shapes: B batch, T tokens, H query heads, K key/value heads, D head dim.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from core.test_positional import rotate_by_definition
from mosar.geometries.block_selection import draw
from mosar.geometries.reformer import hash_rotations

FILE = Path(__file__).with_name("known_answers.json")
LENGTH, HEADS, DIM = 6, 2, 8
# Where keys are chosen.
LONG, SCALE, BLOCK, TOP = 16, 0.7, 2, 4
HIDDEN, PROFILES, EXTENT, POSITIONS, WINDOW, BUCKETS = 5, 3, 9, 4, 4, 4
# MoBA's blocks, of which the last is not full; Linformer's, with `MIXTURES` each.
CHUNK, MIXED, MIXTURES = 3, 4, 2
RAMP, SPANS = 4, (0.15, 0.55)
# BigBird: drawn blocks of a query, and how many blocks and draws show where they come from.
RANDOM, ROWS, DRAWS = 2, 16, 200


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


def mixtures():
    """Linformer's mixtures of keys and of values [r, c]."""
    return [sines(MIXTURES, MIXED, speed=speed) for speed in (1.1, 2.3)]


def drawn_blocks(own):
    """What BigBird's first key head draws in layer 0 for queries of a block.

    Neither the first block, nor the query's own or the one before it.
    """
    between = range(1, own - 1)
    return sorted(between, key=lambda block: -draw(0, 0, own, block))[:RANDOM]


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
    return lsh(with_scale(q), v.expand(q.shape))[0].transpose(0, 1)[None]


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


def with_scale(q):
    """Queries for code whose scale is fixed at 1 / sqrt(D)."""
    return SCALE * DIM**0.5 * q


def bigbird():
    """With causal masks and our draws, for the tokens of all blocks but the first and last two.

    A causal mask leaves the first block, the query's own, the one before it, and those drawn.
    """
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    blocks, last = LONG // BLOCK, LONG // BLOCK - 1
    # Where fewer than `RANDOM` can be drawn, the last block, which is masked.
    plan = [(drawn_blocks(own) + [last] * RANDOM)[:RANDOM] for own in range(1, last)]

    class Drawn(BigBirdBlockSparseAttention):
        def _bigbird_block_rand_mask_with_head(self, **options):
            return [np.array(plan)] * options["num_heads"]

    config = BigBirdConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        block_size=BLOCK,
        num_random_blocks=RANDOM,
    )
    q, k, v = (x.transpose(1, 2) for x in long_heads())
    at = torch.arange(LONG).unflatten(0, (blocks, BLOCK))
    near = torch.cat([at[1:-3], at[2:-2], at[3:-1]], dim=1)
    exists = torch.ones(1, LONG).double()
    exists[:, -BLOCK:] = 0
    out, _ = Drawn(config).bigbird_block_sparse_attention(
        *(with_scale(q), k.expand(q.shape), v.expand(q.shape)),
        band_mask=(near[:, None] <= at[2:-2, :, None])[None, None].double(),
        from_mask=torch.ones(1, 1, LONG, 1).double(),
        to_mask=exists[:, None, None],
        from_blocked_mask=torch.ones(1, blocks, BLOCK).double(),
        to_blocked_mask=exists.unflatten(1, (blocks, BLOCK)),
        n_heads=HEADS,
        n_rand_blocks=RANDOM,
        attention_head_size=DIM,
        from_block_size=BLOCK,
        to_block_size=BLOCK,
        batch_size=1,
        from_seq_len=LONG,
        to_seq_len=LONG,
        seed=None,
        plan_from_length=None,
        plan_num_rand_blocks=None,
    )
    return out[:, 2 * BLOCK : -2 * BLOCK]


def bigbird_draws():
    """For queries of each block: how many blocks are drawn, and whether each is ever drawn.

    By their rule for a row, with the whole window and both global blocks before the query.
    """
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    np.random.seed(0)
    before = {"window_block_left": 2, "window_block_right": 0}
    before |= {"global_block_left": 2, "global_block_right": 0}
    rule, found = BigBirdBlockSparseAttention._get_single_block_row_attention, []
    for own in range(ROWS):
        drawn = [rule(own, 0, own + 1, 3, **before).tolist() for _ in range(DRAWS)]
        (count,) = {len(set(row)) for row in drawn}
        found.append([count, *(int(any(block in row for row in drawn)) for block in range(ROWS))])
    return found


def linformer():
    """Query by query: the projection of the tokens up to it mixes finished blocks only."""
    from linformer import LinformerSelfAttention

    q, k, v = long_heads()
    q, tokens = with_scale(q).flatten(2), torch.cat([k, v], dim=-1)[:, :, 0]
    one, rows = torch.eye(HEADS * DIM).double(), []
    for i in range(LONG):
        own = torch.eye(i % MIXED + 1).double()
        keys, values = (torch.block_diag(*[x] * (i // MIXED), own) for x in mixtures())
        module = LinformerSelfAttention(
            HEADS * DIM, i + 1, k=len(keys), heads=HEADS, one_kv_head=True
        ).double()
        weights = {
            "to_q.weight": one,
            "to_k.weight": one[:DIM],
            "to_v.weight": one[DIM:],
            "proj_k": keys.T,
            "proj_v": values.T,
            "to_out.weight": one,
            "to_out.bias": torch.zeros(HEADS * DIM),
        }
        module.load_state_dict(weights)
        rows.append(module(q[:, i : i + 1], tokens[:, : i + 1]).detach())
    return torch.cat(rows, dim=1).unflatten(-1, (HEADS, DIM))


def moba():
    from moba_naive import moba_attn_varlen_naive

    q, k, v = (x[0].float() for x in long_heads())
    heads = with_scale(q), k.expand(q.shape), v.expand(q.shape)
    return moba_attn_varlen_naive(*heads, torch.tensor([0, LONG]), LONG, CHUNK, TOP)[None]


def moba_fla():
    """With plain attention where theirs calls flash-attn, which needs a GPU."""
    from fla.ops.moba import parallel

    def attend_spans(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **_):
        """softmax(q k) v within each span, and log sum exp [H, T]."""
        out, total = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
        ends = zip(cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True)
        for of_q, of_k in ends:
            queries, keys = slice(*of_q.tolist()), slice(*of_k.tolist())
            scores = softmax_scale * torch.einsum("thd,shd->hts", q[queries], k[keys])
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
            out[queries] = torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v[keys])
            total[:, queries] = scores.logsumexp(dim=-1)
        return out, total, None, None

    q, k, v = (x.float() for x in long_heads())
    heads = with_scale(q), k.expand(q.shape), v.expand(q.shape)
    text = torch.tensor([0, LONG], dtype=torch.int32)
    # It asks whether the first is there, and calls the second.
    with patch.multiple(
        parallel, flash_attn_varlen_func=attend_spans, _flash_attn_varlen_forward=attend_spans
    ):
        return parallel.parallel_moba(*heads, text, LONG, CHUNK, TOP)


def adaptive_span():
    """The output [1, T, H, D], and the loss."""
    from adaptive_span import AdaptiveSpan

    module = AdaptiveSpan(LONG, 1.0, RAMP, 0.0, False, HEADS).double()
    with torch.no_grad():
        module._mask.current_val.copy_(torch.tensor(SPANS)[:, None, None])
        weights = torch.softmax(causal_scores(), dim=-1)[0]
        # Rows of theirs end with the nearest key.
        rows = [weights[:, i].roll(LONG - 1 - i, dims=-1) for i in range(LONG)]
        masked = module(torch.stack(rows, dim=1))
        rows = [masked[:, i].roll(i + 1 - LONG, dims=-1) for i in range(LONG)]
        out = torch.einsum("hts,bsd->bthd", torch.stack(rows, dim=1), long_heads()[2][:, :, 0])
        return {"out": out.tolist(), "loss": module.get_loss().item()}


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
    "bigbird": bigbird,
    "bigbird_draws": bigbird_draws,
    "linformer": linformer,
    "moba_fla": moba_fla,
}
"""By the name in known_answers.json."""
REPOSITORIES = {
    "moba": (
        *(moba, "moba_naive"),
        "MoonshotAI/MoBA 61e456bc956c, from its copy in snowflakedb/ArcticTraining 278a5f908689",
    ),
    "adaptive_span": (
        *(adaptive_span, "adaptive_span"),
        "facebookresearch/adaptive-span 3f760f6dd5bc",
    ),
}
"""By the name in known_answers.json: what asks, the module, and the repository and its commit."""


def answer(name: str):
    """What the package or the authors' file says, as JSON holds it."""
    found = (PACKAGES[name] if name in PACKAGES else REPOSITORIES[name][0])()
    return rounded(found.tolist() if isinstance(found, torch.Tensor) else found)


def rounded(value):
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return value if isinstance(value, int) else float(f"{value:.7g}")


if __name__ == "__main__":
    answers = json.loads(FILE.read_text())
    answers |= {name: answer(name) for name in sys.argv[1:] or PACKAGES}
    answers["sources"] = {name: source for name, (_, _, source) in REPOSITORIES.items()}
    names = [*PACKAGES, *REPOSITORIES, "sources"]
    lines = [f"{json.dumps(name)}: {json.dumps(answers[name])}" for name in names]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
