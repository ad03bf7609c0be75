"""Plans of attention beside one another: schedules by hand, links, predictions against times; and plans with wrong steps."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.cells import measured_cells, write_result
from benchmarks.support.tables import markdown
from commfabric.collectives.counted import exchange
from commfabric.fabric.measurement import repetitions, timed
from commir import Mesh, Plan, Schedule, execute, interpret, known, programs, search
from commir.execution.verifier import smallest, unscheduled
from commir.ir.program import Program
from commir.lowering.plan_steps import Place, Step
from commir.programs.scan_programs import with_lasting_states
from commir.scheduling.loop_nest import IllegalSchedule
from commir.searching.candidates import candidates
from commir.searching.cost import CostModel
from commir.searching.search import _lowered, check_homes_divide
from commir.searching.tile_times import LEAST_OVERLAP, measure_overlap, measure_tile

SMALL, LARGEST = 2_000, 20_000_000  # bytes of the messages by which links are measured
BURST = "16kb"


@dataclass(frozen=True)
class AttentionCell:
    """One measurement: attention of a shape on nodes of some ranks, each node behind a link of a rate."""

    nodes: int
    per_node: int
    rate: str
    kv_heads: int
    heads: int = 8
    seq: int = 1024

    @property
    def ranks(self) -> int:
        """The ranks of all nodes together."""
        return self.nodes * self.per_node

    @property
    def mesh(self) -> Mesh:
        """Two levels, or one if each rank is a node."""
        return Mesh(x=self.ranks) if self.per_node == 1 else Mesh(node=self.nodes, gpu=self.per_node)

    @property
    def program(self) -> Program:
        """Attention of these sizes, of heads of 64."""
        return programs.attention(1, self.heads, self.kv_heads, self.seq, 64, dtype="bfloat16")

    @property
    def tensors(self) -> str:
        """The links and the heads, for a table."""
        return f"{self.rate}, {self.heads}/{self.kv_heads} heads"


@dataclass(frozen=True)
class Comparison:
    """A benchmark of the plan that a search chooses against those by hand, in several cells.

    The speeds of the links, the time of a tile and what it hides of messages are measured before, on all ranks at once. The
    plans take turns, `repeated` times, with random inputs in bf16. A chosen plan that equals one by hand is that plan, and
    not timed again. The plan called ring runs twice, and the difference of its two medians is the spread. by_hand: {name:
    plan} of a cell, with a ring; see `in_all_ways`. shown: the kinds of the table's columns, of which each has the fastest
    plan. chosen: how the table calls the chosen plan.
    """

    cells: Sequence[AttentionCell]
    by_hand: Callable[[AttentionCell], dict[str, Plan]]
    shown: Sequence[str]
    repeated: int
    chosen: Callable[[Plan], str]
    describe: Callable[[AttentionCell], str]

    def table(self, file: str, first_column: str) -> str:
        """The table of all cells, or of those whose numbers the command line gives; they are measured by ranks of `file`."""
        results = measured_cells(file, self.cells, burst=BURST)
        header = [first_column, "ring", *self.shown, "chosen", "predicted/measured", "correlation", "overlap", "spread"]
        rows = [self._row(cell, measured) for cell, measured in results.items()]
        pairs = [pair for each in results.values() for pair in _pairs(each)]
        print(f"rank correlation of {len(pairs)} times over all cells: {correlation(pairs):.3f}")
        cells = [_pairs(each) for each in results.values()]
        print(
            f"of a prediction that knows the median time of each cell alone: {correlation(_of_cells_alone(cells)):.3f}"
        )
        print(f"of times divided by the median of their cell: {correlation(_relative(cells)):.3f}")
        within = [correlation(pairs) for pairs in cells]
        print(f"median of the rank correlations within cells: {statistics.median(within):.2f}")
        return markdown(header, rows)

    def measure(self, out: str, number: str) -> None:
        """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        cell, group, rank = self.cells[int(number)], dist.group.WORLD, dist.get_rank()
        speeds = link_speeds(cell.mesh, group, self.repeated)
        tile = *measure_tile(cell.program, cell.ranks, group), measure_overlap(cell.program, group)
        times = dict(zip(("point_seconds", "call_seconds", "overlap"), tile, strict=True))
        best, *_ = search(cell.program, cell.mesh.with_speeds(speeds), **times)
        by_hand = self.by_hand(cell)
        plans = {"ring again": by_hand["ring"], "chosen": best, **by_hand}
        same = next((name for name, plan in by_hand.items() if plan.hash == best.hash), None)
        if same:
            del plans["chosen"]
        local = random_blocks(cell.ranks, rank, cell.seq, cell.heads, cell.kv_heads)
        seconds = median_seconds(plans, local, group, self.repeated)
        if rank == 0:
            del plans["ring again"]
            on_measured_links = {
                name: plan for name, plan in plans.items() if all(axis.level in speeds for axis in plan.mesh.axes)
            }
            write_result(out, {
                "seconds": seconds,
                "predicted": {name: predicted(plan, speeds, tile) for name, plan in on_measured_links.items()},
                "chosen": same or "chosen",
                "placement": self.chosen(best),
                "speeds": speeds,
                "tile": tile,
            })  # fmt: skip
        dist.barrier()
        dist.destroy_process_group()

    def _row(self, cell: AttentionCell, measured: dict) -> list[str]:
        """A row of the table: times relative to the ring; the chosen plan, relative to the best by hand."""
        seconds, chosen = measured["seconds"], measured["chosen"]
        names = [name for name in seconds if name not in ("chosen", "ring again")]
        best = min(names, key=seconds.__getitem__)
        others = []
        for shown in self.shown:
            ways = [seconds[name] for name in names if name.partition(" (")[0] == shown]
            others.append(f"{seconds['ring'] / min(ways):.2f}x" if ways else "")
        against_best = f"{measured['placement']}: {seconds[chosen] / seconds[best]:.2f} of {best}"
        predictions = f"{measured['predicted'][chosen] / seconds[chosen]:.2f}", f"{correlation(_pairs(measured)):.2f}"
        bound = "at most " * (measured["tile"][2] <= LEAST_OVERLAP)
        overlap, spread = f"{bound}{measured['tile'][2]:.1f}", f"{abs(seconds['ring again'] / seconds['ring'] - 1):.0%}"
        return [
            self.describe(cell),
            f"{seconds['ring']:.3f} s",
            *others,
            against_best,
            *predictions,
            overlap,
            spread,
        ]


