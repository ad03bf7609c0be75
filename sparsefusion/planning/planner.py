"""Plans which gradients are dense or sparse, and in which buffers: SSFusion (Ming et al.), section IV.

`make_plans` makes the plans of some modes from a timeline and costs; `predict` gives the time of a step under a plan.
Both depend on their arguments only, so ranks with the same arguments get the same plan.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

from .compression import CompressionSettings, bytes_per_element
from .fusion_cuts import find_opt_fusion
from .plan import FRAMEWORK_BUCKET_MODES, Buffer, Plan, Unit
from .timeline import Costs, Load, Tensor, Timeline, step_seconds

SMALLEST_SPARSE, SMALLEST_SPARSE_DIMS = (
    2048,
    2,
)  # elements and dims; smaller gradients are dense in modes that may choose
LARGEST_DENSE = 0.05  # gradients above this share of all elements are never sent dense to save their selection
SLACK = 1.01  # a step may become longer by this factor while Eq. 2 makes more gradients of a buffer dense
MOST_INDICES = 2**31 - 1  # the number of elements that 32-bit indices can address
LEAST_COMPENSATION = 0.5  # the smallest compensated density, as a share of the user's density
PAPER_FLOOR = 0.001  # the smallest compensated density in SSFusion

Number = TypeVar("Number", int, float)


def make_plans(
    modes: Iterable[str],
    compression: CompressionSettings,
    timeline: Timeline,
    costs: Costs,
    can_send_early: bool = False,
) -> dict[str, Plan]:
    """{mode: plan} for `modes`, which are some of MODES, but not auto.

    can_send_early: gradients may be sent before their atom is complete.
    """
    fused = _fuse_atoms(compression, timeline, costs) if set(modes) - set(FRAMEWORK_BUCKET_MODES) else []
    chosen = cache(lambda interleaved: _choose_dense(fused, compression, timeline, costs, interleaved))
    return {mode: _make_plan(mode, fused, chosen, compression, timeline, costs, can_send_early) for mode in modes}


def _make_plan(
    mode: str,
    buffers: Sequence[Buffer],
    chosen: Callable[[bool], Sequence[Buffer]],
    compression: CompressionSettings,
    timeline: Timeline,
    costs: Costs,
    can_send_early: bool,
) -> Plan:
    """Make the plan of one mode.

    buffers: fused buffers with sparse units only. chosen: chosen(interleaved) returns these buffers with some units dense.
    """
    empty = Plan(
        mode, compression.sparsifier, compression.density, compression.wire, costs.ranks, exchange=compression.exchange
    )
    if mode in FRAMEWORK_BUCKET_MODES:
        return empty
    if mode == "bucket":
        buffers = [_join_units(buffer, compression, timeline.by_name()) for buffer in buffers]
    elif mode != "layerwise":
        buffers = chosen(mode == "interleaved")
    if mode == "interleaved" and can_send_early:
        buffers = _mark_early(buffers, compression, timeline, costs)
    plan = replace(empty, buffers=tuple(buffers))
    return _mark_offloaded(plan, compression, timeline, costs) if mode == "offload" else plan


def calibrated_costs(costs: Costs, timeline: Timeline) -> Costs:
    """The costs with which the predicted time of the profiled dense step is its measured time."""
    return costs.calibrated(_dense_loads(timeline, costs), timeline)


def predict(plan: Plan, compression: CompressionSettings, timeline: Timeline, costs: Costs) -> float:
    """The predicted time of a step under a plan, in seconds."""
    if plan.mode in FRAMEWORK_BUCKET_MODES:
        in_fp16 = plan.mode == "fp16" and timeline.itemsize > 2
        return step_seconds(_dense_loads(timeline, costs, in_fp16), False, timeline.waits_for_atoms)
    return step_seconds(
        _buffer_loads(plan.buffers, compression, timeline, costs), plan.mode == "interleaved", timeline.waits_for_atoms
    )


def _dense_loads(timeline: Timeline, costs: Costs, in_fp16: bool = False) -> list[Load]:
    """The costs of the framework's own buckets, or of their all-reduce in float16."""
    tensors, loads = timeline.by_name(), []
    for atom in timeline.atoms:
        numel = sum(tensors[name].numel for name in atom)
        copy = costs.copy(numel * timeline.itemsize)
        sent = (
            costs.all_reduce(2 * numel)
            if in_fp16
            else costs.message(costs.dense_operation, numel * timeline.sent_itemsize)
        )
        ready = max(tensors[name].ready for name in atom)
        loads.append(Load(ready, copy if in_fp16 else 0.0, sent, 0.0, copy))
    return loads


