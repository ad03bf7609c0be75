"""One token of a mixer by the C kernels of step.c, in as few calls as its all-reduces allow; caches advance in place."""

import ctypes

import torch

from sparsefusion.native import POINTER, SIZE

from . import kernels
from .kernels import LARGEST_STATE, LONGEST_KERNEL, TYPES, address, check, exact, short_enough, usable


class _Matrix(ctypes.Structure):
    """A matrix, floating point or `weights.Int8Weight`, as step.c takes it."""

    _fields_ = [("values", POINTER), ("scales", POINTER), ("stored", SIZE)]

    @classmethod
    def of(cls, weight):
        """The structure's address; it lives as long as what is returned."""
        if isinstance(weight, torch.Tensor):
            return ctypes.byref(cls(weight.data_ptr(), None, TYPES[weight.dtype]))
        return ctypes.byref(cls(weight.values.data_ptr(), weight.scales.data_ptr(), TYPES[torch.int8]))


def may_step(call, cache, *layers) -> bool:
    """Whether a call decodes one token of sequences whose cache can be updated in place, through layers as they were made.

    layers: (layer, its type) of each whose tensors would be used without calling it: none has hooks, and none was replaced
    by another, such as an adapter around it.
    """
    return (
        call.decoding and cache is not None and call.mask is None and isinstance(call.rows, slice)
        and not torch.is_grad_enabled()
        and all(type(x) is kind and not (x._forward_hooks or x._forward_pre_hooks) for x, kind in layers)
    )  # fmt: skip


def takes_step(hidden, exact_ones, typed, weights) -> bool:
    """Whether one token of few sequences, hidden (batch, 1, hidden_size), can go through a mixer by the kernels of step.c.

    exact_ones: tensors that must be float32, the state last; typed: of hidden's type (None: absent), of which the fourth
    is the convolution's history; weights: matrices of hidden's type, or int8.
    """
    if not (usable(hidden, *typed) and exact(*exact_ones)):
        return False
    if typed[3].shape[1] >= LONGEST_KERNEL or exact_ones[-1].shape[-2] > LARGEST_STATE:
        return False
    for weight in weights:
        matrix, scales = (weight, None) if isinstance(weight, torch.Tensor) else (weight.values, weight.scales)
        if matrix.dtype not in (hidden.dtype, torch.int8) or not (short_enough(len(hidden), matrix) and exact(scales)):
            return False
    return all(t is None or t.is_contiguous() for t in (hidden, *exact_ones, *typed))


def mamba_in(hidden, in_proj, in_bias, conv, conv_bias, history, x_proj):
    """(parameters (batch, 1, R + 2N), this rank's part; what mamba_out needs of it): Mamba-1 up to x_proj. Advances history.

    hidden: (batch, 1, hidden_size); in_proj: rows of x, then of z; conv: (channels, 1, K).
    """
    batch, _, size = hidden.shape
    width, channels = x_proj.shape
    work, parameters = hidden.new_empty(5 * batch * channels), hidden.new_empty(batch, 1, width)
    check(kernels.LIBRARY.functions.mamba_in(
        hidden.data_ptr(), _Matrix.of(in_proj), address(in_bias), conv.data_ptr(), address(conv_bias),
        history.data_ptr(), x_proj.data_ptr(), work.data_ptr(), parameters.data_ptr(), batch, size, channels,
        conv.shape[-1], width, history.stride(0), TYPES[hidden.dtype], torch.get_num_threads(),
    ))  # fmt: skip
    return parameters, work


def mamba_out(parameters, work, dt_proj, dt_bias, A_log, D, state, out_proj):
    """Mamba-1 from the summed parameters on: this rank's part of y (batch, 1, hidden_size). Advances state."""
    parameters = parameters.contiguous()
    batch, (channels, rank), size = len(parameters), dt_proj.shape, out_proj.shape[0]
    y = parameters.new_empty(batch, 1, size)
    check(kernels.LIBRARY.functions.mamba_out(
        parameters.data_ptr(), work.data_ptr(), dt_proj.data_ptr(), dt_bias.data_ptr(), A_log.data_ptr(), D.data_ptr(),
        state.data_ptr(), _Matrix.of(out_proj), y.data_ptr(), batch, size, channels, rank, A_log.shape[1],
        state.stride(0), TYPES[y.dtype], torch.get_num_threads(),
    ))  # fmt: skip
    return y


def mamba2_step(
    hidden, A_log, D, dt_bias, state, in_bias, conv, conv_bias, history, norm, in_proj, out_proj, groups, eps
):
    """Mamba-2 up to out_proj's all-reduce: this rank's part of y (batch, 1, hidden_size). Advances history and state.

    eps None: not normalized; instead the sums of squares, (batch, 1, groups) float32, are returned beside it.
    """
    batch, _, size = hidden.shape
    _, heads, states, width = state.shape
    y, mixed = torch.empty_like(hidden), conv.shape[0]
    work = hidden.new_empty(batch * (2 * mixed + heads + 3 * heads * width))
    dt, squares = D.new_empty(batch, heads), None if eps is not None else D.new_empty(batch, 1, groups)
    check(kernels.LIBRARY.functions.mamba2_step(
        hidden.data_ptr(), _Matrix.of(in_proj), address(in_bias), conv.data_ptr(), address(conv_bias),
        history.data_ptr(), dt_bias.data_ptr(), A_log.data_ptr(), D.data_ptr(), state.data_ptr(), norm.data_ptr(),
        _Matrix.of(out_proj), y.data_ptr(), address(squares), work.data_ptr(), dt.data_ptr(), batch, size, heads, width,
        groups, states, conv.shape[-1], history.stride(0), state.stride(0), eps or 0.0, TYPES[y.dtype],
        torch.get_num_threads(),
    ))  # fmt: skip
    return y if squares is None else (y, squares)
