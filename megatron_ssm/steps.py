"""One token through a layer by the C kernels of step.c: x + mixer(norm(x)), in as few calls as its all-reduces allow.

A `Step` stands for a `Block` while sequences are decoded. It is told once where the layer's tensors and its cache lie, so
that little is left to do in Python: at every token that would have to be read from memory again, which the weights fill.
"""

import ctypes

import torch

from sparsefusion.native import FLOAT, INT, POINTER, SIZE

from . import kernels
from .kernels import LARGEST_STATE, LONGEST_KERNEL, TYPES, address, check, exact, short_enough, usable
from .layers import ColumnParallelLinear, Packed, RMSNorm, RowParallelLinear
from .mamba import Convolution, MambaMixer
from .mamba2 import Mamba2Mixer
from .weights import Int8Weight

CALLED_NO_MORE = (
    MambaMixer,
    Mamba2Mixer,
    RMSNorm,
    ColumnParallelLinear,
    RowParallelLinear,
    Convolution,
    Packed,
    Int8Weight,
)


class _Matrix(ctypes.Structure):
    """A matrix, floating point or `weights.Int8Weight`, as step.c takes it."""

    _fields_ = [("values", POINTER), ("scales", POINTER), ("stored", SIZE)]

    @classmethod
    def of(cls, weight):
        """Of a tensor or an Int8Weight."""
        if isinstance(weight, torch.Tensor):
            return cls(weight.data_ptr(), None, TYPES[weight.dtype])
        return cls(weight.values.data_ptr(), weight.scales.data_ptr(), TYPES[torch.int8])


_POINTERS = "norm in_bias out_bias conv conv_bias history A_log D dt_bias state x_proj dt_proj gated".split()
_SIZES = "batch size channels N taps history_stride state_stride rank heads groups group_channels".split()


class _Layer(ctypes.Structure):
    """step.c's."""

    _fields_ = [
        *((name, _Matrix) for name in ("in_proj", "out_proj")),
        *((name, POINTER) for name in _POINTERS),
        *((name, SIZE) for name in _SIZES),
        *((name, FLOAT) for name in ("eps", "inner_eps")),
        *((name, INT) for name in ("type", "wide")),
    ]


def may_step(block) -> bool:
    """Whether a mixer can step, and nothing is lost if its block's layers are not called: they have no hooks.

    Fields that lie apart would have to be copied together at every token.
    """
    mixer, inside = block.mixer, (*block.norm.modules(), *block.mixer.modules())
    if not all(type(module) in CALLED_NO_MORE for module in inside) or any(map(is_altered, (block, *inside))):
        return False
    if not all(module.is_packed for module in inside if type(module) is Packed):
        return False
    return mixer.heads == 1 if type(mixer) is MambaMixer else mixer.local_norm or mixer.fused_norm


def is_altered(module) -> bool:
    """Whether calling a module does more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def numbers_of(block, norm, mixer) -> tuple:
    """What a block's step knows of it beside its tensors, and anyone may change."""
    own = vars(mixer)
    return norm.eps, block.residual_in_fp32, own.get("inner_norm_eps"), own.get("eps"), own.get("group_channels")


