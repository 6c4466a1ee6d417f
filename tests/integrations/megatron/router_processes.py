"""Two ranks, each with half of the heads: routing, and gradients of a loss that each has part of.

The loss is Σ over heads of f(pi, heads), as attention has it: each rank computes its heads' terms.
"""

import sys

import torch
import torch.distributed as dist

from mosar.core.config import MoSARConfig
from mosar.integrations.megatron.collectives import sum_gradients
from mosar.integrations.megatron.parallel_router import ParallelRouter, local_groups, route

LENGTH, BATCH, DIM = 7, 2, 4
# Query heads, key heads, routing groups; the second has fewer key heads than ranks.
CASES = {"gqa": (4, 2, 1), "mqa": (4, 1, 1), "groups": (4, 4, 2), "cut": (6, 6, 3)}


def loud(router: ParallelRouter) -> None:
    """As after training: initial routers hardly distinguish tokens."""
    with torch.no_grad():
        router.weight1.mul_(30)
        router.weight2.mul_(1000)
        router.bias1.add_(0.1)
        router.bias2.add_(torch.arange(router.bias2.shape[-1]) * 0.2)


def run(case, group):
    """Routing, loss and gradients of the unsplit case (group None) or of this rank's part."""
    heads, kv_heads, groups = CASES[case]
    config = MoSARConfig.scaled(16, routing_groups=groups, router_hidden=5)
    torch.manual_seed(1)
    q = torch.randn(LENGTH, BATCH, heads, DIM, dtype=torch.float64)
    k = torch.randn(LENGTH, BATCH, kv_heads, DIM, dtype=torch.float64)
    q_router, k_router = (
        ParallelRouter(count, DIM, config, group, dtype=torch.float64)
        for count in (heads, kv_heads)
    )
    for router in (q_router, k_router):
        loud(router)
    first = q_router.shard * q_router.local_heads
    q = q[:, :, first : first + q_router.local_heads].clone().requires_grad_()
    first = k_router.shard * k_router.local_heads
    k = k[:, :, first : first + k_router.local_heads].clone().requires_grad_()
    routed = route(q_router, k_router, q, k)
    pi_q, pi_k = sum_gradients([r.probabilities for r in routed], group)
    chosen = local_groups(k_router.groups_of_heads)
    if groups > 1:
        pi_q, pi_k = pi_q[:, chosen], pi_k[:, chosen]
    else:
        pi_q, pi_k = pi_q[:, None], pi_k[:, None]
    heads_a_group = q.shape[2] // pi_q.shape[1]
    pi_q, pi_k = (
        pi.repeat_interleave(heads_a_group, dim=1).permute(2, 0, 1, 3) for pi in (pi_q, pi_k)
    )
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    weights = torch.arange(1.0, 4.0, dtype=torch.float64)
    bilinear = torch.einsum("tbhr,r,tbhr->tbh", pi_q, weights, pi_k)
    loss = ((q.sin() * keys.cos()).sum(-1) * bilinear).sum()
    loss.backward()
    gradients = {
        f"{side}.{name}": parameter.grad
        for side, router in (("query", q_router), ("key", k_router))
        for name, parameter in router.named_parameters()
    }
    gradients |= {"q": q.grad, "k": k.grad}
    return routed, loss.detach(), gradients, (q_router, k_router)


def main(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    group = dist.group.WORLD
    for case in CASES:
        whole, whole_loss, whole_gradients, (whole_q, whole_k) = run(case, None)
        ours, loss, gradients, (q_router, k_router) = run(case, group)
        for one, other in zip(whole, ours, strict=True):
            torch.testing.assert_close(other.logits, one.logits)
            everyone = [torch.empty_like(other.logits) for _ in range(count)]
            dist.all_gather(everyone, other.logits.detach())
            assert all(torch.equal(logits, other.logits) for logits in everyone), case
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, whole_loss)
        if k_router.copies > 1:
            # As Megatron gathers keys that several ranks hold: their gradients add up.
            dist.all_reduce(gradients["k"])
        for name, gradient in gradients.items():
            expected = whole_gradients[name]
            if gradient.shape != expected.shape:
                axis = next(a for a in range(4) if gradient.shape[a] != expected.shape[a])
                own = gradient.shape[axis]
                shard = (k_router if name.startswith("k") else q_router).shard
                expected = expected.narrow(axis, shard * own, own)
            where = f"{case} {name}"
            torch.testing.assert_close(gradient, expected, msg=lambda m, w=where: f"{w}: {m}")
        for router, original in ((q_router, whole_q), (k_router, whole_k)):
            for one, other in zip(
                router.gather().parameters(), original.gather().parameters(), strict=True
            ):
                assert torch.equal(one, other), case
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
