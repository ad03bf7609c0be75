"""What a model's layers are while it decodes: `Step`s where the C kernels take one token of a layer, else the blocks.

Steps are made for some rows of a cache when these are first decoded, and used as long as the model and the cache are what
they were: all that steps know of them is compared at every call.
"""

import threading
import weakref
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from . import kernels
from .steps import Step, is_altered, may_step, numbers_of

PLANS = 4  # sets of rows whose steps are kept


class Decoding(threading.local):
    """The layers of one model, as the sequences need them that a thread decoded last. A copy of it knows none.

    block: the type of the blocks that steps can stand for.
    """

    def __init__(self, block):
        self._block, self._plans = block, []

    def __reduce__(self):
        return Decoding, (self._block,)

    def layers(self, model, call, cache) -> list:
        """One callable for each block of the model: a `Step`, or the block."""
        if not _may_decode(call) or not cache.layers[0].state.is_cpu:
            return model.layers
        plan = next((plan for plan in self._plans if plan.is_for(call.rows, cache)), None)
        if plan is None or not plan.holds(cache):
            self._plans = [other for other in self._plans if other is not plan][: PLANS - 1]
            self._plans.insert(0, plan := _Plan(model, self._block, call.rows, cache))
        return plan.layers


def _may_decode(call) -> bool:
    """Whether a call decodes rows of a cache that follow one another, and no hook is on all modules."""
    return (
        call.decoding and call.mask is None and isinstance(call.rows, slice)
        and kernels.LIBRARY.functions is not None
        and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
        and not _has_any_global_hook()
    )  # fmt: skip


class _Plan:
    """The layers for some rows of a cache; and all that they know of the model and the cache, to see whether it still holds.

    It refers to everything in a model but the model, which would otherwise keep itself alive.
    """

    def __init__(self, model, block, rows, cache):
        self._library, self._rows, self._first = kernels.LIBRARY, rows, weakref.ref(cache.layers[0])
        modules = [module for module in model.modules() if module is not model]
        self._members = [
            (members, name, member)
            for module in (model, *modules)
            for members in (module._modules, module._parameters, module._buffers)
            for name, member in members.items()
        ]
        self._tensors = [member for _, _, member in self._members if isinstance(member, Tensor)]
        self._modules = [(module, type(module), is_altered(module)) for module in modules]
        self._blocks = [(each, each.norm, each.mixer) for each in model.layers if type(each) is block]
        self._places, self._cached, self._numbers = _places(self._tensors), _places(_of(cache)), self._numbers_now()
        room = {}
        self.layers = [
            _step(each, block, layer, rows, room) for each, layer in zip(model.layers, cache.layers, strict=True)
        ]

    def is_for(self, rows, cache) -> bool:
        """Whether it was made for these rows of this cache."""
        return self._rows == rows and self._first() is cache.layers[0]

    def holds(self, cache) -> bool:
        """Whether all that its steps know is as it was."""
        if self._library is not kernels.LIBRARY:
            return False
        for members, name, member in self._members:
            if members.get(name) is not member:
                return False
        for module, kind, altered in self._modules:
            if type(module) is not kind or is_altered(module) != altered:
                return False
        return (
            _places(self._tensors) == self._places and _places(_of(cache)) == self._cached
            and self._numbers_now() == self._numbers
        )  # fmt: skip

    def _numbers_now(self) -> list:
        return [numbers_of(*each) for each in self._blocks]


def _places(tensors) -> list:
    """Where tensors lie, and how: by column, which takes half as long as by row."""
    return [list(map(look, tensors)) for look in (Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype"))]


def _of(cache) -> list:
    return [tensor for layer in cache.layers for tensor in (layer.conv, layer.state)]


def _step(block, kind, layer, rows, room):
    """A block's Step, or the block."""
    step = Step.of(block, *layer.read(rows), room) if type(block) is kind and may_step(block) else None
    return block if step is None else step