def all_plans(
    program: Program, mesh: Mesh, point_seconds: float = 0.0, call_seconds: float = 0.0, overlap: float = 1.0,
    with_chunks: bool = False,
) -> list[Plan]:  # fmt: skip
    """The plans of all candidates in their fixed order. with_chunks=True adds the plans in chunks. Other arguments as in
    `search`.
    """
    check_homes_divide(program, mesh)
    model = CostModel(program, mesh, point_seconds, call_seconds, overlap)
    chosen = list(candidates(program, mesh))
    if with_chunks:
        chosen += [part for candidate in chosen for part in candidate.in_chunks(program)]
    return _lowered(model, chosen)


def placed(plan: Plan) -> str:
    """Which loop each mesh axis of a plan computes."""
    return str(plan.schedule).partition(": ")[2]


def in_all_ways(
    program: Program, kind: str, name: str, ways: Mapping[str, tuple[Mesh, Sequence[str]]]
) -> dict[str, Plan]:
    """{`kind`, or "`kind` (way)": plan} of a known schedule, without those that do not divide.

    ways: {how the ranks are divided, or "": (mesh, its axes)}. name, and the axes of the mesh: as for `commir.known`.
    """
    plans = {}
    for way, (mesh, mesh_axes) in ways.items():
        with suppress(IllegalSchedule):
            plans[kind + f" ({way})" * bool(way)] = known(Schedule(program, mesh), name, *mesh_axes).lower()
    return plans


def link_speeds(mesh: Mesh, group: dist.ProcessGroup, repeated: int) -> dict[str, tuple[float, float]]:
    """{mesh axis: (latency in seconds, bytes per second)} of messages that all ranks pass on along it at the same time."""
    return {axis: _link_speed(mesh, axis, group, repeated) for axis in mesh.names}


def _link_speed(mesh: Mesh, axis: str, group: dist.ProcessGroup, repeated: int) -> tuple[float, float]:
    here = mesh.coordinates(group.rank())
    before, after = (mesh.rank_at({**here, axis: (here[axis] + distance) % mesh.size(axis)}) for distance in (-1, 1))

    def pass_on(nbytes: int) -> Callable[[], object]:
        out, into = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        return lambda: exchange([(out, before)], [(into, after)], group).wait()

    large, seconds = 100 * SMALL, (0.0, 0.0)
    while True:  # with ever larger messages, until they take much longer than a small one
        calls = [timed(pass_on(nbytes)) for nbytes in (SMALL, large)]
        seconds = tuple(repetitions(calls, group, "cpu", repeated).median(0).values.tolist())
        if seconds[1] > 4 * seconds[0] or large >= LARGEST:
            break
        large *= 10
    rate = (large - SMALL) / max(seconds[1] - seconds[0], 1e-9)
    return max(0.0, seconds[0] - SMALL / rate), rate


def predicted(plan: Plan, speeds: Mapping[str, tuple[float, float]], tile: tuple[float, float, float]) -> float:
    """The predicted seconds of a plan. speeds: of the levels of its mesh. tile: (per point, per call, overlap)."""
    return plan.on_mesh(plan.mesh.with_speeds(speeds)).with_tile(*tile).seconds


