"""A finished tape, and its calls from Python."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commfabric.collectives.counted import Counter
from commfabric.native.library import SIZE
from megatron_ssm.kernels import kernels, products
from megatron_ssm.kernels.arguments import address
from megatron_ssm.parallel.ranks import Ranks

from .tape_builder import AllReduce, Buffer, Builder
from .tape_operations import IN_C, IN_PYTHON, NO_MEMORY, ONE_RANK, STOPPED, SUM_IN_PYTHON, UNUSUAL, Op, Slot, Sum, Tape

CACHES = 4  # the most caches whose addresses a call remembers


class TapeSum:
    """An all-reduce of a buffer, this rank's summand `part`, which the sum overwrites.

    squares: A second summand, which the same message sums exactly; or None. is_exact: sum in at least fp32, and not in the
    model's wire format. `struct` is C's `Sum`, and `sum_in_c` the all-reduce that C computes in shared memory, or None.
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


@dataclass(frozen=True)
class Section:
    """The operations from `start` to `stop` - 1."""

    start: int
    stop: int


class FinishedTape:
    """A tape of a model, the result of a `Builder`.

    Args:
        builder: The builder, with all operations.
        sections: {"all": all operations, "layers": the operations of the layers}.
        x: The input of the layers, hidden states.
        embeddings: The second input of the layers, for shared blocks; or None.
        logits_width: The number of logits of a token.
        out: The output of the layers; None if they overwrite x.
    """

    def __init__(
        self, builder: Builder, sections: dict[str, Section], x: Buffer, embeddings: Buffer | None,
        logits_width: int, vocabulary: int, out: Buffer | None = None,
    ):  # fmt: skip
        self.builder, self.sections = builder, sections
        self.x, self.embeddings, self.out = x, embeddings, out or x
        self.logits_width, self.vocabulary = logits_width, vocabulary
        self.ops = (Op * len(builder.ops))(*builder.ops)
        self._storages = [tensor.detach() for tensor in builder.tensors]  # not freed if a parameter gets another one
        self._addresses = [tensor.data_ptr() for tensor in builder.tensors]
        self._table_length = 0
        self._tables: list[Tensor] = []
        self.calls: dict[tuple[int, int], BoundCall] = {}
        self._fast: dict[int, bool] = {}

    def has_addresses(self) -> bool:
        """Return True if the model's tensors still have the addresses in the tape."""
        return [tensor.data_ptr() for tensor in self.builder.tensors] == self._addresses

    def is_fast(self, rows: int) -> bool:
        """Return True if C has kernels for all products with this many rows."""
        if rows not in self._fast:
            needed = self.builder.products
            self._fast[rows] = all(products.has_kernel(w, x, rows, *layout) for w, x, *layout in needed)
        return self._fast[rows]

    def call(self, batch: int, tokens: int) -> "BoundCall":
        """The `BoundCall` for `tokens` tokens of each of `batch` sequences."""
        key = batch, tokens
        if key not in self.calls:
            if len(self.calls) >= 2 * CACHES:
                self.calls.pop(next(iter(self.calls)))
            self.calls[key] = BoundCall(self, batch, tokens)
        return self.calls[key]

    def extend_tables(self, length: int) -> None:
        """Extend the rotary tables to at least this many positions."""
        if length <= self._table_length:
            return
        self._table_length = max(length, 2 * self._table_length)
        tables: dict[Any, Tensor] = {}
        indices = {ctypes.addressof(op): index for index, op in enumerate(self.builder.ops)}
        for key, op, table in self.builder.tables:
            if key not in tables:
                tables[key] = table(self._table_length).contiguous()
            self.ops[indices[ctypes.addressof(op)]].weight = tables[key].data_ptr()
        self._tables = list(tables.values())

    def describe(self) -> str:
        return "\n".join(f"{number:4} {name}" for number, name in enumerate(self.builder.names))


