"""Which gradients to send whole, which sparsely, how densely, and in which buffers: SSFusion (Ming et al.), section IV.

`plans_of` makes the plans of some modes from a timeline and costs; `predict` says how long a step with one would take. Both
are functions of their arguments alone: ranks that are given the same numbers get the same plan.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from sparsefusion.selection.indices import PLACE_BYTES

from .fusion_cuts import find_opt_fusion
from .plan import AS_THEY_COME, Buffer, Plan, Unit, filled_values, value_bytes
from .timeline import Costs, Load, Timeline, seconds

DENSE_NUMEL, DENSE_DIMS = 2048, 2  # smaller gradients, or of fewer dimensions, go whole in plans that may choose
LARGEST_DENSE = 0.05  # of all numbers: a larger gradient is never sent whole to save its selection
SLACK = 1.01  # a step may become this much longer while Eq. 2 sends more of a buffer whole
GUARDED = 4  # bytes of an index, by which a density is judged
MOST_PLACES = 2**31 - 1  # that have an index of 32 bits
LEAST_COMPENSATION = 0.5  # of the density that was asked for
PAPER_FLOOR = 0.001


@dataclass(frozen=True)
class Wish:
    """What was asked for. budget: "bytes" or "paper", for the compensation of the density."""

    density: float
    sparsifier: str = "dgc"
    wire: str = "fp32"
    budget: str = "bytes"

    @property
    def operation(self) -> str:
        """With which selected numbers are sent."""
        return "all_reduce" if self.sparsifier == "randomk" else "all_gather"

    def sent_bytes(self, k: int, itemsize: int, filled: int = 0, of_place: int = PLACE_BYTES) -> int:
        """Of k numbers selected from gradients of that itemsize: values and places, or with randomk values alone.

        filled: how many values they take up if they are of several units (`filled`). But for what places take for each
        65,536 numbers that are selected from, 4 bytes.
        """
        values = value_bytes("fp32" if self.sparsifier == "randomk" else self.wire, max(k, filled), itemsize)
        return values if self.sparsifier == "randomk" else values + of_place * k

    def filled(self, k: int) -> int:
        """How many values a unit's k take up in a message (`plan.filled_values`)."""
        return k if self.sparsifier == "randomk" else filled_values(self.wire, k)


def helps(wish: Wish, ranks: int, itemsize: int, sent: int, reduce_scatters=False, halves=False) -> bool:
    """Whether sparse messages are clearly smaller than dense ones: density (value + index bytes) ranks < 2 dense bytes.

    With an index of 4 bytes, though 2 are sent: what selecting takes is worth the difference. itemsize: bytes of a
    gradient's number; sent: in the framework's own messages. reduce_scatters: it sends half as much. halves: or they are
    all-reduced in 16 bits.
    """
    if ranks == 1:
        return False
    whole = (1 if reduce_scatters else 2) * sent
    return wish.density * _sent_on(ranks, wish, itemsize) < (min(whole, 2 * 2) if halves else whole)


def _sent_on(ranks, wish, itemsize) -> float:
    """Bytes of a selected number, sent once to each of these ranks: what compares with 2 x the bytes of one all-reduced."""
    each = wish.sent_bytes(1 << 20, itemsize, of_place=GUARDED) / (1 << 20)
    return 2 * each if wish.sparsifier == "randomk" else each * ranks


def plans_of(modes, wish: Wish, timeline: Timeline, costs: Costs, early: bool = False) -> dict[str, Plan]:
    """{mode: plan} of modes (of MODES, but auto). early: gradients may be sent before their atom is complete."""
    fused = _fused(wish, timeline, costs) if set(modes) - set(AS_THEY_COME) else []
    chosen = cache(lambda interleaved: _selective(fused, wish, timeline, costs, interleaved))
    return {mode: _plan_of(mode, fused, chosen, wish, timeline, costs, early) for mode in modes}


