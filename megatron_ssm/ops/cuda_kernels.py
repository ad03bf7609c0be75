"""The CUDA kernels of mamba-ssm and causal-conv1d as functions of our tensors; nothing else imports either package.

| operator | several tokens | one token, without gradients |
|---|---|---|
| `scan.selective_scan` | `selective_scan_fn` | `selective_state_update` |
| `scan.ssd` | `mamba_chunk_scan_combined` | `selective_state_update` |
| `conv.causal_conv` | `causal_conv1d_fn` | `causal_conv1d_update` |

A package is imported when a CUDA tensor first asks for it. One that is missing or broken leaves its work to torch, and
`found` keeps the reason for the doctor and for the line that a job begins with. `takes_*` say which calls a kernel can take,
as read in the sources of mamba-ssm 2.3.2 and causal-conv1d 1.6.1; all others are torch's: float64, what does not fit, and
gradients that a kernel does not give. None runs while torch.compile traces: that is untried.

The kernels count elements in 32 bits (causal_conv1d.h: `index_t`; in Triton `pid_b * stride`; so did selective_scan.h before
mamba-ssm 2.3.2), and beyond them go astray without a word: they are given so many rows of a batch at a time that every
offset fits. A call of which one row does not fit, or one token of all rows, is torch's.
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from .optional_imports import Borrowed, borrow

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (2, 3, 4)  # of a convolution (causal_conv1d.cpp)
LARGEST_STATE = 256  # of selective_scan_fn (selective_scan.cpp)
LARGEST_OFFSET = 2**31 - 1  # elements, from the first one of a tensor
SSD_CHUNK = 256  # tokens, state-spaces' own choice (modules/mamba2.py)
SELECTIVE_CHUNK = 2048  # tokens, after which selective_scan_fn keeps a state (selective_scan.cpp)
VECTOR, BYTES = 8, 16  # causal_conv1d_fn loads so many channels at once; strides and addresses are their multiples
RESPONSE_BUDGET = 2**26  # numbers of the decays of (rows, tokens, N, channels) that are held at once


def _selective_scan_fn():
    from mamba_ssm.ops import selective_scan_interface

    if selective_scan_interface.selective_scan_cuda is None:  # its own import of the compiled part failed
        raise ImportError("it was built without selective_scan_cuda")
    return selective_scan_interface.selective_scan_fn


def _selective_state_update():
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    return selective_state_update


def _mamba_chunk_scan_combined():
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined


def _causal_conv1d_fn():
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn


def _causal_conv1d_update():
    from causal_conv1d import causal_conv1d_update

    return causal_conv1d_update


KERNELS = {  # name: (distribution, its import)
    "selective_scan_fn": ("mamba-ssm", _selective_scan_fn),
    "selective_state_update": ("mamba-ssm", _selective_state_update),
    "mamba_chunk_scan_combined": ("mamba-ssm", _mamba_chunk_scan_combined),
    "causal_conv1d_fn": ("causal-conv1d", _causal_conv1d_fn),
    "causal_conv1d_update": ("causal-conv1d", _causal_conv1d_update),
}


@functools.cache
def found(name: str) -> Borrowed:
    """One of KERNELS, imported once."""
    return borrow(*KERNELS[name])


def on_cuda(tensor) -> bool:
    """Whether a kernel can reach a tensor."""
    return tensor.is_cuda


def _usable(name, *tensors) -> bool:
    """Whether the kernel is there and these tensors (None: absent) are on CUDA, of its types and not empty."""
    if not on_cuda(tensors[0]) or torch.compiler.is_compiling():
        return False
    given = [t for t in tensors if t is not None]
    return all(on_cuda(t) and t.dtype in TYPES and t.numel() for t in given) and found(name).item is not None


def _common_type(*tensors) -> torch.dtype:
    """That all (None: absent) can be brought to without loss."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))


def _to_overwrite(state, shape, dtype, like, overwrite):
    """What a kernel that works in place is given: the state itself if it may be overwritten, else a copy, or zeros."""
    if state is None:
        return like.new_zeros(shape, dtype=dtype)
    if overwrite and state.dtype is dtype:
        return state
    return state.to(dtype, copy=True, memory_format=torch.contiguous_format)


# Rows of a batch


