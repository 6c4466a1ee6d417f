"""`mosar bench attention` at tiny sizes: its table, its records, no speed-up for a wrong result.

Nothing here looks at how long something takes.
"""

import json
from dataclasses import replace

import pytest
import torch

from benchmark_records import make_benchmark
from mosar.attention import mosar_attention
from mosar.bench import attention, memory, problem
from mosar.bench.attention import AttentionComparison
from mosar.bench.comparison import Unavailable
from mosar.bench.correctness import check_problem
from mosar.bench.devices import Cpu
from mosar.bench.problem import MODES, Case, Shape, build_problem
from mosar.core.hard_domain import build_hard_domain
from mosar.records import ErrorCheck, Measurement, read_records

TINY = "attention --shapes 4x2x8 --lengths 40,300 --seconds 0.001 --memory none"
QUICK = f"{TINY} --competitors sdpa,reference,ours"
COMPARISON = AttentionComparison(
    shapes=(Shape(4, 2, 8),),
    lengths=(40, 300),
    memory=(),
    competitors=("sdpa", "ours"),
    seconds=0.001,
)
GRADIENTS = ("dq", "dk", "dv")
TENSORS = {
    "sparse": ("out",),
    "sparse-train": ("out", *GRADIENTS),
    "soft-train": ("out", *GRADIENTS, "dpi_q", "dpi_k"),
    "distance-train": ("out", *GRADIENTS),
}


@pytest.fixture
def broken(monkeypatch):
    """Ours, a little off in one query row that is always looked at; the definition is intact."""

    def attend(*arguments, impl="auto", **options):
        out = mosar_attention(*arguments, impl=impl, **options)
        if impl == "auto":
            out = out.clone()
            out[..., -1, :] += 1e-3
        return out

    monkeypatch.setattr(problem, "mosar_attention", attend)


def test_density_is_the_exact_count():
    (record,) = replace(COMPARISON, lengths=(300,)).run()
    drawn = build_problem(Case(mode="sparse", shape=Shape(4, 2, 8), length=300))
    labels = (pi.argmax(dim=-1) for pi in (drawn.pi_q, drawn.pi_k))
    assert record.density == build_hard_domain(*labels, drawn.case.config).density


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_checks_what_it_computes(mode):
    names = ("sdpa", "reference", "ours")
    (record,) = replace(COMPARISON, mode=(mode,), lengths=(20,), competitors=names).run()
    assert tuple(record.checks) == TENSORS[mode]
    assert record.correct, record.checks
    assert (record.density == 1) or mode.startswith("sparse")
    assert record.labels == ("independent" if mode.startswith("sparse") else "none")


@pytest.mark.parametrize("mode", ["sparse", "sparse-train"])
def test_wrong_result_gets_no_speedup(bench, tmp_path, broken, mode):
    path = tmp_path / "a.jsonl"
    result = bench(QUICK, "--mode", mode, "--json", path, "--plot", tmp_path / "a.png")
    assert result.exit_code == 1
    assert "WRONG: out" in result.stdout
    assert result.stderr.splitlines()[-1] == "mosar: error: 2 of 2 rows gave a wrong result"
    for line in path.read_text().splitlines():
        derived = json.loads(line)["derived"]
        assert derived["correct"] is False
        assert derived["speedup"] is None and derived["gflops"] is None
    assert not (tmp_path / "a.png").exists()


