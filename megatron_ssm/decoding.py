"""What a model's layers are while it decodes: `Step`s where the C kernels take one token of a layer, else the blocks.

Steps are made when a call decodes other sequences than the one before, and as long as the model is what it was: what they
know of its tensors is compared at every call.
"""

import threading
import weakref

import torch
from torch.nn.modules.module import _has_any_global_hook

from . import kernels
from .steps import Step, is_altered, may_step


class Decoding(threading.local):
    """The layers of one model, as the sequences need them that a thread decoded last. A copy of it knows none."""

    def __init__(self):
        self._layers, self._made_for = None, None

    def __reduce__(self):
        return Decoding, ()

    def layers(self, model, call, cache) -> list:
        """One callable for each block of the model: a `Step`, whose result the next one overwrites, or the block."""
        if not _may_decode(call) or not cache.layers[0].state.is_cpu:
            return model.layers
        if self._made_for is None or not self._made_for.still(call.rows, cache):
            self._layers, self._made_for = None, None
            room = {}
            self._layers = [
                _step(block, layer, call.rows, room) for block, layer in zip(model.layers, cache.layers, strict=True)
            ]
            self._made_for = _Known(model, call.rows, cache)
        return self._layers


def _may_decode(call) -> bool:
    """Whether a call decodes rows of a cache that follow one another, and nothing watches it."""
    return (
        call.decoding and call.mask is None and isinstance(call.rows, slice)
        and kernels.LIBRARY.functions is not None
        and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
        and not _has_any_global_hook()
    )  # fmt: skip


def _step(block, layer, rows, room):
    """A block's Step, or the block."""
    if not may_step(block):
        return block
    try:
        return Step(block, *layer.read(rows), room)
    except ValueError:
        return block


class _Known:
    """Whether steps are still right: which modules and tensors a model has, where those and a cache's lie, which rows."""

    def __init__(self, model, rows, cache):
        modules = list(model.modules())
        self._library, self._rows, self._first = kernels.LIBRARY, rows, weakref.ref(cache.layers[0])
        self._members = [
            (members, name, member)
            for module in modules
            for members in (module._modules, module._parameters, module._buffers)
            for name, member in members.items()
        ]
        self._tensors = [member for _, _, member in self._members if isinstance(member, torch.Tensor)]
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        self._cached = [tensor.data_ptr() for layer in cache.layers for tensor in (layer.conv, layer.state)]
        self._modules, self._altered = modules, [is_altered(module) for module in modules]

    def still(self, rows, cache) -> bool:
        """Whether all that is as it was."""
        if self._rows != rows or self._first() is not cache.layers[0] or self._library is not kernels.LIBRARY:
            return False
        for members, name, member in self._members:
            if members.get(name) is not member:
                return False
        return (
            [tensor.data_ptr() for tensor in self._tensors] == self._places
            and [tensor.data_ptr() for layer in cache.layers for tensor in (layer.conv, layer.state)] == self._cached
            and [is_altered(module) for module in self._modules] == self._altered
        )
