"""Averages gradients in float16, scaled by a power of two that follows their largest mean, so that small values survive.

Gradients that are float16 already are sent without a scale.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives.counted import Counter, Exchange, begin_all_reduce

from .half_precision import from_fp16, largest, largest_fp16, to_fp16

# Exponents of powers of two.
TARGET_EXPONENT = 5  # the largest mean times the scale is 16 to 32, so means up to 2000 times as large are in range
HIGHEST_EXPONENT = 12  # with a scale below 1, it is 2048 to 4096, so means up to 16 times as large are in range
LARGEST_SCALE_EXPONENT = 64  # the limit of the scale and of its inverse
RISE_EXPONENT = 24  # the rise of the scale if all means are 0, which represents values that underflowed


class Fp16Scale:
    """The factor by which gradients are multiplied before they are rounded to float16; the same on all ranks.

    It is at least 1, because values that overflow are sent again, while values that underflow would be lost. With a loss
    scale, which makes all gradients large, it may be as small as the inverse of the loss scale, but not smaller than
    the largest mean requires.
    """

    value = 1.0

    def follow(self, largest_mean: float, loss_scale: float = 1.0) -> None:
        """Adapt the scale after a step in float16. largest_mean: the largest magnitude of the means of all model parts."""
        if math.isfinite(largest_mean):
            magnitude = math.frexp(largest_mean)[1]
            exponent = TARGET_EXPONENT - magnitude if largest_mean else math.log2(self.value) + RISE_EXPONENT
            if exponent < 0:
                least = -math.floor(math.log2(loss_scale)) if 1 < loss_scale < math.inf else 0
                exponent = max(min(HIGHEST_EXPONENT - magnitude, 0), least, -LARGEST_SCALE_EXPONENT)
            self.value = 2.0 ** min(exponent, LARGEST_SCALE_EXPONENT)


class Fp16Reduction:
    """A pending average of gradients in float16; each tensor is written as soon as its mean arrives.

    A tensor whose mean is not finite is sent again in its own dtype, because its values may merely be outside of float16's
    range. All ranks receive the same means, so all send it again.

    gradients: {name: gradient}. flats: the flat tensors whose parts are the gradients.
    """

    def __init__(
        self,
        group: ProcessGroup,
        counter: Counter,
        gradients: Mapping[str, torch.Tensor],
        flats: Sequence[torch.Tensor],
        scale: Fp16Scale,
    ):
        self._group, self._counter, self.gradients, self._scale = group, counter, gradients, scale.value
        self.maxima: list[torch.Tensor] = []  # the largest magnitude of each mean; filled by `wait`
        encoded = [to_fp16(flat, self._factor(flat) / group.size()) for flat in flats]
        messages = [begin_all_reduce(values, group, counter) for values in encoded]
        self._written = [(flat, self._write_on_arrival(flat, m)) for flat, m in zip(flats, messages, strict=True)]

    def _factor(self, flat: torch.Tensor) -> float:
        return 1.0 if flat.dtype == torch.float16 else self._scale

    def _write_on_arrival(self, flat: torch.Tensor, message: Exchange) -> torch.futures.Future:
        """A future of (largest mean, received tensor or None). Its callback sends nothing: the order would be undefined."""
        (received,), (work,), factor = message.received, message.work, self._factor(flat)
        assert work is not None  # the call is asynchronous

        def write(done):
            done.value()  # raises the error of the all-reduce, if there was one
            largest_value = largest_fp16(received) / factor
            if flat.dtype == torch.float16:  # sent as it is, so NaN and Inf are final
                flat.copy_(received)
            elif received.is_cuda:  # without synchronizing the stream
                flat.copy_(_decoded(received, factor, flat).where(largest_value.isfinite(), flat))
            elif largest_value.isfinite():
                from_fp16(received, 1 / factor, flat)
            return largest_value, received if received.is_cuda or not largest_value.isfinite() else None

        return work.get_future().then(write)

    def wait(self) -> None:
        """Block until the means are in the tensors."""
        written, self._written = self._written, []
        for flat, future in written:
            largest_value, received = future.wait()
            if flat.dtype != torch.float16 and not largest_value.isfinite():
                begin_all_reduce(flat, self._group, self._counter).wait()
                # Finite values of the first message are kept: another part of the model may hold a copy of this parameter
                # in a bucket that was in range, and the copies must stay equal.
                first = _decoded(received, self._factor(flat), flat)
                flat.copy_(first.where(received.isfinite(), flat.div_(self._group.size())))
                largest_value = largest(flat)
            self.maxima.append(largest_value)


def _decoded(received: torch.Tensor, factor: float, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    from_fp16(received, 1 / factor, out)
    return out
