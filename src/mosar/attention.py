"""The public operators: they check the input, choose an implementation, and compute attention.

    mosar_attention      bias = log(pi_Q^T G(d) pi_K), routed "soft", "top1" or "sparse"
    distance_attention   bias = log_gate[h, d] - slopes[h] d, the same for every token

Shapes: B batch, Hq query heads, Hkv key/value heads, T queries, S keys, D head dim, R regimes,
Gr routing groups (a divisor of Hkv). Query head h reads key/value head h // (Hq / Hkv).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mosar.core.bias import Bias, DistanceBias, LabelBias, MixtureBias, Scores, routed_bias
from mosar.core.choice_gradient import LearnChoices, choice_gradient
from mosar.core.config import MoSARConfig, check_config
from mosar.core.inputs import DTYPES, NotANumber, check_attention_inputs
from mosar.core.layout import Layout, can_check_values

Routing = Literal["soft", "top1", "sparse"]
ROUTINGS = ("soft", "top1", "sparse")
IMPLEMENTATIONS = ("auto", "reference", "native", "tiled", "triton")
# How far a row of routing probabilities may be from a simplex; a bf16 softmax is farther than this.
_SIMPLEX_TOLERANCE = 1e-3
# Biases beyond this are no numbers a softmax can use; -inf says that a pair does not exist.
_LARGEST_BIAS = 1e20


def mosar_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pi_q: Tensor,
    pi_k: Tensor,
    config: MoSARConfig,
    *,
    routing: Routing = "soft",
    learn_routing: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_valid: Tensor | None = None,
    segment_ids: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    dropout: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention with routed geometry: softmax(cap(scale q·k) + log worth) v.

    q [B, Hq, T, D]; k, v [B, Hkv, S, D], all of one dtype (float32, float64, bfloat16, float16).
    pi_q [B, T, R] or [B, Gr, T, R] and pi_k [B, S, R] or [B, Gr, S, R]: float32 or float64 rows
    that sum to 1. For "top1" and "sparse" the label of a token is the first largest entry, a
    constant without gradient; hand over one-hot rows to decide labels elsewhere. The shape of pi
    says how many groups route, whatever `config.routing_groups` is.

    routing: "soft" evaluates all causal pairs with the mixture of gates; "top1" all causal pairs
    with the gate of the one-hot pair (floor e^-B outside the reach); "sparse" only the pairs inside
    the reach. The first `config.num_sinks` keys of a row (of a segment) are always inside, gate 1.

    learn_routing: under "sparse", give pi_q and pi_k a gradient: what every other choice of a token
    would have changed. So a model trains on exactly what it executes. Each query's own key must be
    among the keys.

    scale: default 1/sqrt(D). softcap: c tanh(s/c) on the scaled score, before the bias. window:
    pairs farther than this do not exist. query_positions [B, T], key_positions [B, S]: integers
    that are not negative and do not decrease along valid keys (of a segment); default: keys at
    0..S-1, queries the last T of the keys. key_valid [B, S] bool, False for padding. segment_ids
    [B, S]: pairs of different segments do not exist; the queries are the last T.

    Returns [B, Hq, T, D] in the dtype of q; with `return_lse` also the log-sum-exp [B, Hq, T] in
    float32 (float64 for float64 input). A query without an admissible key gets zeros, and -inf.
    Wrong input raises a ValueError that names the argument. Values of positions and probabilities
    are checked on the CPU outside torch.compile. `dropout` other than 0 is refused.
    """
    check_config(config)
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")
    layout = check_attention_inputs(
        *(q, k, v, scale, softcap, dropout),
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_valid=key_valid,
        segment_ids=segment_ids,
    )
    _check_routing_probabilities(q, k, pi_q, pi_k, config)
    bias = routed_bias(pi_q, pi_k, config, routing)
    if learn_routing:
        if not isinstance(bias, LabelBias) or not bias.ends_at_reach:
            raise ValueError(
                f"learn_routing=True needs routing='sparse', got routing={routing!r}"
                + ("; soft routing learns without it" if routing == "soft" else "")
            )
        bias = bias.learning(pi_q, pi_k)
    return _attend(q, k, v, layout, bias, scale, softcap, return_lse, impl)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    **placement: Any,
) -> Any:
    """The same with a bias that was made elsewhere, and is taken as it is."""
    layout = check_attention_inputs(q, k, v, scale, softcap, **placement)
    if isinstance(bias, MixtureBias):
        _check_routing_probabilities(q, k, bias.query, bias.key, bias.config)
    return _attend(q, k, v, layout, bias, scale, softcap, return_lse, impl)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    bias: Bias,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
    impl: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """By the implementation that serves, which is told a scale and groups whatever was given."""
    impl = _choose_implementation(impl, q, k, _gpu_lacks(bias))
    backend = _backend(impl)
    scores = Scores(
        1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        None if softcap is None else float(softcap),
    )
    output, lse = backend.attend(q, k, v, layout, bias, scores)
    if isinstance(bias, LabelBias) and bias.learned is not None:
        gradient = backend.choice_gradient if impl == "native" else choice_gradient
        compute = partial(gradient, scale=scores.scale, softcap=scores.softcap)
        tensors = (x.detach() for x in (lse, q, k, v))
        output = LearnChoices.apply(
            output, *tensors, bias.learned.query, bias.learned.key, layout, bias, compute
        )
    return (output, lse) if return_lse else output


