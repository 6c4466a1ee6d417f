"""torch.compile on a training step, as far as it goes without a GPU: prints its graphs' kernels.

Torch asks Triton which arguments a kernel writes, and Triton asks its driver for a target: one that
says it is an H100 is enough. Nothing is run. The device "meta" stands in for the GPU: what a graph
makes on the CPU would be copied to it in every call.
"""

from functools import partial

import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

from mosar import MoSARConfig
from mosar.core.layout import resolve_layout
from mosar.kernels.triton import callers


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cuda")


triton.runtime.driver.set_active(Driver())
graphs = []


def keep(graph, inputs):
    graphs.append(graph)
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta", node

    def run(*given):
        return [
            None if value is None else torch.empty(value.shape, dtype=value.dtype, device="meta")
            for value in (
                None if node is None else node.meta["val"]
                for node in graph.graph.find_nodes(op="output")[0].args[0]
            )
        ]

    return run


CONFIG = MoSARConfig(num_sinks=1)


def attend(q, k, v, routing_q, routing_k, kind):
    layout = resolve_layout(1, 40, 40, device="meta")
    attention = callers.sparse_attention if kind == "sparse" else callers.worth_attention
    return attention(q, k, v, routing_q, routing_k, CONFIG, layout, scale=None, softcap=None)[0]


new = partial(torch.zeros, dtype=torch.bfloat16, device="meta", requires_grad=True)
q, k, v = (new(1, heads, 40, 16) for heads in (4, 2, 2))
labels = torch.zeros(1, 40, dtype=torch.long, device="meta")
pi = torch.zeros(1, 40, 3, device="meta", requires_grad=True)
compiled = torch.compile(
    attend, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
)
for kind, routing in (("sparse", labels), ("soft", pi)):
    compiled(q, k, v, routing, routing, kind).float().sum().backward()

for graph in graphs:
    for node in graph.graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            # An autotuned one holds the kernel itself.
            function = kernel.fn if isinstance(kernel, Autotuner) else kernel
            print(function.__name__.removesuffix("_kernel"))
