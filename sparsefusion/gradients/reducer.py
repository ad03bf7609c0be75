"""Averages gradients over ranks: dense ones, and selected elements of sparse ones, whose other elements stay in residuals.

A residual is reduced by exactly the value that is applied, after rounding to the wire format. So the applied means,
times the number of ranks, plus the residuals of all ranks are the sum of all gradients.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives.counted import Counter, Exchange, begin_all_reduce
from commfabric.collectives.wire_formats import at_least_fp32
from sparsefusion.planning.plan import Unit
from sparsefusion.selection.fused import add_at, residual_like

from .error_feedback import ErrorFeedback, Selection
from .exchanges import Added, Gathered, SparseAllReduce
from .fp16_reduction import Fp16Reduction, Fp16Scale
from .half_precision import largest


class Reducer:
    """Reduces gradients over `group`. All ranks call `start` and `start_fp16`, and `wait`, in the same order.

    sparsifier, wire and exchange are those of `SparseFusion`, but exchange is not auto.

    Attributes:
        feedback: The residuals of this rank.
        counter: Counts the messages.
        fp16_scale: The scale of gradients that are sent in float16.
    """

    def __init__(self, group: ProcessGroup, sparsifier: str = "dgc", wire: str = "fp32", exchange: str = "all_gather"):
        self.group, self.wire, self.exchange, self.feedback = group, wire, exchange, ErrorFeedback(sparsifier)
        self.counter, self.fp16_scale = Counter(), Fp16Scale()

    def start(
        self, units: Sequence[Unit], gradients: dict[str, torch.Tensor], scale: float = 1.0, interleaved: bool = False
    ) -> "Reduction":
        """Start averaging the gradients of `units` over all ranks; `wait()` writes the means.

        Sends one all-reduce of all dense units, and the messages of the exchange (see `exchanges`).

        Args:
            units: Units with the same names and k on all ranks.
            gradients: {name: gradient}, flat and contiguous.
            scale: The loss scale; residuals are unscaled.
            interleaved: Send the dense units before selecting from the others.
        """
        dense, sparse = [u for u in units if not u.k], [u for u in units if u.k]
        selections = [] if interleaved else self._select_all(sparse, gradients, scale)
        dense_message = self._send_dense(dense, gradients, scale)
        if interleaved:
            selections = self._select_all(sparse, gradients, scale)
        return Reduction(self, dense, dense_message, selections, self._send(selections), gradients, scale)

    def start_fp16(self, gradients: Mapping[str, torch.Tensor], flats: Sequence[torch.Tensor]) -> Fp16Reduction:
        """Start averaging `flats`, whose parts are the gradients, in float16, without residuals."""
        return Fp16Reduction(self.group, self.counter, gradients, flats, self.fp16_scale)

    def _send_dense(self, units: Sequence[Unit], gradients: dict[str, torch.Tensor], scale: float) -> Exchange | None:
        if not units:
            return None
        dense_gradients = {name: gradients[name] for unit in units for name in unit.names}
        self.feedback.flush(dense_gradients, scale)
        flat = torch.cat(list(dense_gradients.values()))
        if flat.dtype == torch.float16:  # the sum could overflow
            flat.div_(self.group.size())
        return begin_all_reduce(flat, self.group, self.counter)

    def _send(self, selections: Sequence[Selection]) -> Added | Gathered | SparseAllReduce | None:
        if not selections:
            return None
        if self.feedback.sparsifier == "randomk":
            return Added(selections, self.group, self.counter)
        kind = SparseAllReduce if self.exchange == "sparse_all_reduce" else Gathered
        return kind(selections, self.wire, self.feedback, self.group, self.counter)

    def _select_all(self, units: Sequence[Unit], gradients: dict[str, torch.Tensor], scale: float) -> list[Selection]:
        """Select from all units; from units that the plan offloads, in another thread at the same time."""
        # On CUDA the thread would have another stream.
        in_thread = [unit for unit in units if unit.offload and not gradients[unit.names[0]].is_cuda]
        futures = {unit.names: self._worker.submit(self.feedback.select, unit, gradients, scale) for unit in in_thread}
        here = {unit.names: self.feedback.select(unit, gradients, scale) for unit in units if unit.names not in futures}
        return [here[unit.names] if unit.names in here else futures[unit.names].result() for unit in units]

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "sparsefusion-offload")


@dataclass(eq=False)
class Reduction:
    """Pending averages, made by `Reducer.start`.

    Attributes:
        gradients: {name: gradient}, into which the means are written; its values may be replaced before `wait`.
        maxima: Filled by `wait`: all are finite if and only if all means are.
    """

    reducer: Reducer
    dense_units: Sequence[Unit]
    dense_message: Exchange | None
    selections: Sequence[Selection]
    sparse_message: Added | Gathered | SparseAllReduce | None
    gradients: dict[str, torch.Tensor]
    scale: float
    maxima: list[torch.Tensor] = field(default_factory=list)
    _is_written: bool = False

    def wait(self) -> None:
        """Block until all messages have arrived, and write the means into the gradients. A second call does nothing."""
        if self._is_written:
            return
        self._is_written, ranks = True, self.reducer.group.size()
        if self.dense_message:
            mean = self.dense_message.wait()[0]
            if mean.dtype != torch.float16:
                mean.div_(ranks)
            self.maxima.append(largest(mean))
            gradients = [self.gradients[name] for unit in self.dense_units for name in unit.names]
            for gradient, part in zip(gradients, mean.split([len(g) for g in gradients]), strict=True):
                gradient.copy_(part)
        if self.sparse_message:
            # While the message is in flight. All selections have been made before, also on CUDA.
            for gradient in (self.gradients[name] for s in self.selections for name in s.unit.names):
                if _accumulates_exactly(gradient):
                    gradient.zero_()
            values, parts = self.sparse_message.wait()
            self.maxima.append(largest(values))
            for selection, part in zip(self.selections, parts, strict=True):
                self._write(selection.unit, part, self.scale / ranks)

    def _write(self, unit: Unit, parts: Iterable, scale: float) -> None:
        """Write the gradients of a unit: the sum of values at indices, in rank order and in at least fp32."""
        gradients = [self.gradients[name] for name in unit.names]
        sums = [g if _accumulates_exactly(g) else residual_like(g) for g in gradients]
        for values, indices in parts:
            add_at(sums, values, indices, scale)
        for name, gradient, total in zip(unit.names, gradients, sums, strict=True):
            if not _accumulates_exactly(gradient):
                gradient.copy_(total)
                rounded_off = total.sub_(gradient)  # the part of the mean that is not applied; equal on all ranks
                rounded_off = rounded_off.where(rounded_off.isfinite(), 0)
                self.reducer.feedback.residuals[name].add_(rounded_off, alpha=1 / self.scale)
                self.maxima.append(largest(gradient))  # the sum may be outside of the range of its dtype


def _accumulates_exactly(gradient: torch.Tensor) -> bool:
    """Return True if means are summed in the gradient's own dtype."""
    return gradient.dtype == at_least_fp32(gradient.dtype)