class Step:
    """A block as it decodes one token of each of some sequences; called as a block is. Its cache advances in place.

    conv, state: the sequences' rows of the layer's cache. room: {(name, dtype, shape): tensor} to work in, which steps that
    follow one another share.
    """

    @classmethod
    def of(cls, block, conv, state, room):
        """The step of a block that `may_step`; None if the kernels cannot take its tensors."""
        mixer = block.mixer
        tensors = _of_mamba2(mixer) if type(mixer) is Mamba2Mixer else _of_mamba(mixer)
        in_bias = None if mixer.in_proj.bias is None else mixer.in_proj.bias()
        weight, bias = mixer.conv.tensors()
        typed = dict(norm=block.norm.weight, conv=weight, conv_bias=bias, in_bias=in_bias, out_bias=mixer.out_proj.bias,
                     history=conv, **tensors)  # fmt: skip
        wide = dict(A_log=mixer.A_log, D=mixer.D, dt_bias=mixer.dt_bias, state=state)
        matrices = dict(in_proj=mixer.in_proj.weight(), out_proj=mixer.out_proj.weight)
        return cls(block, typed, wide, matrices, room) if _takes(typed, wide, matrices, len(conv)) else None

    def __init__(self, block, typed, wide, matrices, room):
        mixer, norm, conv, state = block.mixer, block.norm, typed["history"], wide["state"]
        self.use, self.mixer, self.mamba2 = block.use, mixer, type(mixer) is Mamba2Mixer
        batch, size, self.dtype, self.sum_dtype = len(conv), len(norm.weight), norm.weight.dtype, block.sum_dtype
        layer = _Layer(
            **{name: _Matrix.of(weight) for name, weight in matrices.items()},
            **{name: address(tensor) for name, tensor in {**typed, **wide}.items()},
            batch=batch, size=size, N=mixer.state_size, taps=mixer.kernel, history_stride=conv.stride(0),
            state_stride=state.stride(0), eps=norm.eps, type=TYPES[self.dtype], wide=TYPES[self.sum_dtype],
            **(_numbers_of_mamba2(mixer) if self.mamba2 else _numbers_of_mamba(mixer)),
        )  # fmt: skip
        self._layer, self._layer_at = layer, ctypes.addressof(layer)
        self._make_room(room, batch, size, layer)

    def _make_room(self, room, batch, size, layer):
        def tensor(name, dtype, *shape):
            if (name, dtype, shape) not in room:
                room[name, dtype, shape] = torch.empty(shape, dtype=dtype, device="cpu")
            return room[name, dtype, shape]

        self._part = tensor("part", self.dtype, batch, 1, size)
        channels = layer.channels
        if self.mamba2:
            mixed = channels + 2 * layer.groups * layer.N
            work = 3 * channels + 2 * mixed + layer.heads
            self._dt = tensor("dt", torch.float32, batch, layer.heads)
            self._squares = tensor("squares", torch.float32, batch, 1, 1) if self.mixer.fused_norm else None
        else:
            work = 5 * channels
            self._parameters = tensor("parameters", self.dtype, batch, 1, layer.rank + 2 * layer.N)
            self._parameters_at = self._parameters.data_ptr()
        self._work = tensor("work", self.dtype, batch * (size + work))
        self._part_at, self._work_at = self._part.data_ptr(), self._work.data_ptr()

    def __call__(self, x, call, cache=None, shared=None, embeddings=None):
        """x (batch, 1, hidden) -> the same: see `Block`."""
        x = given = x.to(self.sum_dtype).contiguous()
        if self.use is not None:
            given = (x + shared(x, embeddings, self.use, call, cache)).to(self.sum_dtype).contiguous()
        y, squares = (self._mamba2 if self.mamba2 else self._mamba)(given.data_ptr())
        total = torch.empty_like(x)
        kernels.LIBRARY.functions.layer_end(
            self._layer_at, x.data_ptr(), y.data_ptr(), address(squares), total.data_ptr()
        )
        return total

    def _mamba(self, x_at):
        """(the mixer's output but for its bias, None); x_at: the address of x."""
        functions, threads, ranks = kernels.LIBRARY.functions, torch.get_num_threads(), self.mixer.head_ranks
        parameters, parameters_at = self._parameters, self._parameters_at
        check(functions.mamba_in(self._layer_at, x_at, self._work_at, parameters_at, threads))
        if ranks.group is not None:
            parameters = ranks.exact(parameters, ranks.group)
            parameters_at = parameters.data_ptr()
        check(functions.mamba_out(self._layer_at, parameters_at, self._work_at, self._part_at, threads))
        return self._sum(self._part), None

    def _mamba2(self, x_at):
        """(the mixer's output but for its bias, None), or before its norm, and the sums of squares."""
        part, squares, ranks = self._part, self._squares, self.mixer.ranks
        check(kernels.LIBRARY.functions.mamba2_step(
            self._layer_at, x_at, self._work_at, self._dt.data_ptr(), self._part_at, address(squares),
            torch.get_num_threads(),
        ))  # fmt: skip
        if squares is None:
            return self._sum(part), None
        whole, squares = ranks.reduce_beside(_given(part, ranks).float(), squares, ranks.group)
        return _as_kernels_take(whole, part, torch.float32), squares

    def _sum(self, part):
        """Every rank's part of out_proj's product added up."""
        ranks = self.mixer.out_proj.ranks
        if ranks.group is None:
            return part
        return _as_kernels_take(ranks.reduce(_given(part, ranks), ranks.group), part, part.dtype)


def _given(part, ranks):
    """A part as it is given to be added up: a caller's function may keep it."""
    return part.clone() if callable(ranks.format) else part


def _as_kernels_take(whole, part, dtype):
    """What a caller's function has made of `part`: of its shape, on the CPU, dense."""
    return whole.to(part.device, dtype).expand_as(part).contiguous()


def _of_mamba(mixer) -> dict:
    """Tensors of _Layer that only Mamba-1 has."""
    return dict(x_proj=mixer.x_proj, dt_proj=mixer.dt_proj)


def _numbers_of_mamba(mixer) -> dict:
    eps = -1 if mixer.inner_norm_eps is None else mixer.inner_norm_eps
    return dict(channels=mixer.channels, rank=mixer.splits[0], inner_eps=eps)


def _of_mamba2(mixer) -> dict:
    """Tensors of _Layer that only Mamba-2 has."""
    return dict(gated=mixer.norm_weight)


def _numbers_of_mamba2(mixer) -> dict:
    return dict(channels=mixer.rows["x"], heads=mixer.heads, groups=mixer.groups, group_channels=mixer.group_channels,
                inner_eps=mixer.eps)  # fmt: skip


def _takes(typed, wide, matrices, batch) -> bool:
    """Whether tensors are of types and sizes that step.c takes, without gaps."""
    weights = [t for m in matrices.values() for t in ([m] if isinstance(m, torch.Tensor) else [m.values])]
    floating = [weight for weight in weights if weight.dtype is not torch.int8]
    scales = [m.scales for m in matrices.values() if isinstance(m, Int8Weight)]
    products = [*weights, *(typed[name] for name in ("x_proj", "dt_proj") if name in typed)]
    return (
        usable(typed["norm"], *typed.values(), *floating) and exact(*wide.values(), *scales)
        and typed["conv"].shape[-1] <= LONGEST_KERNEL and wide["state"].shape[-2] <= LARGEST_STATE
        and all(short_enough(batch, weight) for weight in products)
        and all(t is None or t.is_contiguous() for t in (*typed.values(), *wide.values(), *scales))
    )  # fmt: skip
