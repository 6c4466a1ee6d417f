"""Megatron's GPTModel with MoSAR on CPU and gloo: tensor-parallel size 1 against 2, in 2 processes.

With size 1 the two processes are copies of one model (data parallel), with size 2 each holds half.
Weights go from one to the other through a checkpoint of `dist_checkpointing`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mosar import MoSARConfig, mosar_attention
from mosar.integrations.megatron import (
    MoSARCoreAttention,
    MoSARObjectiveState,
    mosar_layer_spec,
)

LENGTH, VOCAB, DIM, WEIGHT = 40, 64, 8, 0.3
# Query heads, key heads, routing groups; in the first, keys are fewer than ranks.
CASES = {"mqa": (4, 1, 1), "groups": (4, 4, 2), "cut": (6, 6, 3)}
# Against the largest number of a tensor: sums over ranks add up in another order.
TOLERANCE = 2e-5


def build(case, size):
    heads, kv_heads, groups = CASES[case]
    config = TransformerConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=DIM,
        ffn_hidden_size=32,
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        init_method_std=0.2,
        # A window in every other layer, as Gemma 2 has it.
        window_size=(29, 0),
        window_attn_skip_freq=2,
    )
    mosar = MoSARConfig.scaled(32, routing_groups=groups, num_sinks=1)
    spec = mosar_layer_spec(
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        config,
        mosar,
        softcap=2.0,
        query_pre_attn_scalar=5.0,
        router_queries=LENGTH // 2,
    )
    torch.manual_seed(size)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )


def tokens():
    return torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(4))


def losses_of(model):
    text = tokens()
    positions = torch.arange(LENGTH).expand(2, -1)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(text[:, :-1], positions, causal, labels=text[:, 1:])


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, MoSARCoreAttention)]


def gradients_of(model, routing, state):
    """Losses, the objective, its price and gradients by name, of one pass."""
    state.attach(model)
    state.step = 3
    for layer in layers_of(model):
        layer.set_routing(routing)
    losses = losses_of(model)
    objective = state.objective(losses.mean())
    model.zero_grad()
    objective.backward()
    result = {"losses": losses.detach(), "objective": objective.detach(), "cost": state.cost}
    return result | {"gradients": {name: p.grad for name, p in model.named_parameters()}}


def learn(model):
    """What a pass gives under each routing, with gradients under those that train."""
    result = {
        "soft": gradients_of(model, "soft", MoSARObjectiveState(WEIGHT, 0)),
        "hard": gradients_of(model, "hard", MoSARObjectiveState(WEIGHT, 0, "pairs")),
        "routing": [
            torch.stack([side.logits for side in layer.last_routing]) for layer in layers_of(model)
        ],
    }
    for routing in ("top1", "sparse"):
        for layer in layers_of(model):
            layer.set_routing(routing)
        with torch.no_grad():
            result[routing] = losses_of(model)
    assert torch.equal(result["hard"]["losses"], result["sparse"])
    return result


def assert_near(ours, whole, what):
    error = (ours - whole).abs().max()
    assert error <= TOLERANCE * whole.abs().max() + 1e-9, f"{what}: off by {error}"


def expected_part(name, entry, gradient):
    """This rank's part of a gradient of the unsplit model, by the offsets of the checkpoint."""
    if isinstance(entry, ShardedTensor):
        offset = entry.global_offset[entry.prepend_axis_num :]
        for axis, (first, length) in enumerate(zip(offset, entry.local_shape, strict=True)):
            gradient = gradient.narrow(axis, first, length)
        return gradient
    # The gated feed-forward: each rank has its part of the gate and of the other half.
    assert name.endswith("linear_fc1.weight"), name
    rank = parallel_state.get_tensor_model_parallel_rank()
    return torch.cat([half.chunk(2)[rank] for half in gradient.chunk(2)])


def compare(case, folder):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    whole_model = build(case, 1)
    with torch.no_grad():
        for layer in layers_of(whole_model):
            for router in (layer.query_router, layer.key_router):
                # As after training: initial routers hardly distinguish tokens.
                router.weight1.mul_(20)
                router.weight2.mul_(1000)
                router.bias2.add_(torch.arange(3) * 0.2)
    checkpoint = Path(folder) / case
    if dist.get_rank() == 0:
        checkpoint.mkdir()
    dist.barrier()
    dist_checkpointing.save(whole_model.sharded_state_dict(), str(checkpoint))
    whole = learn(whole_model)
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = build(case, 2)
    sharded = model.sharded_state_dict()
    model.load_state_dict(dist_checkpointing.load(sharded, str(checkpoint)))
    ours = learn(model)
    for one, other in zip(ours["routing"], whole["routing"], strict=True):
        assert_near(one, other, f"{case}: routing")
        everyone = [torch.empty_like(one) for _ in range(2)]
        dist.all_gather(everyone, one.contiguous())
        assert torch.equal(everyone[0], everyone[1]), f"{case}: ranks route differently"
    for what in ("top1", "sparse"):
        assert_near(ours[what], whole[what], f"{case}: {what}")
    soft, hard = whole["soft"], whole["hard"]
    assert not torch.allclose(soft["losses"], hard["losses"], atol=1e-3), "routing does nothing"
    sharded = model.sharded_state_dict()
    for routing in ("soft", "hard"):
        for what in ("losses", "objective", "cost"):
            assert_near(ours[routing][what], whole[routing][what], f"{case}, {routing}: {what}")
        for name, gradient in ours[routing]["gradients"].items():
            expected = expected_part(name, sharded[name], whole[routing]["gradients"][name])
            what = f"{case}, {routing}: gradient of {name}"
            assert gradient is not None and expected.abs().max() > 0, what
            assert_near(gradient, expected, what)
    parallel_state.destroy_model_parallel()


