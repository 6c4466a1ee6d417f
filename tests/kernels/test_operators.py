"""The native operators as torch sees them: schema, fake tensors, autograd, torch.compile."""

import pytest
import torch
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode

from cases import SMALL, Case
from kernels.budget import NAMES, attend, collect, differentiable, operator, run
from mosar import MoSARConfig
from mosar.core.layout import resolve_layout
from mosar.kernels import native
from mosar.kernels.plan import sparse_plan_input

EVERYTHING = MoSARConfig(regimes=SMALL.regimes, routing_groups=2, num_sinks=1, exponent=1.0)
PLAIN = Case(
    dtype=torch.float32,
    batch=2,
    kv_heads=2,
    heads_per_kv=2,
    num_queries=20,
    num_keys=37,
    head_dim=12,
)
RICH = PLAIN.with_(config=EVERYTHING, padding="holes", segments="packed", softcap=5.0, window=9)
# One path for each kind of bias that the operators know.
BIASES = [("native", "soft"), ("planned", "sparse"), ("native", "none"), ("native", "both")]
biases = pytest.mark.parametrize(("impl", "kind"), BIASES)
both = pytest.mark.parametrize("case", [PLAIN, RICH], ids=["plain", "rich"])


@pytest.fixture(autouse=True)
def operators():
    native.load_operators()


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the last call of each of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mosar":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


def recorded(case, impl, kind):
    """The arguments of `attend` and `attend_backward`."""
    with Recorder() as recorder:
        run(case, kind, impl=impl)
    operators = (torch.ops.mosar.attend.default, torch.ops.mosar.attend_backward.default)
    return [copied(recorder.calls[operator]) for operator in operators]


def copied(arguments):
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in arguments]


def plan_arguments(case):
    layout = resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)
    given = sparse_plan_input(*case.labels, case.config, layout)
    return [
        given.labels_q,
        given.classes_k,
        given.places_q,
        given.places_k,
        given.floor_q,
        given.valid_k,
        given.reach,
    ]


@both
def test_opcheck_of_the_plan(case):
    torch.library.opcheck(torch.ops.mosar.plan.default, plan_arguments(case))


@both
@biases
def test_opcheck_of_attention(impl, kind, case):
    forward, backward = recorded(case, impl, kind)
    torch.library.opcheck(torch.ops.mosar.attend_backward.default, backward)
    # q, k, v, and the routings where there are any
    for trained in forward[:5]:
        if trained is not None:
            trained.requires_grad_()
    torch.library.opcheck(torch.ops.mosar.attend.default, forward)


@pytest.mark.parametrize("kind", ["soft", "top1", "sparse", "none", "both"])
def test_compiled_is_eager(kind):
    torch.compiler.reset()
    attention = torch.compile(
        operator(RICH, kind, impl="native"), fullgraph=True, backend="aot_eager", dynamic=False
    )
    leaves = differentiable(*RICH.inputs)
    found = collect(RICH, *attention(*leaves), leaves)
    expected = run(RICH, kind, impl="native")
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_inductor_calls_the_operators():
    """Alone, so that it has nothing of its own to compile, which takes long."""
    operators = torch.ops.mosar.attend, torch.ops.mosar.attend_backward
    # Its own cache of graphs outlives a change of our operators.
    with fresh_cache():
        for call, given in zip(operators, recorded(RICH, *BIASES[0]), strict=True):
            torch.compiler.reset()
            found = torch.compile(lambda *x, call=call: call(*x), fullgraph=True)(*given)
            for ours, expected in zip(found, call(*given), strict=True):
                assert ours is expected is None or torch.equal(ours, expected)


def test_layers_of_one_graph_may_differ_in_geometry_and_window():
    torch.compiler.reset()
    case = PLAIN.with_(num_queries=300, num_keys=300)
    other = MoSARConfig(regimes=SMALL.regimes, exponent=3.0)
    layers = [
        operator(case.with_(config=config, window=window), routing, impl="native")
        for config, window, routing in (
            *((SMALL, None, "soft"), (other, None, "soft")),
            *((SMALL, None, "sparse"), (other, 9, "sparse")),
        )
    ]

    def model(q, k, v, pi_q, pi_k):
        for layer in layers:
            q, _ = layer(q, k, v, pi_q, pi_k)
        return q

    found = torch.compile(model, fullgraph=True, backend="aot_eager")(*case.inputs)
    assert torch.equal(found, model(*case.inputs))


def test_one_graph_serves_several_lengths():
    torch.compiler.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    attention = operator(PLAIN, "sparse", impl="native")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counting)
    for length in (300, native._FEW_KEYS, native._FEW_KEYS + 1):
        inputs = PLAIN.with_(num_queries=length, num_keys=length).inputs
        # A graph of any length goes by the plan, also where a single call takes a short cut.
        expected = attend(PLAIN, "sparse", inputs, impl="planned")
        assert all(map(torch.equal, compiled(*inputs), expected))
    assert len(graphs) == 1


