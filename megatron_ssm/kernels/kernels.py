"""The C kernels of this package as functions of torch tensors, and the conditions under which they can be used.

The operations of this room, tapes, and norms call them, and have an equivalent in torch for arguments that the kernels do
not support. All tensors are on the CPU; nothing is sent. "Typed" tensors share one dtype, float32 or
bfloat16. The functions record no gradients: each backward pass is a kernel of its own, in float32. A function that
overwrites a state returns that tensor. Unlike torch, the kernels do not broadcast: another shape than the documented one is
a ValueError. Limits of sizes are checked where an operation is dispatched, and not here.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from commfabric.native.library import FLOAT, INT, POINTER, SIZE, Library

from .arguments import address, c_array, check_shapes, contiguous, next_state, token_major, token_strides

# The codes of dtypes in native.h. A uint8 holds two 4-bit numbers.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3, torch.uint8: 4}
_ACTIVATIONS = (torch.float32, torch.bfloat16)  # the dtypes of typed tensors
LONGEST_KERNEL, LARGEST_STATE = 8, 256  # limits of a convolution's taps and of a recurrence's N
CHUNK, CHANNEL_BLOCK = 16, 16  # for ssd_backward: tokens between two saved states, and channels at a time (ssd_loops.c)

SIGNATURES: dict[str, list[Any]] = {
    "causal_conv": [POINTER] * 6 + [SIZE] * 7 + [INT] * 2,
    "causal_conv_backward": [POINTER] * 10 + [SIZE] * 7 + [INT],
    "selective_scan": [POINTER] * 13 + [SIZE] * 6 + [INT] * 2,
    "selective_scan_backward": [POINTER] * 20 + [SIZE] * 5 + [INT],
    "selective_carry": [POINTER] * 9 + [SIZE] * 4 + [INT] * 2,
    "ssd": [POINTER] * 11 + [SIZE] * 6 + [INT] * 4,
    "ssd_backward": [POINTER] * 17 + [SIZE] * 6 + [INT],
    "gated_delta": [POINTER] * 9 + [SIZE] * 6 + [INT] * 3,
    "norm_gated": [POINTER] * 4 + [SIZE] * 4 + [FLOAT] + [INT] * 2,
    "rms_norm": [POINTER] * 3 + [SIZE] * 2 + [FLOAT] * 2 + [INT] * 3,
    "gated_norm": [POINTER] * 5 + [SIZE] * 4 + [FLOAT] + [INT] * 3,
    "linear": [POINTER] * 5 + [SIZE] * 3 + [INT] * 3 + [ctypes.c_char_p],
    "has_kernel": [INT] * 2 + [SIZE] * 2 + [INT],
    "kernel_line": [INT] * 3 + [POINTER] * 2,
    "instructions": [],
    "widen": [POINTER] * 3 + [SIZE] * 2 + [INT] * 3,
    "quantize": [POINTER] * 3 + [SIZE] * 3 + [INT] * 3,
    "has_products_of": [INT],
    "run_tape": [POINTER],
    "keep_tokens": [POINTER, POINTER],
}
LIBRARY = Library("megatron_ssm", SIGNATURES)


def functions() -> Any:
    """The C functions of SIGNATURES. Raises RuntimeError if the library cannot be used."""
    if LIBRARY.functions is None:
        raise RuntimeError(f"the C kernels of megatron_ssm cannot be used: {LIBRARY.why}")
    return LIBRARY.functions


def usable(first: Tensor, *others: Tensor | None) -> bool:
    """Return True if the library can be used and all tensors but None are on the CPU and have one supported dtype.

    While torch.compile traces, it returns False, because the trace would contain addresses of tensors that are freed.
    """
    dtype = first.dtype
    if LIBRARY.functions is None or dtype not in _ACTIVATIONS or not first.is_cpu or torch.compiler.is_compiling():
        return False
    for other in others:
        if other is not None and (other.dtype is not dtype or not other.is_cpu):
            return False
    return True


def raise_if_failed(failed: int) -> None:
    if failed:
        raise MemoryError("a C kernel could not allocate memory")


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """`kernels.convolution.causal_conv` of typed tensors, with K <= LONGEST_KERNEL."""
    batch, seq, channels = x.shape
    taps = weight.shape[-1]
    shape = batch, taps - 1, channels
    check_shapes(weight=(weight, (channels, 1, taps)), bias=(bias, (channels,)), history=(history, shape))
    x, (weight, bias) = token_major(x), contiguous(weight, bias)
    history, next_history = next_state(history, x, shape, overwrite)
    if taps > 1 and history is not None and history.stride(0) != next_history.stride(0):
        history = history.contiguous()
    y = x.new_empty(batch, seq, channels)
    functions().causal_conv(
        x.data_ptr(), weight.data_ptr(), address(bias), address(history), y.data_ptr(), next_history.data_ptr(),
        batch, seq, channels, taps, *token_strides(x), next_history.stride(0), TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y, next_history


def causal_conv_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor | None,
    dy: Tensor,
    dnext: Tensor,
    needs_history: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of the inputs of a float32 `causal_conv`.

    Args:
        x, weight, bias, history: The inputs.
        dy, dnext: The gradients of the results.
        needs_history: True if the gradient of the history is needed.

    Returns:
        (dx, dweight, dbias or None without a bias, dhistory or None unless it is needed).
    """
    x, (weight, bias, history, dy, dnext) = token_major(x), contiguous(weight, bias, history, dy, dnext)
    batch, seq, channels = x.shape
    taps = weight.shape[-1]
    dx, dweight = x.new_empty(batch, seq, channels), torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    dhistory = x.new_empty(batch, taps - 1, channels) if needs_history else None
    functions().causal_conv_backward(
        x.data_ptr(), weight.data_ptr(), address(bias), address(history), dy.data_ptr(), dnext.data_ptr(),
        dx.data_ptr(), address(dhistory), dweight.data_ptr(), address(dbias), batch, seq, channels, taps, *token_strides(x),
        (taps - 1) * channels, torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight, dbias, dhistory


def scan_chunk(state_size: int) -> int:
    """The number of tokens between two states that `selective_scan` saves for its backward pass."""
    return max(1, LARGEST_STATE // state_size)


def selective_scan(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None, overwrite: bool = False, overwrite_x: bool = False, save: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`kernels.scan.selective_scan` of typed x, dt, B, C and z, and float32 A_log, D, dt_bias and state; N <= LARGEST_STATE.

    Args:
        x, dt, A_log, B, C, D, z, dt_bias, state, overwrite, overwrite_x: As in `kernels.scan.selective_scan`.
        save: True to also return the states before each chunk of `scan_chunk(N)` tokens.

    Returns:
        (y; the final state; the saved states (batch, chunks, N, channels), or None).
    """
    batch, seq, channels = x.shape
    size = A_log.shape[1]
    check_shapes(
        dt=(dt, x.shape), A_log=(A_log, (channels, size)), B=(B, (batch, seq, size)), C=(C, (batch, seq, size)),
        D=(D, (channels,)), z=(z, x.shape), dt_bias=(dt_bias, (channels,)), state=(state, (batch, size, channels)),
    )  # fmt: skip
    x, dt, B, C, z = map(token_major, (x, dt, B, C, z))
    A_log, D, dt_bias = contiguous(A_log, D, dt_bias)
    state, final_state = next_state(state, D, (batch, size, channels), overwrite)
    y = x if overwrite_x and x.is_contiguous() else x.new_empty(batch, seq, channels)
    chunk = scan_chunk(size) if save else 0
    saved = D.new_empty(batch, -(-seq // chunk), size, channels) if save else None
    strides = c_array(*(s for t in (x, dt, B, C, z) for s in token_strides(t)), 0 if state is None else state.stride(0),
                     final_state.stride(0))  # fmt: skip
    functions().selective_scan(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), address(z),
        address(dt_bias), address(state), y.data_ptr(), final_state.data_ptr(), address(saved), strides,
        batch, seq, channels, 1, size, chunk, TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y, final_state, saved


def selective_scan_backward(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor | None,
    saved: Tensor, dy: Tensor, adjoint: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the inputs of a float32 `selective_scan`, in their order.

    Args:
        x, dt, A_log, B, C, D, z, dt_bias: The inputs.
        saved: The states that `selective_scan` saved.
        dy: The gradient of y.
        adjoint: The gradient of the final state.
    """
    x, dt, B, C, z = map(token_major, (x, dt, B, C, z))
    batch, seq, channels = x.shape
    A_log, D, dt_bias, dy = contiguous(A_log, D, dt_bias, dy)
    size, threads = A_log.shape[1], torch.get_num_threads()
    adjoint = adjoint.clone(memory_format=torch.contiguous_format)
    dx, ddt = x.new_empty(batch, seq, channels), x.new_empty(batch, seq, channels)
    dA_log, dD = x.new_empty(batch, channels, size), x.new_empty(batch, channels)
    dz = None if z is None else torch.empty_like(dx)
    ddt_bias = None if dt_bias is None else torch.empty_like(dD)
    dB, dC = (x.new_zeros(threads, batch, seq, size) for _ in "BC")  # a sum for each thread
    strides = c_array(*(s for t in (x, dt, B, C, z) for s in token_strides(t)), 0, 0)
    functions().selective_scan_backward(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), address(z),
        address(dt_bias), saved.data_ptr(), dy.data_ptr(), adjoint.data_ptr(), dx.data_ptr(), ddt.data_ptr(),
        dA_log.data_ptr(), dB.data_ptr(), dC.data_ptr(), dD.data_ptr(), address(dz), address(ddt_bias), strides,
        batch, seq, channels, size, scan_chunk(size), threads,
    )  # fmt: skip
    ddt_bias = None if ddt_bias is None else ddt_bias.sum(0)
    return dx, ddt, dA_log.sum(0), dB.sum(0), dC.sum(0), dD.sum(0), dz, ddt_bias, adjoint


def ssd(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None, overwrite: bool = False,
    save: bool = False, one_by_one: bool = False, may_round: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`kernels.scan.ssd` of typed x, B and C, and float32 dt, A_log, D and state; N <= LARGEST_STATE.

    In calls with several tokens, numbers below 2^-126 may count as zeros, unless `one_by_one` is True.

    Args:
        x, dt, A_log, B, C, D, state, overwrite, one_by_one, may_round: As in `kernels.scan.ssd`.
        save: True to also return the states before each chunk of CHUNK tokens.

    Returns:
        (y; the final state; the saved states (batch, chunks, heads, N, head_dim), or None).
    """
    batch, seq, heads, width = x.shape
    groups, size = B.shape[2:]
    check_shapes(
        dt=(dt, (batch, seq, heads)), A_log=(A_log, (heads,)), B=(B, (batch, seq, groups, size)), C=(C, B.shape),
        D=(D, (heads,)), state=(state, (batch, heads, size, width)),
    )  # fmt: skip
    x, B, C = map(token_major, (x, B, C))
    dt, A_log, D = contiguous(dt, A_log, D)
    state, final_state = next_state(state, D, (batch, heads, size, width), overwrite)
    y = x.new_empty(batch, seq, heads, width)
    saved = D.new_empty(batch, -(-seq // CHUNK), heads, size, width) if save else None
    state_stride = 0 if state is None else state.stride(0)
    strides = c_array(*(s for t in (x, B, C) for s in token_strides(t)), state_stride, final_state.stride(0))
    raise_if_failed(functions().ssd(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), address(state),
        y.data_ptr(), final_state.data_ptr(), address(saved), strides, batch, seq, heads, width, groups, size,
        TYPES[x.dtype], one_by_one, may_round, torch.get_num_threads(),
    ))  # fmt: skip
    return y, final_state, saved


def ssd_backward(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, saved: Tensor, dy: Tensor, adjoint: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of the inputs of a float32 `ssd`, in their order; see `selective_scan_backward`."""
    x, B, C = map(token_major, (x, B, C))
    dt, A_log, D, dy = contiguous(dt, A_log, D, dy)
    batch, seq, heads, width = x.shape
    groups, size = B.shape[2:]
    threads = torch.get_num_threads()
    adjoint = adjoint.clone(memory_format=torch.contiguous_format)
    dx, ddt = torch.empty_like(dy), torch.zeros_like(dt)
    dA_log, dD = x.new_zeros(batch, heads), x.new_zeros(batch, heads)
    dB, dC = (x.new_zeros(threads, batch, seq, groups, size) for _ in "BC")
    scratch = x.new_empty(threads, CHUNK + 2, CHANNEL_BLOCK, size)
    strides = c_array(*(s for t in (x, B, C) for s in token_strides(t)), 0, 0)
    functions().ssd_backward(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), saved.data_ptr(),
        dy.data_ptr(), adjoint.data_ptr(), dx.data_ptr(), ddt.data_ptr(), dA_log.data_ptr(), dB.data_ptr(), dC.data_ptr(),
        dD.data_ptr(), scratch.data_ptr(), strides, batch, seq, heads, width, groups, size, threads,
    )  # fmt: skip
    return dx, ddt, dA_log.sum(0), dB.sum(0), dC.sum(0), dD.sum(0), adjoint


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, overwrite: bool = False,
    one_by_one: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.gated_delta.gated_delta` of typed q, k and v, and float32 g, beta and state; K <= LARGEST_STATE.

    Numbers below 2^-126 may count as zeros.
    """
    (batch, seq, heads, width), (key_heads, size) = v.shape, k.shape[2:]
    rates, shape = (batch, seq, heads), (batch, heads, size, width)
    check_shapes(
        q=(q, k.shape), k=(k, (batch, seq, key_heads, size)), g=(g, rates), beta=(beta, rates), state=(state, shape)
    )
    q, k, v = map(token_major, (q, k, v))
    g, beta = contiguous(g, beta)
    state, final_state = next_state(state, g, shape, overwrite)
    y = v.new_empty(batch, seq, heads, width)
    state_stride = 0 if state is None else state.stride(0)
    strides = c_array(*(s for t in (q, k, v, g) for s in token_strides(t)), state_stride, final_state.stride(0))
    raise_if_failed(functions().gated_delta(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), address(state), y.data_ptr(),
        final_state.data_ptr(), strides, batch, seq, key_heads, heads, size, width, TYPES[v.dtype], one_by_one,
        torch.get_num_threads(),
    ))  # fmt: skip
    return y, final_state


def norm_gated(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * RMSNorm(y) * silu(z), normalized over each head: typed y, z (..., heads * size) and weight (size,)."""
    width, size = y.shape[-1], len(weight)
    check_shapes(z=(z, y.shape))
    y, weight = contiguous(y, weight)
    rows = z.reshape(-1, width)  # a view if all tokens have the same stride
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty_like(y)
    functions().norm_gated(
        y.data_ptr(), rows.data_ptr(), weight.data_ptr(), out.data_ptr(), len(rows), rows.stride(0), width // size, size,
        eps, TYPES[y.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def supports_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Return True if `rms_norm` supports these tensors: x has the weight's dtype, or float32."""
    return usable(weight) and x.dtype in (weight.dtype, torch.float32) and x.is_cpu and x.shape[-1] == len(weight) > 0


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """(offset + weight) * RMSNorm(x) over the last dimension of x (..., size), in the dtype of weight (size,)."""
    size, (x, weight) = x.shape[-1], contiguous(x, weight)
    check_shapes(weight=(weight, (size,)))
    y = torch.empty_like(x, dtype=weight.dtype)
    functions().rms_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // size, size, eps, offset, TYPES[x.dtype],
        TYPES[weight.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float | None) -> tuple[Tensor, Tensor | None]:
    """weight * RMSNorm(y * silu(z)), normalized over each group of channels, of typed tensors.

    Args:
        y, z: (..., width).
        weight: (width,).
        groups: The number of equal groups of channels.
        eps: The number that is added to the mean of squares, or None to omit the normalization.

    Returns:
        (the result (..., width); the sums of squares (..., groups) in float32 if eps is None, otherwise None).
    """
    width = y.shape[-1]
    check_shapes(z=(z, y.shape), weight=(weight, (width,)))
    y, weight = contiguous(y, weight)
    rows = z.reshape(-1, width)  # a view if all tokens have the same stride
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty_like(y)
    squares = None if eps is not None else y.new_empty(*y.shape[:-1], groups, dtype=torch.float32)
    raise_if_failed(functions().gated_norm(
        y.data_ptr(), rows.data_ptr(), weight.data_ptr(), out.data_ptr(), address(squares), len(rows), rows.stride(0),
        groups, width // groups, eps or 0.0, eps is not None, TYPES[y.dtype], torch.get_num_threads(),
    ))  # fmt: skip
    return out, squares
