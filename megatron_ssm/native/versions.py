"""Whether dictionaries still have the same items, and objects the same types: compared in C at every decoded token.

Up to and including Python 3.12, CPython gives a dictionary a new version number at every change, which no other one has or
had (PEP 509; torch.compile's guards used it too). Where the items of hundreds of dictionaries are in memory, but not in the
processor's caches, reading only these numbers takes a tenth of the time of comparing the items.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from . import kernels

WORD = ctypes.sizeof(ctypes.c_uint64)
TYPE = object.__basicsize__ - WORD  # where an object has the address of its type
VERSION = object.__basicsize__ + WORD  # where a dictionary has its version number: after the number of its items


class Versions:
    """The version numbers of some dictionaries, and the types of some objects. Both stay alive as long as this does."""

    def __init__(self, dictionaries: Sequence[dict], objects: Sequence[Any]):
        self._owners, self._compare = (dictionaries, objects), _compare_in_c()
        if self._compare is not None:
            addresses = [*(id(each) + VERSION for each in dictionaries), *(id(each) + TYPE for each in objects)]
            self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
            self._words = (ctypes.c_uint64 * len(addresses))(*map(_word_at, addresses))

    def are_current(self) -> bool:
        """Whether no dictionary was changed, and no object has another type. False where that cannot be compared."""
        return self._compare is not None and bool(self._compare(self._addresses, self._words, len(self._words)))


def _word_at(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@cache
def have_versions() -> bool:
    """Whether this Python's dictionaries have version numbers."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return False
    one: dict[str, int] = {"": 0}
    numbers = [_word_at(id(one) + VERSION)]
    for value in range(1, 3):
        one[""] = value
        numbers.append(_word_at(id(one) + VERSION))
    return len({*numbers}) == len(numbers) and _word_at(id(one) + TYPE) == id(dict)


def _compare_in_c() -> Any:
    """have_words of layouts.c; None if it cannot be used."""
    is_usable = kernels.LIBRARY.functions is not None and have_versions()
    return kernels.with_global_lock("have_words", ctypes.c_int) if is_usable else None
