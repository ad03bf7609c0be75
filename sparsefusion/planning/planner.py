"""Plans which gradients are dense or sparse, and in which buffers: SSFusion (Ming et al.), section IV.

A planner is a function from a `StepModel` (settings, a profiled step, the costs of its parts) to the buffers of a plan.
There is one for each mode. It depends on nothing else, so ranks with the same model get the same plan.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from .compression import CompressionSettings
from .fusion_cuts import find_opt_fusion
from .plan import FRAMEWORK_BUCKET_MODES, Buffer, Plan, Unit
from .timeline import Costs, Load, Tensor, Timeline, step_seconds

# Gradients with fewer elements or dimensions are dense in modes that may choose.
SMALLEST_SPARSE, SMALLEST_SPARSE_DIMS = 2048, 2
LARGEST_DENSE = 0.05  # gradients above this share of all elements are never sent dense to save their selection
SLACK = 1.01  # a step may become longer by this factor while Eq. 2 makes more gradients of a buffer dense
MOST_INDICES = 2**31 - 1  # the number of elements that 32-bit indices can address
PAPER_FLOOR = 0.001  # the smallest compensated density in SSFusion
LARGEST_CORRECTION = 3.0  # the largest factor by which costs of messages are corrected; the smallest is its inverse
BISECTIONS = 12  # bisections of the interval of these factors


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
    model = StepModel(compression, timeline, costs, can_send_early)
    return {mode: compression.plan(mode, costs.ranks, PLANNERS[mode](model)) for mode in modes}


def predict(plan: Plan, compression: CompressionSettings, timeline: Timeline, costs: Costs) -> float:
    """The predicted time of a step under a plan, in seconds."""
    model = StepModel(compression, timeline, costs)
    if plan.mode in FRAMEWORK_BUCKET_MODES:
        return model.seconds(framework_loads(timeline, costs, in_fp16=plan.mode == "fp16" and timeline.itemsize > 2))
    return model.seconds(list(map(model.load, plan.buffers)), plan.mode == "interleaved")


def calibrated_costs(costs: Costs, timeline: Timeline) -> Costs:
    """The costs with the factor for which the predicted time of the profiled dense step is its measured time.

    The factor, found by bisection, is at most LARGEST_CORRECTION and at least its inverse. If computation takes nearly all
    of the step, the costs are returned unchanged.
    """
    if timeline.step - timeline.tensors[-1].ready < 0.1 * timeline.step:
        return costs
    loads, low, high = framework_loads(timeline, costs), 1 / LARGEST_CORRECTION, LARGEST_CORRECTION
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        slower = [load._replace(reduce=middle * load.reduce) for load in loads]
        if step_seconds(slower, False, timeline.waits_for_atoms) < timeline.step:
            low = middle
        else:
            high = middle
    return replace(costs, factor=(low + high) / 2 * costs.factor)


def framework_loads(timeline: Timeline, costs: Costs, in_fp16: bool = False) -> list[Load]:
    """The costs of the framework's own buckets, or of their all-reduce in float16."""
    tensors, loads = {tensor.name: tensor for tensor in timeline.tensors}, []
    for atom in timeline.atoms:
        numel = sum(tensors[name].numel for name in atom)
        copy = costs.copy(numel * timeline.itemsize)
        operation, sent = ("all_reduce", 2) if in_fp16 else (costs.dense_operation, timeline.sent_itemsize)
        ready = max(tensors[name].ready for name in atom)
        loads.append(Load(ready, copy if in_fp16 else 0.0, costs.message(operation, numel * sent), 0.0, copy))
    return loads


