"""A mesh of ranks: named axes from the outermost (slowest links) to the innermost, each with the speed of its level."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from commfabric.fabric.cost_model import Fabric


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh. `level` is the axis of the original mesh of which it is a part, and whose links it uses."""

    name: str
    size: int
    level: str

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"mesh axis {self.name} has size {self.size!r}: expected a whole number of at least 1")


class Mesh:
    """Ranks in a grid: `Mesh(node=2, gpu=4)` has 8 ranks, and rank = 4 * node + gpu, because the last axis varies fastest.

    Args:
        speeds: {axis: speed}, where a speed is (seconds until the first byte, bytes per second) or a `commfabric.Fabric`.
            Without any speed, all axes are equally fast. Axes whose speed alone is missing count as links of 1e9 bytes per
            second without latency, which may be far from the truth: give all speeds or none.
        sizes: the number of ranks along each axis, the outermost first.

    Raises:
        ValueError: there is no axis, a size is below 1, or a speed is invalid or for an axis that does not exist.
    """

    def __init__(self, /, speeds: Mapping[str, Any] | None = None, **sizes: int) -> None:
        if not sizes:
            raise ValueError("a mesh needs at least one axis, for example Mesh(gpu=4)")
        self.axes = tuple(MeshAxis(name, size, name) for name, size in sizes.items())
        self._speeds = _checked_speeds(speeds or {}, list(sizes))

    @staticmethod
    def of_axes(axes: Iterable[MeshAxis]) -> "Mesh":
        """The mesh with these axes, without speeds. Raises ValueError if there is none, or two have the same name."""
        axes = tuple(axes)
        names = [axis.name for axis in axes]
        if not axes or len(set(names)) < len(names):
            raise ValueError(f"a mesh needs axes with different names, not {', '.join(names) or 'none'}")
        return Mesh(gpu=1)._with(axes)

    @property
    def speeds(self) -> Mapping[str, Any]:
        """{level: (seconds, bytes per second) or a Fabric}, read-only; see `with_speeds`."""
        return MappingProxyType(self._speeds)

    @property
    def ranks(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def levels(self) -> tuple[MeshAxis, ...]:
        """The axes of the original mesh, before `split` made parts of them."""
        sizes = dict.fromkeys((axis.level for axis in self.axes), 1)
        for axis in self.axes:
            sizes[axis.level] *= axis.size
        return tuple(MeshAxis(level, size, level) for level, size in sizes.items())

    def refines(self, other: "Mesh") -> bool:
        """Return True if each axis of `other`, a mesh of the same levels, is an axis of this one or consists of several."""
        mine, theirs = (set(accumulate((axis.size for axis in mesh.axes), operator.mul)) for mesh in (self, other))
        return self.levels == other.levels and theirs <= mine

    def in_words(self) -> str:
        """The mesh as text for errors; if it was split, with the mesh whose axes were split."""
        return repr(self) + ("" if self.levels == self.axes else f", parts of {Mesh.of_axes(self.levels)!r}")

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.axes == other.axes and self._speeds == other._speeds

    def __hash__(self) -> int:
        return hash(self.axes)

    def axis(self, name: str) -> MeshAxis:
        """The axis of this name. Raises ValueError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ValueError(f"the mesh has no axis {name!r}: expected {', '.join(self.names)}")

    def size(self, name: str) -> int:
        return self.axis(name).size

    def split(self, name: str, /, **sizes: int) -> "Mesh":
        """The same ranks, with one axis divided into parts (outermost first) that use the same links.

        For example `Mesh(gpu=4).split("gpu", a=2, b=2)`.

        Raises:
            ValueError: a size is below 1, the sizes do not multiply to that of the axis, or a name is taken.
        """
        axis = self.axis(name)
        parts = tuple(MeshAxis(part, size, axis.level) for part, size in sizes.items())
        if not parts or math.prod(sizes.values()) != axis.size:
            product = " * ".join(map(str, sizes.values()))
            raise ValueError(f"mesh axis {name} of {axis.size} ranks is not {product} = {math.prod(sizes.values())}")
        for part in sizes:
            if part in {*self.names} - {name}:
                raise ValueError(f"the mesh has an axis {part!r} already")
        index = self.axes.index(axis)
        return self._with((*self.axes[:index], *parts, *self.axes[index + 1 :]))

    def with_speeds(self, speeds: Mapping[str, Any]) -> "Mesh":
        """The same ranks with these speeds of levels; other levels keep theirs. Raises ValueError as `Mesh` does."""
        mesh = self._with(self.axes)
        mesh._speeds = self._speeds | _checked_speeds(speeds, [axis.level for axis in self.axes])
        return mesh

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: index along it} of a rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in a mesh of {self.ranks} ranks")
        coordinates = {}
        for axis in reversed(self.axes):
            rank, coordinates[axis.name] = divmod(rank, axis.size)
        return coordinates

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank with these coordinates."""
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + coordinates[axis.name]
        return rank

    def _with(self, axes: tuple[MeshAxis, ...]) -> "Mesh":
        mesh = object.__new__(Mesh)
        mesh.axes, mesh._speeds = axes, self._speeds
        return mesh


def _checked_speeds(speeds: Mapping[str, Any], levels: Sequence[str]) -> dict[str, Fabric | tuple[float, float]]:
    """Speeds as a mesh stores them. Raises ValueError for an invalid speed or an unknown level."""
    checked: dict[str, Fabric | tuple[float, float]] = {}
    for name, speed in speeds.items():
        if name not in levels:
            raise ValueError(f"speed of unknown mesh axis {name!r}: expected {', '.join(dict.fromkeys(levels))}")
        if isinstance(speed, Fabric):
            if not {"p2p", "all_gather"} & {curve.operation for curve in speed.curves}:
                raise ValueError(
                    f"the fabric of mesh axis {name} has neither p2p nor all_gather, which predict messages"
                )
            checked[name] = speed
        elif isinstance(speed, tuple | list) and len(speed) == 2 and speed[0] >= 0 and speed[1] > 0:
            checked[name] = float(speed[0]), float(speed[1])
        else:
            raise ValueError(
                f"speed of mesh axis {name} is {speed!r}: expected (seconds of at least 0, bytes per second above 0) or a "
                f"Fabric"
            )
    return checked