def _plan_of(mode, buffers, chosen, wish, timeline, costs, early) -> Plan:
    """buffers: fused, all of them sparse; chosen(interleaved): of which some units go whole."""
    empty = Plan(mode, wish.sparsifier, wish.density, wish.wire, costs.ranks)
    if mode in AS_THEY_COME:
        return empty
    if mode == "bucket":
        buffers = [_joined(buffer, wish, timeline.by_name()) for buffer in buffers]
    elif mode != "layerwise":
        buffers = chosen(mode == "interleaved")
    if mode == "interleaved" and early:
        buffers = _early(buffers, wish, timeline, costs)
    plan = replace(empty, buffers=tuple(buffers))
    return _offloaded(plan, wish, timeline, costs) if mode == "offload" else plan


def corrected(costs: Costs, timeline: Timeline) -> Costs:
    """Costs by which the dense step takes what it was measured to take."""
    return costs.corrected(_whole_loads(timeline, costs), timeline)


def predict(plan: Plan, wish: Wish, timeline: Timeline, costs: Costs) -> float:
    """Seconds of a step."""
    if plan.mode in AS_THEY_COME:
        halves = plan.mode == "fp16" and timeline.itemsize > 2
        return seconds(_whole_loads(timeline, costs, halves), False, timeline.waits)
    return seconds(_loads(plan.buffers, wish, timeline, costs), plan.mode == "interleaved", timeline.waits)


def _whole_loads(timeline, costs, halves=False) -> list[Load]:
    """Of the framework's own buckets; halves: all-reduced in 16 bits instead."""
    tensors, loads = timeline.by_name(), []
    for atom in timeline.atoms:
        numel = sum(tensors[name].numel for name in atom)
        copy = costs.copy(numel * timeline.itemsize)
        sent = costs.all_reduce(2 * numel) if halves else costs.message(costs.whole, numel * timeline.sent)
        ready = max(tensors[name].ready for name in atom)
        loads.append(Load(ready, copy if halves else 0.0, sent, 0.0, copy))
    return loads


def _loads(buffers, wish, timeline, costs) -> list[Load]:
    tensors = timeline.by_name()
    return [_load(buffer, wish, tensors, timeline.itemsize, costs) for buffer in buffers]


def _load(buffer, wish, tensors, itemsize, costs) -> Load:
    """A buffer's seconds."""
    early = [unit for unit in buffer.units if unit.early]
    sent_early = sum(unit.numel for unit in early) * itemsize
    dense = sum(unit.numel for unit in buffer.units if not unit.k) * itemsize
    sparse = [unit for unit in buffer.units if unit.k]
    sent, filled = sum(unit.k for unit in sparse), sum(wish.filled(unit.k) for unit in sparse)
    cleared = sum(unit.numel for unit in sparse) * itemsize / 2  # written once, not read
    return Load(
        ready=max(tensors[name].ready for name in buffer.names),
        select=sum(costs.select(u.numel) for u in sparse) + costs.copy(dense) + (sent > 0) * costs.handle,
        reduce=costs.all_reduce(dense - sent_early),
        gather=_exchange(sent, wish, itemsize, costs, filled),
        write=costs.copy(dense) + costs.copy(cleared) + costs.add(sent * costs.ranks),
        early=max((tensors[unit.names[0]].ready for unit in early), default=0.0),
        early_reduce=costs.all_reduce(sent_early),
    )


def _exchange(k, wish, itemsize, costs, filled=0) -> float:
    """Seconds of sending k selected numbers, of units that fill so many places of values."""
    return costs.message(wish.operation, wish.sent_bytes(k, itemsize, filled))


