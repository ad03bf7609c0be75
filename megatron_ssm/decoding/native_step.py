"""One token through layers by the C kernels of step.c: x + mixer(norm(x)) of each, in as few calls as their sums allow.

`Steps` stand for `Block`s that follow one another while sequences are decoded. C is told once where the layers' tensors and
their caches lie, and goes from one to the next without Python: at every token that would have to be read from memory
again, which the weights fill. All-reduces in shared memory are C's too; for others it comes back to Python.
"""

import ctypes

import torch

from megatron_ssm.layers.mamba1 import Convolution, MambaMixer
from megatron_ssm.layers.mamba2 import Mamba2Mixer
from megatron_ssm.native import kernels
from megatron_ssm.native.kernels import (
    LARGEST_STATE,
    LONGEST_KERNEL,
    TYPES,
    address,
    check,
    exact,
    short_enough,
    usable,
)
from megatron_ssm.ops.matrices import Int8Weight
from megatron_ssm.parallel.layers import ColumnParallelLinear, Packed, RMSNorm, RowParallelLinear, is_altered
from sparsefusion.collectives.counted import Counter
from sparsefusion.native.library import FLOAT, INT, POINTER, SIZE

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


class _Sum(ctypes.Structure):
    """step.c's."""

    _fields_ = [
        *((name, POINTER) for name in ("call", "channel", "parts", "total", "squares")),
        *((name, INT) for name in ("count", "by")),
    ]


_POINTERS = "norm in_bias out_bias conv conv_bias history A_log D dt_bias state x_proj dt_proj gated".split()
_ROOM = "work parameters part dt squares exact".split()
_SIZES = "batch size channels N taps history_stride state_stride rank heads groups group_channels".split()
NO_SUM, NO_MEMORY = -1, -2
ONE_RANK, IN_C, IN_PYTHON = range(3)


class _Layer(ctypes.Structure):
    """step.c's."""

    _fields_ = [
        *((name, _Matrix) for name in ("in_proj", "out_proj")),
        *((name, _Sum) for name in ("inner", "outer")),
        *((name, POINTER) for name in (*_POINTERS, *_ROOM)),
        *((name, SIZE) for name in _SIZES),
        *((name, FLOAT) for name in ("eps", "inner_eps")),
        *((name, INT) for name in ("type", "wide", "mamba2")),
    ]


