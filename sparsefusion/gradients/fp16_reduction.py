"""Whole gradients in float16, times a power of two that follows the largest of their means, so that small ones stay.

Those that are float16 themselves go as they are.
"""

import math

import torch

from sparsefusion.collectives.counted import begin_all_reduce

from .half_precision import largest_half, restore, to_half
from .nonfinite import largest

# Powers of two.
EXPONENT = 5  # of the largest mean times the scale, 16 to 32: 2000 times that is in range
HIGHEST = 12  # of the largest mean times a scale below 1, 2048 to 4096: 16 times that is in range
MOST = 64  # of the scale, or of its inverse
RISE = 24  # of the scale, if all means are 0: what was nothing before is less than a half then


class HalfScale:
    """The same on all ranks. value: times which gradients are sent.

    At least 1: a few large numbers, which are sent again, take nothing from others. But with a loss scale, which makes all
    numbers large, at least its inverse, and no smaller than the largest mean needs.
    """

    value = 1.0

    def follow(self, most: float, loss_scale: float = 1.0) -> None:
        """A step in float16 ended; most: the largest magnitude of all its means, of all parts of the model."""
        if math.isfinite(most):
            magnitude = math.frexp(most)[1]
            exponent = EXPONENT - magnitude if most else math.log2(self.value) + RISE
            if exponent < 0:
                least = -math.floor(math.log2(loss_scale)) if 1 < loss_scale < math.inf else 0
                exponent = max(min(HIGHEST - magnitude, 0), least, -MOST)
            self.value = 2.0 ** min(exponent, MOST)


class HalfReduction:
    """Tensors of which gradients are parts, under way in float16, each written when its mean is there.

    One whose mean is not finite, which all ranks see, is sent again as it is: it may only be out of float16's range.
    """

    def __init__(self, group, counter, gradients, flats, scale: HalfScale):
        self._group, self._counter, self.gradients, self._scale, self.marks = group, counter, gradients, scale.value, []
        halves = [to_half(flat, self._times(flat) / group.size()) for flat in flats]
        under_way = [begin_all_reduce(each, group, counter) for each in halves]
        self._written = [(flat, self._write(flat, each)) for flat, each in zip(flats, under_way, strict=True)]

    def _times(self, flat) -> float:
        return 1.0 if flat.dtype == torch.float16 else self._scale

    def _write(self, flat, under_way):
        """A future of the largest mean, and of what came if it may be needed; sends nothing that could be misplaced."""
        (received,), (work,), times = under_way.received, under_way.work, self._times(flat)

        def write(done):
            done.value()  # raises what went wrong
            mark = largest_half(received) / times
            if flat.dtype == torch.float16:  # sent as it is: what is not finite, too, is the mean
                flat.copy_(received)
            elif received.is_cuda:  # where a stream is not waited for
                flat.copy_(_restored(received, times, flat).where(mark.isfinite(), flat))
            elif mark.isfinite():
                restore(received, 1 / times, flat)
            return mark, received if received.is_cuda or not mark.isfinite() else None

        return work.get_future().then(write)

    def wait(self) -> None:
        """Block until the means are there."""
        written, self._written = self._written, []
        for flat, future in written:
            mark, received = future.wait()
            if flat.dtype != torch.float16 and not mark.isfinite():
                begin_all_reduce(flat, self._group, self._counter).wait()
                # The others as they came: a copy on another part of the model, whose bucket may be in range, has them so.
                came = _restored(received, self._times(flat), flat)
                flat.copy_(came.where(received.isfinite(), flat.div_(self._group.size())))
                mark = largest(flat)
            self.marks.append(mark)


def _restored(received, times, like) -> torch.Tensor:
    out = torch.empty_like(like)
    restore(received, 1 / times, out)
    return out