def _fused(wish, timeline, costs) -> list[Buffer]:
    """Buffers of whole atoms, all of whose gradients are sent sparsely, each with its own k."""
    tensors = timeline.by_name()
    units = [[_unit(tensors[name], wish.density) for name in atom] for atom in timeline.atoms]
    ready = [max(tensors[name].ready for name in atom) for atom in timeline.atoms]
    selecting = _sums([sum(costs.select(unit.numel) for unit in atom) for atom in units])
    sent = _sums([sum(unit.k for unit in atom) for atom in units])
    places = _sums([sum(wish.filled(unit.k) for unit in atom) for atom in units])

    def compute(i, j):
        backward = ready[j - 1] - (ready[i - 1] if i else 0.0)
        return max(0.0, backward) + selecting[j] - selecting[i] + costs.handle

    exchange = cache(lambda k, filled: _exchange(k, wish, timeline.itemsize, costs, filled))  # layers are alike

    def send(i, j):
        return exchange(sent[j] - sent[i], places[j] - places[i])

    if timeline.waits:  # so atoms cannot be sent together
        ends = range(1, len(units) + 1)
    else:
        ends = find_opt_fusion(len(units), compute, send, [sum(unit.numel for unit in atom) for atom in units])
    return [Buffer(tuple(unit for atom in units[i:j] for unit in atom)) for i, j in zip((0, *ends), ends, strict=False)]


def _unit(tensor, density) -> Unit:
    k = max(1, math.floor(density * tensor.numel)) if 0 < tensor.numel <= MOST_PLACES else 0
    return Unit((tensor.name,), tensor.numel, k)


def _joined(buffer, wish, tensors) -> Buffer:
    """One unit of all, one k over the whole buffer; but what is copied is alone, or each copy would meet other numbers."""
    fits = [unit.k > 0 and not tensors[unit.names[0]].copied for unit in buffer.units]
    joined = [unit for unit, joins in zip(buffer.units, fits, strict=True) if joins]
    numel = sum(unit.numel for unit in joined)
    if not 0 < numel <= MOST_PLACES:
        return buffer
    names = tuple(name for unit in joined for name in unit.names)
    alone = [unit for unit, joins in zip(buffer.units, fits, strict=True) if not joins]
    return Buffer((Unit(names, numel, max(1, math.floor(wish.density * numel))), *alone))


def _sums(numbers) -> list:
    """Sums of the first 0, 1, ... of them."""
    found = [0]
    for number in numbers:
        found.append(found[-1] + number)
    return found


def _selective(buffers, wish, timeline, costs, interleaved) -> list[Buffer]:
    """What costs more to select than it saves, and by Eq. 2 more of each buffer, is sent whole; the rest less densely."""
    tensors = timeline.by_name()
    dense = {
        t.name for t in timeline.tensors if t.numel < DENSE_NUMEL or t.dims < DENSE_DIMS or wish.density * t.numel < 1
    }
    most = LARGEST_DENSE * timeline.numel
    whole = sum(tensors[name].numel for name in dense)
    for tensor in sorted(timeline.tensors, key=lambda t: t.numel):
        if tensor.name not in dense and tensor.numel <= most and _cheaper_whole(tensor, whole, wish, timeline, costs):
            dense.add(tensor.name)
            whole += tensor.numel
    buffers = [_without(buffer, dense) for buffer in buffers]
    loads = _loads(buffers, wish, timeline, costs)
    allowed = SLACK * seconds(loads, interleaved, timeline.waits)
    for number in range(1, len(buffers)):
        left = [unit for unit in buffers[number].units if unit.k]
        backward = loads[number].ready - loads[number - 1].ready
        for unit in sorted(left, key=lambda unit: unit.numel)[: _excluded(left, backward, loads[number - 1], costs)]:
            buffer = _without(buffers[number], unit.names)
            load = _load(buffer, wish, tensors, timeline.itemsize, costs)
            tried = [*loads[:number], load, *loads[number + 1 :]]
            if unit.numel > most or seconds(tried, interleaved, timeline.waits) > allowed:
                break
            buffers[number], loads = buffer, tried
    return _compensated(buffers, wish, costs.ranks, timeline.itemsize)


def _cheaper_whole(tensor, whole, wish, timeline, costs) -> bool:
    """Whether selecting takes as long as is saved by sending less, where `whole` numbers are sent whole anyway."""
    dense = costs.all_reduce((whole + tensor.numel) * timeline.itemsize) - costs.all_reduce(whole * timeline.itemsize)
    k = max(1, math.floor(wish.density * tensor.numel))
    sparse = _exchange(100 * k, wish, timeline.itemsize, costs) / 100  # as a part of a longer message
    return costs.select(tensor.numel) >= dense - sparse


