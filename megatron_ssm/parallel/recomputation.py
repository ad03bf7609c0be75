"""Activation recomputation: backward computes the activations of a block again instead of storing them.

Recomputing must not send again what ranks have exchanged. So the results of communication are kept: sums of a few columns,
states, and sums that a later operation of the same part needs for its backward. Source: Chen et al., "Training Deep Nets
with Sublinear Memory Cost" (2016); torch.utils.checkpoint does the work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


class Recomputation:
    """Runs parts of a model so that their activations are recomputed. is_on: False runs them as usual.

    All objects of a model that communicate (`Ranks`, `ContextRanks`) have the same `Recomputation`. Two threads must not run
    one model at the same time.
    """

    def __init__(self, is_on: bool = False):
        self.is_on = is_on
        self._kept: list | None = None  # the results of the part that is running; None: no part is running
        self._next: Iterator | None = None  # over them, while the part runs again

    def __deepcopy__(self, memo: dict) -> "Recomputation":
        return Recomputation(self.is_on)

    @property
    def is_running(self) -> bool:
        """Whether a part is running whose activations are recomputed."""
        return self._kept is not None

    def run(self, part: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        """part(*inputs). While gradients are enabled, only inputs and results of communication are stored for backward."""
        if not self.is_on or not torch.is_grad_enabled():
            return part(*inputs)
        kept: list = []
        return checkpoint(
            part,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # no layer draws random numbers
            context_fn=lambda: (self._running(kept, None), self._running(kept, iter(kept))),
        )

    @contextmanager
    def _running(self, kept: list, again: Iterator | None) -> Iterator[None]:
        before = self._kept, self._next
        self._kept, self._next = kept, again
        try:
            yield
        finally:
            self._kept, self._next = before

    def once(self, send: Callable[[], Result]) -> Result:
        """send(), which communicates. When a part is recomputed: the result of the first time, and nothing is sent."""
        if self._kept is None:
            return send()
        if self._next is not None:
            return next(self._next)
        self._kept.append(send())
        return self._kept[-1]
