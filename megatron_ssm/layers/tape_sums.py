"""The all-reduces of a tape. C computes the ones in shared memory, and Python the others."""

from collections.abc import Sequence

from torch import Tensor

from commfabric.collectives.counted import Counter
from megatron_ssm.kernels.arguments import address
from megatron_ssm.parallel.ranks import Ranks

from .tape_operations import IN_C, IN_PYTHON, ONE_RANK, SUM_IN_PYTHON, Sum


class TapeSum:
    """An all-reduce of a buffer.

    Args:
        ranks: The ranks whose summands are added.
        part: This rank's summand; the sum overwrites it.
        squares: A second summand, which the same message sums exactly; or None.
        is_exact: True to sum in at least fp32, and not in the model's wire format.

    Attributes:
        struct: C's `Sum`.
        sum_in_c: The all-reduce that C computes in shared memory, or None.
    """

    def __init__(self, ranks: Ranks, part: Tensor, squares: Tensor | None = None, is_exact: bool = False):
        self._ranks, self._part, self._squares, self._is_exact = ranks, part, squares, is_exact
        tensors, is_alone = [part] if squares is None else [part, squares], ranks.group is None
        self.sum_in_c = None if is_alone else ranks.sum_in_c(tensors, "fp32" if is_exact else None)
        done_by = ONE_RANK if is_alone else IN_PYTHON if self.sum_in_c is None else IN_C
        self.struct = Sum(total=address(part), squares=address(squares), done_by=done_by)
        if c := self.sum_in_c:
            struct = self.struct
            struct.call, struct.channel, struct.parts, struct.count = c.reduce, c.channel, c.parts, c.count

    def finish(self, code: int) -> None:
        """Finish an all-reduce for which C returned `code`.

        For SUM_IN_PYTHON, compute it here. Any other code is one of the shared memory: wait for the other ranks, or raise an
        error.
        """
        if code != SUM_IN_PYTHON:
            assert self.sum_in_c is not None  # without it, C returns no other code
            return self.sum_in_c.memory.wait(code)
        ranks, part, squares = self._ranks, self._part, self._squares
        assert ranks.group is not None  # one rank has no all-reduce
        if callable(ranks.format) and not self._is_exact:
            part = part.clone()  # the user's function may keep it
        if self._is_exact:
            whole = ranks.all_reduce_exact(part, ranks.group)
        elif squares is None:
            whole = ranks.all_reduce_in_format(part, ranks.group)
        else:
            whole, columns = ranks.reduce_beside(part, squares, ranks.group)
            squares.copy_(columns)
        self._part.copy_(whole)


class SentInC:
    """The messages of the all-reduces that C computes in one call."""

    def __init__(self, sums: Sequence[TapeSum]):
        in_c = [tape_sum.sum_in_c for tape_sum in sums if tape_sum.sum_in_c is not None]
        self._memories, self._counter = {one.memory for one in in_c}, in_c[0].counter if in_c else None
        self._sent = Counter()
        for one in in_c:
            self._sent.add("all_reduce", one.nbytes, one.sent)

    def check(self) -> None:
        """Raise an error if another rank has failed. Called before the call of C."""
        for memory in self._memories:
            memory.check()

    def count(self) -> None:
        """Add the sent bytes to the counter. Called after the call of C."""
        if self._counter is not None:
            self._counter.include(self._sent)
