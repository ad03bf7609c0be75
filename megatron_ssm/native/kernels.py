"""The C kernels of this package as functions of torch tensors; their twins in `scan`, `conv` and `layers` choose.

All take and return tensors of the CPU, float32 or bfloat16 where it says "type", on this rank's channels alone. None is
differentiable by itself: each gradient is a kernel of its own, in float32. A function that overwrites a state returns the
tensor that it was given.
"""

import ctypes
from functools import cache

import torch

from sparsefusion.native.library import FLOAT, INT, POINTER, SIZE, Library

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3}  # native.h's
_ACTIVATIONS = (torch.float32, torch.bfloat16)
HALVES = (torch.bfloat16, torch.float16)
LONGEST_KERNEL, LARGEST_STATE = 8, 256  # of a convolution; of a recurrence
CHUNK, PART = 16, 16  # tokens and channels of ssd whose states are kept in backward (ssd.c)
BLOCK = 64  # numbers of an int8 weight that share a scale (linear.c)
ROWS = {torch.float32: 16, torch.bfloat16: 4, torch.int8: 36}  # beyond so many, torch's matrix product is faster
ROWS_IF_WIDENED = 24  # of bfloat16, where torch's product is float32's

SIGNATURES = {
    "causal_conv": [POINTER] * 6 + [SIZE] * 7 + [INT] * 2,
    "causal_conv_backward": [POINTER] * 10 + [SIZE] * 7 + [INT],
    "selective_scan": [POINTER] * 13 + [SIZE] * 6 + [INT] * 2,
    "selective_scan_backward": [POINTER] * 20 + [SIZE] * 5 + [INT],
    "ssd": [POINTER] * 11 + [SIZE] * 6 + [INT] * 2,
    "ssd_backward": [POINTER] * 17 + [SIZE] * 6 + [INT],
    "rms_norm": [POINTER] * 3 + [SIZE] * 2 + [FLOAT] + [INT] * 2,
    "gated_norm": [POINTER] * 5 + [SIZE] * 4 + [FLOAT] + [INT] * 2,
    "linear": [POINTER] * 5 + [SIZE] * 4 + [INT] * 3,
    "multiplies": [INT],
    "decode": [POINTER, INT],
}
LIBRARY = Library("megatron_ssm", SIGNATURES)


def usable(first, *others) -> bool:
    """Whether a kernel can take these tensors (None: absent): one type on the CPU, and the library is there.

    Not while torch.compile traces: it would keep addresses of tensors that it has freed.
    """
    dtype = first.dtype
    if LIBRARY.functions is None or dtype not in _ACTIVATIONS or not first.is_cpu or torch.compiler.is_compiling():
        return False
    for other in others:
        if other is not None and (other.dtype is not dtype or not other.is_cpu):
            return False
    return True


def exact(*tensors) -> bool:
    """Whether tensors (None: absent) are float32 on the CPU: states, A_log, D, dt's bias."""
    return all(t is None or (t.dtype is torch.float32 and t.is_cpu) for t in tensors)


def address(tensor):
    """Where a tensor begins (None: absent)."""
    return None if tensor is None else tensor.data_ptr()


def _dense(*tensors):
    """The tensors (None: absent) without gaps."""
    return (t if t is None else t.contiguous() for t in tensors)


def _token_major(tensor):
    """The tensor with contiguous tokens: what follows the first two dimensions must not have gaps."""
    if tensor is None or tensor.stride(-1) == 1 and (tensor.ndim < 4 or tensor[0, 0].is_contiguous()):
        return tensor
    return tensor.contiguous()


def _strides(tensor) -> tuple[int, int]:
    """Elements from one sequence to the next, and from one token to the next."""
    return (0, 0) if tensor is None else tensor.stride()[:2]


