"""The objective in Megatron: the same gradient as lm_loss + lambda * cost, however it is scaled."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosar.integrations.megatron.objective import MoSARObjectiveState

LAYERS, WEIGHT = 3, 0.4


class CostedLayer(nn.Module):
    """A layer whose output and whose cost depend on one weight each, and on its input."""

    has_reach_cost = True

    def __init__(self, number):
        super().__init__()
        self.number, self.objective = number, None
        self.config = SimpleNamespace(num_layers=LAYERS)
        torch.manual_seed(number)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        x = torch.tanh(x * self.weight)
        cost = self.cost_of(x)
        return x if self.objective is None else self.objective.collect(x, cost, self.number)

    def cost_of(self, x):
        return (x * self.weight).sigmoid().mean()


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(CostedLayer(number) for number in range(LAYERS))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)
        return x


def gradients(model):
    return torch.stack([layer.weight.grad for layer in model.layers])


def expected_gradients(x, lm_weight):
    """By the definition: lm_weight * (lm_loss + WEIGHT * mean cost), all in one graph."""
    model = Model()
    costs, y = [], x
    for layer in model.layers:
        y = layer(y)
        costs.append(layer.cost_of(y))
    (lm_weight * (y.square().mean() + WEIGHT * torch.stack(costs).mean())).backward()
    return gradients(model), torch.stack(costs).mean().detach()


def state_of(model, **options):
    state = MoSARObjectiveState(WEIGHT, 0, **options)
    state.attach(model)
    return state


@pytest.fixture
def x():
    torch.manual_seed(9)
    return torch.randn(5, 4, requires_grad=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lm_weight", [1.0, 0.25])
def test_the_gradient_is_that_of_the_objective(x, recompute, lm_weight):
    expected, cost = expected_gradients(x, lm_weight)
    model = Model(recompute)
    state = state_of(model)
    lm_loss = model(x).square().mean()
    loss = state.objective(lm_loss)
    # A microbatch's share and the scale of fp16 reach the cost too.
    (loss * lm_weight).backward()
    torch.testing.assert_close(gradients(model), expected)
    torch.testing.assert_close(state.cost, cost)
    torch.testing.assert_close(loss.detach(), lm_loss.detach() + WEIGHT * cost)


def test_a_sum_over_tokens_takes_their_count(x):
    expected, _ = expected_gradients(x, 1.0)
    model = Model()
    state = state_of(model)
    summed = model(x).square().sum()
    (state.objective(summed, count=20) / 20).backward()
    torch.testing.assert_close(gradients(model), expected)


def test_a_stage_without_the_loss_is_told_the_scale(x):
    model = Model()
    state = state_of(model)
    model(x).square().mean().mul(0.5)
    with pytest.raises(RuntimeError, match=r"set state\.gradient_scale"):
        model(x).square().mean().mul(0.5).backward()
    model.zero_grad()
    state.gradient_scale = 0.5
    model(x).square().mean().mul(0.5).backward()
    torch.testing.assert_close(gradients(model), expected_gradients(x, 0.5)[0])


def test_no_weight_changes_nothing(x):
    plain, attached = Model(), Model()
    plain(x).square().mean().backward()
    state = MoSARObjectiveState()
    state.attach(attached)
    lm_loss = attached(x).square().mean()
    assert state.objective(lm_loss) is lm_loss
    lm_loss.backward()
    assert torch.equal(gradients(plain), gradients(attached))
    assert state.cost > 0


def test_the_weight_grows_linearly():
    state = MoSARObjectiveState(0.01, 500)
    weights = []
    for step in (1, 250, 500, 501):
        state.step = step
        weights.append(state.cost_weight)
    assert weights == pytest.approx([0.01 / 500, 0.005, 0.01, 0.01])


def test_wrong_use_is_said():
    with pytest.raises(ValueError, match="cost_weight must be a number >= 0, got -1"):
        MoSARObjectiveState(-1)
    with pytest.raises(ValueError, match="cost_warmup must be a number >= 0, got 'x'"):
        MoSARObjectiveState(1, "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="cost_of must be reach or pairs, got 'tokens'"):
        MoSARObjectiveState(0.1, cost_of="tokens")
    with pytest.raises(ValueError, match="the model has no MoSAR layer"):
        MoSARObjectiveState().attach(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="no forward pass yet"):
        _ = MoSARObjectiveState().cost
