"""torch.compile around the GPU's operators: what is in its graphs, and what they compute."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from cases import Case
from kernels.budget import collect, differentiable, operator, run
from mosar import MoSARConfig
from mosar.core.bias import LabelBias, MixtureBias, Scores
from mosar.core.layout import resolve_layout
from mosar.kernels.triton import callers

CONFIG = MoSARConfig(num_sinks=1)


@pytest.mark.parametrize(
    ("kind", "backend"), [("sparse", "inductor"), ("soft", "aot_eager"), ("both", "aot_eager")]
)
def test_compiled_is_what_is_not(kind, backend):
    """Bit for bit, forward and backward, the kernels interpreted inside of the graph."""
    case = Case(
        config=replace(MoSARConfig.scaled(32), num_sinks=1 if kind == "soft" else 0),
        dtype=torch.float32,
        batch=2,
        heads_per_kv=2,
        num_queries=10,
        num_keys=14,
        padding="holes",
    )
    expected = run(case, kind, impl="triton")
    compiled = torch.compile(operator(case, kind, impl="triton"), fullgraph=True, backend=backend)
    leaves = differentiable(*case.inputs)
    found = collect(case, *compiled(*leaves), leaves)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def attend(q, k, v, routing_q, routing_k, kind):
    layout = resolve_layout(1, 40, 40, device="meta")
    bias = MixtureBias(routing_q[:, None], routing_k[:, None], CONFIG)
    if kind == "sparse":
        bias = LabelBias(routing_q[:, None], routing_k[:, None], CONFIG, ends_at_reach=True)
    return callers.attend(q, k, v, layout, bias, Scores(0.25, None))[0]


@pytest.mark.parametrize("kind", ["sparse", "soft"])
def test_graphs_make_nothing_on_the_host(kind):
    """The device "meta" stands in for the GPU: what is made on the CPU would be copied to it."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        outputs = graph.graph.find_nodes(op="output")[0].args[0]
        values = [None if node is None else node.meta["val"] for node in outputs]
        return lambda *given: [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device="meta")
            for x in values
        ]

    new = partial(torch.zeros, dtype=torch.bfloat16, device="meta", requires_grad=True)
    q, k, v = (new(1, heads, 40, 16) for heads in (4, 2, 2))
    labels = torch.zeros(1, 40, dtype=torch.long, device="meta")
    pi = torch.zeros(1, 40, 3, device="meta", requires_grad=True)
    routing = labels if kind == "sparse" else pi
    compiled = torch.compile(
        attend,
        fullgraph=True,
        dynamic=False,
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
    )
    compiled(q, k, v, routing, routing, kind).float().sum().backward()
    nodes = [node for graph in graphs for node in graph.nodes]
    for node in nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta", node
    ours = [n.target.name() for n in nodes if getattr(n.target, "namespace", None) == "mosar"]
    expected = [*["plan"] * (kind == "sparse"), "attend", "attend_backward"]
    assert ours == [f"mosar::triton_{name}" for name in expected]
