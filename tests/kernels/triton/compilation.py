"""Compiles the kernels for GPUs that are not here, in a process that does not interpret them.

`python -m kernels.triton.compilation` reads what is wanted as JSON and prints what became of it;
with `table` it prints the table of docs/gpu.md.
The arguments are those of real launches: the operators run, and what they would launch is recorded.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Bytes of shared memory that a program may have: A100, H100, MI300, and cards for consumers.
SHARED_LIMIT = {"sm80": 163 * 1024, "sm90": 227 * 1024, "gfx942": 64 * 1024}
CONSUMER_LIMIT = 99 * 1024
TARGETS = tuple(SHARED_LIMIT)
DTYPES = ("bfloat16", "float16", "float32")
# What a call computes, one for each bias, and the kernels it launches; "keyed": keys have a bias.
KERNELS = {
    "sparse": ("forward", "query", "key"),
    "soft": ("forward", "query", "key"),
    "distance": ("forward", "query", "key"),
    "keyed sparse": ("forward", "query", "key"),
    "decode": ("decode", "combine"),
    "keyed decode": ("decode",),
    "plan": ("count", "scan", "place", "runs", "readers"),
}


@dataclass(frozen=True)
class Wanted:
    """A kernel to be compiled for a target."""

    call: str
    kernel: str
    target: str
    dtype: str
    head_dim: int = 64
    share: int = 4
    softcap: float | None = None
    num_sinks: int = 0
    num_regimes: int = 3
    tf32: bool = False
    far: bool = False
    """Reaches for which gates are computed."""
    every_block: bool = False
    """All candidate blocks instead of the first."""


class Compiled(NamedTuple):
    """What became of it."""

    shared: int
    registers: int
    spilled: int
    """Bytes a thread keeps in local memory."""


class Launch(NamedTuple):
    name: str
    kernel: Any
    arguments: dict[str, Any]


class Recorder:
    """In place of `wrap_triton`: keeps what would be launched."""

    def __init__(self, launches: list[Launch], names: dict[Any, str]):
        self.launches, self.names = launches, names

    def __call__(self, kernel):
        class Grid:
            def __getitem__(_, grid):
                name = self.names[kernel]
                return lambda **given: self.launches.append(Launch(name, kernel, given))

        return Grid()


@lru_cache(maxsize=32)
def record_launches(
    call: str,
    dtype: str,
    head_dim: int,
    share: int,
    softcap: float | None,
    num_sinks: int,
    num_regimes: int = 3,
    tf32: bool = False,
    far: bool = False,
) -> dict[str, Launch]:
    """What forward and backward of a call launch, or a step of decoding, by name."""
    import torch

    from mosar import MoSARConfig
    from mosar.core.bias import DistanceBias, LabelBias, MixtureBias, Scores
    from mosar.core.layout import resolve_layout
    from mosar.kernels.triton import blocks, callers, decode, ops, plan
    from mosar.model.cache import RegimeLayerCache

    launches: list[Launch] = []
    names = {kernel: name for name, kernel in blocks.KERNELS.items()}
    names |= {getattr(decode, f"{name}_kernel"): name for name in KERNELS["decode"]}
    names |= {getattr(plan, f"{name}_kernel"): name for name in KERNELS["plan"]}
    recorder = Recorder(launches, names)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    config = MoSARConfig(num_sinks=num_sinks)
    regimes = config.regimes[-num_regimes:]
    if far:
        regimes = tuple(replace(regime, reach=1000 * regime.reach) for regime in regimes)
    config = replace(config, regimes=regimes)
    length, kv_heads = 512, 2
    keyed, _, call = call.rpartition(" ")
    kind, training = getattr(torch, dtype), call != "decode"
    q, k, v = (
        torch.zeros(2, heads, length, head_dim, dtype=kind, requires_grad=training)
        for heads in (kv_heads * share, kv_heads, kv_heads)
    )
    labels = torch.zeros(2, length, dtype=torch.long)
    of_key = None
    if keyed:
        shape = (2, kv_heads * share, length)
        of_key = torch.zeros(shape, dtype=torch.float64, requires_grad=training)
    layout = resolve_layout(2, length, length)
    with (
        mock.patch.object(ops, "wrap_triton", recorder),
        mock.patch.object(decode, "wrap_triton", recorder),
        mock.patch.object(plan, "wrap_triton", recorder),
        mock.patch.object(ops, "choose", lambda name, *_: (blocks.KERNELS[name], {})),
    ):
        if call == "decode":
            cache = RegimeLayerCache(config, impl="tiled")
            cache.update(k, v, labels, of_key=of_key)
            cache.settle()
            store: Any = cache._store
            decode.attend_token(
                q[:, :, :1], labels[:, :1], None, store.lists.state,
                position=length - 1, window=None, scale=1.0, softcap=softcap, config=config,
                of_key=cache.last_of_key,
            )  # fmt: skip
            return {launch.name: launch for launch in launches}
        if call in ("sparse", "plan"):
            both = (labels[:, None], labels[:, None])
            bias = LabelBias(*both, config, ends_at_reach=True, of_key=of_key)
        elif call == "soft":
            pi = torch.zeros(2, 1, length, num_regimes, requires_grad=True)
            bias = MixtureBias(pi, pi, config)
        else:
            bias = DistanceBias(torch.zeros(1, length), torch.zeros(kv_heads * share))
        out, lse = callers.attend(q, k, v, layout, bias, Scores(head_dim**-0.5, softcap))
        (out.float().sum() + lse.sum()).backward()
    return {launch.name: launch for launch in launches}


def compile_launch(launch: Launch, target: str, blocks=None) -> Compiled:
    """Compiles as Triton does at a launch: with what it knows of the arguments' values."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import type_canonicalisation_dict

    given, options = dict(launch.arguments), {}
    if blocks is not None:
        given |= {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys}
        options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, given[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if name.isupper() or value is None or (special and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            dtype = type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]
            signature[name] = f"*{dtype}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if special and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    gpu = (
        GPUTarget("cuda", int(target[2:]), 32)
        if target.startswith("sm")
        else GPUTarget("hip", target, 64)
    )
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu, options=options)
    if "cubin" in compiled.asm:
        return Compiled(compiled.metadata.shared, *_cuda_resources(compiled.asm["cubin"]))
    return Compiled(compiled.metadata.shared, *_hip_resources(compiled.asm["amdgcn"]))


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (registers,), (stack,) = (re.findall(rf"\b{key}:(\d+)", text)[-1:] for key in ("REG", "STACK"))
    return int(registers), int(stack)


