"""Compares rows of a result with the float64 definition before anything is timed.

    error(ours) <= 2 error(plain PyTorch, same dtype) + 4 eps max|exact|

The dense definition of a few query rows costs little at any length. With a gradient of the output
that is zero elsewhere, the gradients of q, k, v and of the routing follow from these rows alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mosar.bench.problem import Problem, attend, build_problem, solve
from mosar.records import ErrorCheck

NAMES = ("out", "dq", "dk", "dv", "dpi_q", "dpi_k")
_NUM_ROWS = 64
# At this length every row is checked, because rows that share keys add their gradients.
_FULL_LENGTH = 256


def check_problem(problem: Problem) -> dict[str, ErrorCheck]:
    """The worst of two checks by tensor: some rows at full length, all rows of a short problem."""
    case = problem.case
    checks = check_rows(problem, choose_rows(case.length, case.seed))
    if case.trains and case.length > _NUM_ROWS:
        short = build_problem(replace(case, length=min(case.length, _FULL_LENGTH)))
        everything = check_rows(short, torch.arange(short.case.length))
        checks = {name: max(checks[name], everything[name], key=_strain) for name in checks}
    return checks


def check_rows(problem: Problem, rows: Tensor) -> dict[str, ErrorCheck]:
    """Our error and its budget at these query rows, by tensor."""
    chosen = torch.zeros(problem.case.length, dtype=torch.bool, device=problem.q.device)
    chosen[rows] = True
    masked = replace(problem, dout=problem.dout * chosen[:, None])
    ours = solve(masked, attend, masked.leaves)
    exact, plain = (dense_rows(problem, rows, dtype) for dtype in (torch.float64, problem.q.dtype))
    checks = {}
    for name, mine, theirs, truth in zip(NAMES, ours, plain, exact, strict=False):
        checks[name] = error_check(
            _take(name, mine, rows), theirs, truth, torch.finfo(problem.q.dtype).eps
        )
    return checks


def error_check(
    ours: Tensor, plain: Tensor, exact: Tensor, eps: float = torch.finfo(torch.float32).eps
) -> ErrorCheck:
    """Our largest error and its budget, from plain PyTorch's result and the exact one."""
    budget = 2 * largest_error(plain, exact)
    budget += 4 * eps * float(exact.abs().max())
    return compare(largest_error(ours, exact), budget)


def compare(error: float, budget: float) -> ErrorCheck:
    """An error of NaN exceeds every budget; None, since JSON has no NaN."""
    finite = math.isfinite(error) and math.isfinite(budget)
    return ErrorCheck(error=error if finite else None, budget=budget if finite else 0.0)


def dense_rows(problem: Problem, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Output and gradients of the dense definition with only these queries."""
    positions = rows[None] if problem.query_positions is None else problem.query_positions[:, rows]

    def cast(tensor: Tensor, name: str) -> Tensor:
        # Routings are float32 for every dtype of q.
        wide = torch.promote_types(dtype, torch.float32) if name.startswith("dpi") else dtype
        tensor = _take(name, tensor.detach(), rows).to(wide)
        return tensor.requires_grad_(problem.case.trains)

    few = replace(
        problem,
        q=cast(problem.q, "dq"),
        k=cast(problem.k, "dk"),
        v=cast(problem.v, "dv"),
        pi_q=cast(problem.pi_q, "dpi_q"),
        pi_k=cast(problem.pi_k, "dpi_k"),
        dout=_take("out", problem.dout, rows).to(dtype),
        query_positions=positions.to(problem.q.device),
    )
    return solve(few, lambda given: attend(given, "reference"), few.leaves)


def _take(name: str, tensor: Tensor, rows: Tensor) -> Tensor:
    """These query rows of tensors with one row per query; other tensors as they are."""
    return tensor[..., rows, :] if name in ("out", "dq", "dpi_q") else tensor


def choose_rows(length: int, seed: int, number: int = _NUM_ROWS) -> Tensor:
    """Random rows, and the last one, which sees the farthest."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(length - 1, generator=generator)[: number - 1]
    return torch.cat([rows.sort().values, torch.tensor([length - 1])])


def largest_error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact).abs().max())


def _strain(check: ErrorCheck) -> float:
    """An error as a share of its budget."""
    return (check.error or 0.0) / (check.budget or 1.0) if check.passed else math.inf