WRONG_PLAN = {
    "labels_q": [torch.Tensor.long, lambda x: x[:, :-1], lambda x: x[0]],
    "classes_k": [torch.Tensor.float, lambda x: x[:1], lambda x: x.mT.contiguous().mT],
    "pos_q": [torch.Tensor.long, lambda x: x[:, 1:]],
    "pos_k": [torch.Tensor.long, lambda x: x[:, 1:]],
    "floor_q": [torch.Tensor.long, lambda x: x[:, 1:]],
    "valid_k": [torch.Tensor.int, lambda x: x[:, 1:]],
    "reach": [torch.Tensor.double, lambda x: x[0]],
}


@pytest.mark.parametrize(
    ("index", "change"),
    [(i, change) for i, changes in enumerate(WRONG_PLAN.values()) for change in changes],
)
def test_wrong_arguments_of_the_plan(index, change):
    given = plan_arguments(RICH)
    torch.ops.mosar.plan(*given)
    given[index] = change(given[index])
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        torch.ops.mosar.plan(*given)


@pytest.mark.parametrize("label", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("index", [0, 1], ids=["labels_q", "classes_k"])
def test_a_label_outside_the_table(index, label):
    given = plan_arguments(PLAIN)
    given[index] = given[index].index_fill(1, torch.tensor([5]), label)
    with pytest.raises((ValueError, RuntimeError, IndexError), match="regime label"):
        torch.ops.mosar.plan(*given)


FLOATS = (
    "dout",
    "dlse",
    "out",
    "lse",
    "q",
    "k",
    "v",
    "pi_q",
    "pi_k",
    "geometry",
    "table",
    "slopes",
)
SIGNATURE = (
    *("dout", "dlse", "out", "softmax", "learned"),
    *("q", "k", "v", "pi_q", "pi_k", "pos_q", "pos_k"),
    *("query_order", "key_order", "query_offsets", "key_offsets", "run_lo", "run_hi"),
    *("geometry", "table", "slopes", "key_bias", "groups", "bias", "scale", "softcap"),
    *("barrier", "exponent", "epsilon"),
)


def other_float(value):
    return torch.float32 if value.dtype == torch.float64 else torch.float64


def changes(name, value):
    """Wrong versions of one argument."""
    if isinstance(value, torch.Tensor):
        yield value.long() if value.dtype == torch.int32 else value.to(other_float(value))
        yield value[..., None]
        yield value[0]
        if name not in ("table", "key_order"):
            yield value[..., :-1].contiguous()
        yield torch.cat([value, value])
        if name not in ("q", "k", "v") and value.dim() > 1 and min(value.shape) > 1:
            yield value.mT.contiguous().mT
    elif name == "groups":
        yield from (0, -1, 3)
    elif name == "bias":
        yield from (-1, 4, 10**9)
    elif name == "learned":
        yield from (-1, 8)


@both
@biases
def test_wrong_arguments_of_attention(impl, kind, case):
    forward, backward = recorded(case, impl, kind)
    assert len(backward) == len(SIGNATURE)
    for call, given in (
        (torch.ops.mosar.attend, forward),
        (torch.ops.mosar.attend_backward, backward),
    ):
        names = SIGNATURE[-len(given) :]
        call(*given)
        for index, name in enumerate(names):
            for wrong in changes(name, given[index]):
                arguments = [*given[:index], wrong, *given[index + 1 :]]
                try:
                    call(*arguments)
                except (ValueError, RuntimeError, NotImplementedError):
                    continue
                pytest.fail(f"{call} took a wrong {name}: {wrong}")


@pytest.mark.parametrize(
    ("impl", "kind", "names"),
    [
        ("native", "soft", ("pi_q", "pi_k", "table")),
        ("planned", "sparse", ("geometry",)),
    ],
)
def test_missing_arguments_of_attention(impl, kind, names):
    forward, _ = recorded(PLAIN, impl, kind)
    for name in names:
        arguments = [*forward]
        arguments[SIGNATURE.index(name) - 5] = None
        with pytest.raises((ValueError, RuntimeError), match="mosar"):
            torch.ops.mosar.attend(*arguments)


@pytest.mark.parametrize("kind", ["soft", "top1", "sparse", "slopes"])
def test_export_leaves_the_length_open(kind):
    """Across the number of keys up to which sparse routing takes its short cut."""
    short = native._FEW_KEYS

    def call(length):
        return PLAIN.with_(num_queries=length, num_keys=length, head_dim=4)

    attention = operator(call(1000), kind, impl="native")

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, pi_q, pi_k):
            return attention(q, k, v, pi_q, pi_k)

    length = torch.export.Dim("length", max=100_000)
    shapes = [{2: length}] * 3 + [{1: length}] * 2
    program = torch.export.export(Attention(), call(50).inputs, dynamic_shapes=tuple(shapes))
    for size in (2, 100, short, short + 1, 1000):
        inputs = call(size).inputs
        found, expected = program.module()(*inputs), Attention()(*inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
