"""The memory model against real runs: what torch saves, what AdamW holds, what caches use."""

import pytest
import torch

from mosar.kernels.native import native_obstacle
from mosar.model.decoder import Decoder
from mosar.planning.density import DensityCurve, Point, outer
from mosar.planning.memory import activation_bytes, cache_bytes, layer_bytes, loss_bytes
from mosar.planning.plan import PEAK, make_plan
from mosar.training.batches import open_batches
from mosar.training.distributed.mesh import Mesh
from mosar.training.learner import Learner
from mosar.training.objective import Objective
from planning.configs import small_config
from planning.peak import as_on_a_gpu, peak_of_update

ALONE = Mesh()
BATCH, LENGTH = 2, 128
TOLERANCE = 0.02
"""Tables by position and a kernel's plan are not in the model; docs/plan.md states this."""


def saved_bytes(config):
    """Distinct storages that a pass saves for its backward pass, parameters and copies left out."""
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    parameters = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    sizes = {torch.Size(p.shape) for p in decoder.parameters() if p.dim() > 1}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        copy = tensor.dtype == torch.bfloat16 and {tensor.shape, tensor.shape[::-1]} & sizes
        if storage.data_ptr() not in parameters and not copy:
            # Held, so that no later tensor takes its place.
            seen[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, config.model.vocab_size, (BATCH, LENGTH + 1))
    narrow = config.train.precision == "bf16"
    with (
        as_on_a_gpu(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=narrow),
    ):
        terms = Objective(config)(decoder, tokens, None, step=1)
    assert terms.loss.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", ["rope", "alibi", "fixed-m", "mosar"])
def test_activations_are_what_torch_saves(variant, precision):
    if (obstacle := native_obstacle()) is not None:
        pytest.skip(f"the model is of the native kernels, which cannot be had: {obstacle}")
    config = small_config(variant, "smoke", f"train.precision={precision}", "model.num_layers=3")
    tokens = BATCH * LENGTH
    modelled = activation_bytes(config, ALONE, tokens) + loss_bytes(config, tokens)
    assert modelled == pytest.approx(saved_bytes(config), rel=TOLERANCE)


def test_checkpointing_keeps_the_inputs_of_layers():
    config = small_config("mosar", "smoke", "train.checkpoint_activations=true")
    tokens = BATCH * LENGTH
    # One layer's worth more exists only while its backward pass runs.
    modelled = activation_bytes(config, ALONE, tokens) - tokens * layer_bytes(config, ALONE)
    assert modelled + loss_bytes(config, tokens) == pytest.approx(
        saved_bytes(config), rel=TOLERANCE
    )


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ((), 0.03),
        (("train.precision=bf16",), 0.04),
        # The plan adds the loss to the layer that is recomputed; they do not meet.
        (("train.checkpoint_activations=true",), 0.08),
        (("model.hidden_size=256", "model.num_layers=4", "model.ffn_size=768"), 0.02),
    ],
)
@pytest.mark.parametrize("variant", ["rope", "mosar"])
def test_the_peak_of_an_update_is_the_plans_sum(smoke, variant, changes, tolerance):
    """What the allocator holds at most, with gradients of a pass before; docs/plan.md states it."""
    if (obstacle := native_obstacle()) is not None:
        pytest.skip(f"the model is of the native kernels, which cannot be had: {obstacle}")
    config = smoke(variant, "train.micro_batch=2", *changes)
    learner = Learner.of(config, open_batches(config))
    plan = make_plan(config, context=config.model.max_length, gpus=1)
    assert peak_of_update(learner) == pytest.approx(plan.value(*PEAK), rel=tolerance)


def test_parameters_gradients_and_optimizer():
    config = small_config()
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    optimizer = torch.optim.AdamW(decoder.parameters())
    decoder.logits(decoder(torch.zeros(1, 8, dtype=torch.long)).hidden).sum().backward()
    optimizer.step()
    plan = make_plan(config, context=64, gpus=1)
    section = "memory of a rank, training"
    held = list(decoder.parameters())
    assert plan.value(section, "parameters") == sum(p.nbytes for p in held)
    assert plan.value(section, "gradients") == sum(p.grad.nbytes for p in held)
    state = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
    assert plan.value(section, "optimizer") == sum(t.nbytes for t in state)


@torch.no_grad()
def routed_model(length, *changes):
    """A model whose routers choose all regimes, and what they chose for a text."""
    config = small_config("mosar", "smoke", *changes)
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    for layer in decoder.layers:
        for router in (layer.attention.geometry.query_router, layer.attention.geometry.key_router):
            router.weight1.mul_(20)
            router.weight2.mul_(1000)
    tokens = torch.randint(0, 500, (1, length), generator=torch.Generator().manual_seed(0))
    routings = decoder(tokens).routings
    shares = [
        [
            side.labels.flatten().bincount(minlength=3).double().div(length).tolist()
            for side in (routing.query, routing.key)
        ]
        for routing in routings
    ]
    mean = [
        [sum(rows) / len(rows) for rows in zip(*side, strict=True)]
        for side in zip(*shares, strict=True)
    ]
    pairs = outer(*mean)
    return config, decoder, tokens, DensityCurve("own", "itself", (Point(1.0, pairs),))


@pytest.mark.parametrize("change", ["attention.num_sinks=0", "train.precision=bf16"])
def test_the_cache_of_regimes_holds_what_is_modelled(change):
    """Within a tenth: which keys are alive depends on where in the text the choices fell."""
    config, decoder, tokens, curve = routed_model(400, change)
    narrow = {"dtype": torch.bfloat16} if config.train.precision == "bf16" else {}
    cache = decoder.new_cache("sparse", **narrow)
    with torch.no_grad():
        for start in range(0, tokens.shape[1], 50):
            decoder(tokens[:, start : start + 50], routing="sparse", cache=cache)
    mosar = config.attention.mosar_config(config.model.max_length)
    keys = curve.kept_keys(mosar, tokens.shape[1])
    modelled = cache_bytes(config, ALONE, keys, by_regime=True)
    assert keys < 300, "nothing was evicted, so nothing was tested"
    assert cache.used_bytes == pytest.approx(modelled, rel=0.1)


@pytest.mark.parametrize("variant", ["rope", "fox", "mosar-plus"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cache_of_all_keys_is_exact(variant, precision):
    """Regimes that start global keep every key too."""
    config = small_config(variant, "smoke", f"train.precision={precision}")
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    if precision == "bf16":
        decoder.bfloat16()
    cache = decoder.new_cache("sparse")
    with torch.no_grad():
        decoder(torch.zeros(1, 96, dtype=torch.long), routing="sparse", cache=cache)
    by_regime = variant == "mosar-plus"
    assert cache.used_bytes == cache_bytes(config, ALONE, 96, by_regime=by_regime)
