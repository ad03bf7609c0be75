"""Means of gradients over ranks: some whole, of others what was selected; what is not sent waits for the next step.

Error feedback (Seide et al., 2014; SSFusion, section II-C): v = gradient + residual; what leaves v is what is applied, bit
for bit, whatever the format on the wire; the rest is the residual. So applied means times ranks, and residuals, add up to
all gradients.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import accumulate, compress

import torch
from torch.nn.functional import pad

from sparsefusion.collectives.counted import Counter, begin_all_gather, begin_all_reduce
from sparsefusion.collectives.wire_formats import at_least_fp32, padded, wire_format
from sparsefusion.planning.plan import Unit
from sparsefusion.selection.fused import add_at, residual_like, take
from sparsefusion.selection.indices import bytes_of_places, decode_places, dtype_of_places, encode_places
from sparsefusion.selection.sparsifiers import random_places

from .fp16_reduction import HalfReduction, HalfScale
from .nonfinite import largest

PEEK = 64  # numbers all over a gradient, one of which is hardly ever 0 in all


@dataclass
class Selected:
    """What a rank takes out of a unit: values (k,), at least fp32, and places (k,), int32, ascending."""

    unit: Unit
    values: torch.Tensor
    places: torch.Tensor


@dataclass
class Reducer:
    """Reduces gradients over `group` and keeps residuals, by the parameters' names: flat, at least fp32, of this rank.

    sparsifier, wire: how numbers are selected, and the format their values are sent in. keeps: residuals can go back to
    where they were before a step.
    """

    group: object
    sparsifier: str = "dgc"
    wire: str = "fp32"
    keeps: bool = False
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    counter: Counter = field(default_factory=Counter)
    half_scale: HalfScale = field(default_factory=HalfScale)
    step: int = 0
    _before: dict[str, torch.Tensor] = field(default_factory=dict)

    def start(
        self, units, gradients: Mapping[str, torch.Tensor], scale: float = 1.0, interleaved: bool = False
    ) -> "Reduction":
        """Start the messages of `units`; `wait()` writes the means over all ranks into `gradients`, flat and contiguous.

        scale: gradients / scale are added to residuals (a loss scale). interleaved: what is sent whole leaves before
        anything is selected. All ranks call this in the same order with units of the same names and k. Sends an all-reduce
        of dense units, and an all-gather of k values and places of others.
        """
        dense, sparse = [u for u in units if not u.k], [u for u in units if u.k]
        whole, selected = None, None
        if not interleaved:
            selected = self._select_all(sparse, gradients, scale)
        if dense:
            parts = {name: gradients[name] for unit in dense for name in unit.names}
            self.flush(parts, scale)
            flat = torch.cat(list(parts.values()))
            if flat.dtype == torch.float16:  # whose sum may be out of its range
                flat.div_(self.group.size())
            whole = begin_all_reduce(flat, self.group, self.counter)
        if interleaved:
            selected = self._select_all(sparse, gradients, scale)
        return Reduction(self, dense, whole, selected, self._send(selected), gradients, scale)

    def _send(self, selected):
        if not selected:
            return None
        if self.sparsifier == "randomk":
            return begin_all_reduce(torch.cat([s.values for s in selected]), self.group, self.counter)
        return begin_all_gather(self._message(selected), self.group, self.counter)

    def flush(self, gradients: Mapping[str, torch.Tensor], scale: float = 1.0) -> None:
        """Residuals of these parameters into their gradients, which are then sent whole.

        Not of a parameter that was not used: its mean is not applied by all frameworks.
        """
        for name, gradient in gradients.items():
            residual = self.residuals.get(name)
            if residual is None or (_is_zero(gradient) and not _is_zero(residual)):
                continue
            wide = torch.promote_types(gradient.dtype, residual.dtype)
            gradient.copy_(gradient.to(wide).add_(residual, alpha=scale))
            self._before.setdefault(name, self.residuals.pop(name))

    def start_fp16(self, gradients, flats) -> HalfReduction:
        """Start averaging `flats`, tensors that the gradients are parts of, in float16; all of it, without residuals."""
        return HalfReduction(self.group, self.counter, gradients, flats, self.half_scale)

    def begin_step(self, step: int) -> None:
        """Forget what residuals were before the last step."""
        self.step, self._before = step, {}

    def roll_back(self) -> None:
        """Residuals as they were before the last step, which was skipped."""
        self.residuals.update(self._before)
        self._before = {}

    def _keep(self, name, residual) -> None:
        if self.keeps and name not in self._before:
            self._before[name] = residual.clone()

    def _select_all(self, units, gradients, scale) -> list[Selected]:
        apart = [u.offload and not gradients[u.names[0]].is_cuda for u in units]  # there, the thread has another stream
        later = [
            self._worker.submit(self.select, u, gradients, scale) if there else None
            for u, there in zip(units, apart, strict=True)
        ]
        now = [None if future else self.select(u, gradients, scale) for u, future in zip(units, later, strict=True)]
        return [future.result() if future else found for found, future in zip(now, later, strict=True)]

    @cached_property
    def _worker(self):
        return ThreadPoolExecutor(1, "sparsefusion-offload")

    def select(self, unit, gradients, scale) -> Selected:
        """What is sent of a unit; the rest stays in the residuals of its parameters."""
        given = [gradients[name] for name in unit.names]
        for name, gradient in zip(unit.names, given, strict=True):
            residual = self.residuals.get(name)
            if residual is None:
                residual = residual_like(gradient)
            self.residuals[name] = residual.to(at_least_fp32(gradient.dtype))  # a loaded one may be of another
            self._keep(name, self.residuals[name])
        residuals = [self.residuals[name] for name in unit.names]
        if self.sparsifier == "randomk":
            return self._select_random(unit, given, residuals, scale)
        return Selected(unit, *self._take(given, residuals, unit.k, 1 / scale))

    def _take(self, given, residuals, k, scale):
        """Values (k,) and places (k,), of used parameters alone: the mean of an unused one is not applied everywhere."""
        used = [not _is_zero(gradient) for gradient in given]
        if all(used):
            return take(self.sparsifier, given, residuals, k, scale)
        parts, lengths = [list(compress(each, used)) for each in (given, residuals)], [len(g) for g in given]
        inside, numel = sum(compress(lengths, used)), sum(lengths)
        dtype = reduce(torch.promote_types, (r.dtype for r in residuals))  # whichever are used, as on all ranks
        values = residuals[0].new_zeros(k, dtype=dtype)
        places = residuals[0].new_full((k,), numel - 1, dtype=torch.int32)
        if count := min(k, inside):
            values[:count], found = take(self.sparsifier, *parts, count, scale)
            ends = torch.tensor([*accumulate(compress(lengths, used))], device=found.device)
            skipped = torch.tensor([*accumulate(0 if there else n for there, n in zip(used, lengths, strict=True))])
            before = skipped[torch.tensor(used)].to(found.device)
            places[:count] = found + before[torch.bucketize(found, ends, right=True)]
        return values, places

    def _select_random(self, unit, given, residuals, scale) -> Selected:
        """Places that all ranks know, so only values are sent, and added up on the way."""
        for gradient, residual in zip(given, residuals, strict=True):
            residual.add_(gradient.to(residual.dtype), alpha=1 / scale)
        x = torch.cat(residuals)
        places = random_places(unit.numel, unit.k, unit.names[0], self.step, x.device)
        values, stays = x[places], _of_unused(given, places)
        if stays is not None:
            values = values.masked_fill(stays, 0)
        if not x.isfinite().all():
            values = torch.full_like(values, torch.nan)  # who sends them sees it, and all others
            for residual in residuals:
                residual.masked_fill_(~residual.isfinite(), 0)
        add_at(residuals, -values.nan_to_num(0), places.int())
        return Selected(unit, values, places.int())

    def _message(self, selected) -> torch.Tensor:
        """uint8: all values in the format of the wire, each unit's from a new block; then all places, through all units.

        What rounding takes from values stays.
        """
        dtype = _dtype_of(selected)
        format = wire_format(self.wire, dtype)
        lengths = self._lengths(selected)
        values = torch.cat(
            [pad(s.values.to(dtype), (0, n - len(s.values))) for s, n in zip(selected, lengths, strict=True)]
        )
        encoded = format.encode(_within(values, format, self.group.size()).unsqueeze(0), self.group.size())
        if self.wire != "fp32":
            lost = values - self._decoded(encoded, dtype)[0]
            lost = lost.where(lost.isfinite(), 0)
            for s, part in zip(selected, lost.split(lengths), strict=True):
                add_at([self.residuals[name] for name in s.unit.names], part[: len(s.values)], s.places)
        starts, numel = _starts(selected)
        places = torch.cat(
            [s.places.to(dtype_of_places(numel)) + start for s, start in zip(selected, starts, strict=True)]
        )
        return torch.cat([encoded[0], encode_places(places, numel)])

    def _lengths(self, selected) -> list[int]:
        """Of each unit's values in a message."""
        block = wire_format(self.wire, _dtype_of(selected)).block
        return [padded(len(s.values), block) for s in selected]

    def _decoded(self, encoded, dtype):
        """(rows, numbers) of rows of encoded values."""
        ranks, format = self.group.size(), wire_format(self.wire, dtype)
        return format.restore(format.decode(encoded, dtype), ranks)