def _last_offset(tensor) -> int:
    """Of its last element from its first one."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _rows_within(held, *tensors) -> int:
    """With how many rows of a batch no offset is beyond LARGEST_OFFSET (0: one row is too long).

    Neither in these tensors (None: absent), nor in copies of them without gaps, nor in what a kernel lays out itself:
    `held` numbers a row.
    """
    most = (LARGEST_OFFSET + 1) // held
    for tensor in (t for t in tensors if t is not None):
        row, step = tensor.numel() // len(tensor), tensor.stride(0)
        last = max(_last_offset(tensor) - (len(tensor) - 1) * step, row - 1)
        most = min(most, (LARGEST_OFFSET - last) // max(step, row) + 1)
    return max(most, 0)


def _by_rows(function, rows, *tensors):
    """A function of tensors (batch, ...) that returns such tensors, called with at most so many rows at a time."""
    if rows >= len(tensors[0]):
        return function(*tensors)
    parts = [itertools.repeat(None) if tensor is None else tensor.split(rows) for tensor in tensors]
    results = [function(*part) for part in zip(*parts, strict=False)]
    return tuple(torch.cat(outputs) for outputs in zip(*results, strict=True))


# The selective scan


def takes_selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state) -> bool:
    """Whether a kernel computes this `scan.selective_scan`.

    `selective_state_update` has no gradients, and `selective_scan_fn` starts from zeros: a state before the first token
    is carried in here, without gradients. It gives none for the final state either; see `scan._AfterKernel`.
    """
    one_token = x.shape[1] == 1
    if torch.is_grad_enabled() and (one_token or state is not None):
        return False
    inputs = (x, dt, A_log, B, C, D, z, dt_bias, state)
    if one_token:
        usable = _usable("selective_state_update", *inputs)
        return usable and len(x) <= _rows_within(A_log.numel(), x, dt, B, C, z, state)
    fits = A_log.shape[1] <= LARGEST_STATE and _usable("selective_scan_fn", *inputs)
    return fits and _selective_rows(x, dt, A_log, B, C, z) > 0


def _selective_rows(x, dt, A, B, C, z) -> int:
    """How many rows `selective_scan_fn` is given; it keeps two numbers for each of A's and each chunk."""
    chunks = -(-x.shape[1] // SELECTIVE_CHUNK)
    return _rows_within(2 * chunks * A.numel(), x, dt, B, C, z)


def selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state, overwrite=False):
    """`scan.selective_scan` by mamba-ssm; y with, the final state without a gradient."""
    A, D, dt_bias = -torch.exp(A_log.float()), D.float(), dt_bias if dt_bias is None else dt_bias.float()
    if x.shape[1] == 1:
        return _selective_step(x, dt, A, B, C, D, z, dt_bias, state, overwrite)
    tokens = functools.partial(_selective_tokens, A, D, dt_bias)
    y, after = _by_rows(tokens, _selective_rows(x, dt, A, B, C, z), x, dt, B, C, z)
    if state is None:
        return y, after
    added, left = _response(dt, A, C, dt_bias, state.float())
    return (y + (added if z is None else added * F.silu(z.float()))).to(x.dtype), after + left


def _selective_step(x, dt, A, B, C, D, z, dt_bias, state, overwrite):
    """One token (mamba_ssm/ops/triton/selective_state_update.py): it takes any strides and overwrites the state.

    Its state is (batch, channels, N). Without a dt_bias it raises, so that there always is one.
    """
    batch, _, channels = x.shape
    state = _to_overwrite(state, (batch, A.shape[1], channels), torch.float32, x, overwrite)
    y = found("selective_state_update").item(
        state.transpose(1, 2), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, z=None if z is None else z[:, 0],
        dt_bias=torch.zeros_like(D) if dt_bias is None else dt_bias, dt_softplus=dt_bias is not None,
    )  # fmt: skip
    return y.unsqueeze(1), state


def _selective_tokens(A, D, dt_bias, x, dt, B, C, z):
    """Several tokens from zeros (mamba_ssm/ops/selective_scan_interface.py, csrc/selective_scan/selective_scan.cpp).

    Its tensors are (batch, channels, seq) without gaps and of one type; A, D and dt_bias are float32. Its final state is
    (batch, channels, N), and "the gradient of the last state is not considered in the backward pass".
    """
    dtype = _common_type(x, dt, B, C, z)
    u, delta, B, C, z = (t if t is None else t.to(dtype).transpose(1, 2).contiguous() for t in (x, dt, B, C, z))
    y, after = found("selective_scan_fn").item(
        u, delta, A, B, C, D.contiguous(), z=z, delta_bias=dt_bias if dt_bias is None else dt_bias.contiguous(),
        delta_softplus=dt_bias is not None, return_last_state=True,
    )  # fmt: skip
    return y.transpose(1, 2).to(x.dtype), after.detach().transpose(1, 2).contiguous()


