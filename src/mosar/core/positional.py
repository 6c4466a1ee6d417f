"""Positional schemes: rotation of q and k (RoPE), linear bias (ALiBi), positions in segments.

    RoPE   (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a),   a = position * theta^(-2i/D)
    ALiBi  bias = -slope_h * distance

x1 and x2 are the halves of a head, i = 0 .. D/2 - 1 (the convention of Llama and Gemma). p-RoPE
rotates only with the highest frequencies; the others have the angle 0.

Shapes: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from mosar.core.layout import can_check_values, is_traced

# A table of up to this many positions is always worth its memory.
_SHORT_TABLE = 1 << 16


def rotation(
    positions: Tensor,
    head_dim: int,
    *,
    theta: float = 10000.0,
    fraction: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at `positions` [B or 1, T], each [B or 1, T, 1, D/2].

    The highest `fraction` of the frequencies rotates. Positions need not be integers. If they are,
    and reading them is free, the rows come from a cached table, unless there are only a few
    positions and they are large.
    """
    settings = (head_dim, theta, fraction, dtype)
    length = 0
    if can_check_values(positions) and not positions.is_floating_point():
        length = next_power_of_two(int(positions.max()) + 1)
    if 0 < length <= max(_SHORT_TABLE, 4 * positions.numel()):
        cos, sin = (table[positions] for table in _rotation_table(length, *settings))
    else:
        cos, sin = _cos_sin(positions, *settings)
    return cos[:, :, None], sin[:, :, None]


def _cos_sin(
    positions: Tensor, head_dim: int, theta: float, fraction: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # The same operations and precision as in transformers, so that its weights give equal results.
    even = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device)
    inverse_wavelengths = 1.0 / theta ** (even / head_dim)
    # Not a plain floor: 0.58 * 50 is 28.999999999999996.
    inverse_wavelengths[math.floor(fraction * head_dim / 2 + 1e-9) :] = 0
    angles = positions[..., None].to(dtype) * inverse_wavelengths
    return angles.cos(), angles.sin()


@lru_cache(maxsize=16)
def _rotation_table(
    length: int, head_dim: int, theta: float, fraction: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # The first call may be an evaluation, and a later one may train with the same table.
    with torch.inference_mode(False), torch.device("cpu"):
        return _cos_sin(torch.arange(length), head_dim, theta, fraction, dtype)


RESCALINGS = ("pi", "ntk", "yarn")
"""Ways to rotate texts longer than the training length; see `rescaled_frequencies`."""


def rescaled_frequencies(
    name: str, head_dim: int, theta: float, length: int, stretch: float
) -> tuple[Tensor, float]:
    """Frequencies [D/2] float64 for a text `stretch` times as long as `length`, and a factor.

    pi    all frequencies divided by the stretch s (position interpolation, Chen et al. 2023)
    ntk   theta times s^(D / (D - 2)): fast frequencies stay, the slowest is divided by s
    yarn  a frequency that turns 32 times in `length` stays, one that turns once is divided by s,
          those between are blended; q and k are multiplied by 1 + ln(s) / 10 (Peng et al. 2023)
    """
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    if name == "ntk":
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    frequencies = theta ** (-2 * pairs / head_dim)
    if name == "pi":
        return frequencies / stretch, 1.0
    if name != "yarn":
        return frequencies, 1.0

    def turning(times: float) -> float:
        """The index of the pair that turns this many times within the length."""
        return head_dim * math.log(length / (2 * math.pi * times)) / (2 * math.log(theta))

    first = max(math.floor(turning(32)), 0)
    last = min(math.ceil(turning(1)), head_dim - 1)
    slow = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    blended = frequencies / stretch * slow + frequencies * (1 - slow)
    return blended, 1 + 0.1 * math.log(stretch)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D] rotated, in its own dtype; computed in the dtype of cos and sin."""
    if is_traced():
        # torch.compile fuses the plain formula, and cannot trace the faster eager one.
        x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)
    return _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]


class _Rotate(torch.autograd.Function):
    """Its gradient is the inverse rotation, so only the angles are stored for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        dtype, x = x.dtype, x.to(cos.dtype)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(x, torch.cat([cos, cos], dim=-1), out=out)
        (x1, x2), (out1, out2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        out1.addcmul_(x2, sin, value=-1)
        out2.addcmul_(x1, sin)
        return out.to(dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(gradient, cos, -sin), None, None


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope per head: 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two.

    Other counts use the slopes of the power of two below, then every other slope of the next.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]


def positions_in_segments(segment_ids: Tensor) -> Tensor:
    """Positions [B, S] that restart at 0 in each run of equal `segment_ids` [B, S]."""
    index_S = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    starts_BS = torch.ones_like(segment_ids, dtype=torch.bool)
    starts_BS[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index_S - torch.where(starts_BS, index_S, 0).cummax(dim=1).values


def next_power_of_two(number: int) -> int:
    """The smallest power of two >= number; it keeps the number of table sizes small."""
    return 1 << max(number - 1, 0).bit_length()
