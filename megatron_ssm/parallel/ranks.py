"""The tensor-parallel ranks that a model is split over, and their sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commfabric import all_reduce
from commfabric.collectives import counted as collectives
from commfabric.collectives.agreement import check_member
from commfabric.collectives.shared_memory import SharedMemory, SumInPlace, connect
from commfabric.collectives.wire_formats import at_least_fp32

from .groups import neighbours
from .recomputation import Recomputation


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks that a model is split over.

    group=None is a single rank, which sends nothing. group=None with size > 1 is the part of one rank alone, for
    measurements.

    Attributes:
        rank, size: This rank's number in the group, and the size of the group.
        counter: A counter of the messages of this rank.
        format: The format in which outputs of blocks (out_proj, o_proj, down_proj) are summed: fp32, fp16, bf16, int8 or
            auto (see `commfabric.all_reduce`), or a function (tensor, group) -> tensor. All other tensors are summed by
            `all_reduce_exact`.
        memory: The shared memory of ranks on one host, or None. Sums and gathers of CPU tensors use it, and `auto` then is
            fp32, the fastest format in memory.
        transport: The transport of tensors, with the reason if it is not shared memory; "" for one rank.
        sequence_parallel: True if each rank has a share of the tokens between layers (see `sequence_parallel.py`).
        recomputation: Activation recomputation, and the results of communication that it stores.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    counter: collectives.Counter = field(default_factory=collectives.Counter)
    format: str | Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = "fp32"
    memory: SharedMemory | None = None
    transport: str = ""
    sequence_parallel: bool = False
    recomputation: Recomputation = field(default_factory=Recomputation)

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None,
        counter: collectives.Counter | None = None,
        format: str | Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = "fp32",
        share: bool | None = True,
        sequence_parallel: bool = False,
        recomputation: Recomputation | None = None,
    ) -> "Ranks":
        """The ranks of a process group (None, or a group of one, is one rank). All ranks of the group call it together.

        share: True: use shared memory if the ranks are on one host, all have the C kernels, and none has share=False; the
            ranks exchange objects to find out. None, on all ranks: do not ask, because tensors will not be on the CPU.
        """
        check_member(group)
        counter = collectives.Counter() if counter is None else counter
        recomputation = recomputation or Recomputation()
        if group is None or group.size() == 1:
            return cls(counter=counter, format=format, recomputation=recomputation)
        backend = dist.get_backend(group)
        memory, why = (None, "") if share is None else connect(group, wanted=share)
        transport = "shared memory" if memory else f"{backend} ({why})" if why else backend
        return cls(
            group, group.rank(), group.size(), counter, format, memory, transport, sequence_parallel, recomputation
        )

    def __deepcopy__(self, memo: dict) -> "Ranks":
        """Itself, because process groups are handles."""
        return self

    def piece_index(self, pieces: int) -> int:
        """The index of this rank's piece, if size/pieces consecutive ranks hold each of `pieces` pieces."""
        return self.rank * pieces // self.size

    def with_same_piece(self, pieces: int) -> "Ranks":
        """The consecutive ranks that hold the same one of `pieces` pieces as this rank; one rank if pieces >= size.

        All ranks call it together. If 1 < pieces < size, it creates a process group, unless it exists.
        """
        if pieces >= self.size:
            return Ranks(counter=self.counter, recomputation=self.recomputation)
        if pieces == 1 or self.group is None:
            return self
        share = True if self.memory is not None else None
        group = neighbours(self.group, self.size // pieces)
        return Ranks.of(group, self.counter, share=share, recomputation=self.recomputation)

    def close(self) -> None:
        """Release the shared memory; ranks that are waiting for this one raise an error."""
        if self.memory is not None:
            self.memory.close()

    def _memory_of(self, tensor: torch.Tensor) -> SharedMemory | None:
        return self.memory if tensor.is_cpu else None

    def all_reduce_exact(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The sum over `group` (this object's) of a floating-point tensor, added in at least fp32.

        A new tensor of the same shape and dtype, bitwise equal on all ranks. One all-reduce; no gradient.
        """
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), counter=self.counter)
        return collectives.all_reduce(tensor.to(at_least_fp32(tensor.dtype)), group, self.counter).to(tensor.dtype)

    def all_reduce_exact_once(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """`all_reduce_exact`; with recomputation, the sum is stored and not sent again."""
        return self.recomputation.communicate_once(lambda: self.all_reduce_exact(tensor, group))

    def all_reduce_in_format_once(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """`all_reduce_in_format`; with recomputation, the sum is stored and not sent again."""
        return self.recomputation.communicate_once(lambda: self.all_reduce_in_format(tensor, group))

    def all_reduce_in_format(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The sum over `group` (this object's) in the model's format. Otherwise as `all_reduce_exact`."""
        if callable(self.format):
            return self.format(tensor, group)
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), self._memory_format, self.counter)
        return all_reduce(tensor, group, self.format, counter=self.counter)

    @property
    def _memory_format(self) -> str:
        return "fp32" if self.format == "auto" else str(self.format)

    def reduce_beside(
        self, tensor: torch.Tensor, column: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of `tensor` (..., n) in the model's format, and of `column` (..., 1) exactly."""
        if callable(self.format):
            return self.format(tensor, group), self.all_reduce_exact(column, group)
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), self._memory_format, self.counter, column.detach())
        return all_reduce(tensor, group, self.format, counter=self.counter, exact=column)

    def sum_in_c(self, tensors: Sequence[torch.Tensor], format: str | None = None) -> SumInPlace | None:
        """A sum that C code can repeat, of one tensor in `format` (None: the model's), or of two, the second exactly.

        None without shared memory, or if the format is a function.
        """
        if self.memory is None or (format is None and callable(self.format)):
            return None
        return SumInPlace(self.memory, tensors, format or self._memory_format, self.counter)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of the ranks' tensors. One all-reduce; no gradient."""
        if memory := self._memory_of(tensor):
            return memory.all_reduce(tensor.detach(), counter=self.counter, op="max")
        return collectives.all_reduce(tensor, self.group, self.counter, dist.ReduceOp.MAX)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, in rank order: (ranks, *tensor.shape). One all-gather; no gradient."""
        if memory := self._memory_of(tensor):
            return memory.all_gather(tensor.detach(), self.counter)
        return collectives.all_gather(tensor, self.group, self.counter)
