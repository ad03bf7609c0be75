"""Measures the costs of messages on the links between ranks, and of selecting and copying on their cores.

All ranks measure together and use the mean over the ranks, so that all ranks have the same costs.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commfabric.collectives.counted import all_reduce
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.measurement import collective_calls, repetitions, timed
from sparsefusion.gradients.error_feedback import ErrorFeedback
from sparsefusion.gradients.reducer import Reducer
from sparsefusion.planning.compression import CompressionSettings
from sparsefusion.planning.plan import Unit
from sparsefusion.planning.timeline import Costs
from sparsefusion.selection.fused import add_at

SIZES = {1 << 10: 8, 1 << 15: 5, 1 << 18: 3, 1 << 20: 1, 1 << 21: 1}  # {bytes of a message: repetitions}
SLOW_S = 0.03  # if a message takes longer, larger ones are not measured, except that at least two sizes are
SMALLEST, LARGEST = 1 << 12, 1 << 22  # numbers of elements from which a selection is measured
SMALL_MESSAGE = 64  # elements of the message that measures the fixed costs of messages


def mean_over_ranks(numbers: list, group: ProcessGroup, device: torch.device) -> list[float]:
    """The mean of each number over the ranks, with the same bits on every rank."""
    total = all_reduce(torch.tensor(numbers, dtype=torch.float64, device=device), group)
    return (total / group.size()).tolist()


def measure_costs(
    group: ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    numel: int,
    compression: CompressionSettings,
    dense_operation: str = "all_reduce",
    fabric: Fabric | None = None,
) -> Costs:
    """Measure the costs of a step with gradients of `numel` elements. All ranks of `group` call it, and get the same result.

    dense_operation: the collective with which the framework sends gradients. fabric: the times of messages, which are
    measured by default.
    """
    ranks = group.size()
    small = compression.messages(compression.sent_bytes(SMALL_MESSAGE, dtype.itemsize), ranks)

    def times_of_fabric(operation, nbytes):
        return fabric.time(operation, nbytes, ranks)

    operations = {"all_reduce", dense_operation, *(name for name, _ in small)}
    times = interpolated_times(measure_messages(group, device, operations)) if fabric is None else times_of_fabric
    sizes = np.unique(np.geomspace(SMALLEST, max(2 * SMALLEST, min(numel, LARGEST)), 4).astype(int))
    selecting = [_time_selection(size, dtype, compression, device) for size in sizes.tolist()]
    numel, k = int(sizes[-1]), max(64, int(compression.density * sizes[-1]))
    indices, values = (torch.arange(k, device=device) * (numel // k)).int(), torch.ones(k, device=device)
    source, target = torch.zeros(2, numel, device=device).unbind()
    adding = _median(lambda: add_at([target], values, indices), device) / k
    copying = _median(lambda: target.copy_(source), device) / (4 * numel)
    per_message = _time_message(group, dtype, compression, device)
    *selecting, adding, copying, per_message = mean_over_ranks(
        [*selecting, adding, copying, per_message], group, device
    )
    sending = sum(times(name, nbytes) for name, nbytes in small)

    @cache
    def select(count):
        """Seconds to select from `count` elements: interpolated, or proportional beyond the largest measured size."""
        if count > sizes[-1]:
            return selecting[-1] * count / sizes[-1]
        return float(np.interp(count, [0, *sizes], [0.0, *selecting]))

    return Costs(
        times, ranks, select, lambda n: n * adding, lambda nbytes: nbytes * copying,
        dense_operation=dense_operation, per_message=max(0.0, per_message - selecting[0] - sending),
    )  # fmt: skip


def measure_messages(
    group: ProcessGroup, device: torch.device, operations: Iterable[str]
) -> dict[str, list[tuple[int, float]]]:
    """{operation: [(bytes, seconds)]}: collectives of a few sizes, up to 2 MB or SLOW_S.

    Two of them take 0.6 seconds at 200 mbit.
    """
    names = sorted(operations)
    calls, points = collective_calls(group, names, device), {name: [] for name in names}
    if "reduce_scatter" in calls:
        calls["reduce_scatter"] = partial(_reduce_scatter, group, device)
    for nbytes, count in SIZES.items():
        running = [name for name in calls if len(points[name]) < 2 or points[name][-1][1] < SLOW_S]
        if running:
            functions = [timed(calls[name](nbytes), device) for name in running]
            medians = repetitions(functions, group, device, count, warm_up=count > 1).median(0).values.tolist()
            for name, seconds in zip(running, medians, strict=True):
                points[name].append((nbytes, seconds))
    return points


def _reduce_scatter(group: ProcessGroup, device: torch.device, nbytes: int) -> Callable[[], object]:
    """torch's reduce-scatter, which frameworks call; on gloo it sends as much as an all-reduce."""
    part = torch.zeros(-(-nbytes // (4 * group.size())), device=device)
    return partial(dist.reduce_scatter_tensor, part, part.repeat(group.size()), group=group)


def interpolated_times(points: Mapping[str, Sequence[tuple[int, float]]]) -> Callable[[str, int], float]:
    """times(operation, nbytes): seconds of a message, interpolated between the measured sizes {operation: points}.

    Beyond the largest size, times continue along the line through the last two points, because links with burst credit take
    longer per byte of a large message.
    """

    def times(operation, nbytes):
        measured = points[operation]
        if nbytes <= measured[0][0]:
            return measured[0][1]
        end = min(bisect_left(measured, (nbytes,)), len(measured) - 1)
        (small, before), (large, after) = measured[end - 1], measured[end]
        slope = (after - before) / (large - small)
        return after + (slope if nbytes <= large else max(0.0, slope)) * (nbytes - large)

    return times


def _time_selection(numel: int, dtype: torch.dtype, compression: CompressionSettings, device: torch.device) -> float:
    generator = torch.Generator(device).manual_seed(0)  # the global generator belongs to the training
    gradients = {"gradient": torch.randn(numel, device=device, generator=generator).to(dtype)}
    feedback = ErrorFeedback(compression.sparsifier)
    unit = Unit(("gradient",), numel, max(1, int(compression.density * numel)))
    return _median(lambda: feedback.select(unit, gradients, 1.0), device)


def _time_message(
    group: ProcessGroup, dtype: torch.dtype, compression: CompressionSettings, device: torch.device
) -> float:
    """The time of a small sparse message with its selection and its transfer: the median of seven calls."""
    reducer = Reducer(group, compression.sparsifier, compression.wire, compression.exchange)
    unit = Unit(("gradient",), SMALLEST, SMALL_MESSAGE)
    gradients = {"gradient": torch.ones(SMALLEST, dtype=dtype, device=device)}
    return _median(lambda: reducer.start([unit], gradients).wait(), device, 7)


def _median(function: Callable[[], object], device: torch.device, count: int = 3) -> float:
    """The median time of `count` calls, after a warm-up."""
    run = timed(function, device)
    run()
    return median(run() for _ in range(count))
