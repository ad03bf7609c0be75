"""The times of tiles on this machine, and how much of them hides messages: for predictions of plans that overlap."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import on_first, together
from commfabric.collectives.counted import all_reduce, exchange
from commfabric.collectives.wire_formats import at_least_fp32
from commfabric.fabric.measurement import repetitions, timed
from commir.ir.mesh import Mesh
from commir.ir.program import WHOLE, Program
from commir.programs.tiles import tile_into, tile_of

from .operator_options import GraphNode, options_of, tile_name

REPETITIONS = 7
LEAST_OVERLAP = -2.0
LARGEST = 1 << 24  # bytes of a block


def measure_tile(
    program: Program, ranks: int, group: ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Measure (point_seconds, call_seconds), as `search` takes them, with a tile as plans on `ranks` ranks have it and a
    smaller one.

    If no tile is smaller, point_seconds is 0.

    Args:
        program: the program; the tiles have random inputs in its dtype.
        ranks: the number of ranks of the plans.
        group: its ranks measure at the same time, as they will compute, and all return the times of the slowest.
        device: of the inputs.

    Raises:
        ValueError: on every rank, if the ranks of `group` have different arguments, which they compare.
    """
    _compare(program, group, device, ranks=ranks)
    tile = tile_program(program, ranks)
    smaller = tile_program(tile, 4)
    measured = [tile_seconds(tile, device), tile_seconds(smaller, device)]
    times = torch.tensor(measured, dtype=torch.float64, device=device)
    large, small = all_reduce(times, group, op=dist.ReduceOp.MAX).tolist()
    if smaller == tile:
        return 0.0, large
    per_point = max(0.0, (large - small) / (tile.points - smaller.points))
    return per_point, max(0.0, small - per_point * smaller.points)


