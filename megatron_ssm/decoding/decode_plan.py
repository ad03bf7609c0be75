"""What a model's layers are while it decodes: `Step`s where the C kernels take one token of a layer, else the blocks.

Steps are made for some rows of a cache when these are first decoded, and used as long as the model and the cache are what
they were: all that steps know of them is compared at every call.
"""

import threading
import weakref
from itertools import repeat
from operator import attrgetter, contains, is_

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.native import kernels

from .native_step import Step, Steps, may_step, numbers_of

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
        """(index of the first block, callable) for all blocks of the model: `Steps` for some of them, or one itself."""
        if not _may_decode(call) or not cache.layers[0].state.is_cpu:
            return list(enumerate(model.layers))
        plan = next((plan for plan in self._plans if plan.known.is_for(call.rows, cache)), None)
        if plan is None or not plan.known.holds(cache):
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
    """The layers for some rows of a cache, and what they know."""

    def __init__(self, model, block, rows, cache):
        self.known = Known(model, block, rows, cache, _of)
        room = {}
        steps = [_step(each, block, layer, rows, room) for each, layer in zip(model.layers, cache.layers, strict=True)]
        self.layers = _together(steps)


class Known:
    """All that is known of a model and of some rows of a cache, to see whether it still holds.

    block: the type of the blocks whose numbers count. tensors_of: a function of a cache, those of its tensors whose places
    count. It refers to everything in a model but the model, which would otherwise keep itself alive.
    """

    def __init__(self, model, block, rows, cache, tensors_of):
        self._library, self._rows, self._first = kernels.LIBRARY, rows, weakref.ref(cache.layers[0])
        self._tensors_of = tensors_of
        self._modules = [module for module in model.modules() if module is not model]
        named = [
            (owner, name, member)
            for module in (model, *self._modules)
            for owner in (module._modules, module._parameters, module._buffers)
            for name, member in owner.items()
        ]
        self._owners, self._names, self._members = zip(*named, strict=True)
        self._tensors = [member for member in self._members if isinstance(member, Tensor)]
        self._own = list(map(vars, self._modules))
        self._kinds, self._altered = list(map(type, self._modules)), self._altered_now()
        self._blocks = [(each, each.norm, each.mixer) for each in model.layers if type(each) is block]
        self._places, self._cached, self._numbers = _places(self._tensors), self._cached_now(cache), self._numbers_now()

    def is_for(self, rows, cache) -> bool:
        """Whether it is of these rows of this cache."""
        return self._rows == rows and self._first() is cache.layers[0]

    def holds(self, cache) -> bool:
        """Whether all is as it was."""
        return (
            self._library is kernels.LIBRARY
            and all(map(is_, map(dict.get, self._owners, self._names), self._members))
            and list(map(type, self._modules)) == self._kinds and self._altered_now() == self._altered
            and _places(self._tensors) == self._places and self._cached_now(cache) == self._cached
            and self._numbers_now() == self._numbers
        )  # fmt: skip

    def _altered_now(self) -> tuple:
        """How many hooks modules have, and whether a forward of their own (`layers.is_altered`)."""
        hooks = (
            list(map(len, map(attrgetter(name), self._modules))) for name in ("_forward_hooks", "_forward_pre_hooks")
        )
        return *hooks, list(map(contains, self._own, repeat("forward")))

    def _cached_now(self, cache) -> list:
        return _places(self._tensors_of(cache))

    def _numbers_now(self) -> list:
        return [numbers_of(*each) for each in self._blocks]


def _places(tensors) -> list:
    """Where tensors lie, and how: by column, which takes half as long as by row. (Here all loops are C's for that.)"""
    return [list(map(look, tensors)) for look in (Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype"))]


def _of(cache) -> list:
    return [tensor for layer in cache.layers for tensor in (layer.conv, layer.state)]


def _together(layers) -> list:
    """(index of the first, callable): steps that one call can take, together; blocks alone."""
    runs = []
    for index, each in enumerate(layers):
        last = runs[-1][1][-1] if runs else None
        if type(each) is type(last) is Step and each.use is None and each.sum_dtype is last.sum_dtype:
            runs[-1][1].append(each)
        else:
            runs.append((index, [each]))
    return [(index, Steps(run) if type(run[0]) is Step else run[0]) for index, run in runs]


def _step(block, kind, layer, rows, room):
    """A block's Step, or the block."""
    step = Step.of(block, *layer.read(rows), room) if type(block) is kind and may_step(block) else None
    return block if step is None else step
