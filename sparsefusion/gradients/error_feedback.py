"""Selects elements of gradient + residual, and keeps the rest as the residual of the next step (error feedback).

Residuals are flat, at least fp32, and belong to one rank. Sources: Seide et al., 2014; SSFusion, section II-C.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, compress

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from sparsefusion.planning.plan import Unit
from sparsefusion.selection.fused import add_at, residual_like, take
from sparsefusion.selection.sparsifiers import random_indices

PROBES = 64  # evenly spaced elements that `is_zero` tests first; in a used gradient they are hardly ever all 0


@dataclass
class Selection:
    """The elements that a rank selected from a unit: values (k,), at least fp32, and indices (k,), int32, ascending."""

    unit: Unit
    values: torch.Tensor
    indices: torch.Tensor


@dataclass
class ErrorFeedback:
    """The residuals of a rank, and the selection from gradients that updates them.

    Attributes:
        sparsifier: One of SPARSIFIERS.
        can_roll_back: Keep copies, from which `roll_back` restores the residuals before the step.
        residuals: {name of the parameter: residual}.
        step: The number of the current step.
    """

    sparsifier: str = "dgc"
    can_roll_back: bool = False
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0
    _residuals_before_step: dict[str, torch.Tensor] = field(default_factory=dict)  # those that this step has changed

    def begin_step(self, step: int) -> None:
        """Start a step; the residuals of the last one can no longer be restored."""
        self.step, self._residuals_before_step = step, {}

    def roll_back(self) -> None:
        """Restore the residuals before the last step, which was skipped."""
        self.residuals.update(self._residuals_before_step)
        self._residuals_before_step = {}

    def flush(self, gradients: Mapping[str, torch.Tensor], scale: float = 1.0) -> None:
        """Add the residuals of these parameters, times `scale`, to their gradients, which are then sent dense.

        Parameters that were not used in this step keep their residuals, because some frameworks do not apply their means.
        """
        for name, gradient in gradients.items():
            residual = self.residuals.get(name)
            if residual is None or (is_zero(gradient) and not is_zero(residual)):
                continue
            wide = torch.promote_types(gradient.dtype, residual.dtype)
            gradient.copy_(gradient.to(wide).add_(residual, alpha=scale))
            self._residuals_before_step.setdefault(name, self.residuals.pop(name))

    def select(self, unit: Unit, all_gradients: Mapping[str, torch.Tensor], scale: float) -> Selection:
        """Select k elements of gradients / scale + residuals of a unit; the others stay in its residuals."""
        gradients = [all_gradients[name] for name in unit.names]
        for name, gradient in zip(unit.names, gradients, strict=True):
            residual = self.residuals[name] if name in self.residuals else residual_like(gradient)
            residual = residual.to(at_least_fp32(gradient.dtype))  # one from a checkpoint may have another dtype
            self.residuals[name] = residual
            if self.can_roll_back and name not in self._residuals_before_step:
                self._residuals_before_step[name] = residual.clone()
        residuals = [self.residuals[name] for name in unit.names]
        if self.sparsifier == "randomk":
            return self._select_random(unit, gradients, residuals, scale)
        return Selection(unit, *self._select_used(gradients, residuals, unit.k, 1 / scale))

    def _select_used(
        self, gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], k: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select values (k,) and indices (k,), only from parameters whose gradient is not all zero: some frameworks discard
        the means of the others.
        """
        used = [not is_zero(gradient) for gradient in gradients]
        if all(used):
            return take(self.sparsifier, gradients, residuals, k, scale)
        lengths = [len(gradient) for gradient in gradients]
        used_gradients, used_residuals = list(compress(gradients, used)), list(compress(residuals, used))
        used_numel, numel = sum(compress(lengths, used)), sum(lengths)
        dtype = reduce(torch.promote_types, (r.dtype for r in residuals))  # of all residuals: the same on every rank
        values = residuals[0].new_zeros(k, dtype=dtype)
        indices = residuals[0].new_full((k,), numel - 1, dtype=torch.int32)
        if count := min(k, used_numel):
            values[:count], found = take(self.sparsifier, used_gradients, used_residuals, count, scale)
            ends = torch.tensor([*accumulate(compress(lengths, used))], device=found.device)
            skipped = torch.tensor([*accumulate(0 if is_used else n for is_used, n in zip(used, lengths, strict=True))])
            unused_elements_before = skipped[torch.tensor(used)].to(found.device)
            indices[:count] = found + unused_elements_before[torch.bucketize(found, ends, right=True)]
        return values, indices

    def _select_random(
        self, unit: Unit, gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], scale: float
    ) -> Selection:
        """Select the same indices on all ranks, so that only values are sent, and an all-reduce sums them."""
        for gradient, residual in zip(gradients, residuals, strict=True):
            residual.add_(gradient.to(residual.dtype), alpha=1 / scale)
        x = torch.cat(list(residuals))
        indices = random_indices(unit.numel, unit.k, unit.names[0], self.step, x.device)
        values, unused = x[indices], [is_zero(gradient) for gradient in gradients]
        if any(unused):
            ends = torch.tensor([len(gradient) for gradient in gradients]).cumsum(0)
            is_unused = torch.tensor(unused)[torch.bucketize(indices.cpu(), ends, right=True)]
            values = values.masked_fill(is_unused.to(x.device), 0)
        if not x.isfinite().all():
            values = torch.full_like(values, torch.nan)  # so that every rank sees it
            for residual in residuals:
                residual.masked_fill_(~residual.isfinite(), 0)
        add_at(residuals, -values.nan_to_num(0), indices.int())
        return Selection(unit, values, indices.int())

    def add_back(self, selection: Selection, values: torch.Tensor) -> None:
        """Add values to the residuals at the indices of a selection: its rounding errors, or elements that were not sent."""
        add_at([self.residuals[name] for name in selection.unit.names], values, selection.indices)


def is_zero(gradient: torch.Tensor) -> bool:
    """Return True if all elements are zero, as in the gradient of an unused parameter."""
    return not (gradient[:: -(-len(gradient) // PROBES) or 1].any() or gradient.any())
