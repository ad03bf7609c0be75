"""A mesh of ranks: named axes from the outermost (slowest links) to the innermost, each with the speed of its level."""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Real
from types import MappingProxyType
from typing import Any

from sparsefusion.fabric.cost_model import Fabric

from .checks import check_name, shown

FASTEST = 1e30  # bytes per second
LONGEST = 1e9  # seconds until the first byte of a message, and of a point of a tile: all predicted times are finite


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh. level: the axis of the original mesh of which it is a part, whose links it uses.

    ValueError: a name is no identifier, or the size is below 1.
    """

    name: str
    size: int
    level: str

    def __post_init__(self) -> None:
        for name in (self.name, self.level):
            check_name("a mesh axis", name)
        if type(self.size) is not int or self.size < 1:
            raise ValueError(
                f"mesh axis {self.name} has size {shown(self.size)}; it must be a whole number of at least 1"
            )


class Mesh:
    """Ranks in a grid: `Mesh(node=2, gpu=4)` has 8 ranks; rank = 4 * node + gpu, as the last axis counts fastest.

    sizes: {axis: number of ranks along it}, outermost first. speeds: {axis: (alpha_s, bytes_per_s) or a
    `sparsefusion.Fabric`}, what a message costs along the axis: seconds before the first byte, at most LONGEST, and the rate
    at which a rank sends, at least 1 and below FASTEST. Without any speed, all axes are equally fast. If only some axes have
    one, the others count as links of 1e9 bytes per second without latency, which may be far from the truth: give all speeds
    or none.
    ValueError: a size below 1, a name that is no identifier, no axis, or a speed that is none, or for an axis that does not
    exist.
    """

    def __init__(self, /, speeds: Mapping[str, Any] | None = None, **sizes: int) -> None:
        if not sizes:
            raise ValueError("a mesh needs at least one axis, for example Mesh(gpu=4)")
        self.axes = tuple(MeshAxis(name, size, name) for name, size in sizes.items())
        self._speeds = {} if speeds is None else _speeds_in(speeds)
        for name, speed in self._speeds.items():
            if name not in sizes:
                raise ValueError(f"speed for mesh axis {shown(name)}, but the mesh has {', '.join(sizes)}")
            self._speeds[name] = _speed(name, speed)

    @staticmethod
    def of_axes(axes: Iterable[MeshAxis]) -> "Mesh":
        """The mesh with these axes, as `axes` lists them, without speeds.

        ValueError: there is none, two have the same name, the parts of a level are not neighbours, or one is no MeshAxis.
        """
        axes = tuple(axes) if isinstance(axes, Iterable) else axes
        if not isinstance(axes, tuple) or not all(isinstance(axis, MeshAxis) for axis in axes):
            raise ValueError(f"a mesh consists of MeshAxis(name, size, level), not {shown(axes)}")
        names, levels = [axis.name for axis in axes], [axis.level for axis in axes]
        if not axes or len(set(names)) < len(names):
            raise ValueError(f"a mesh needs axes with different names, not {', '.join(names) or 'none'}")
        if levels != [level for level in dict.fromkeys(levels) for _ in range(levels.count(level))]:
            raise ValueError(
                f"the parts of a mesh axis must be neighbours, but {', '.join(names)} are of {', '.join(levels)}"
            )
        return Mesh(gpu=1)._with(axes)

    @property
    def speeds(self) -> Mapping[str, Any]:
        """{level: (seconds, bytes per second) or a Fabric}, which cannot be changed; see `with_speeds`."""
        return MappingProxyType(self._speeds)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def levels(self) -> tuple[MeshAxis, ...]:
        """The axes of the original mesh, before `split` made parts of them."""
        sizes = dict.fromkeys((axis.level for axis in self.axes), 1)
        for axis in self.axes:
            sizes[axis.level] *= axis.size
        return tuple(MeshAxis(level, size, level) for level, size in sizes.items())

    def refines(self, other: "Mesh") -> bool:
        """Whether each axis of another mesh of the same levels is an axis of this one, or consists of several."""
        mine, theirs = (set(accumulate((axis.size for axis in mesh.axes), operator.mul)) for mesh in (self, other))
        return self.levels == other.levels and theirs <= mine

    def in_words(self) -> str:
        """The mesh as text for errors; if it was split, with the mesh of which its axes are parts."""
        return repr(self) + ("" if self.levels == self.axes else f", parts of {Mesh.of_axes(self.levels)!r}")

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.axes == other.axes and self._speeds == other._speeds

    def __hash__(self) -> int:
        return hash(self.axes)

    def axis(self, name: str) -> MeshAxis:
        """The axis of this name. ValueError: there is none."""
        for axis in self.axes if isinstance(name, str) else ():
            if axis.name == name:
                return axis
        raise ValueError(f"the mesh has no axis {shown(name)}; it has {', '.join(self.names)}")

    def size(self, name: str) -> int:
        """The number of ranks along an axis. ValueError: there is no such axis."""
        return self.axis(name).size

    def split(self, name: str, /, **sizes: int) -> "Mesh":
        """The same ranks, with one axis in several parts (outermost first) that use the same links.

        `Mesh(gpu=4).split("gpu", a=2, b=2)`. ValueError: there is no part, a size is below 1, the sizes do not multiply to
        the axis's, or a name is taken.
        """
        axis = self.axis(name)
        parts = tuple(MeshAxis(part, size, axis.level) for part, size in sizes.items())
        if not parts:
            raise ValueError(
                f"mesh axis {name} needs parts to be split into, for example split({name!r}, a={axis.size})"
            )
        if math.prod(sizes.values()) != axis.size:
            product = " * ".join(map(str, sizes.values()))
            raise ValueError(f"mesh axis {name} of {axis.size} ranks is not {product} = {math.prod(sizes.values())}")
        for part in sizes:
            if part in {*self.names} - {name}:
                raise ValueError(f"the mesh has an axis {part!r} already")
        index = self.axes.index(axis)
        return self._with((*self.axes[:index], *parts, *self.axes[index + 1 :]))

    def with_speeds(self, speeds: Mapping[str, Any]) -> "Mesh":
        """The same ranks, with these speeds of levels in place of those that are known; other levels keep theirs.

        ValueError: a value is no speed, there is no such level, or `speeds` is no mapping.
        """
        speeds = _speeds_in(speeds)
        levels = {axis.level for axis in self.axes}
        for name, speed in speeds.items():
            if name not in levels:
                raise ValueError(f"speed for level {shown(name)}, but the mesh has {', '.join(sorted(levels))}")
            speeds[name] = _speed(name, speed)
        mesh = self._with(self.axes)
        mesh._speeds = {**self._speeds, **speeds}
        return mesh

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: index along it} of a rank. ValueError: there is no such rank."""
        try:
            rank = operator.index(rank)
        except TypeError:
            raise ValueError(f"rank {shown(rank)} is no whole number") from None
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in a mesh of {self.ranks} ranks")
        found = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.size)
        return found

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


def _speeds_in(speeds: Any) -> dict[str, Any]:
    if not isinstance(speeds, Mapping):
        raise ValueError(f"speeds={shown(speeds)}: they are given as {{mesh axis: (seconds, bytes per second)}}")
    return dict(speeds)


def _speed(name: str, speed: Any) -> Fabric | tuple[float, float]:
    """A speed as it is stored; ValueError if it is none."""
    if isinstance(speed, Fabric):
        if not {"p2p", "all_gather"} & {curve.operation for curve in speed.curves}:
            raise ValueError(
                f"the fabric of mesh axis {name} has neither p2p nor all_gather, and plans send between pairs of ranks"
            )
        return speed
    is_pair = isinstance(speed, tuple | list) and len(speed) == 2 and all(isinstance(number, Real) for number in speed)
    if not is_pair or not (0 <= speed[0] <= LONGEST and 1 <= speed[1] < FASTEST):
        raise ValueError(
            f"speed of mesh axis {name} is {shown(speed)}; it must be (0 to {LONGEST:g} seconds, at least 1 byte per "
            f"second) in two numbers below {FASTEST:g}, or a Fabric"
        )
    return float(speed[0]), float(speed[1])
