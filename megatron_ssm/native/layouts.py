"""Where tensors are, and their sizes, strides and dtypes: compared with those of before at every decoded token."""

import ctypes
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from . import kernels

FIELDS = 4  # numbers of a tensor before its sizes and strides (layouts.c)
DESCRIBES = 5  # the place of dltensor_from_py_object_no_sync in DLPack's exchange interface, in pointers


def can_be_described(tensor: Tensor) -> bool:
    """Whether a tensor has one storage of plain numbers, as all those have that C reads."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


class Layouts:
    """The layouts of some tensors, to compare with later ones.

    This happens in C where it can, because in Python it takes a noticeable part of the time of a decoded token.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._compare, size = _compare_in_c(), sum(FIELDS + 2 * tensor.dim() for tensor in tensors)
        self._numbers: Any = (ctypes.c_int64 * size)() if self._compare else _in_python(tensors)
        if self._compare:
            self._compared(tensors, write=True)

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors, in the same order, have these layouts."""
        return self._compared(tensors) == len(self._numbers) if self._compare else _in_python(tensors) == self._numbers

    def _compared(self, tensors: Sequence[Tensor], write: bool = False) -> int:
        return self._compared_at(_addresses_of(tensors), write)

    def _compared_at(self, objects: Any, write: bool = False, parts: Any = None) -> int:
        """What compare_layouts returns: how many numbers describe the tensors, or 0 if they differ from before."""
        return self._compare(_describe(), objects, len(objects), self._numbers, len(self._numbers), write, parts)


class LayoutsOfKept(Layouts):
    """The layouts of tensors that stay alive as long as this does, so that their addresses are collected only once."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__(tensors)
        self._tensors, self._objects, self._parts = tensors, _addresses_of(tensors), None
        if self._compare:
            self._parts = _parts_of(tensors)

    def are_current(self) -> bool:
        """Whether the tensors still have these layouts."""
        if self._compare is None:
            return self.are_those_of(self._tensors)
        return self._compared_at(self._objects, parts=self._parts) == len(self._numbers)


def _addresses_of(tensors: Sequence[Tensor]) -> Any:
    """The addresses of the Python objects, as a C array."""
    return (ctypes.c_void_p * len(tensors))(*map(id, tensors))


def _parts_of(tensors: Sequence[Tensor]) -> Any:
    """The addresses of each tensor's Python object, of torch's object and of its storage, as a C array."""
    parts = [part for each in tensors for part in (id(each), each._cdata, each.untyped_storage()._cdata)]
    return (ctypes.c_void_p * len(parts))(*parts)


def _in_python(tensors: Sequence[Tensor]) -> list:
    """One `map` per property takes half as long as a loop over the tensors."""
    return [list(map(look, tensors)) for look in (Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype"))]


@cache
def _describe() -> int | None:
    """The address of torch's function that describes a tensor; None if this version has none."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    interface = pointer_of(capsule, b"dlpack_exchange_api")
    major_version = ctypes.cast(interface, ctypes.POINTER(ctypes.c_uint32))[0]
    return ctypes.cast(interface, ctypes.POINTER(ctypes.c_void_p))[DESCRIBES] if major_version == 1 else None


def _compare_in_c() -> Any:
    """compare_layouts of layouts.c; None if it cannot be used."""
    is_usable = kernels.LIBRARY.functions is not None and _describe() is not None
    return kernels.with_global_lock("compare_layouts", ctypes.c_ssize_t) if is_usable else None
