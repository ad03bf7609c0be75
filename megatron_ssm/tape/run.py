"""A finished tape, and its calls."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ssm.native import kernels, products
from sparsefusion.native.library import SIZE

from . import structs
from .builder import Buffer, Builder
from .structs import NO_MEMORY, STOPPED, UNUSUAL
from .sums import SentInC, TapeSum

CACHES = 4  # whose addresses a call keeps


@dataclass(frozen=True)
class Section:
    """Operations from start to stop."""

    start: int
    stop: int


class FinishedTape:
    """The result of a `Builder`. sections: {"all": ..., "layers": ...}. x, embeddings: what the layers read.

    out: the hidden states that they give (None: those in x). logits_width: how many logits each token gets. Deep copies of a
    model have no tapes.
    """

    def __init__(
        self, builder: Builder, sections: dict[str, Section], x: Buffer, embeddings: Buffer | None,
        logits_width: int, vocabulary: int, out: Buffer | None = None,
    ):  # fmt: skip
        self.builder, self.sections = builder, sections
        self.x, self.embeddings, self.out = x, embeddings, out or x
        self.logits_width, self.vocabulary = logits_width, vocabulary
        self.ops = (structs.Op * len(builder.ops))(*builder.ops)
        self._kept = [tensor.detach() for tensor in builder.kept]  # storages that stay, whatever becomes of parameters
        self._addresses = [tensor.data_ptr() for tensor in builder.kept]
        self._table_length = 0
        self._tables: list[Tensor] = []
        self.calls: dict[tuple[int, int], BoundCall] = {}
        self._fast: dict[int, bool] = {}

    def has_addresses(self) -> bool:
        """Return True if the model's tensors are where they were."""
        return [tensor.data_ptr() for tensor in self.builder.kept] == self._addresses

    def is_fast(self, rows: int) -> bool:
        """Return True if C has kernels for the products of this many rows."""
        if rows not in self._fast:
            weights = self.builder.weights
            self._fast[rows] = all(products.has_kernel(w, x, rows, *layout) for w, x, *layout in weights)
        return self._fast[rows]

    def call(self, batch: int, tokens: int) -> "BoundCall":
        """A runner of the tape for this many tokens of each of this many sequences."""
        key = batch, tokens
        if key not in self.calls:
            if len(self.calls) >= 2 * CACHES:
                self.calls.pop(next(iter(self.calls)))
            self.calls[key] = BoundCall(self, batch, tokens)
        return self.calls[key]

    def extend_tables(self, length: int) -> None:
        """Let the rotary tables have at least this many positions."""
        if length <= self._table_length:
            return
        self._table_length = max(length, 2 * self._table_length)
        made: dict[Any, Tensor] = {}
        places = {ctypes.addressof(op): index for index, op in enumerate(self.builder.ops)}
        for key, op, table in self.builder.tables:
            if key not in made:
                made[key] = table(self._table_length).contiguous()
            self.ops[places[ctypes.addressof(op)]].weight = made[key].data_ptr()
        self._tables = list(made.values())

    def describe(self) -> str:
        """One line for each operation."""
        return "\n".join(f"{number:4} {name}" for number, name in enumerate(self.builder.names))


