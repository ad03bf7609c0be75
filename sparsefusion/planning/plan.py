"""A plan: the elements of every gradient to send, their format and their order. It is equal on all ranks."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property

import torch

from commfabric.collectives.wire_formats import Cast, Int8, padded, wire_format
from sparsefusion import EXCHANGES, FORMATS, MODES, SPARSIFIERS

FRAMEWORK_BUCKET_MODES = ("dense", "fp16")  # modes that reduce the framework's own buckets
WIRES = tuple(format for format in FORMATS if format != "auto")
VERSION = 1


@dataclass(frozen=True)
class Unit:
    """Parameters from whose gradients k elements are selected together, or whose gradients are dense.

    Attributes:
        names: The names of the parameters.
        numel: The number of their elements.
        k: The number of elements to send. 0: the unit is dense, and sent by all-reduce.
        offload: Select in another thread (on the CPU).
        early: Send the dense unit as soon as all early units of its buffer are ready, before the rest of the buffer.
    """

    names: tuple[str, ...]
    numel: int
    k: int = 0
    offload: bool = False
    early: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.k <= self.numel:
            raise ValueError(f"k={self.k} of {self.names} must be from 0 to its {self.numel} elements")

    def with_density_ratio(self, density_ratio: float) -> "Unit":
        """The unit with k multiplied by a ratio."""
        if not self.k or density_ratio == 1:
            return self
        return replace(self, k=min(self.numel, math.ceil(self.k * density_ratio)))


@dataclass(frozen=True)
class Buffer:
    """Units that are sent together, in the order in which their gradients are ready."""

    units: tuple[Unit, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its parameters."""
        return tuple(name for unit in self.units for name in unit.names)

    def restricted_to(self, sizes: Mapping[str, int]) -> "Buffer":
        """The buffer with only the parameters in `sizes` ({name: numel}); each k is reduced in proportion."""
        units = []
        for unit in self.units:
            names = tuple(name for name in unit.names if name in sizes)
            numel = sum(sizes[name] for name in names)
            if names:
                units.append(replace(unit, names=names, numel=numel, k=unit.k and -(-unit.k * numel // unit.numel)))
        return Buffer(tuple(units))


@dataclass(frozen=True)
class Plan:
    """The messages of every rank in a step.

    Attributes:
        mode: One of MODES, but auto.
        sparsifier, density, wire, exchange: The user's settings (see `SparseFusion`).
        ranks: The number of ranks over which gradients are averaged.
        buffers: The buffers, in their order. Plans of the modes dense and fp16 have none: they reduce the framework's
            buckets.
        predicted: {mode: predicted seconds of a step} of all modes that were considered.
    """

    mode: str
    sparsifier: str
    density: float
    wire: str
    ranks: int
    buffers: tuple[Buffer, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    exchange: str = "all_gather"

    def __post_init__(self) -> None:
        modes, exchanges = (tuple(each for each in known if each != "auto") for known in (MODES, EXCHANGES))
        for what, known in (("mode", modes), ("sparsifier", SPARSIFIERS), ("wire", WIRES), ("exchange", exchanges)):
            if getattr(self, what) not in known:
                raise ValueError(f"{what}={getattr(self, what)!r} is none of a plan's: {', '.join(known)}")

    @property
    def sent_elements(self) -> tuple[int, int, int]:
        """(dense elements that each rank sends, sparse ones that it sends, all elements); (0, 0, 0) without buffers."""
        units = [unit for buffer in self.buffers for unit in buffer.units]
        return (
            sum(unit.numel for unit in units if not unit.k),
            sum(unit.k for unit in units),
            sum(unit.numel for unit in units),
        )

    def for_sizes(self, sizes: Mapping[str, int]) -> "Plan":
        """The plan for parameters of these sizes ({name: numel}), with k in proportion. ValueError if names differ."""
        if different := {name for buffer in self.buffers for name in buffer.names} ^ set(sizes) if self.buffers else ():
            raise ValueError(f"{sorted(different)[0]!r} is not in both the plan and this rank's part of the model")
        return replace(self, buffers=tuple(buffer.restricted_to(sizes) for buffer in self.buffers))

    def fits_sizes(self, sizes: Mapping[str, int]) -> bool:
        """Return True if the plan is for parameters of these sizes."""
        names = {name for buffer in self.buffers for name in buffer.names}
        return not names or (names == set(sizes) and self == self.for_sizes(sizes))

    @cached_property
    def hash(self) -> str:
        """The SHA-256 digest of the plan without its predictions."""
        made = self._plain()
        del made["predicted"]
        if self.exchange == "all_gather":  # plans of older versions do not have it
            del made["exchange"]
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    def _plain(self) -> dict:
        """The plan as dictionaries and lists. (`dataclasses.asdict` makes deep copies, and takes ten times as long.)"""
        made = {each.name: getattr(self, each.name) for each in fields(self)}
        return made | {"buffers": [{"units": [vars(unit) for unit in buffer.units]} for buffer in self.buffers]}

    def to_json(self) -> str:
        """Write JSON, from which `from_json` reads an equal plan."""
        return json.dumps({"version": VERSION, "hash": self.hash, **self._plain()})

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read the JSON of `to_json`. ValueError if it is not a plan, has another version, or was changed."""
        try:
            made = json.loads(text)
            version, known = made.pop("version"), made.pop("hash")
            if version != VERSION:
                raise ValueError(f"its version is {version}, and this program reads {VERSION}")
            buffers = [
                Buffer(tuple(Unit(**{**unit, "names": tuple(unit["names"])}) for unit in buffer["units"]))
                for buffer in made.pop("buffers")
            ]
            plan = Plan(**made, buffers=tuple(buffers))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a plan of sparsefusion: {error}") from None
        if plan.hash != known:
            raise ValueError("a plan of sparsefusion whose hash does not match: it was changed")
        return plan


def value_bytes(wire: str, count: int, itemsize: int = 4) -> int:
    """Bytes of `count` selected values in a format, padded to whole blocks. itemsize: bytes of a gradient's element."""
    return _format(wire, itemsize == 8).nbytes(filled_values(wire, count))


def filled_values(wire: str, count: int) -> int:
    """The number of values that `count` values of one unit occupy in a message, in which int8 pads its blocks."""
    return padded(count, _format(wire, False).block)


@cache
def _format(wire: str, double: bool) -> Cast | Int8:
    return wire_format(wire, torch.float64 if double else torch.float32)