class _Layers(ctypes.Structure):
    """step.c's."""

    _fields_ = [
        *((name, POINTER) for name in ("layers", "x", "given", "total")),
        *((name, SIZE) for name in ("count", "layer", "begun")),
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
    if type(mixer) is MambaMixer:
        return mixer.channels // mixer.heads % 2 == 0 or mixer.heads == 1  # bfloat16's numbers are taken in pairs
    return mixer.local_norm or mixer.fused_norm


def numbers_of(block, norm, mixer) -> tuple:
    """What a block's step knows of it beside its tensors, and anyone may change."""
    own = vars(mixer)
    return (
        norm.eps, block.residual_in_fp32, block.use, own.get("ranks"), own.get("head_ranks"), own.get("inner_norm_eps"),
        own.get("eps"), own.get("group_channels"), getattr(getattr(mixer, "out_proj", None), "ranks", None),
    )  # fmt: skip


class Sum:
    """An all-reduce of a step's `part`, and of `squares` beside it (None: there are none).

    exactly: not in the model's format.
    """

    def __init__(self, ranks, part, squares=None, exactly=False):
        self._ranks, self._part, self._squares, self._exactly = ranks, part, squares, exactly
        tensors, alone = [part] if squares is None else [part, squares], ranks.group is None
        self.in_place = None if alone else ranks.in_place(tensors, "fp32" if exactly else None)
        by = ONE_RANK if alone else IN_PYTHON if self.in_place is None else IN_C
        self.of_c = _Sum(total=address(part), squares=address(squares), by=by)
        if c := self.in_place:
            self.of_c.call, self.of_c.channel, self.of_c.parts, self.of_c.count = c.reduce, c.channel, c.parts, c.count

    def finish(self, code, of_c) -> None:
        """Do what C has left to Python, and say in C's structure where the sum is."""
        if code != NO_SUM:
            return self.in_place.memory.wait(code)
        ranks, part, squares = self._ranks, self._part, self._squares
        if callable(ranks.format) and not self._exactly:
            part = part.clone()  # the caller's function may keep it
        if self._exactly:
            whole = ranks.exact(part, ranks.group)
        elif squares is None:
            whole = ranks.reduce(part, ranks.group)
        else:
            whole, squares = ranks.reduce_beside(part, squares, ranks.group)
        # What the caller's function has made of it: of its shape, on the CPU, dense.
        whole = whole.to(part.device, part.dtype).expand_as(part).contiguous()
        self._kept = whole, squares  # until the next one
        of_c.total, of_c.squares = whole.data_ptr(), address(squares)


class Step:
    """What C is told of a block that decodes one token of each of some sequences.

    conv, state: the sequences' rows of the layer's cache, which advances in place. room: {(name, dtype, shape): tensor} to
    work in, which steps that follow one another share.
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
        self.use, self.sum_dtype, mamba2 = block.use, block.sum_dtype, type(mixer) is Mamba2Mixer
        self.layer = _Layer(
            **{name: _Matrix.of(weight) for name, weight in matrices.items()},
            **{name: address(tensor) for name, tensor in {**typed, **wide}.items()},
            batch=len(conv), size=len(norm.weight), N=mixer.state_size, taps=mixer.kernel, mamba2=mamba2,
            history_stride=conv.stride(0), state_stride=state.stride(0), eps=norm.eps, type=TYPES[norm.weight.dtype],
            wide=TYPES[self.sum_dtype], **(_numbers_of_mamba2(mixer) if mamba2 else _numbers_of_mamba(mixer)),
        )  # fmt: skip
        self._room, self._dtype = room, norm.weight.dtype
        self.sums = self._sums_of_mamba2(mixer) if mamba2 else self._sums_of_mamba(mixer)
        for name, each in self.sums.items():
            setattr(self.layer, name, each.of_c)

    def _tensor(self, name, *shape, dtype=None):
        """Room that C is told of."""
        key = name, dtype or self._dtype, shape
        if key not in self._room:
            self._room[key] = torch.empty(shape, dtype=key[1], device="cpu")
        setattr(self.layer, name, self._room[key].data_ptr())
        return self._room[key]

    def _sums_of_mamba(self, mixer) -> dict:
        """{name in _Layer: Sum}, and room."""
        layer = self.layer
        batch, size = layer.batch, layer.size
        self._tensor("work", batch * (size + 5 * layer.channels))
        parameters = self._tensor("parameters", batch, 1, layer.heads * (layer.rank + 2 * layer.N))
        part = self._tensor("part", batch, 1, size)
        return dict(inner=Sum(mixer.head_ranks, parameters, exactly=True), outer=Sum(mixer.out_proj.ranks, part))

    def _sums_of_mamba2(self, mixer) -> dict:
        """{name in _Layer: Sum}, and room."""
        layer = self.layer
        batch, size = layer.batch, layer.size
        mixed = layer.channels + 2 * layer.groups * layer.N
        self._tensor("work", batch * (size + 3 * layer.channels + 2 * mixed + layer.heads))
        self._tensor("dt", batch, layer.heads, dtype=torch.float32)
        part, squares = self._tensor("part", batch, 1, size), None
        if mixer.fused_norm:
            squares = self._tensor("squares", batch, 1, 1, dtype=torch.float32)
            if self._dtype is not torch.float32:
                part = self._tensor("exact", batch, 1, size, dtype=torch.float32)
        return dict(outer=Sum(mixer.out_proj.ranks, part, squares))


class Steps:
    """Blocks that follow one another, as `Step`s of one sum_dtype; called as a block is.

    Only the first one may use a shared block: what that needs is in Python.
    """

    def __init__(self, steps):
        self._steps, self.use, self._dtype = steps, steps[0].use, steps[0].sum_dtype
        self._layers = (_Layer * len(steps))(*(step.layer for step in steps))
        self._c = _Layers(layers=ctypes.addressof(self._layers), count=len(steps))
        self._at = ctypes.addressof(self._c)
        in_c = [each.in_place for step in steps for each in step.sums.values() if each.in_place is not None]
        self._memories, self._counter = {each.memory for each in in_c}, in_c[0].counter if in_c else None
        self._sent = Counter()
        for each in in_c:
            self._sent.add("all_reduce", each.nbytes, each.sent)

    def __len__(self):
        return len(self._steps)

    def __call__(self, x, call, cache=None, shared=None, embeddings=None):
        """x (batch, 1, hidden) -> the same: see `Block`. What C sums is counted when all is done."""
        x = given = x.to(self._dtype).contiguous()
        if self.use is not None:
            given = (x + shared(x, embeddings, self.use, call, cache)).to(self._dtype).contiguous()
        total, c, threads = torch.empty_like(x), self._c, torch.get_num_threads()
        for memory in self._memories:
            memory.check()
        c.x, c.given, c.total, c.layer, c.begun = x.data_ptr(), given.data_ptr(), total.data_ptr(), 0, 0
        while code := kernels.LIBRARY.functions.decode(self._at, threads):
            self._finish(code)
        if self._counter is not None:
            self._counter.include(self._sent)
        return total

    def _finish(self, code) -> None:
        """A sum that C has begun."""
        check(code == NO_MEMORY)
        name, layer = ("inner", "outer")[self._c.begun - 1], self._c.layer
        self._steps[layer].sums[name].finish(code, getattr(self._layers[layer], name))


def _of_mamba(mixer) -> dict:
    """Tensors of _Layer that only Mamba-1 has."""
    return dict(x_proj=mixer.x_proj, dt_proj=mixer.dt_proj)


def _numbers_of_mamba(mixer) -> dict:
    eps = -1 if mixer.inner_norm_eps is None else mixer.inner_norm_eps
    return dict(channels=mixer.channels, heads=mixer.heads, rank=mixer.splits[0], inner_eps=eps)


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