def core(size=1, **changes):
    """One core attention of a small layer, as Megatron builds it."""
    settings = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    settings |= {"num_query_groups": 2, "kv_channels": DIM, "attention_dropout": 0.0}
    own = ("softcap", "num_kv_heads", "start_regimes", "start_logit")
    options = {k: changes.pop(k) for k in own if k in changes}
    config = TransformerConfig(**(settings | {"use_cpu_initialization": True} | changes))
    torch.manual_seed(0)
    return MoSARCoreAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        softmax_scale=config.softmax_scale,
        mosar=MoSARConfig.scaled(32),
        **({"num_kv_heads": 2} | options),
    )


def check_against_the_operator():
    """Scale, soft-cap and window are those of the operator; a step with cached keys is its last."""
    layer = core(softcap=3.0, softmax_scale=0.7, window_size=(9, 0))
    q, k, v = (torch.randn(20, 2, heads, DIM) for heads in (4, 2, 2))
    whole = layer(q, k, v, None)
    pi_q, pi_k = (side.probabilities for side in layer.last_routing)
    expected = mosar_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
        *(pi_q, pi_k, layer.mosar),
        **{"scale": 0.7, "softcap": 3.0, "window": 9},
    )
    torch.testing.assert_close(whole, expected.permute(2, 0, 1, 3).flatten(2))
    for last in (1, 3):
        mask_type = AttnMaskType.no_mask if last == 1 else AttnMaskType.causal
        step = layer(q[-last:], k, v, None, attn_mask_type=mask_type)
        torch.testing.assert_close(step, whole[-last:])
    packed = [x[:, 0] for x in (q, k, v)]
    ends = torch.tensor([0, 7, 20], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    together = layer(*packed, None, packed_seq_params=params)
    apart = [
        layer(*(x[part, None] for x in packed), None)[:, 0] for part in (slice(7), slice(7, 20))
    ]
    torch.testing.assert_close(together, torch.cat(apart))


def check_the_start():
    """Nearly all tokens start in the regime that is asked for."""
    layer = core(start_regimes=("M",), start_logit=3.0)
    layer.query_router.reset_parameters()
    layer(*(torch.randn(20, 2, heads, DIM) for heads in (4, 2, 2)), None)
    for side in layer.last_routing:
        assert bool((side.probabilities[..., 1] > 0.85).all())


def check_refusals():
    q, k, v = (torch.randn(5, 1, heads, DIM) for heads in (4, 2, 2))
    layer = core()
    anything = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    padded = PackedSeqParams("thd", ends, ends, ends + 1, ends)
    spec = get_gpt_layer_local_spec()
    for call, said in (
        (lambda: core(attention_dropout=0.1), "does not support attention_dropout=0.1"),
        (lambda: core(num_kv_heads=4), "num_kv_heads must be num_query_groups"),
        (lambda: core(softmax_type="learnable"), "does not support softmax_type='learnable'"),
        (lambda: layer(q, k, v, anything), "attention_mask must be None or causal"),
        (lambda: layer(q, k, v, None, attention_bias=anything), "attention_bias is not supported"),
        (
            lambda: layer(q, k, v, None, attn_mask_type=AttnMaskType.padding),
            "attn_mask_type must be causal, got padding",
        ),
        (
            lambda: layer(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=padded),
            "cu_seqlens_q_padded must be None or equal",
        ),
        (lambda: layer.set_routing("harder"), "routing must be one of"),
        (lambda: core(start_regimes=("X",)), "'X'"),
        (
            lambda: mosar_layer_spec(spec.submodules.self_attention, layer.config, MoSARConfig()),
            "spec must be a layer with self_attention.core_attention",
        ),
    ):
        try:
            call()
        except ValueError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"nobody said {said}")


def stay_on_the_cpu():
    """Megatron asks for the GPU where it makes tables and where it saves."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None


def main(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    stay_on_the_cpu()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    for case in CASES:
        compare(case, folder)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    check_against_the_operator()
    check_the_start()
    check_refusals()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