def _next_state(state, like, shape, overwrite):
    """(the state as the kernel reads it, where it leaves the next one): float32 with contiguous rows of a batch."""
    if state is not None and not (state.dtype is like.dtype and (state.is_contiguous() or state[0].is_contiguous())):
        state, overwrite = state.to(like.dtype).contiguous(), False
    return state, state if overwrite and state is not None else like.new_empty(shape)


def causal_conv(x, weight, bias, history, overwrite=False):
    """`conv.causal_conv` of one type: x (batch, seq, channels), history (batch, K-1, channels) or None."""
    x, (weight, bias) = _token_major(x), _dense(weight, bias)
    batch, seq, channels = x.shape
    taps = weight.shape[-1]
    history, after = _next_state(history, x, (batch, taps - 1, channels), overwrite)
    if taps > 1 and history is not None and history.stride(0) != after.stride(0):
        history = history.contiguous()
    y = x.new_empty(batch, seq, channels)
    LIBRARY.functions.causal_conv(
        x.data_ptr(), weight.data_ptr(), address(bias), address(history), y.data_ptr(), after.data_ptr(),
        batch, seq, channels, taps, *_strides(x), after.stride(0), TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y, after


def causal_conv_backward(x, weight, bias, history, dy, dnext, needs_history):
    """(dx, dweight, dbias, dhistory) of a float32 `causal_conv`; dbias None without a bias, dhistory unless needed."""
    x, (weight, bias, history, dy, dnext) = _token_major(x), _dense(weight, bias, history, dy, dnext)
    batch, seq, channels = x.shape
    taps = weight.shape[-1]
    dx, dweight = x.new_empty(batch, seq, channels), torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    dhistory = x.new_empty(batch, taps - 1, channels) if needs_history else None
    LIBRARY.functions.causal_conv_backward(
        x.data_ptr(), weight.data_ptr(), address(bias), address(history), dy.data_ptr(), dnext.data_ptr(),
        dx.data_ptr(), address(dhistory), dweight.data_ptr(), address(dbias), batch, seq, channels, taps, *_strides(x),
        (taps - 1) * channels, torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight, dbias, dhistory


def _array(*numbers):
    return (ctypes.c_ssize_t * len(numbers))(*numbers)


def scan_chunk(state_size: int) -> int:
    """Tokens of selective_scan between two states that are kept for backward."""
    return max(1, LARGEST_STATE // state_size)


def selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state, overwrite=False, overwrite_x=False, save=False):
    """`scan.selective_scan`: x, dt, B, C, z of one type; A_log (channels, N), D, dt_bias and state float32.

    overwrite: the next state may take the state's place in memory; overwrite_x: y may take that of x.
    Returns (y, next state, the states before each chunk of tokens if they are to be saved for backward).
    """
    x, dt, B, C, z = map(_token_major, (x, dt, B, C, z))
    A_log, D, dt_bias = _dense(A_log, D, dt_bias)
    batch, seq, channels = x.shape
    size = A_log.shape[1]
    state, after = _next_state(state, D, (batch, size, channels), overwrite)
    y = x if overwrite_x and x.is_contiguous() else x.new_empty(batch, seq, channels)
    chunk = scan_chunk(size) if save else 0
    saved = D.new_empty(batch, -(-seq // chunk), size, channels) if save else None
    strides = _array(*(s for t in (x, dt, B, C, z) for s in _strides(t)), 0 if state is None else state.stride(0),
                     after.stride(0))  # fmt: skip
    LIBRARY.functions.selective_scan(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), address(z),
        address(dt_bias), address(state), y.data_ptr(), after.data_ptr(), address(saved), strides,
        batch, seq, channels, 1, size, chunk, TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y, after, saved


def selective_scan_backward(x, dt, A_log, B, C, D, z, dt_bias, saved, dy, adjoint):
    """The gradients of a float32 `selective_scan`'s inputs, in their order; adjoint: that of the final state."""
    x, dt, B, C, z = map(_token_major, (x, dt, B, C, z))
    batch, seq, channels = x.shape
    A_log, D, dt_bias, dy = _dense(A_log, D, dt_bias, dy)
    size, threads = A_log.shape[1], torch.get_num_threads()
    adjoint = adjoint.clone(memory_format=torch.contiguous_format)
    dx, ddt = x.new_empty(batch, seq, channels), x.new_empty(batch, seq, channels)
    dA_log, dD = x.new_empty(batch, channels, size), x.new_empty(batch, channels)
    dz = None if z is None else torch.empty_like(dx)
    ddt_bias = None if dt_bias is None else torch.empty_like(dD)
    dB, dC = (x.new_zeros(threads, batch, seq, size) for _ in "BC")
    strides = _array(*(s for t in (x, dt, B, C, z) for s in _strides(t)), 0, 0)
    LIBRARY.functions.selective_scan_backward(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), address(z),
        address(dt_bias), saved.data_ptr(), dy.data_ptr(), adjoint.data_ptr(), dx.data_ptr(), ddt.data_ptr(),
        dA_log.data_ptr(), dB.data_ptr(), dC.data_ptr(), dD.data_ptr(), address(dz), address(ddt_bias), strides,
        batch, seq, channels, size, scan_chunk(size), threads,
    )  # fmt: skip
    ddt_bias = None if ddt_bias is None else ddt_bias.sum(0)
    return dx, ddt, dA_log.sum(0), dB.sum(0), dC.sum(0), dD.sum(0), dz, ddt_bias, adjoint


def ssd(x, dt, A_log, B, C, D, state, overwrite=False, save=False):
    """`scan.ssd`: x, B, C of one type; dt (batch, seq, heads), A_log, D (heads,), state float32. As selective_scan."""
    x, B, C = map(_token_major, (x, B, C))
    dt, A_log, D = _dense(dt, A_log, D)
    batch, seq, heads, width = x.shape
    groups, size = B.shape[2:]
    state, after = _next_state(state, D, (batch, heads, size, width), overwrite)
    y = x.new_empty(batch, seq, heads, width)
    saved = D.new_empty(batch, -(-seq // CHUNK), heads, size, width) if save else None
    strides = _array(
        *(s for t in (x, B, C) for s in _strides(t)), 0 if state is None else state.stride(0), after.stride(0)
    )
    LIBRARY.functions.ssd(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), address(state),
        y.data_ptr(), after.data_ptr(), address(saved), strides, batch, seq, heads, width, groups, size,
        TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return y, after, saved


def ssd_backward(x, dt, A_log, B, C, D, saved, dy, adjoint):
    """The gradients of a float32 `ssd`'s inputs, in their order; adjoint: that of the final state."""
    x, B, C = map(_token_major, (x, B, C))
    dt, A_log, D, dy = _dense(dt, A_log, D, dy)
    batch, seq, heads, width = x.shape
    groups, size = B.shape[2:]
    threads = torch.get_num_threads()
    adjoint = adjoint.clone(memory_format=torch.contiguous_format)
    dx, ddt = torch.empty_like(dy), torch.zeros_like(dt)
    dA_log, dD = x.new_zeros(batch, heads), x.new_zeros(batch, heads)
    dB, dC = (x.new_zeros(threads, batch, seq, groups, size) for _ in "BC")
    scratch = x.new_empty(threads, CHUNK + 2, PART, size)
    strides = _array(*(s for t in (x, B, C) for s in _strides(t)), 0, 0)
    LIBRARY.functions.ssd_backward(
        x.data_ptr(), dt.data_ptr(), A_log.data_ptr(), B.data_ptr(), C.data_ptr(), D.data_ptr(), saved.data_ptr(),
        dy.data_ptr(), adjoint.data_ptr(), dx.data_ptr(), ddt.data_ptr(), dA_log.data_ptr(), dB.data_ptr(), dC.data_ptr(),
        dD.data_ptr(), scratch.data_ptr(), strides, batch, seq, heads, width, groups, size, threads,
    )  # fmt: skip
    return dx, ddt, dA_log.sum(0), dB.sum(0), dC.sum(0), dD.sum(0), adjoint


def takes_norm(x, weight) -> bool:
    """Whether `rms_norm` takes these: the weight may be narrower than a float32 x."""
    return usable(weight) and x.dtype in (weight.dtype, torch.float32) and x.is_cpu and x.shape[-1] == len(weight) > 0


def rms_norm(x, weight, eps):
    """x (..., size) normalized over its last dimension, times weight (size,), in the weight's type; x may be float32."""
    size, (x, weight) = x.shape[-1], _dense(x, weight)
    y = torch.empty_like(x, dtype=weight.dtype)
    LIBRARY.functions.rms_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // size, size, eps, TYPES[x.dtype], TYPES[weight.dtype]
    )
    return y


def gated_norm(y, z, weight, groups, eps=None):
    """y silu(z), normalized over each of `groups` equal parts of the last dimension, times weight; all of one type.

    eps None: not normalized; instead the sums of squares, (..., groups) float32, are returned beside it.
    """
    width, (y, weight) = y.shape[-1], _dense(y, weight)
    if z.stride(-1) != 1 or z.stride(0) != z.shape[1] * z.stride(1):
        z = z.contiguous()
    out = torch.empty_like(y)
    squares = None if eps is not None else y.new_empty(*y.shape[:-1], groups, dtype=torch.float32)
    check(LIBRARY.functions.gated_norm(
        y.data_ptr(), z.data_ptr(), weight.data_ptr(), out.data_ptr(), address(squares), y.numel() // width, z.stride(1),
        groups, width // groups, eps or 0.0, eps is not None, TYPES[y.dtype],
    ))  # fmt: skip
    return out if squares is None else (out, squares)


def check(failed) -> None:
    """MemoryError if a kernel says so."""
    if failed:
        raise MemoryError("a C kernel found no memory")


@cache
def _multiplies(dtype) -> bool:
    return bool(LIBRARY.functions.multiplies(TYPES[dtype]))


def widens(dtype) -> bool:
    """Whether matrix products of a type are faster in float32: this processor has no instructions for the type.

    torch takes two to ten times as long for them then. Without the library that is not known, and left to torch.
    """
    return dtype in HALVES and LIBRARY.functions is not None and not _multiplies(dtype)


def most_rows(dtype) -> int:
    """Of x, for which `linear` of a matrix of this type is faster than torch."""
    return ROWS_IF_WIDENED if dtype is torch.bfloat16 and widens(dtype) else ROWS.get(dtype, 0)


def short_enough(rows: int, weight) -> bool:
    """Whether so few rows times a matrix (a tensor, or int8 values) are faster here than in torch."""
    dtype = weight.dtype
    return (
        rows <= most_rows(dtype)
        and weight.is_contiguous()
        and (dtype is not torch.bfloat16 or weight.shape[1] % 2 == 0)
        and not torch.is_autocast_enabled("cpu")
    )


def takes(x, weight, bias=None) -> bool:
    """Whether `linear` takes this product: few rows of x, outside autocast."""
    typed = usable(x, bias) if weight.dtype is torch.int8 else usable(x, weight, bias)
    return typed and x.shape[-1] == weight.shape[1] > 0 and short_enough(x.numel() // x.shape[-1], weight)


def linear(x, weight, scales=None, bias=None):
    """x (..., in) W^T + b for few rows of x; weight (out, in): x's type, or int8 with scales (out, in / BLOCK)."""
    out, columns = weight.shape
    x, scales, bias = _dense(x, scales, bias)
    y = x.new_empty(*x.shape[:-1], out)
    check(LIBRARY.functions.linear(
        weight.data_ptr(), address(scales), address(bias), x.data_ptr(), y.data_ptr(), x.numel() // columns, out,
        columns, columns, TYPES[weight.dtype], TYPES[x.dtype], torch.get_num_threads(),
    ))  # fmt: skip
    return y