def test_wrong_gradient_is_found():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.001

    def attend(q, k, *arguments, impl="auto", **options):
        k = Doubled.apply(k) if impl == "auto" else k
        return mosar_attention(q, k, *arguments, impl=impl, **options)

    drawn = build_problem(Case(mode="sparse-train", shape=Shape(4, 2, 8), length=300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "mosar_attention", attend)
        checks = check_problem(drawn)
    assert [name for name, check in checks.items() if not check.passed] == ["dk"]


def test_not_a_number_is_wrong(monkeypatch):
    def attend(*arguments, impl="auto", **options):
        out = mosar_attention(*arguments, impl=impl, **options)
        return out * torch.nan if impl == "auto" else out

    monkeypatch.setattr(problem, "mosar_attention", attend)
    (record,) = replace(COMPARISON, lengths=(40,)).run()
    assert record.checks["out"].error is None
    assert not record.correct
    json.dumps(record.to_dict(), allow_nan=False)


def test_flex_is_left_out_where_it_cannot_or_need_not_run(monkeypatch):
    monkeypatch.setattr(attention, "first_call", lambda name, call: pytest.fail("compiled"))
    comparison = replace(COMPARISON, competitors=None, lengths=(40,))
    (record,) = comparison.run()
    assert "1024 to 4096 tokens" in record.measurements["flex"].unavailable
    comparison = replace(comparison, competitors=("flex", "ours"), mode=("sparse-train",))
    (record,) = comparison.run()
    assert "no backward pass" in record.measurements["flex"].unavailable
    assert record.speedup is None


@pytest.mark.parametrize("failure", ["no compiler", "is wrong here"])
def test_flex_that_fails_gives_a_reason(monkeypatch, failure):
    def first_call(name, call):
        if failure == "no compiler":
            raise Unavailable("no compiler here")
        return torch.zeros(1, 4, 40, 8)

    monkeypatch.setattr(attention, "first_call", first_call)
    comparison = replace(
        COMPARISON, competitors=("sdpa", "flex", "flex-sorted", "ours"), lengths=(40,)
    )
    (record,) = comparison.run()
    for name in ("flex", "flex-sorted"):
        assert failure in record.measurements[name].unavailable
    assert record.correct and record.speedup


@pytest.mark.slow
def test_flex_computes_the_same(bench, tmp_path):
    path = tmp_path / "a.jsonl"
    result = bench(f"{TINY} --competitors sdpa,flex,flex-sorted,ours", "--json", path)
    assert result.exit_code == 0, result.output
    for record in read_records(path):
        for name in ("flex", "flex-sorted"):
            refusal = record.measurements[name].unavailable
            if refusal is not None and record.length < 64:
                # Torch's own fault on CPUs without AVX-512 (docs/benchmarks.md): refused by name.
                assert refusal.startswith("compiled FlexAttention is wrong here, off by")
                continue
            assert refusal is None
            assert record.median_ms(name)


@pytest.mark.skipif(not memory._CLEAR.exists(), reason="needs /proc/self/clear_refs")
def test_memory_holds_at_least_the_output():
    case = Case(mode="sparse", shape=Shape(8, 8, 64), length=4096)
    output = 8 * 4096 * 64 * 4
    assert output <= Cpu().measure_peak(case, "sdpa") < 8 * output


def test_memory_alone_makes_a_row(monkeypatch):
    peaks = {"sdpa": 2, "ours": 3}
    monkeypatch.setattr(Cpu, "measure_peak", lambda self, case, name: peaks[name])
    comparison = replace(COMPARISON, lengths=(40,), memory=(64,))
    timed, remembered = comparison.run()
    assert (timed.memory_ratio, remembered.memory_ratio) == (None, 1.5)
    assert remembered.length == 64 and remembered.speedup is None


def test_memory_is_measured_by_default_at_8192_or_the_largest_length():
    assert AttentionComparison().memory_lengths == (8192,)
    assert AttentionComparison(lengths=(64, 4096, 16384)).memory_lengths == (4096,)
    assert AttentionComparison(lengths=(16384,)).memory_lengths == ()
    assert len(AttentionComparison(lengths=(16384,)).cases()) == 3


def test_plot_is_drawn(bench, tmp_path):
    result = bench(QUICK, "--plot", tmp_path / "a.svg", "--labels", "clustered")
    assert result.exit_code == 0, result.output
    assert 'id="speedup-4x2x8"' in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("≥ 0.8/ρ", True), ("plan ≤ 3 %", True)]),
        ({"pairs": 990_000}, [("≥ 0.8/ρ", False), ("plan ≤ 3 %", True)]),
        ({"pairs": 790_000, "length": 4096}, [("≥ 0.64/ρ", False), ("plan ≤ 3 %", True)]),
        ({"length": 2048}, [("≥ 1.5×", True)]),
        ({"length": 256}, [("≤ 1.05× SDPA", True)]),
        ({"length": 255}, []),
        ({"mode": "sparse-train", "pairs": 760_000}, [("≥ 0.6/ρ", True)]),
        ({"mode": "soft-train", "length": 2048}, [("≤ 1.3× SDPA", True)]),
        ({"mode": "distance-train", "length": 2048}, [("≤ 1.2× SDPA", True)]),
        ({"heads": 4}, []),
        ({"checks": {"out": ErrorCheck(error=2e-6, budget=1e-6)}}, []),
    ],
)
def test_targets(changes, expected):
    assert COMPARISON.verdicts(make_benchmark(**changes)) == expected


@pytest.mark.parametrize(("ours", "met"), [(200, True), (201, False)])
def test_memory_target(ours, met):
    measurements = {"sdpa": Measurement(peak_bytes=100), "ours": Measurement(peak_bytes=ours)}
    record = make_benchmark(mode="soft-train", measurements=measurements, plan=Measurement())
    assert COMPARISON.verdicts(record) == [("memory ≤ 2× SDPA", met)]