def _without(buffer, names) -> Buffer:
    """With those parameters sent whole."""
    return Buffer(tuple(replace(u, k=0) if u.k and u.names[0] in names else u for u in buffer.units))


def _excluded(units, backward, sending: Load, costs) -> int:
    """How many of the smallest sparse units of a buffer Eq. 2 sends whole: `sending` is the buffer before."""
    return excluded(
        [unit.numel for unit in units],
        backward,
        [costs.select(unit.numel) for unit in units],
        sending.reduce + sending.gather,
    )


def excluded(sizes, backward: float, selecting, sending: float) -> int:
    """Eq. 2: how many of the smallest gradients to exclude until sending (of the buffer before) >= backward + selecting.

    sizes: of a buffer's gradients; backward: their seconds, all together; selecting: seconds of each.
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    left, count = backward + sum(selecting), 0
    while count < len(order) and sending < left:
        left -= selecting[order[count]]
        count += 1
    return count


def _compensated(buffers, wish, ranks, itemsize) -> list[Buffer]:
    """The density of what is sent sparsely, lowered by what is sent whole."""
    numbers = [unit.numel for buffer in buffers for unit in buffer.units if not unit.k]
    sparse = sum(unit.numel for buffer in buffers for unit in buffer.units if unit.k)
    if not sparse:
        return buffers
    worth = 2 * itemsize / _sent_on(ranks, wish, itemsize)
    density = compensated(wish.density, sum(numbers), sparse, worth, wish.budget)

    def changed(unit):
        return replace(unit, k=max(1, math.floor(density * unit.numel))) if unit.k else unit

    return [Buffer(tuple(changed(unit) for unit in buffer.units)) for buffer in buffers]


def compensated(density: float, dense: int, sparse: int, worth: float, budget: str = "bytes") -> float:
    """The density of `sparse` numbers for which about as much is sent as of all, if `dense` numbers are sent whole.

    worth: how many selected numbers take the bytes of one that is sent whole: 1/ranks if both are of 4 bytes, and so is an
    index. budget: bytes: (density N - worth dense) / sparse, at least half the density; paper: with dense for worth dense,
    and at least 0.001.
    """
    if budget == "paper":
        return min(density, max(PAPER_FLOOR, (density * (dense + sparse) - dense) / sparse))
    return min(density, max(LEAST_COMPENSATION * density, (density * (dense + sparse) - worth * dense) / sparse))


def _early(buffers, wish, timeline, costs) -> list[Buffer]:
    """Of each buffer the first dense units, as many as make the step shortest, leave early (SSFusion-I's l')."""
    tensors, loads, found = timeline.by_name(), _loads(buffers, wish, timeline, costs), []
    for number, buffer in enumerate(buffers):
        dense = sorted((unit for unit in buffer.units if not unit.k), key=lambda unit: tensors[unit.names[0]].ready)
        if not dense:
            found.append(buffer)
            continue
        tried = [
            [*loads[:number], load, *loads[number + 1 :]]
            for load in _early_loads(loads[number], dense, tensors, timeline.itemsize, costs)
        ]
        count = min(range(len(tried)), key=lambda count: seconds(tried[count], True))
        loads, chosen = tried[count], {unit.names for unit in dense[:count]}
        found.append(Buffer(tuple(replace(u, early=True) if u.names in chosen else u for u in buffer.units)))
    return found


def _early_loads(load, dense, tensors, itemsize, costs) -> list[Load]:
    """A buffer's, when the first 0, 1, ... of its dense units leave early."""
    nbytes = [itemsize * numel for numel in _sums([unit.numel for unit in dense])]
    ready = [0.0, *(tensors[unit.names[0]].ready for unit in dense)]
    reduce = [costs.all_reduce(n) for n in nbytes]
    late = [costs.all_reduce(nbytes[-1] - n) for n in nbytes]
    return [load._replace(early=e, early_reduce=r, reduce=rest) for e, r, rest in zip(ready, reduce, late, strict=True)]


def _offloaded(plan, wish, timeline, costs) -> Plan:
    """Sparse units that another processor can select from before their buffer's last gradient is there (SSFusion-O)."""
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
