"""Activation recomputation: backward computes the activations of a block again instead of storing them.

Recomputation does not repeat all-reduces, reduce-scatters or the passing of states: their results are stored in the first
forward pass (`communicate_once`) if a later operation of the same function needs them. The exception is the all-gather of
sequence parallelism: storing its result would undo the saving, so backward gathers again, as it does without recomputation.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); implemented by torch.utils.checkpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


class Recomputation:
    """Runs functions so that their activations are recomputed. is_on: False runs them normally.

    All communicating objects of a model (`Ranks`, `ContextRanks`) have the same `Recomputation`. Two threads must not
    run one model at the same time.
    """

    def __init__(self, is_on: bool = False):
        self.is_on = is_on
        self._stored: list | None = None  # the stored results of the running function; None if none is running
        self._next: Iterator | None = None  # an iterator over them, while the function is repeated

    def __deepcopy__(self, memo: dict) -> "Recomputation":
        return self  # like `Ranks`: all parts of a copy have the same one

    @property
    def is_running(self) -> bool:
        """True while a function runs whose activations are recomputed."""
        return self._stored is not None

    @property
    def is_repeating(self) -> bool:
        """True while a function is repeated for backward."""
        return self._next is not None

    def run(self, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        """function(*inputs). With gradients, only its inputs and the results of communication are stored for backward."""
        if not self.is_on or not torch.is_grad_enabled():
            return function(*inputs)
        stored: list = []
        return checkpoint(
            function,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # no layer draws random numbers
            context_fn=lambda: (self.recording(stored), self.replaying(stored)),
        )

    def recording(self, stored: list) -> AbstractContextManager:
        """A context in which the results of `communicate_once` are appended to `stored`."""
        return _Running(self, stored, again=False)

    def replaying(self, stored: list) -> AbstractContextManager:
        """A context in which `communicate_once` returns the results in `stored`, in order, and sends nothing."""
        return _Running(self, stored, again=True)

    def communicate_once(self, send: Callable[[], Result]) -> Result:
        """Call send(), which communicates. In a repeated function, return the result of the first call and send nothing.

        Results are read in the order in which they were stored, so both runs must make the same calls in the same order.
        """
        if self._stored is None:
            return send()
        if self._next is None:
            self._stored.append(send())
            return _without_graph(self._stored[-1])
        return _without_graph(next(self._next))


def _without_graph(result: Any) -> Any:
    """Detached aliases of tensors: autograd attaches its graph, with all activations, to the result of a function."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    return tuple(map(_without_graph, result)) if isinstance(result, tuple) else result


class _Running(AbstractContextManager):
    """A context in which a function runs whose results of communication are in `stored`. again: True for a repetition.

    torch enters it for each backward pass through the function, so it may be entered several times.
    """

    def __init__(self, recomputation: Recomputation, stored: list, again: bool):
        self.recomputation, self.stored, self.again = recomputation, stored, again

    def __enter__(self) -> None:
        owner = self.recomputation
        self.before = owner._stored, owner._next
        owner._stored, owner._next = self.stored, iter(self.stored) if self.again else None

    def __exit__(self, *error: object) -> None:
        self.recomputation._stored, self.recomputation._next = self.before