@dataclass(frozen=True)
class StepModel:
    """Predicts the time of a step from the user's settings, a profiled step, and the costs of its parts.

    can_send_early: gradients may be sent before their atom is complete.
    """

    compression: CompressionSettings
    timeline: Timeline
    costs: Costs
    can_send_early: bool = False

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.timeline.tensors}

    def seconds(self, loads: Sequence[Load], interleaved: bool = False) -> float:
        return step_seconds(loads, interleaved, self.timeline.waits_for_atoms)

    def load(self, buffer: Buffer) -> Load:
        """The costs of a buffer."""
        costs, tensors, itemsize = self.costs, self.tensors, self.timeline.itemsize
        early, sparse = [u for u in buffer.units if u.early], [u for u in buffer.units if u.k]
        sent_early = sum(unit.numel for unit in early) * itemsize
        dense = sum(unit.numel for unit in buffer.units if not unit.k) * itemsize
        sent, filled = sum(unit.k for unit in sparse), sum(self.compression.filled(unit.k) for unit in sparse)
        added = sent * (2 if self.compression.reduces_sparsely else costs.ranks)
        cleared = sum(unit.numel for unit in sparse) * itemsize / 2  # written once, not read
        return Load(
            ready=max(tensors[name].ready for name in buffer.names),
            select=sum(costs.select(u.numel) for u in sparse) + costs.copy(dense) + (sent > 0) * costs.per_message,
            reduce=costs.message("all_reduce", dense - sent_early),
            gather=self.exchange(sent, filled),
            write=costs.copy(dense) + costs.copy(cleared) + costs.add(added),
            early=max((tensors[unit.names[0]].ready for unit in early), default=0.0),
            early_reduce=costs.message("all_reduce", sent_early),
        )

    def exchange(self, k: int, filled: int = 0) -> float:
        """Seconds to send k selected elements, which occupy `filled` values."""
        sent = self.compression.sent_bytes(k, self.timeline.itemsize, filled)
        messages = self.compression.messages(sent, self.costs.ranks)
        return sum(self.costs.message(operation, nbytes) for operation, nbytes in messages)

    @cached_property
    def fused(self) -> list[Buffer]:
        """Buffers of one or more atoms, in which every gradient is a sparse unit of its own."""
        timeline, costs = self.timeline, self.costs
        units = [
            [_sparse_unit(self.tensors[name], self.compression.density) for name in atom] for atom in timeline.atoms
        ]
        ready = [max(self.tensors[name].ready for name in atom) for atom in timeline.atoms]
        selecting = _sums(sum(costs.select(unit.numel) for unit in atom) for atom in units)
        sent = _sums(sum(unit.k for unit in atom) for atom in units)
        filled = _sums(sum(self.compression.filled(unit.k) for unit in atom) for atom in units)
        exchange = cache(self.exchange)  # layers repeat

        def compute(i, j):
            """Seconds from the gradients of atoms before i to the selected elements of atoms i to j - 1."""
            backward = ready[j - 1] - (ready[i - 1] if i else 0.0)
            return max(0.0, backward) + selecting[j] - selecting[i] + costs.per_message

        def send(i, j):
            """Seconds to send the selected elements of atoms i to j - 1 together."""
            return exchange(sent[j] - sent[i], filled[j] - filled[i])

        if timeline.waits_for_atoms:  # then atoms cannot be sent together
            ends = tuple(range(1, len(units) + 1))
        else:
            ends = find_opt_fusion(len(units), compute, send, [sum(unit.numel for unit in atom) for atom in units])
        return [Buffer(tuple(u for atom in units[i:j] for u in atom)) for i, j in zip((0, *ends), ends, strict=False)]

    @cached_property
    def selective(self) -> list[Buffer]:
        return self.with_dense(interleaved=False)

    def with_dense(self, interleaved: bool) -> list[Buffer]:
        """`fused` with gradients dense that cost more to select than they save, and further ones by Eq. 2."""
        timeline, costs, density = self.timeline, self.costs, self.compression.density
        dense = {
            t.name
            for t in timeline.tensors
            if t.numel < SMALLEST_SPARSE or t.dims < SMALLEST_SPARSE_DIMS or density * t.numel < 1
        }
        largest_dense = LARGEST_DENSE * timeline.numel
        dense_numel = sum(self.tensors[name].numel for name in dense)
        for tensor in sorted(timeline.tensors, key=lambda t: t.numel):
            is_candidate = tensor.name not in dense and tensor.numel <= largest_dense
            if is_candidate and self._is_cheaper_dense(tensor.numel, dense_numel):
                dense.add(tensor.name)
                dense_numel += tensor.numel
        buffers = [_send_dense(buffer, dense) for buffer in self.fused]
        loads = list(map(self.load, buffers))
        allowed = SLACK * self.seconds(loads, interleaved)
        for number in range(1, len(buffers)):
            sparse, before = [unit for unit in buffers[number].units if unit.k], loads[number - 1]
            sizes, backward = [unit.numel for unit in sparse], loads[number].ready - before.ready
            count = count_excluded(sizes, backward, list(map(costs.select, sizes)), before.reduce + before.gather)
            for unit in sorted(sparse, key=lambda unit: unit.numel)[:count]:
                buffer = _send_dense(buffers[number], unit.names)
                tried = [*loads[:number], self.load(buffer), *loads[number + 1 :]]
                if unit.numel > largest_dense or self.seconds(tried, interleaved) > allowed:
                    break
                buffers[number], loads = buffer, tried
        return self._compensated(buffers)

    def _is_cheaper_dense(self, numel: int, dense_numel: int) -> bool:
        """Return True if selecting takes at least the time that it saves; `dense_numel` elements are sent dense anyway."""
        costs, itemsize = self.costs, self.timeline.itemsize
        all_dense = costs.message("all_reduce", (dense_numel + numel) * itemsize)
        saved = all_dense - costs.message("all_reduce", dense_numel * itemsize)
        k = max(1, math.floor(self.compression.density * numel))
        return costs.select(numel) >= saved - self.exchange(100 * k) / 100  # as a part of a longer message

    def _compensated(self, buffers: list[Buffer]) -> list[Buffer]:
        """With budget="paper", lower the density of sparse units to make up for dense ones, as SSFusion does."""
        units = [unit for buffer in buffers for unit in buffer.units]
        dense, sparse = sum(u.numel for u in units if not u.k), sum(u.numel for u in units if u.k)
        if self.compression.budget == "none" or not sparse:
            return buffers
        density = compensated_density(self.compression.density, dense, sparse)
        return [_map_units(b, lambda u: replace(u, k=u.k and max(1, math.floor(density * u.numel)))) for b in buffers]


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


