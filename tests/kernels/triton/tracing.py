"""torch.compile on a training step, as far as it goes without a GPU: prints its graphs' kernels.

Torch asks Triton which arguments a kernel writes, and Triton asks its driver for a target: one that
says it is an H100 is enough. Nothing is run.
"""

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

    def run(*given):
        return [
            None if value is None else torch.empty(value.shape, dtype=value.dtype)
            for value in (
                None if node is None else node.meta["val"]
                for node in graph.graph.find_nodes(op="output")[0].args[0]
            )
        ]

    return run


def attend(q, k, v, labels_q, labels_k):
    layout = resolve_layout(1, 40, 40)
    config = MoSARConfig.scaled(64)
    options = {"scale": None, "softcap": None}
    return callers.sparse_attention(q, k, v, labels_q, labels_k, config, layout, **options)[0]


q = torch.zeros(1, 4, 40, 16, dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.zeros(1, 2, 40, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
labels = torch.zeros(1, 40, dtype=torch.long)
compiled = torch.compile(
    attend, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
)
compiled(q, k, v, labels, labels).float().sum().backward()

for graph in graphs:
    for node in graph.graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            # An autotuned one holds the kernel itself.
            function = kernel.fn if isinstance(kernel, Autotuner) else kernel
            print(function.__name__.removesuffix("_kernel"))