def measure_overlap(program: Program, group: ProcessGroup | None = None, device: torch.device | str = "cpu") -> float:
    """Measure the `overlap` of tiles and messages on the ranks of `group`, as `search` takes it; the same on all of them.

    A ring of all ranks computes as many small tiles as it has ranks, and passes a block on during each. The ring, and tiles
    and messages alone, take turns; the slowest rank's median time of each counts. Ranks that share processors wait for one
    another in every turn, so the result may be negative; it is at least LEAST_OVERLAP. It is 1.0 for one rank, and where
    tiles or messages take so little time that nothing can be told.

    A block has the mean size of an input's block at home or, if that arrives before a tile is computed, as many more bytes
    as make up for it (at most LARGEST). Sends 3 (REPETITIONS + 1) times as many blocks as the group has ranks.

    Args:
        program, group, device: as in `measure_tile`.

    Raises:
        ValueError: on every rank, if the ranks have different programs or devices.
    """
    _compare(program, group, device)
    if group is None or group.size() == 1:
        return 1.0
    ranks, rank = group.size(), group.rank()
    tile = _prepared(tile_program(program, ranks**2), device)

    def ring(nbytes: int, tiles: int) -> Callable[[], object]:
        """A function that takes the turns of a ring, with blocks of some bytes (0: none) and some tiles in each."""
        leaving, arriving = torch.zeros(2, nbytes, dtype=torch.uint8, device=device)

        def turns() -> None:
            for _ in range(ranks):
                sends, receives = [(leaving, (rank - 1) % ranks)], [(arriving, (rank + 1) % ranks)]
                message = exchange(sends, receives, group) if nbytes else None
                for _ in range(tiles):
                    tile()
                if message is not None:
                    message.wait()

        return turns

    def seconds(*calls: Callable[[], object]) -> torch.Tensor:
        return repetitions([timed(each, device) for each in calls], group, device, REPETITIONS)

    nbytes = min(LARGEST, sum(program.nbytes(operand) for operand in program.inputs) // len(program.inputs) // ranks)
    computing, latency, message = seconds(ring(0, 1), ring(1, 0), ring(nbytes, 0)).median(0).values.tolist()
    nbytes = min(LARGEST, int(nbytes * max(1.0, computing / max(message - latency, 1e-3 * message))))
    times = seconds(ring(0, 1), ring(1, 0), ring(nbytes, 0), ring(nbytes, 1))
    computing, latency, message, both = times.median(0).values.tolist()
    shorter, longer = sorted((computing, message - latency))
    if shorter <= (times[:, 3] - both).abs().median():
        return 1.0
    return min(1.0, max(LEAST_OVERLAP, 1 - (both - latency - longer) / shorter))


def _compare(program: Program, group: ProcessGroup | None, device: torch.device | str, **others: object) -> None:
    """Raise ValueError on every rank of `group` unless all call with the same arguments."""

    def arguments() -> dict[str, object]:
        """The arguments that must be equal on all ranks."""
        axes = ", ".join(f"{axis.name} {axis.size}" for axis in program.axes)
        summary = f"{program.name} in {program.dtype}: {axes}"  # an error shows it before the whole program
        return {**others, "device": torch.device(device).type, "program": summary, "the whole program": program}

    together(arguments, [group], lambda checked: checked)


def tile_program(program: Program, blocks: int) -> Program:
    """The program on one of about `blocks` blocks: of its two loops with the most elements, as far as they divide."""
    loops = [axis for axis in program.axes if axis.kind != WHOLE]
    units = {axis.name: math.lcm(*(operand.divisor(axis.name) for operand in program.operands)) for axis in loops}
    loops.sort(key=lambda axis: -(axis.size // units[axis.name]))
    counts = {axis.name: axis.size // units[axis.name] // math.isqrt(blocks) for axis in loops[:2]}
    return program.resized(**{name: units[name] * max(1, count) for name, count in counts.items()})


def random_inputs(
    program: Program, shapes: Mapping[str, Sequence[int]], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Normal random inputs of these shapes, in the dtypes of the program."""
    dtype = getattr(torch, program.dtype)
    dtypes = {name: at_least_fp32(dtype) if program.operand(name).is_wide else dtype for name in shapes}
    return {name: torch.randn(tuple(shape), device=device).to(dtypes[name]) for name, shape in shapes.items()}


def tile_seconds(tile: Program, device: torch.device | str) -> float:
    """The median time of a tile on a device of this machine."""
    stopwatch = timed(_prepared(tile, device), device)
    return statistics.median(stopwatch() for _ in range(REPETITIONS))


def _prepared(tile: Program, device: torch.device | str = "cpu") -> Callable[[], object]:
    """A tile with random inputs, to be computed and, if one function does both, combined into earlier results."""
    shapes = {operand.name: tile.shape(operand) for operand in tile.inputs if operand.in_tile}
    inputs = random_inputs(tile, shapes, device)
    indices = {axis.name: torch.arange(axis.size, device=device) for axis in tile.axes if axis.kind != WHOLE}
    compute, into = tile_of(tile), tile_into(tile)
    if into is None:
        return partial(compute, tile, inputs, indices)
    computed = compute(tile, inputs, indices)
    return partial(into, tile, inputs, indices, [computed[name] for name in tile.results[0].outputs])


def measure_operators(
    operators: Sequence[GraphNode], mesh: Mesh, path: str | Path, group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:  # fmt: skip
    """Measure the tiles that the operators of a graph have in all placements on a mesh: {tile: seconds}.

    Times that the file has are not measured again; new ones are added to it by the first rank. All ranks of the group call
    it, measure at the same time, and return the times of the slowest rank.

    Args:
        operators, mesh: as in `search_graph`.
        path: a JSON file of this machine and device, which need not exist.
        group: the ranks of the mesh (None: this process alone).
        device: of the tiles.

    Raises:
        ValueError: on every rank, if the file is no JSON object of times, or an operator has no option.
    """
    path = Path(path)
    known = on_first(lambda: _read(path), group)
    tiles: dict[str, Program] = {}

    def collect(tile: Program) -> float:
        """Remember a tile that an option has."""
        tiles[tile_name(tile)] = tile
        return 0.0

    for operator in operators:
        options_of(operator, mesh, None, None, collect)
    missing = [name for name in tiles if name not in known]
    measured = torch.tensor([tile_seconds(tiles[name], device) for name in missing], dtype=torch.float64, device=device)
    if missing:
        slowest = all_reduce(measured, group, op=dist.ReduceOp.MAX).tolist()
        known |= dict(zip(missing, slowest, strict=True))
        on_first(lambda: path.write_text(json.dumps(known, indent=1)), group)
    return known


def _read(path: Path) -> dict[str, float]:
    try:
        saved = json.loads(path.read_text()) if path.exists() else {}
        return {str(name): float(seconds) for name, seconds in saved.items()}
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path} is no JSON object of times of tiles") from None