class Reduction:
    """Gradients under way; `wait()` writes their means and may be called again, for nothing."""

    def __init__(self, reducer, dense, whole, selected, sent, gradients, scale):
        self._reducer, self._dense, self._whole, self._selected, self._sent = reducer, dense, whole, selected, sent
        self.gradients, self._scale, self.written = gradients, scale, False
        self.marks = []  # once written: what is finite if the means are

    def wait(self) -> None:
        """Block until all messages are here, and write the means into the gradients."""
        if self.written:
            return
        self.written, ranks = True, self._reducer.group.size()
        if self._whole:
            mean = self._whole.wait()[0]
            if mean.dtype != torch.float16:
                mean.div_(ranks)
            self.marks.append(largest(mean))
            self._write_dense(mean)
        if self._sent:
            self._empty()  # while the message is under way
            (received,) = self._sent.wait()
            random = self._reducer.sparsifier == "randomk"
            parts = self._added_up(received) if random else self._of_all_ranks(received)
            for s, part in zip(self._selected, parts, strict=True):
                self._write(s.unit, part, self._scale / ranks)

    def _write_dense(self, mean) -> None:
        gradients = [self.gradients[name] for unit in self._dense for name in unit.names]
        for gradient, part in zip(gradients, mean.split([len(g) for g in gradients]), strict=True):
            gradient.copy_(part)

    def _added_up(self, total):
        """Of each unit, [(values, places)]: one part, already the sum."""
        self.marks.append(largest(total))
        parts = total.split([len(s.values) for s in self._selected])
        return [[(part, s.places)] for part, s in zip(parts, self._selected, strict=True)]

    def _of_all_ranks(self, messages):
        """Of each unit, [(values, places)] of every rank."""
        lengths, counts = self._reducer._lengths(self._selected), [len(s.values) for s in self._selected]
        starts, numel = _starts(self._selected)
        bytes_of_values = messages.shape[1] - bytes_of_places(sum(counts), numel)
        values = self._reducer._decoded(messages[:, :bytes_of_values], _dtype_of(self._selected))
        self.marks.append(largest(values))
        places = decode_places(messages[:, bytes_of_values:], sum(counts), numel)
        parts = zip(values.split(lengths, 1), places.split(counts, 1), starts, strict=True)
        return [list(zip(v[:, : p.shape[1]], (p - start).int(), strict=True)) for v, p, start in parts]

    def _empty(self) -> None:
        """Zeros for means to be added up in. All was selected from, on CUDA too: selectors wait for what they find."""
        for name in (name for s in self._selected for name in s.unit.names):
            if _is_exact(self.gradients[name]):
                self.gradients[name].zero_()

    def _write(self, unit, parts, scale) -> None:
        """Gradients of a unit from values and places, added up in the order of the ranks, in at least fp32."""
        gradients = [self.gradients[name] for name in unit.names]
        sums = [g if _is_exact(g) else residual_like(g) for g in gradients]
        for values, places in parts:
            add_at(sums, values, places, scale)
        for name, gradient, total in zip(unit.names, gradients, sums, strict=True):
            if not _is_exact(gradient):
                gradient.copy_(total)
                rounded = total.sub_(gradient)  # on every rank, so that this much of the mean is still to be applied
                rounded = rounded.where(rounded.isfinite(), 0)
                self._reducer.residuals[name].add_(rounded, alpha=1 / self._scale)
                self.marks.append(largest(gradient))  # a sum may be out of its range