def compensated_density(density: float, dense: int, sparse: int) -> float:
    """SSFusion's density of `sparse` elements with which as many are sent as if `dense` elements were sparse too.

    It is at least PAPER_FLOOR, and at most `density`, the density of all elements.
    """
    return min(density, max(PAPER_FLOOR, (density * (dense + sparse) - dense) / sparse))


def joined(model: StepModel) -> list[Buffer]:
    """`fused` with one unit for all gradients of a buffer, except gradients of parameters that other ranks hold copies of.

    Such a parameter has a unit of its own: in a joint selection, its copies would compete with different gradients.
    """

    def join(buffer: Buffer) -> Buffer:
        copied = {tensor.name for tensor in model.timeline.tensors if tensor.copied}
        joins = [unit for unit in buffer.units if unit.k and unit.names[0] not in copied]
        alone = [unit for unit in buffer.units if not unit.k or unit.names[0] in copied]
        numel = sum(unit.numel for unit in joins)
        if not 0 < numel <= MOST_INDICES:
            return buffer
        names = tuple(name for unit in joins for name in unit.names)
        return Buffer((Unit(names, numel, max(1, math.floor(model.compression.density * numel))), *alone))

    return list(map(join, model.fused))


def interleaved(model: StepModel) -> list[Buffer]:
    """`with_dense`, with the first dense units of each buffer marked as early (l' in SSFusion-I).

    It marks the number of units that makes the step shortest.
    """
    buffers = model.with_dense(interleaved=True)
    if not model.can_send_early:
        return buffers
    loads, found = list(map(model.load, buffers)), []
    for number, buffer in enumerate(buffers):
        dense = sorted((unit for unit in buffer.units if not unit.k), key=lambda u: model.tensors[u.names[0]].ready)
        tried = [[*loads[:number], load, *loads[number + 1 :]] for load in _early_loads(model, loads[number], dense)]
        count = min(range(len(tried)), key=lambda count: step_seconds(tried[count], True))
        loads, early = tried[count], {unit.names for unit in dense[:count]}
        found.append(Buffer(tuple(replace(unit, early=unit.names in early) for unit in buffer.units)))
    return found


def _early_loads(model: StepModel, load: Load, dense: Sequence[Unit]) -> list[Load]:
    """The costs of a buffer if its first 0, 1, ... dense units are sent early."""
    if not dense:
        return [load]
    nbytes = [model.timeline.itemsize * numel for numel in _sums(unit.numel for unit in dense)]
    ready = [0.0, *(model.tensors[unit.names[0]].ready for unit in dense)]
    reduce = [model.costs.message("all_reduce", n) for n in nbytes]
    late = [model.costs.message("all_reduce", nbytes[-1] - n) for n in nbytes]
    return [load._replace(early=e, early_reduce=r, reduce=rest) for e, r, rest in zip(ready, reduce, late, strict=True)]


def offloaded(model: StepModel) -> list[Buffer]:
    """`selective`, with the units offloaded whose selection another core can finish before the buffer is complete."""
    buffers = []
    for buffer in model.selective:
        end, done, units = max(model.tensors[name].ready for name in buffer.names), 0.0, []
        for unit in buffer.units:
            finished = max(done, model.tensors[unit.names[0]].ready) + model.costs.select(unit.numel)
            fits = bool(unit.k) and unit is not buffer.units[-1] and finished <= end
            done = finished if fits else done
            units.append(replace(unit, offload=fits))
        buffers.append(Buffer(tuple(units)))
    return buffers


PLANNERS: Mapping[str, Callable[[StepModel], Sequence[Buffer]]] = {
    "dense": lambda model: [],
    "fp16": lambda model: [],
    "layerwise": lambda model: model.fused,
    "bucket": joined,
    "selective": lambda model: model.selective,
    "interleaved": interleaved,
    "offload": offloaded,
}


def _sparse_unit(tensor: Tensor, density: float) -> Unit:
    k = max(1, math.floor(density * tensor.numel)) if 0 < tensor.numel <= MOST_INDICES else 0
    return Unit((tensor.name,), tensor.numel, k)


def _map_units(buffer: Buffer, change: Callable[[Unit], Unit]) -> Buffer:
    return Buffer(tuple(map(change, buffer.units)))


def _send_dense(buffer: Buffer, names: Collection[str]) -> Buffer:
    return _map_units(buffer, lambda unit: replace(unit, k=0) if unit.k and unit.names[0] in names else unit)


def _sums(numbers: Iterable) -> list:
    """Sums of the first 0, 1, ... numbers."""
    return list(accumulate(numbers, initial=0))