class BoundCall:
    """A tape with room for `tokens` tokens of each of `batch` sequences. It also is what `Cache.accept` calls."""

    def __init__(self, tape: FinishedTape, batch: int, tokens: int):
        self.tape, self.batch, self.tokens = tape, batch, tokens
        builder, self.rows = tape.builder, batch * tokens
        self.arena = torch.empty(self.rows * builder.width + 64, dtype=torch.uint8)
        self.arena = self.arena[-self.arena.data_ptr() % 64 :][: self.rows * builder.width]
        self.sums = [self._sum(each) for each in builder.sums]
        self._sum_structs = (structs.Sum * max(1, len(self.sums)))(*(each.struct for each in self.sums))
        self.sent = SentInC(self.sums)
        self._scratch: dict[tuple, Tensor] = {}
        self._slots: dict[int, tuple[Any, int, Any, Tensor]] = {}
        self._finish = kernels.functions().run_tape
        self.struct = structs.Tape(
            ops=ctypes.addressof(tape.ops), arena=self.arena.data_ptr(), sums=ctypes.addressof(self._sum_structs),
            batch=batch, tokens=tokens, vocabulary=tape.vocabulary, speculative=builder.speculative, prompt=builder.prompt,
        )  # fmt: skip
        self.address = ctypes.addressof(self.struct)
        self.cache: Any = None
        self.call: Any = None
        self.version = -1

    def _sum(self, each: Any) -> TapeSum:
        part = each.part.tensor(self.arena, self.rows).view(self.batch, self.tokens, -1)
        columns = each.columns and each.columns.tensor(self.arena, self.rows).view(self.batch, self.tokens, -1)
        return TapeSum(each.ranks, part, columns, each.is_exact)

    def tensor(self, buffer: Buffer) -> Tensor:
        """(batch, tokens, width): a buffer of this call."""
        return buffer.tensor(self.arena, self.rows).view(self.batch, self.tokens, -1)

    def bind(self, cache: Any) -> bool:
        """Take the addresses of a cache; whether it has the tensors that the tape needs."""
        layout, struct = cache.layout, self.struct
        known = self._slots.get(id(layout))
        if known is None or known[0]() is not layout or known[1] != layout.version:
            slots, every = self._make_slots(cache), torch.arange(cache.rows_held)
            if slots is None:
                return False
            if len(self._slots) >= CACHES:
                self._slots.pop(next(iter(self._slots)))
            self._slots[id(layout)] = known = weakref.ref(layout), layout.version, slots, every
            if cache.capacity is not None:
                self.tape.extend_tables(cache.capacity)
        self.cache, self.version = cache, layout.version
        struct.slots = ctypes.addressof(known[2])
        rows, lengths = cache.rows, cache.lengths
        if isinstance(rows, slice):
            sequences, first = known[3], rows.start or 0
        else:
            sequences, first = rows, 0
        struct.sequences, struct.lengths = sequences.data_ptr() + 8 * first, lengths.data_ptr()
        return True

    def _make_slots(self, cache: Any) -> Any:
        builder = self.tape.builder
        slots = (structs.Slot * max(1, len(builder.slots)))()
        for slot, (path, name) in zip(slots, builder.slots, strict=False):
            tensor = cache.states[path][name]
            wanted = torch.float32 if name == "state" else builder.dtype
            if (
                tensor.dtype is not wanted
                or not tensor.is_cpu
                or not (tensor.is_contiguous() or tensor[0].is_contiguous())
            ):
                return None
            slot.data, slot.stride = tensor.data_ptr(), tensor.stride(0)
            if builder.speculative and name == "state":
                shape = (self.batch, *tensor.shape[1:])
                if shape not in self._scratch:
                    self._scratch[shape] = torch.empty(shape, dtype=torch.float32)
                slot.next, slot.next_stride = self._scratch[shape].data_ptr(), self._scratch[shape].stride(0)
        return slots

    def run(self, section: Section) -> int:
        """Run the operations of a section. UNUSUAL: nothing was done, because C does not do it; else 0."""
        struct = self.struct
        struct.start = struct.at = section.start
        struct.stop, struct.threads = section.stop, torch.get_num_threads()
        self.sent.check()
        while code := self._finish(self.address):
            if code == UNUSUAL:
                return code
            kernels.raise_if_failed(code == NO_MEMORY)
            if code == STOPPED:
                self.tape.builder.stops[struct.at - 1](self)
            else:
                number = self.tape.ops[struct.at - 1].sum
                self.sums[number].finish(code)
        self.sent.count()
        return 0

    def hidden(self, ids: Tensor, x: Tensor, section: Section) -> Tensor | None:
        """The hidden states (batch, tokens, hidden) of ids (batch, tokens) and x, the same shape; None: nothing done."""
        ids = ids.contiguous()
        self.struct.ids = ids.data_ptr()
        self.tensor(self.tape.x).copy_(x)
        return None if self.run(section) else self.tensor(self.tape.out).clone()

    def logits(self, ids: Tensor, section: Section) -> Tensor | None:
        """This rank's logits (batch, tokens, width) in float32 of ids (batch, tokens); None: nothing was done."""
        logits = torch.empty(self.batch, self.tokens, self.tape.logits_width, dtype=torch.float32)
        ids = ids.contiguous()
        self.struct.ids, self.struct.logits = ids.data_ptr(), logits.data_ptr()
        return None if self.run(section) else logits

    # What `Cache.accept` calls after a speculative call

    def check(self, cache: Any) -> None:
        """See `operators.state.Pending`."""
        if cache.layout.version != self.version or not self.tape.has_addresses():
            raise RuntimeError(
                "tensors of the model or of the cache have moved since speculative_logits read these tokens, "
                "so accept cannot keep them"
            )

    def advance(self, cache: Any, counts: Sequence[int]) -> None:
        """See `operators.state.Pending`: all states at once."""
        kernels.raise_if_failed(kernels.functions().keep_tokens(self.address, (SIZE * len(counts))(*counts)))

    def __deepcopy__(self, memo: dict) -> "BoundCall":
        raise RuntimeError("a cache cannot be copied between speculative_logits and accept")