def _gpu_lacks(bias: Bias) -> str | None:
    """What the GPU kernels cannot do of a bias; None: nothing."""
    if not isinstance(bias, DistanceBias):
        return None
    tables = (("log_gate", bias.log_gate), ("slopes", bias.slopes))
    learned = [name for name, table in tables if table is not None and table.requires_grad]
    if not learned or not torch.is_grad_enabled():
        return None
    return f"it gives no gradient to {' and '.join(learned)}"


def distance_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_gate: Tensor | None = None,
    log_gate_extends: bool = False,
    slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_valid: Tensor | None = None,
    segment_ids: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    dropout: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dense causal attention whose bias depends on distance: log_gate[h, d] - slopes[h] d.

    log_gate [1 or Hq, max_distance + 1] must cover every distance that occurs (a window bounds
    them), unless `log_gate_extends`: then its last entry holds for all farther ones too. Where it
    is -inf the pair does not exist. slopes [Hq] are ALiBi's, positive. key_bias [B, Hq, S] is added
    to every pair of a key; only its differences within a row matter, and the native kernels take
    them in float64: give it in float64 where it grows along the text. Gradients reach all three.
    Everything else is as in `mosar_attention`.
    """
    layout = check_attention_inputs(
        *(q, k, v, scale, softcap, dropout),
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_valid=key_valid,
        segment_ids=segment_ids,
    )
    bias = DistanceBias(log_gate, slopes, key_bias)
    _check_distance_bias(q, k, layout, bias, log_gate_extends)
    return _attend(q, k, v, layout, bias, scale, softcap, return_lse, impl)


def _check_routing_probabilities(
    q: Tensor, k: Tensor, pi_q: Tensor, pi_k: Tensor, config: MoSARConfig
) -> None:
    num_regimes = config.num_regimes
    for name, pi, length in (("pi_q", pi_q, q.shape[2]), ("pi_k", pi_k, k.shape[2])):
        if not isinstance(pi, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(pi).__name__}")
        shaped = pi.dim() in (3, 4) and pi.shape[0] == q.shape[0]
        if not shaped or tuple(pi.shape[-2:]) != (length, num_regimes):
            raise ValueError(
                f"{name} must be [{q.shape[0]}, {length}, {num_regimes}] or "
                f"[{q.shape[0]}, groups, {length}, {num_regimes}], got {list(pi.shape)}"
            )
        if pi.dim() == 4 and (pi.shape[1] < 1 or k.shape[1] % pi.shape[1]):
            raise ValueError(
                f"{name} has {pi.shape[1]} routing groups, which must divide the {k.shape[1]} "
                "key/value heads"
            )
        if pi.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float32 or float64 (labels tie in lower precision), got {pi.dtype}"
            )
        if pi.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {pi.device}")
    if pi_q.shape[:-2] != pi_k.shape[:-2]:
        raise ValueError(
            "pi_q and pi_k must have the same routing groups, "
            f"got {list(pi_q.shape)} and {list(pi_k.shape)}"
        )
    if can_check_values(pi_q):
        # Both at once where they stack: on a short context every operator counts.
        stacks = pi_q.shape == pi_k.shape and pi_q.dtype == pi_k.dtype
        if stacks and _simplex_fault(torch.stack((pi_q.detach(), pi_k.detach()))) is None:
            return
        for name, pi in (("pi_q", pi_q), ("pi_k", pi_k)):
            fault = _simplex_fault(pi.detach())
            if fault is not None:
                raise (NotANumber if pi.isnan().any() else ValueError)(
                    f"{name} must hold probabilities: rows >= 0 that sum to 1; got {fault}; "
                    "pass softmax(logits), or top1_routing(logits)"
                )


def _simplex_fault(values: Tensor) -> str | None:
    """What keeps rows of numbers from being probabilities, if anything does."""
    smallest, largest = torch.aminmax(values.sum(dim=-1))
    off = max(1 - float(smallest), float(largest) - 1)
    lowest = float(values.min())
    # Written so that NaN is a fault too.
    if lowest >= -_SIMPLEX_TOLERANCE and off <= _SIMPLEX_TOLERANCE:
        return None
    return f"a smallest entry of {lowest:.4g} and a sum off by {off:.4g}"


def _check_distance_bias(
    q: Tensor, k: Tensor, layout: Layout, bias: DistanceBias, log_gate_extends: bool
) -> None:
    heads, log_gate = q.shape[1], bias.log_gate
    shapes = {"slopes": [heads], "key_bias": [q.shape[0], heads, k.shape[2]]}
    given = (("log_gate", log_gate), ("slopes", bias.slopes), ("key_bias", bias.key))
    for name, tensor in given:
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if name in shapes and list(tensor.shape) != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}, got {list(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be one of {[str(d) for d in DTYPES]}, got {tensor.dtype}"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    if log_gate is not None and (
        log_gate.dim() != 2 or log_gate.shape[0] not in (1, heads) or not log_gate.shape[1]
    ):
        raise ValueError(
            f"log_gate must be [1 or {heads}, max_distance + 1], got {list(log_gate.shape)}"
        )
    for name, tensor in given:
        if tensor is None or not can_check_values(tensor) or not tensor.numel():
            continue
        values = tensor.detach().double()
        refused = ~(values.abs() < _LARGEST_BIAS)
        if name == "log_gate":
            refused &= values != -math.inf
        if name == "key_bias" and layout.key_valid is not None:
            refused &= layout.key_valid[:, None]
        if refused.any():
            raise ValueError(
                f"{name} must be smaller than {_LARGEST_BIAS:g} in magnitude"
                f"{' (or -inf)' if name == 'log_gate' else ''}, got {values[refused][0]:g}"
            )
    if log_gate is None or log_gate_extends:
        return
    if layout.is_ordinary or can_check_values(q):
        farthest = layout.max_distance()
        if farthest >= log_gate.shape[1]:
            raise ValueError(
                f"log_gate covers distances up to {log_gate.shape[1] - 1}, but a pair at distance "
                f"{farthest} exists; give a longer table, a window, or log_gate_extends=True"
            )


# Below this many pairs the dense reference is quicker than tiling with torch operators.
_FEW_PAIRS = 512 * 512


def _choose_implementation(impl: str, q: Tensor, k: Tensor, gpu_lacks: str | None = None) -> str:
    """The implementation that serves; "auto" chooses, a named one that cannot serve is refused."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
    if impl == "triton" or (impl == "auto" and q.device.type == "cuda"):
        obstacle = gpu_lacks or _triton_obstacle(q)
        if obstacle is None:
            return "triton"
        if impl == "triton":
            raise ValueError(f"impl='triton' cannot serve: {obstacle}; use impl='auto'")
    if q.device.type == "meta":
        # Shapes alone: whatever needs no values serves.
        if impl in ("auto", "reference"):
            return "reference"
        if impl == "tiled":
            raise ValueError(
                "impl='tiled' cannot serve: it reads the plan, and q is on meta; use impl='auto'"
            )
    if impl in ("native", "auto"):
        obstacle = None
        if q.device.type != "cpu":
            obstacle = f"it runs on the CPU, and q is on {q.device}"
        elif q.dtype == torch.float64:
            obstacle = "it computes in float32, and q is float64"
        else:
            obstacle = _native_obstacle()
        if obstacle is None:
            return "native"
        if impl == "native":
            raise ValueError(f"impl='native' cannot serve: {obstacle}; use impl='auto'")
        return "reference" if q.shape[2] * k.shape[2] <= _FEW_PAIRS else "tiled"
    return impl


def _native_obstacle() -> str | None:
    """Why the native kernels cannot be had on this machine; None where they can."""
    from mosar.kernels.native import native_obstacle

    return native_obstacle()


def _triton_obstacle(q: Tensor) -> str | None:
    """Why the GPU kernels cannot serve; None where they can."""
    from mosar.kernels.triton import obstacle

    return obstacle(q)


def _backend(impl: str) -> Any:
    """The module of an implementation, imported when it is first used; each has an `attend`."""
    if impl == "native":
        from mosar.kernels import native as backend
    elif impl == "triton":
        from mosar.kernels.triton import callers as backend
    elif impl == "tiled":
        from mosar.kernels import tiled as backend
    else:
        from mosar.core import reference_attention as backend
    return backend
