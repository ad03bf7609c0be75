"""The tensor-parallel ranks that a model is split over, and how their parts are added up."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from sparsefusion import all_reduce
from sparsefusion.collectives import counted as collectives
from sparsefusion.collectives.agreement import agree
from sparsefusion.collectives.shared_memory import SharedMemory, SumInPlace, connect
from sparsefusion.collectives.wire_formats import at_least_fp32

from .groups import neighbours


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks a model is split over; `group` None is one rank.

    counter: adds up what this rank sends. format: of the block outputs' sums (out_proj, o_proj, down_proj): fp32, fp16,
    bf16, int8 or auto (`sparsefusion.all_reduce`), or a `(tensor, group) -> tensor` function of the caller's. Everything
    else is summed by `exact`. memory: what the ranks share if they are on one host, through which tensors of the CPU go,
    then; `transport` says why, if they do not. (In memory fp32 is the fastest format, and what auto chooses.)
    """

    group: object = None
    rank: int = 0
    size: int = 1
    counter: collectives.Counter | None = None
    format: str | Callable = "fp32"
    memory: SharedMemory | None = None
    transport: str = ""  # of one rank, none

    @classmethod
    def of(cls, group, counter=None, format="fp32", share=True) -> "Ranks":
        """The ranks of a process group (None, or a group of one: one rank), which all of them call together.

        They share memory if they are on one host, all have the C kernels, and none says share=False; None, on all of
        them: the tensors will not be on the CPU.
        """
        if group is None or group.size() == 1:
            return cls(counter=counter, format=format)
        backend = dist.get_backend(group)
        memory, why = (None, "") if share is None else connect(group, wanted=share)
        transport = "shared memory" if memory else f"{backend} ({why})" if why else backend
        return cls(group, group.rank(), group.size(), counter, format, memory, transport)

    def __deepcopy__(self, memo):
        return self  # process groups are handles

    def slot(self, pieces: int) -> int:
        """Which of `pieces` pieces this rank holds, each being held by size/pieces neighbouring ranks."""
        return self.rank * pieces // self.size

    def sharing(self, pieces: int) -> "Ranks":
        """The neighbours that hold the same one of `pieces` pieces as this rank: one rank where there are enough of them.

        Makes a process group if 1 < pieces < size, on all ranks together.
        """
        if pieces >= self.size:
            return Ranks(counter=self.counter)
        if pieces == 1:
            return self
        share = True if self.memory is not None else None
        return Ranks.of(neighbours(self.group, self.size // pieces), self.counter, share=share)

    def close(self) -> None:
        """Give up the shared memory; ranks that still wait for this one learn of it."""
        if self.memory is not None:
            self.memory.close()

    def _memory_of(self, tensor) -> SharedMemory | None:
        """What such a tensor goes through, if the ranks share it."""
        return self.memory if tensor.is_cpu else None

    def exact(self, tensor, group):
        """The sum over the group of a floating-point tensor, added in at least fp32 whatever its dtype."""
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), counter=self.counter)
        return collectives.all_reduce(tensor.to(at_least_fp32(tensor.dtype)), group, self.counter).to(tensor.dtype)

    def reduce(self, tensor, group):
        """The sum over the group in this model's format."""
        if callable(self.format):
            return self.format(tensor, group)
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), self._memory_format, self.counter)
        return all_reduce(tensor, group, self.format, counter=self.counter)

    @property
    def _memory_format(self) -> str:
        return "fp32" if self.format == "auto" else str(self.format)

    def reduce_beside(self, tensor, column, group):
        """The sums of `tensor` (..., n) in this model's format and, exactly, of `column` (..., 1)."""
        if callable(self.format):
            return self.format(tensor, group), self.exact(column, group)
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), self._memory_format, self.counter, column.detach())
        return all_reduce(tensor, group, self.format, counter=self.counter, exact=column)

    def in_place(self, tensors, format=None):
        """The `SumInPlace` of one tensor in a format (this model's), or of two, the second exactly; None if C has none."""
        if self.memory is None or (format is None and callable(self.format)):
            return None
        return SumInPlace(self.memory, tensors, format or self._memory_format, self.counter)

    def largest(self, tensor):
        """The largest of the ranks' numbers, elementwise."""
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), counter=self.counter, op="max")
        return collectives.all_reduce(tensor, self.group, self.counter, dist.ReduceOp.MAX)

    def agree(self, device, asked: Callable[[], object]) -> int:
        """`sparsefusion.collectives.agreement.agree` among these ranks."""
        return agree(self.gather, device, asked, "tensor-parallel ranks")

    def gather(self, tensor):
        """Every rank's tensor, in rank order: (ranks, *tensor.shape)."""
        if memory := self._memory_of(tensor):
            return memory.all_gather(tensor.detach(), self.counter)
        return collectives.all_gather(tensor, self.group, self.counter)
