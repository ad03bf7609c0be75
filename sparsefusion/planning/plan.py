"""What to send of every gradient, how, and in which order: decided once, the same on all ranks, kept in checkpoints."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property

import torch

from sparsefusion import FORMATS, MODES, SPARSIFIERS
from sparsefusion.collectives.wire_formats import padded, wire_format

AS_THEY_COME = ("dense", "fp16")  # modes that reduce the framework's own buckets
WIRES = tuple(format for format in FORMATS if format != "auto")
VERSION = 1


@dataclass(frozen=True)
class Unit:
    """Parameters of which k numbers are selected together and sent; k = 0: all of them are, by all-reduce.

    numel: their numbers, all together. offload: they are selected from on the CPU, by another thread. early: they are sent
    whole as soon as all such units of their buffer are there, before the rest of it.
    """

    names: tuple[str, ...]
    numel: int
    k: int = 0
    offload: bool = False
    early: bool = False

    def __post_init__(self):
        if not 0 <= self.k <= self.numel:
            raise ValueError(f"k={self.k} of {self.names} must be from 0 to its {self.numel} numbers")

    def at(self, density_ratio: float) -> "Unit":
        """The same with as many times the k."""
        if not self.k or density_ratio == 1:
            return self
        return replace(self, k=min(self.numel, math.ceil(self.k * density_ratio)))


@dataclass(frozen=True)
class Buffer:
    """Units whose messages are sent together, in the order in which their gradients are ready."""

    units: tuple[Unit, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all units."""
        return tuple(name for unit in self.units for name in unit.names)

    def of(self, sizes: Mapping[str, int]) -> "Buffer":
        """What is left of it when there are only the parameters in `sizes` ({name: numel}): k in proportion."""
        units = []
        for unit in self.units:
            names = tuple(name for name in unit.names if name in sizes)
            numel = sum(sizes[name] for name in names)
            if names:
                units.append(replace(unit, names=names, numel=numel, k=unit.k and -(-unit.k * numel // unit.numel)))
        return Buffer(tuple(units))


@dataclass(frozen=True)
class Plan:
    """mode: one of MODES but auto. Dense and fp16 plans have no buffers: they reduce the framework's.

    sparsifier, density (the share of numbers that is to be sent), wire (the format of sent values): what was asked for.
    ranks: among which gradients are averaged. predicted: seconds of a step in each mode that was considered.
    """

    mode: str
    sparsifier: str
    density: float
    wire: str
    ranks: int
    buffers: tuple[Buffer, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        modes = tuple(mode for mode in MODES if mode != "auto")
        for what, known in (("mode", modes), ("sparsifier", SPARSIFIERS), ("wire", WIRES)):
            if getattr(self, what) not in known:
                raise ValueError(f"{what}={getattr(self, what)!r} is none of a plan's: {', '.join(known)}")

    @property
    def sent_numbers(self) -> tuple[int, int, int]:
        """(sent densely, selected, all) of a step's numbers on each rank; (0, 0, 0) without buffers."""
        units = [unit for buffer in self.buffers for unit in buffer.units]
        return (
            sum(unit.numel for unit in units if not unit.k),
            sum(unit.k for unit in units),
            sum(unit.numel for unit in units),
        )

    def predicting(self, seconds: Mapping[str, float]) -> "Plan":
        """The same, with what each mode was predicted to take."""
        return replace(self, predicted=dict(seconds))

    def among(self, ranks: int) -> "Plan":
        """The same for another number of ranks."""
        return replace(self, ranks=ranks)

    def sized(self, sizes: Mapping[str, int]) -> "Plan":
        """The same for parameters of these sizes ({name: numel}), k in proportion. ValueError: not of the same names."""
        if different := {name for buffer in self.buffers for name in buffer.names} ^ set(sizes) if self.buffers else ():
            raise ValueError(f"{sorted(different)[0]!r} is not in both the plan and this rank's part of the model")
        return replace(self, buffers=tuple(buffer.of(sizes) for buffer in self.buffers))

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is one for parameters of these sizes."""
        names = {name for buffer in self.buffers for name in buffer.names}
        return not names or (names == set(sizes) and self == self.sized(sizes))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what is sent: equal plans on all ranks have the same."""
        made = self._plain()
        del made["predicted"]
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    def _plain(self) -> dict:
        """In dicts and lists; `asdict`, which copies all of it, takes ten times as long."""
        made = {each.name: getattr(self, each.name) for each in fields(self)}
        return made | {"buffers": [{"units": [vars(unit) for unit in buffer.units]} for buffer in self.buffers]}

    def to_json(self) -> str:
        """What `from_json` reads back exactly."""
        return json.dumps({"version": VERSION, "hash": self.hash, **self._plain()})

    @staticmethod
    def from_json(text: str) -> "Plan":
        """ValueError: no plan, one of another version, or a changed one."""
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
            raise ValueError("a plan of sparsefusion whose hash is another's: it was changed")
        return plan


def value_bytes(wire: str, count: int, itemsize: int = 4) -> int:
    """Bytes of `count` selected values of gradients of that itemsize in a format; its blocks are filled up."""
    return _format(wire, itemsize == 8).nbytes(filled_values(wire, count))


def filled_values(wire: str, count: int) -> int:
    """How many values `count` of one unit take up in a message: int8 has blocks, which it fills."""
    return padded(count, _format(wire, False).block)


@cache
def _format(wire, double):
    return wire_format(wire, torch.float64 if double else torch.float32)