def _buffer_loads(
    buffers: Sequence[Buffer], compression: CompressionSettings, timeline: Timeline, costs: Costs
) -> list[Load]:
    tensors = timeline.by_name()
    return [_buffer_load(buffer, compression, tensors, timeline.itemsize, costs) for buffer in buffers]


def _buffer_load(
    buffer: Buffer, compression: CompressionSettings, tensors: Mapping[str, Tensor], itemsize: int, costs: Costs
) -> Load:
    early = [unit for unit in buffer.units if unit.early]
    sent_early = sum(unit.numel for unit in early) * itemsize
    dense = sum(unit.numel for unit in buffer.units if not unit.k) * itemsize
    sparse = [unit for unit in buffer.units if unit.k]
    sent, filled = sum(unit.k for unit in sparse), sum(compression.filled(unit.k) for unit in sparse)
    added = sent * (2 if compression.reduces_sparsely else costs.ranks)
    cleared = sum(unit.numel for unit in sparse) * itemsize / 2  # written once, not read
    return Load(
        ready=max(tensors[name].ready for name in buffer.names),
        select=sum(costs.select(u.numel) for u in sparse) + costs.copy(dense) + (sent > 0) * costs.per_message,
        reduce=costs.all_reduce(dense - sent_early),
        gather=_exchange(sent, compression, itemsize, costs, filled),
        write=costs.copy(dense) + costs.copy(cleared) + costs.add(added),
        early=max((tensors[unit.names[0]].ready for unit in early), default=0.0),
        early_reduce=costs.all_reduce(sent_early),
    )


def _exchange(k: int, compression: CompressionSettings, itemsize: int, costs: Costs, filled: int = 0) -> float:
    """Seconds to send k selected elements, which occupy `filled` values."""
    messages = compression.messages(compression.sent_bytes(k, itemsize, filled), costs.ranks)
    return sum(costs.message(operation, nbytes) for operation, nbytes in messages)


def _fuse_atoms(compression: CompressionSettings, timeline: Timeline, costs: Costs) -> list[Buffer]:
    """Buffers of one or more atoms, in which every gradient is a sparse unit of its own."""
    tensors = timeline.by_name()
    units = [[_sparse_unit(tensors[name], compression.density) for name in atom] for atom in timeline.atoms]
    ready = [max(tensors[name].ready for name in atom) for atom in timeline.atoms]
    selecting = _prefix_sums([sum(costs.select(unit.numel) for unit in atom) for atom in units])
    sent = _prefix_sums([sum(unit.k for unit in atom) for atom in units])
    filled = _prefix_sums([sum(compression.filled(unit.k) for unit in atom) for atom in units])

    def compute(i, j):
        """Seconds from the gradients of atoms before i to the selected elements of atoms i to j - 1."""
        backward = ready[j - 1] - (ready[i - 1] if i else 0.0)
        return max(0.0, backward) + selecting[j] - selecting[i] + costs.per_message

    exchange = cache(lambda k, filled: _exchange(k, compression, timeline.itemsize, costs, filled))  # layers repeat

    def send(i, j):
        """Seconds to send the selected elements of atoms i to j - 1 together."""
        return exchange(sent[j] - sent[i], filled[j] - filled[i])

    if timeline.waits_for_atoms:  # then atoms cannot be sent together
        ends = tuple(range(1, len(units) + 1))
    else:
        ends = find_opt_fusion(len(units), compute, send, [sum(unit.numel for unit in atom) for atom in units])
    return [Buffer(tuple(unit for atom in units[i:j] for unit in atom)) for i, j in zip((0, *ends), ends, strict=False)]


def _sparse_unit(tensor: Tensor, density: float) -> Unit:
    k = max(1, math.floor(density * tensor.numel)) if 0 < tensor.numel <= MOST_INDICES else 0
    return Unit((tensor.name,), tensor.numel, k)


