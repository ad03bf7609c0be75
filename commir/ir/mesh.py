"""A mesh of ranks: named axes from the outermost (slowest links) to the innermost, each with the speed of its level."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh. level: the axis of the original mesh of which it is a part, whose links it uses."""

    name: str
    size: int
    level: str


class Mesh:
    """Ranks in a grid: `Mesh(node=2, gpu=4)` has 8 ranks; rank = 4 * node + gpu, as the last axis counts fastest.

    sizes: {axis: number of ranks along it}, outermost first. speeds: {axis: (alpha_s, bytes_per_s) or a
    `sparsefusion.Fabric`}, what a message costs along the axis: seconds before the first byte, and the rate at which a
    rank sends; axes without one are taken to be equally fast. ValueError: a size below 1, no axis, or a speed for an axis
    that does not exist.
    """

    def __init__(self, speeds: Mapping[str, Any] | None = None, **sizes: int) -> None:
        if not sizes:
            raise ValueError("a mesh needs at least one axis, for example Mesh(gpu=4)")
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {name} has size {size!r}; it must be a whole number of at least 1")
        self.axes = tuple(MeshAxis(name, size, name) for name, size in sizes.items())
        self.speeds = dict(speeds or {})
        for name, speed in self.speeds.items():
            if name not in sizes:
                raise ValueError(f"speed for mesh axis {name!r}, but the mesh has {', '.join(sizes)}")
            _check_speed(name, speed)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.axes == other.axes and self.speeds == other.speeds

    def __hash__(self) -> int:
        return hash(self.axes)

    def axis(self, name: str) -> MeshAxis:
        """The axis of this name. ValueError: there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ValueError(f"the mesh has no axis {name!r}; it has {', '.join(self.names)}")

    def size(self, name: str) -> int:
        """The number of ranks along an axis. ValueError: there is no such axis."""
        return self.axis(name).size

    def split(self, name: str, **sizes: int) -> "Mesh":
        """The same ranks, with one axis in several parts (outermost first) that use the same links.

        `Mesh(gpu=4).split("gpu", a=2, b=2)`. ValueError: the sizes do not multiply to the axis's, or a name is taken.
        """
        axis = self.axis(name)
        if math.prod(sizes.values()) != axis.size:
            product = " * ".join(map(str, sizes.values()))
            raise ValueError(f"mesh axis {name} of {axis.size} ranks is not {product} = {math.prod(sizes.values())}")
        taken = {*self.names} - {name}
        for part in sizes:
            if part in taken:
                raise ValueError(f"the mesh has an axis {part!r} already")
        return self._with(
            tuple(
                part
                for each in self.axes
                for part in ([MeshAxis(n, s, axis.level) for n, s in sizes.items()] if each is axis else [each])
            )
        )

    def with_speeds(self, speeds: Mapping[str, Any]) -> "Mesh":
        """The same ranks, with these speeds of levels besides those that are known."""
        mesh = self._with(self.axes)
        mesh.speeds = {**speeds, **self.speeds}
        return mesh

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: index along it} of a rank. ValueError: there is no such rank."""
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
        mesh.axes, mesh.speeds = axes, self.speeds
        return mesh


def _check_speed(name: str, speed: Any) -> None:
    if hasattr(speed, "time"):
        return
    try:
        alpha, rate = speed
        is_valid = alpha >= 0 and rate > 0
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"speed of mesh axis {name} is {speed!r}; it must be (seconds >= 0, bytes per second > 0) or a Fabric"
        )
