"""Plans of attention beside one another: their schedules by hand, the speed of links, and predictions against times."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from commir import Mesh, Plan, Schedule, execute
from commir.ir.program import Program
from commir.scheduling.loop_nest import Illegal
from commir.scheduling.placements import Placement, place
from sparsefusion.collectives.counted import exchange
from sparsefusion.fabric.measurement import repetitions, timed

SMALL, LARGEST = 2_000, 20_000_000  # bytes of the messages by which links are measured
STREAMED_Q, STREAMED_KV = Placement("kv", True), Placement("q", True)


def lowered(program: Program, mesh: Mesh, placement: Mapping[str, str | Placement]) -> list[Plan]:
    """The plan of a placement, or nothing if it does not divide."""
    try:
        return [place(Schedule(program, mesh), **placement).lower()]
    except Illegal:
        return []


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


def predicted(plan: Plan, speeds: Mapping[str, tuple[float, float]], tile: tuple[float, float]) -> float:
    """The predicted seconds of a plan. speeds: of the levels of its mesh. tile: (seconds per point, seconds per call)."""
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


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation."""
    pairs = torch.tensor([_places(a), _places(b)], dtype=torch.float64)
    return float(torch.corrcoef(pairs)[0, 1])


def _places(values: list[float]) -> list[float]:
    """The place of each value in their order, from 0."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(number)) for number in range(len(values))]