def _is_exact(gradient) -> bool:
    """Whether means are added up in its own dtype."""
    return gradient.dtype == at_least_fp32(gradient.dtype)


def _starts(selected) -> tuple[list[int], int]:
    """Where each unit's numbers begin, one after the other, and how many there are."""
    *starts, numel = accumulate((s.unit.numel for s in selected), initial=0)
    return starts, numel


def _dtype_of(selected) -> torch.dtype:
    """In which the values of several units are sent."""
    return reduce(torch.promote_types, (s.values.dtype for s in selected))


def _of_unused(given, places) -> torch.Tensor | None:
    """Which of the places in gradients, one after the other, are in one that was not used; None: none is.

    Its mean is not applied by all frameworks, so none of its residual leaves.
    """
    unused = [_is_zero(gradient) for gradient in given]
    if not any(unused):
        return None
    ends = torch.tensor([len(gradient) for gradient in given]).cumsum(0)
    return torch.tensor(unused)[torch.bucketize(places.cpu(), ends, right=True)].to(places.device)


def _is_zero(gradient) -> bool:
    """Whether no number of it is anything else: the parameter was not used."""
    return not (gradient[:: -(-len(gradient) // PEEK) or 1].any() or gradient.any())


def _within(values, format, ranks):
    """Finite values that the format has no number for become its largest; the rest of them stays behind."""
    dtype = getattr(format, "dtype", None)
    if dtype is None or dtype.itemsize >= values.dtype.itemsize:
        return values
    limit = torch.finfo(dtype).max * (ranks if format.scaled else 1)
    return values.where(~values.isfinite(), values.clamp(-limit, limit))