def _join_units(buffer: Buffer, compression: CompressionSettings, tensors: Mapping[str, Tensor]) -> Buffer:
    """The buffer with one unit for all gradients, except gradients of parameters that other ranks hold copies of.

    Such a parameter has a unit of its own: in a joint selection, its copies would compete with different gradients.
    """
    fits = [unit.k > 0 and not tensors[unit.names[0]].copied for unit in buffer.units]
    joined = [unit for unit, joins in zip(buffer.units, fits, strict=True) if joins]
    numel = sum(unit.numel for unit in joined)
    if not 0 < numel <= MOST_INDICES:
        return buffer
    names = tuple(name for unit in joined for name in unit.names)
    alone = [unit for unit, joins in zip(buffer.units, fits, strict=True) if not joins]
    return Buffer((Unit(names, numel, max(1, math.floor(compression.density * numel))), *alone))


def _prefix_sums(numbers: Iterable[Number]) -> list[Number]:
    """Sums of the first 0, 1, ... numbers."""
    found: list[Number] = [0]
    for number in numbers:
        found.append(found[-1] + number)
    return found


def _choose_dense(
    buffers: Sequence[Buffer], compression: CompressionSettings, timeline: Timeline, costs: Costs, interleaved: bool
) -> list[Buffer]:
    """Make gradients dense that cost more to select than they save, and further ones by Eq. 2; lower the other densities."""
    tensors = timeline.by_name()
    dense = {
        t.name
        for t in timeline.tensors
        if t.numel < SMALLEST_SPARSE or t.dims < SMALLEST_SPARSE_DIMS or compression.density * t.numel < 1
    }
    largest_dense = LARGEST_DENSE * timeline.numel
    dense_numel = sum(tensors[name].numel for name in dense)
    for tensor in sorted(timeline.tensors, key=lambda t: t.numel):
        if (
            tensor.name not in dense
            and tensor.numel <= largest_dense
            and _is_cheaper_dense(tensor, dense_numel, compression, timeline, costs)
        ):
            dense.add(tensor.name)
            dense_numel += tensor.numel
    buffers = [_send_dense(buffer, dense) for buffer in buffers]
    loads = _buffer_loads(buffers, compression, timeline, costs)
    allowed = SLACK * step_seconds(loads, interleaved, timeline.waits_for_atoms)
    for number in range(1, len(buffers)):
        left = [unit for unit in buffers[number].units if unit.k]
        backward = loads[number].ready - loads[number - 1].ready
        for unit in sorted(left, key=lambda unit: unit.numel)[
            : _count_excluded(left, backward, loads[number - 1], costs)
        ]:
            buffer = _send_dense(buffers[number], unit.names)
            load = _buffer_load(buffer, compression, tensors, timeline.itemsize, costs)
            tried = [*loads[:number], load, *loads[number + 1 :]]
            if unit.numel > largest_dense or step_seconds(tried, interleaved, timeline.waits_for_atoms) > allowed:
                break
            buffers[number], loads = buffer, tried
    return _compensate_density(buffers, compression, costs.ranks, timeline.itemsize)


def _is_cheaper_dense(
    tensor: Tensor, dense_numel: int, compression: CompressionSettings, timeline: Timeline, costs: Costs
) -> bool:
    """Return True if selecting takes at least the time that it saves; `dense_numel` elements are sent dense anyway."""
    dense = costs.all_reduce((dense_numel + tensor.numel) * timeline.itemsize) - costs.all_reduce(
        dense_numel * timeline.itemsize
    )
    k = max(1, math.floor(compression.density * tensor.numel))
    sparse = _exchange(100 * k, compression, timeline.itemsize, costs) / 100  # as a part of a longer message
    return costs.select(tensor.numel) >= dense - sparse


def _send_dense(buffer: Buffer, names: Collection[str]) -> Buffer:
    return Buffer(tuple(replace(u, k=0) if u.k and u.names[0] in names else u for u in buffer.units))


def _count_excluded(units: Sequence[Unit], backward: float, sending: Load, costs: Costs) -> int:
    """The number of sparse units, smallest first, that Eq. 2 makes dense. sending: the costs of the previous buffer."""
    return count_excluded(
        [unit.numel for unit in units],
        backward,
        [costs.select(unit.numel) for unit in units],
        sending.reduce + sending.gather,
    )