class BoundCall:
    """A tape with buffers for `tokens` tokens of each of `batch` sequences; a `layers.state.Pending`.

    `cache`, of the last `bind`, and `call`, if the tape stops for operators in Python, are held until the run ends.
    """

    def __init__(self, tape: FinishedTape, batch: int, tokens: int):
        self.tape, self.batch, self.tokens = tape, batch, tokens
        builder, self.rows = tape.builder, batch * tokens
        self.arena = torch.empty(self.rows * builder.arena_bytes_per_row + 64, dtype=torch.uint8)
        self.arena = self.arena[-self.arena.data_ptr() % 64 :][: self.rows * builder.arena_bytes_per_row]
        self.sums = [self._sum(all_reduce) for all_reduce in builder.sums]
        self._sum_structs = (Sum * max(1, len(self.sums)))(*(tape_sum.struct for tape_sum in self.sums))
        self.sent = SentInC(self.sums) if any(one.sum_in_c for one in self.sums) else None
        self._scratch: dict[tuple, Tensor] = {}
        self._slots: dict[int, tuple[Any, int, Any, Tensor]] = {}
        self._run_tape = kernels.functions().run_tape
        self.struct = Tape(
            ops=ctypes.addressof(tape.ops), arena=self.arena.data_ptr(), sums=ctypes.addressof(self._sum_structs),
            batch=batch, tokens=tokens, vocabulary=tape.vocabulary, speculative=builder.speculative, prompt=builder.prompt,
        )  # fmt: skip
        self.address = ctypes.addressof(self.struct)
        self.cache: Any = None
        self.call: Any = None
        self.version = -1

    def _sum(self, all_reduce: AllReduce) -> TapeSum:
        columns = None if all_reduce.columns is None else self.tensor(all_reduce.columns)
        return TapeSum(all_reduce.ranks, self.tensor(all_reduce.part), columns, all_reduce.is_exact)

    def tensor(self, buffer: Buffer) -> Tensor:
        """The tensor of a buffer in this call, (batch, tokens, width)."""
        return buffer.tensor(self.arena, self.rows).view(self.batch, self.tokens, -1)

    def bind(self, cache: Any) -> bool:
        """Use the tensors of a cache in the next run. Return False if the tape does not support their dtypes or strides."""
        layout, struct = cache.layout, self.struct
        entry = self._slots.get(id(layout))
        if entry is None or entry[0]() is not layout or entry[1] != layout.version:
            slots, all_rows = self._make_slots(cache), torch.arange(cache.rows_held)
            if slots is None:
                return False
            if len(self._slots) >= CACHES:
                self._slots.pop(next(iter(self._slots)))
            self._slots[id(layout)] = entry = weakref.ref(layout), layout.version, slots, all_rows
            if cache.capacity is not None:
                self.tape.extend_tables(cache.capacity)
        self.cache, self.version = cache, layout.version
        struct.slots = ctypes.addressof(entry[2])
        rows, lengths = cache.rows, cache.lengths
        if isinstance(rows, slice):
            sequences, first = entry[3], rows.start or 0
        else:
            sequences, first = rows, 0
        struct.sequences, struct.lengths = sequences.data_ptr() + 8 * first, lengths.data_ptr()
        return True

    def _make_slots(self, cache: Any) -> Any:
        builder = self.tape.builder
        slots = (Slot * max(1, len(builder.slots)))()
        for slot, (path, name) in zip(slots, builder.slots, strict=False):
            tensor = cache.states[path][name]
            dtype = torch.float32 if name == "state" else builder.dtype
            rows_are_contiguous = tensor.is_contiguous() or tensor[0].is_contiguous()
            if tensor.dtype is not dtype or not tensor.is_cpu or not rows_are_contiguous:
                return None
            slot.data, slot.stride = tensor.data_ptr(), tensor.stride(0)
            if builder.speculative and name == "state":
                shape = (self.batch, *tensor.shape[1:])
                if shape not in self._scratch:
                    self._scratch[shape] = torch.empty(shape, dtype=torch.float32)
                slot.next, slot.next_stride = self._scratch[shape].data_ptr(), self._scratch[shape].stride(0)
        return slots

    def run(self, section: Section) -> int:
        """Run the operations of a section. Return 0, or UNUSUAL if C does not support the call and changed nothing."""
        struct = self.struct
        struct.start = struct.at = section.start
        struct.stop, struct.threads = section.stop, torch.get_num_threads()
        if self.sent is not None:
            self.sent.check()
        try:
            while code := self._run_tape(self.address):
                if code == UNUSUAL:
                    return code
                kernels.raise_if_failed(code == NO_MEMORY)
                if code == STOPPED:
                    self.tape.builder.stops[struct.at - 1](self)
                else:
                    number = self.tape.ops[struct.at - 1].sum
                    self.sums[number].finish(code)
        finally:
            self.cache = self.call = None  # a tape does not keep a cache in memory
        if self.sent is not None:
            self.sent.count()
        return 0

    def hidden(self, ids: Tensor, x: Tensor, section: Section) -> Tensor | None:
        """The hidden states (batch, tokens, hidden) for ids (batch, tokens) and x, of the same shape.

        None if C does not support the call and changed nothing.
        """
        ids = ids.contiguous()
        self.struct.ids = ids.data_ptr()
        self.tensor(self.tape.x).copy_(x)
        return None if self.run(section) else self.tensor(self.tape.out).clone()

    def logits(self, ids: Tensor, section: Section) -> Tensor | None:
        """This rank's logits (batch, tokens, width) in float32 for ids (batch, tokens).

        None if C does not support the call and changed nothing.
        """
        logits = torch.empty(self.batch, self.tokens, self.tape.logits_width, dtype=torch.float32)
        ids = ids.contiguous()
        self.struct.ids, self.struct.logits = ids.data_ptr(), logits.data_ptr()
        return None if self.run(section) else logits

    # The methods of `layers.state.Pending`, which `Cache.accept` calls after a speculative call

    def check(self, cache: Any) -> None:
        """RuntimeError if tensors of the model or of the cache have moved since the call."""
        if cache.layout.version != self.version or not self.tape.has_addresses():
            raise RuntimeError(
                "accept() failed: tensors of the model or the cache were reallocated since speculative_logits()"
            )

    def advance(self, cache: Any, counts: Sequence[int]) -> None:
        kernels.raise_if_failed(kernels.functions().keep_tokens(self.address, (SIZE * len(counts))(*counts)))