def _response(dt, A, C, dt_bias, state):
    """What the state before the first token, (batch, N, channels), adds to each y, and what is left of it in the end.

    The recurrence is linear in its state: h_t has exp(A (dt_1 + ... + dt_t)) h_0 more. In float32; no exponent is positive.
    """
    rows = max(1, RESPONSE_BUDGET // state[:1].numel())
    return _by_rows(functools.partial(_response_of_rows, A, dt_bias), rows, dt, C, state)


def _response_of_rows(A, dt_bias, dt, C, state):
    """`_response`, of as many tokens at once as the budget has room for."""
    dt, C = dt.float(), C.float()
    total = (dt if dt_bias is None else F.softplus(dt + dt_bias)).cumsum(1)
    decay = A.t()  # (N, channels)
    tokens = max(1, RESPONSE_BUDGET // state.numel())
    added = []
    for piece, read in zip(total.split(tokens, 1), C.split(tokens, 1), strict=True):
        kept = (piece.unsqueeze(2) * decay).exp_().mul_(state.unsqueeze(1))  # (rows, tokens, N, channels)
        added.append(torch.matmul(read.unsqueeze(2), kept).squeeze(2))
    return torch.cat(added, 1), torch.exp(total[:, -1:] * decay) * state


# SSD


def takes_ssd(x, dt, A_log, B, C, D, state) -> bool:
    """Whether a kernel computes this `scan.ssd`.

    Of several tokens `mamba_chunk_scan_combined` gives every gradient, the states' included. But Triton's products of
    float32 are TF32, so that float32 is left to torch unless its own products may be TF32, or lower: under autocast.
    """
    inputs = (x, dt, A_log, B, C, D, state)
    if x.shape[1] == 1:
        usable = not torch.is_grad_enabled() and _usable("selective_state_update", *inputs)
        return usable and len(x) <= _rows_within(x[0].numel() * B.shape[3], x, dt, B, C, state)
    if not _usable("mamba_chunk_scan_combined", *inputs) or not _ssd_rows(x, dt, B, C, state):
        return False
    rounded = _rounds_products() or torch.is_autocast_enabled(x.device.type)
    return rounded or _common_type(x, B, C) is not torch.float32


def _ssd_rows(x, dt, B, C, state) -> int:
    """How many rows `mamba_chunk_scan_combined` is given; of each chunk it keeps the state, dt and products of C and B."""
    _, seq, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    chunk = max(heads * head_dim * size, heads * SSD_CHUNK, groups * SSD_CHUNK * SSD_CHUNK)
    return _rows_within(-(-seq // SSD_CHUNK) * chunk, x, dt, B, C, state)


def _rounds_products() -> bool:
    """Whether torch may use TF32 for products of float32; the older of its two switches raises if the newer was used."""
    switch = torch.backends.cuda.matmul
    return switch.fp32_precision == "tf32" if hasattr(switch, "fp32_precision") else switch.allow_tf32


def ssd(x, dt, A_log, B, C, D, state, overwrite=False):
    """`scan.ssd` by mamba-ssm."""
    A, D, dt = -torch.exp(A_log.float()), D.float(), dt.float()
    if x.shape[1] == 1:
        return _ssd_step(x, dt, A, B, C, D, state, overwrite)
    return _by_rows(functools.partial(_ssd_tokens, A, D), _ssd_rows(x, dt, B, C, state), x, dt, B, C, state)


def _ssd_step(x, dt, A, B, C, D, state, overwrite):
    """One token, by the selective scan's kernel: it knows that A and dt are one number a head by their strides of 0.

    Its state is (batch, heads, head_dim, N).
    """
    batch, _, heads, head_dim = x.shape
    size = B.shape[3]
    state = _to_overwrite(state, (batch, heads, size, head_dim), torch.float32, x, overwrite)
    dt, D, no_bias = (t.unsqueeze(-1).expand(*t.shape, head_dim) for t in (dt[:, 0], D, torch.zeros_like(D)))
    A = A[:, None, None].expand(heads, head_dim, size)
    y = found("selective_state_update").item(
        state.transpose(2, 3), x[:, 0], dt, A, B[:, 0], C[:, 0], D, dt_bias=no_bias
    )
    return y.unsqueeze(1), state


def _ssd_tokens(A, D, x, dt, B, C, state):
    """Several tokens (mamba_ssm/ops/triton/ssd_combined.py): x, B and C of one type, any strides; states transposed.

    It sums in float32, but what it multiplies is of x's type: also, for y, the states between chunks. The final state is
    float32. Its backward takes the final state's gradient and gives the initial one's (`_state_passing_bwd`).
    """
    dtype = _common_type(x, B, C)
    y, after = found("mamba_chunk_scan_combined").item(
        x.to(dtype), dt, A, B.to(dtype), C.to(dtype), SSD_CHUNK, D=D.contiguous(),
        initial_states=None if state is None else state.float().transpose(2, 3), return_final_states=True,
    )  # fmt: skip
    if y.requires_grad:  # backward loads it by its strides
        y.register_hook(lambda dy: dy if _last_offset(dy) <= LARGEST_OFFSET else dy.contiguous())
    return y.to(x.dtype), after.transpose(2, 3).contiguous()


# The convolution


def takes_conv(x, weight, bias, history) -> bool:
    """Whether a kernel computes this `conv.causal_conv` (csrc/causal_conv1d.cpp: widths, types, multiples of 8)."""
    if weight.shape[-1] not in WIDTHS or bias is not None and bias.dtype is not weight.dtype:
        return False
    if x.shape[1] == 1:
        usable = not torch.is_grad_enabled() and _usable("causal_conv1d_update", x, weight, bias, history)
        return usable and len(x) <= _conv_rows(x, weight, history)
    usable = x.shape[2] % VECTOR == 0 and _usable("causal_conv1d_fn", x, weight, bias, history)
    return usable and _conv_rows(x, weight, history) > 0


def _conv_rows(x, weight, history) -> int:
    """How many rows causal-conv1d's kernels are given; a history may be taken for more of x."""
    return _rows_within((x.shape[1] + weight.shape[-1] - 1) * x.shape[2], x, history)


def causal_conv(x, weight, bias, history, overwrite=False):
    """`conv.causal_conv` by causal-conv1d; the history is of x's type.

    Under autograd a history is taken for more of x, and the next history is always cut out by torch: no gradient of the
    kernel's states is needed.
    """
    weight, bias = weight.squeeze(1), bias if bias is None else bias.contiguous()
    if x.shape[1] == 1:
        return _conv_step(x, weight, bias, history, overwrite)
    return _by_rows(functools.partial(_conv_tokens, weight, bias), _conv_rows(x, weight, history), x, history)


def _conv_step(x, weight, bias, history, overwrite):
    """One token (csrc/causal_conv1d_update.cu): any strides; the history, as (batch, channels, K-1), is overwritten."""
    batch, _, channels = x.shape
    history = _to_overwrite(history, (batch, weight.shape[1] - 1, channels), x.dtype, x, overwrite)
    y = found("causal_conv1d_update").item(x[:, 0], history.transpose(1, 2), weight, bias, activation="silu")
    return y.unsqueeze(1), history


def _conv_tokens(weight, bias, x, history):
    """Several tokens, and the history for the next ones."""
    before = weight.shape[1] - 1
    past = x.new_zeros(x.shape[0], before, x.shape[2]) if history is None else history
    after = torch.cat([past, x[:, -before:]], 1)[:, -before:]
    if history is None or not torch.is_grad_enabled():
        return _channel_last(x, weight, bias, history), after
    return _channel_last(torch.cat([history, x], 1), weight, bias, None)[:, before:], after


def _channel_last(x, weight, bias, history):
    """Several tokens, in the layout that the kernel calls channel-last: (batch, channels, seq) with stride 1 of channels."""
    history = history if history is None else _in_vectors(history).transpose(1, 2)
    y = found("causal_conv1d_fn").item(
        _in_vectors(x).transpose(1, 2), weight, bias, initial_states=history, activation="silu"
    )
    if y.requires_grad:  # the kernel's backward loads it as forward does x
        y.register_hook(lambda gradient: _in_vectors(gradient.transpose(1, 2)).transpose(1, 2))
    return y.transpose(1, 2)


def _in_vectors(tensor):
    """The tensor (batch, seq, channels) where each vector of channels can be loaded at once, copied if it cannot.

    Nor is it left where an offset is too large, as a gradient's may be. Strides are looked at even where there is one
    sequence or token: the kernel does, and torch's is_contiguous does not.
    """
    rows, row, channel = tensor.stride()
    aligned = tensor.data_ptr() % BYTES == rows % VECTOR == row % VECTOR == 0
    fits = aligned and _last_offset(tensor) <= LARGEST_OFFSET
    if fits and channel == 1 and row >= tensor.shape[2] and rows >= row:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