def count_excluded(sizes: Sequence[int], backward: float, selecting: Sequence[float], sending: float) -> int:
    """Eq. 2: the number of smallest gradients to exclude from selection so that sending >= backward + selecting.

    Args:
        sizes: The sizes of the gradients of a buffer.
        backward: Seconds of the backward pass for all of them.
        selecting: Seconds to select from each of them.
        sending: Seconds of the messages of the previous buffer.
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    left, count = backward + sum(selecting), 0
    while count < len(order) and sending < left:
        left -= selecting[order[count]]
        count += 1
    return count


def _compensate_density(
    buffers: Sequence[Buffer], compression: CompressionSettings, ranks: int, itemsize: int
) -> list[Buffer]:
    """Lower the density of sparse units to make up for dense ones."""
    numbers = [unit.numel for buffer in buffers for unit in buffer.units if not unit.k]
    sparse = sum(unit.numel for buffer in buffers for unit in buffer.units if unit.k)
    if not sparse:
        return [*buffers]
    worth = 2 * itemsize / bytes_per_element(ranks, compression, itemsize)
    density = compensated_density(compression.density, sum(numbers), sparse, worth, compression.budget)

    def changed(unit):
        """A sparse unit with the k of the lower density."""
        return replace(unit, k=max(1, math.floor(density * unit.numel))) if unit.k else unit

    return [Buffer(tuple(changed(unit) for unit in buffer.units)) for buffer in buffers]


def compensated_density(density: float, dense: int, sparse: int, worth: float, budget: str) -> float:
    """The density of `sparse` elements with which about as many bytes are sent as if `dense` elements were sparse too.

    Args:
        density: The density of all N elements.
        dense, sparse: The numbers of elements.
        worth: The number of selected elements that take as many bytes as a dense one: 1/ranks, if elements and indices have
            4 bytes each.
        budget: "none": the density, without compensation. "bytes": (density N - worth dense) / sparse, but at least half of
            the density. "paper" (SSFusion): (density N - dense) / sparse, but at least 0.001.
    """
    if budget == "none":
        return density
    if budget == "paper":
        return min(density, max(PAPER_FLOOR, (density * (dense + sparse) - dense) / sparse))
    return min(density, max(LEAST_COMPENSATION * density, (density * (dense + sparse) - worth * dense) / sparse))


def _mark_early(
    buffers: Sequence[Buffer], compression: CompressionSettings, timeline: Timeline, costs: Costs
) -> list[Buffer]:
    """Mark the first dense units of each buffer as early: the number that makes the step shortest (l' in SSFusion-I)."""
    tensors, loads, found = timeline.by_name(), _buffer_loads(buffers, compression, timeline, costs), []
    for number, buffer in enumerate(buffers):
        dense = sorted((unit for unit in buffer.units if not unit.k), key=lambda unit: tensors[unit.names[0]].ready)
        if not dense:
            found.append(buffer)
            continue
        tried = [
            [*loads[:number], load, *loads[number + 1 :]]
            for load in _early_loads(loads[number], dense, tensors, timeline.itemsize, costs)
        ]
        count = min(range(len(tried)), key=lambda count: step_seconds(tried[count], True))
        loads, chosen = tried[count], {unit.names for unit in dense[:count]}
        found.append(Buffer(tuple(replace(u, early=True) if u.names in chosen else u for u in buffer.units)))
    return found


def _early_loads(
    load: Load, dense: Sequence[Unit], tensors: Mapping[str, Tensor], itemsize: int, costs: Costs
) -> list[Load]:
    """The costs of a buffer if its first 0, 1, ... dense units are sent early."""
    nbytes = [itemsize * numel for numel in _prefix_sums([unit.numel for unit in dense])]
    ready = [0.0, *(tensors[unit.names[0]].ready for unit in dense)]
    reduce = [costs.all_reduce(n) for n in nbytes]
    late = [costs.all_reduce(nbytes[-1] - n) for n in nbytes]
    return [load._replace(early=e, early_reduce=r, reduce=rest) for e, r, rest in zip(ready, reduce, late, strict=True)]


def _mark_offloaded(plan: Plan, compression: CompressionSettings, timeline: Timeline, costs: Costs) -> Plan:
    """Offload the sparse units whose selection another core can finish before the buffer is complete (SSFusion-O)."""
    tensors, buffers = timeline.by_name(), []
    for buffer in plan.buffers:
        end, done, units = max(tensors[name].ready for name in buffer.names), 0.0, []
        for unit in buffer.units:
            finished = max(done, tensors[unit.names[0]].ready) + costs.select(unit.numel)
            fits = unit.k and unit is not buffer.units[-1] and finished <= end
            done = finished if fits else done
            units.append(replace(unit, offload=True) if fits else unit)
        buffers.append(Buffer(tuple(units)))
    return replace(plan, buffers=tuple(buffers))
