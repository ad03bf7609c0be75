"""Whole gradients in float16, times a power of two that follows the largest of their means, so that small ones stay."""

import math

import torch

from .collectives import begin_all_reduce
from .finite import largest
from .halves import largest_half, restore, to_half

# Powers of two.
EXPONENT = 5  # of the largest mean times the scale, 16 to 32: 2048 times that is in range
MOST = 64  # of the scale; at least 0, so that a few large numbers, which are sent again, take nothing from others
RISE = 24  # of the scale, if all means are 0: what was nothing before is less than a half then


class HalfScale:
    """The same on all ranks, as means are. value: times which gradients are sent."""

    def __init__(self):
        self.value, self._means = 1.0, []

    def saw(self, means) -> None:
        """The largest magnitudes of means of this step."""
        self._means += means

    def follow(self) -> None:
        """A step ended."""
        if self._means:
            most, self._means = torch.stack(self._means).max().item(), []
            if math.isfinite(most):
                exponent = EXPONENT - math.frexp(most)[1] if most else math.log2(self.value) + RISE
                self.value = 2.0 ** min(max(exponent, 0), MOST)


class HalfReduction:
    """Tensors of which gradients are parts, under way in float16, each written when its mean is there.

    One whose mean is not finite, which all ranks see, is sent again as it is: it may only be out of float16's range.
    """

    def __init__(self, group, counter, gradients, flats, scale: HalfScale):
        self._group, self._counter, self.gradients, self._scale, self.marks = group, counter, gradients, scale, []
        halves = [to_half(flat, self._times(flat) / group.size()) for flat in flats]
        under_way = [begin_all_reduce(each, group, counter) for each in halves]
        self._written = [(flat, self._write(flat, each)) for flat, each in zip(flats, under_way, strict=True)]

    def _times(self, flat) -> float:
        return 1.0 if flat.dtype == torch.float16 else self._scale.value

    def _write(self, flat, under_way):
        """A future of the largest mean; it sends nothing, so that no message can come at another place on another rank."""
        (received,), (work,), times = under_way.received, under_way.work, self._times(flat)

        def write(done):
            done.value()  # raises what went wrong
            mark = largest_half(received) / times
            if received.is_cuda:  # where a stream is not waited for
                flat.copy_((received.to(flat.dtype) / times).where(mark.isfinite(), flat))
            elif mark.isfinite():
                restore(received, 1 / times, flat)
            return mark

        return work.get_future().then(write)

    def wait(self) -> None:
        """Block until the means are there."""
        written, self._written, marks = self._written, [], []
        for flat, future in written:
            mark = future.wait()
            if flat.dtype != torch.float16 and not mark.isfinite():
                begin_all_reduce(flat, self._group, self._counter).wait()
                mark = largest(flat.div_(self._group.size()))
            marks.append(mark)
        self.marks += marks
        self._scale.saw(marks)