def random_blocks(ranks: int, rank: int, seq: int, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """This rank's blocks of q, k and v at home, in bf16: (1, seq / ranks, heads, 64)."""
    generator, counts = torch.Generator().manual_seed(rank), {"q": heads, "k": kv_heads, "v": kv_heads}
    return {
        name: torch.randn(1, seq // ranks, count, 64, generator=generator).bfloat16() for name, count in counts.items()
    }


def median_seconds(
    plans: Mapping[str, Plan], local: dict[str, torch.Tensor], group: dist.ProcessGroup, repeated: int
) -> dict[str, float]:
    """{name: median seconds} of plans that take turns; the slowest rank's."""
    calls = [timed(lambda plan=plan: execute(plan, local, group)) for plan in plans.values()]  # type: ignore[misc]
    return dict(zip(plans, repetitions(calls, group, "cpu", repeated).median(0).values.tolist(), strict=True))


def _pairs(measured: dict) -> list[tuple[float, float]]:
    """(measured, predicted) seconds of a cell's plans."""
    return [(measured["seconds"][name], seconds) for name, seconds in measured["predicted"].items()]


def _of_cells_alone(cells: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """(measured, median of the measured times of the cell): what predictions must exceed to be more than the cell's size."""
    return [
        (time, statistics.median(times)) for times in ([time for time, _ in pairs] for pairs in cells) for time in times
    ]


def _relative(cells: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """(measured, predicted), each divided by the median of its cell."""
    found = []
    for pairs in cells:
        medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
        found += [(measured / medians[0], predicted / medians[1]) for measured, predicted in pairs]
    return found


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation."""
    places = torch.tensor([_places(list(values)) for values in zip(*pairs, strict=True)], dtype=torch.float64)
    return float(torch.corrcoef(places)[0, 1])


def _places(values: list[float]) -> list[float]:
    """The place of each value in their order, from 0; equal values have the mean of their places."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


# Plans with a wrong step, and whether they compute something else


def random_inputs(program: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """{input: random float64 tensor} for the inputs that a caller gives; the states of a scan do not grow."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        operand.name: torch.randn(program.shape(operand), generator=generator, dtype=torch.float64)
        for operand in program.inputs
        if not operand.source
    }
    return inputs if program.scan is None else with_lasting_states(program, inputs)


def _other_value(value: Any, names: Sequence[str], generator: random.Random) -> Any:
    """A wrong value for a field of a step. names: that are as valid as those in the value."""
    if isinstance(value, int):
        return value + generator.choice([-1, 1])
    if isinstance(value, str):
        return generator.choice([name for name in names if name != value] or ["unknown"])
    if isinstance(value, Place):
        return generator.choice([replace(value, dim=value.dim + 1), replace(value, outer=value.outer * 2)])
    if isinstance(value, tuple) and value:
        index = generator.randrange(len(value))
        return (*value[:index], _other_value(value[index], names, generator), *value[index + 1 :])
    return value


def corrupted(plan: Plan, generator: random.Random) -> Plan:
    """A plan with one step dropped, repeated, changed in a field, or exchanged with another.

    A field gets the value that another step of its kind has there, or another number, operand, mesh axis or place.
    """
    steps = list(plan.steps)
    index, other = generator.randrange(len(steps)), generator.randrange(len(steps))
    kind = generator.choice(["drop", "repeat", "exchange", "change", "change", "change"])
    if kind == "drop" or (kind == "change" and not fields(steps[index])):
        del steps[index]
    elif kind == "repeat":
        steps.insert(index, steps[index])
    elif kind == "exchange":
        steps[index], steps[other] = steps[other], steps[index]
    else:
        steps[index] = _changed(plan, steps[index], generator)
    return replace(plan, steps=tuple(steps))


def _changed(plan: Plan, step: Step, generator: random.Random) -> Step:
    """A step with another value of one field."""
    name = generator.choice(fields(step)).name
    value = getattr(step, name)
    elsewhere = [
        getattr(each, name) for each in plan.steps if type(each) is type(step) and getattr(each, name) != value
    ]
    if elsewhere and generator.random() < 0.5:
        return replace(step, **{name: generator.choice(elsewhere)})
    operands = [each.name for each in (*plan.program.operands, *plan.program.internal)]
    names = plan.mesh.names if name in ("axis", "axes") else operands
    return replace(step, **{name: _other_value(value, names, generator)})


def effect(plan: Plan) -> str:
    """What is wrong with a plan on inputs of twice the size: "raises", "differs" from the unscheduled program, or ""."""
    double = smallest(plan, whole=8, inner=4)
    for mask in (True, False):
        masked = double.with_options(causal=mask) if "causal" in dict(plan.program.options) else double
        inputs = random_inputs(masked.program, seed=12345)
        try:
            found = interpret(masked, inputs)
        except (RuntimeError, ValueError, KeyError, IndexError):
            return "raises"
        expected = unscheduled(masked.program, inputs)
        if not all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-9) for name in found):
            return "differs"
    return ""