def _hip_resources(assembly: str) -> tuple[int, int]:
    (registers,) = re.findall(r"\.vgpr_count:\s+(\d+)", assembly)
    (scratch,) = re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    return int(registers), int(scratch)


def compile_all(wanted: Iterable[Wanted]) -> Iterator[dict[str, Any]]:
    """One result per kernel and blocks, as it is done."""
    import torch

    from mosar.kernels.triton import blocks

    for want in wanted:
        launch = record_launches(
            want.call,
            want.dtype,
            want.head_dim,
            want.share,
            want.softcap,
            want.num_sinks,
            want.num_regimes,
            want.tf32,
            want.far,
        )[want.kernel]
        found: tuple[Any, ...] = (None,)
        if want.kernel in blocks.KERNELS:
            hip, dtype = not want.target.startswith("sm"), getattr(torch, want.dtype)
            found = blocks.candidates(want.kernel, want.head_dim, dtype, hip=hip)
        for chosen in found if want.every_block else found[:1]:
            start = time.process_time()
            compiled = compile_launch(launch, want.target, chosen)
            yield {
                **vars(want),
                "is_first": chosen == found[0],
                "blocks": None if chosen is None else list(chosen),
                **compiled._asdict(),
                "seconds": round(time.process_time() - start, 2),
            }


def compile_elsewhere(wanted: list[Wanted], cache: Path) -> list[dict[str, Any]]:
    """The same in a process of its own, which compiles instead of interpreting."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TRITON_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kernels.triton.compilation"],
        input=json.dumps([vars(want) for want in wanted]),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert not done.returncode, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def resource_table() -> Iterator[str]:
    """The lines of the table in docs/gpu.md."""
    yield "| routing | kernel | D | CUDA blocks | A100 (sm80) | H100 (sm90) | HIP blocks | MI300 |"
    yield "|---|---|---|---|---|---|---|---|"
    for call, head_dim in itertools.product(("sparse", "soft"), (64, 128, 256)):
        for kernel in KERNELS[call]:
            wanted = [Wanted(call, kernel, t, "bfloat16", head_dim, 4, 50.0, 4) for t in TARGETS]
            found = list(compile_all(wanted))
            cuda, _, hip = ("{} × {}".format(*result["blocks"]) for result in found)
            a100, h100, mi300 = (
                f"{-(-result['shared'] // 1024)}, {result['registers']}, {result['spilled']}"
                for result in found
            )
            yield (
                f"| {call} | `{kernel}_kernel` | {head_dim} | {cuda} | {a100} | {h100} | {hip} "
                f"| {mi300} |"
            )


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET")
    if sys.argv[1:] == ["table"]:
        for line in resource_table():
            print(line, flush=True)
        sys.exit()
    for result in compile_all(Wanted(**want) for want in json.load(sys.stdin)):
        print(json.dumps(result), flush=True)
