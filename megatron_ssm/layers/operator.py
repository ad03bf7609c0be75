"""The protocol of an operator: a module, split over tensor-parallel ranks, that maps (batch, seq, hidden) to itself.

A unit (`unit.py`) gives its operators the whole input on every rank, and sums their outputs over the operators and over the
ranks in one message. An operator itself sends only the sums inside its own mathematics, such as that of x_proj in Mamba-1.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ssm.parallel.blocks import ContextRanks
from megatron_ssm.parallel.layers import ColumnParallelLinear, Packed, apply_layer, is_altered
from megatron_ssm.parallel.operators import copy_to_ranks, in_pieces, reduce_beside, reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.sequence_parallel import all_gathered_tokens, reduce_scatter_tokens, replicated
from megatron_ssm.parallel.tracked import TrackedModule

from .call import Call
from .low_rank import Adapters, PartsProduct, adapter_of
from .state import State, read_speculatively
from .tape_builder import Buffer, Builder, NotLowered


@dataclass
class Place:
    """The arguments with which operators are built: their ranks, and the dtype and device of their parameters.

    Attributes:
        ranks: The tensor-parallel ranks, which split the parameters.
        experts: The expert-parallel ranks. They split the routed experts; all other parameters are the same on each of them.
        context: The context-parallel ranks that split the sequence; None without context parallelism.
        core: The function that attends, with the arguments and the result of `attention.attend_with_cache`. None: that
            function.
    """

    ranks: Ranks
    context: ContextRanks | None = None
    core: Callable[..., torch.Tensor] | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None
    experts: Ranks = field(default_factory=Ranks)
    _sharing: dict[int, Ranks] = field(default_factory=dict)

    @property
    def where(self) -> dict[str, Any]:
        return dict(dtype=self.dtype, device=self.device)

    @property
    def part(self) -> tuple[int, int, int, int]:
        """The arguments of `Field.piece` for the part of a field that this rank holds."""
        return self.ranks.rank, self.ranks.size, self.experts.rank, self.experts.size

    def ranks_with_same_piece(self, pieces: int) -> Ranks:
        """The ranks that hold the same one of `pieces` pieces as this rank (see `Ranks.with_same_piece`); cached for the
        whole model. A collective call: every rank makes it.
        """
        if pieces not in self._sharing:
            self._sharing[pieces] = self.ranks.with_same_piece(pieces)
        return self._sharing[pieces]

    @property
    def all_ranks(self) -> list[Ranks]:
        """The tensor-parallel ranks, the expert-parallel ranks, and all results of `ranks_with_same_piece`."""
        return [self.ranks, self.experts, *(ranks for ranks in self._sharing.values() if ranks is not self.ranks)]


@dataclass(frozen=True)
class Partial:
    """The output of an operator before the sum over the ranks: this rank's summand, and the steps after the sum.

    Attributes:
        out: (batch, seq, hidden), this rank's summand.
        columns: (batch, seq, n) in at least fp32, or None. Further values of this rank that the same message sums without
            rounding them to the wire format.
        finish: A function that computes the output from the sums of `out` and `columns`, token by token; None if the output
            is the sum of `out`.
        bias: (hidden), the same on every rank; it is added to the output. Or None.
    """

    out: torch.Tensor
    columns: torch.Tensor | None = None
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Lowered:
    """`Partial` on a tape.

    Attributes:
        out, columns, bias: As in `Partial`. The columns are sums of squares for a grouped RMSNorm of the output.
        channels_per_column: The number of channels that a column covers.
        eps: The number that the norm adds to the mean of squares.
    """

    out: Buffer
    columns: Buffer | None = None
    bias: torch.Tensor | None = None
    channels_per_column: int = 1
    eps: float = 0.0


class Operator(TrackedModule):
    """The base class of operators. Its parameters are the fields of its specification, under the same names.

    A call has two steps: `project` reads the input, and `mix` does the rest. So the operators of a unit can share their
    input, and recomputation can repeat only the first step.

    Attributes:
        recomputes_mix: True if recomputation repeats `mix` as well. False for attention over context ranks, which would send
            keys and values again.
        small_matrices: The names of parameters that a model with quantized weights keeps in bfloat16.
        lora: Low-rank adapters of its linear layers, or None.
    """

    recomputes_mix = True
    small_matrices: tuple[str, ...] = ()
    lora: Adapters | None
    ranks: Ranks
    context: ContextRanks | None
    in_proj: Any

    def __init__(self, place: Place):
        super().__init__()
        self.ranks, self.context = place.ranks, place.context
        self.register_module("lora", None)

    def project(self, x: torch.Tensor) -> Any:
        """Map the whole input x (batch, seq, hidden) to the arguments of `mix`. Sends nothing.

        The default is the product with `in_proj`, (batch, seq, n). Backward gives only this rank's part of the gradient of
        x; `as_input` sums the parts.
        """
        return apply_layer(self.in_proj, x, adapter_of(self.lora, "in_proj"))

    def mix(self, projected: Any, call: Call, state: State | None = None) -> Partial:
        """Return this rank's summand of the output. Reads and updates the rows `call.rows` of the state."""
        raise NotImplementedError

    def lower(self, tape: Builder, x: Buffer) -> "Lowered":
        """Write the operations of `project` and `mix` to a tape. Raises NotLowered if Python must compute them.

        An operator is lowered only while it and its modules are unmodified classes of this library (see `check_plain`).
        """
        raise NotLowered(f"{type(self).__name__} has no operations")

    def new_state(self, batch: int) -> State | None:
        """An empty state of this rank's part for `batch` sequences; None for an operator without a state."""
        return None

    def copied(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that every rank holds and uses for its own channels. Backward sums its gradient over the ranks."""
        return copy_to_ranks(parameter, self.ranks.group, self.ranks.all_reduce_exact)


def check_plain(*modules: torch.nn.Module) -> None:
    """Raise NotLowered if a module has hooks, overridden methods, or a class from outside this library: C would ignore
    them.
    """
    for module in itertools.chain.from_iterable(root.modules() for root in modules):
        is_known = type(module).__module__.startswith(("megatron_ssm.", "torch.nn.modules.container"))
        if not is_known or is_altered(module):
            raise NotLowered(
                f"{type(module).__name__} has hooks, overridden methods, or a class from outside megatron_ssm"
            )
    if any(type(parameter) is not torch.nn.Parameter for root in modules for parameter in root.parameters()):
        raise NotLowered("a parameter is not a torch.nn.Parameter but a subclass")


def lowered_linear(tape: Builder, layer: Any, x: Buffer, adapter: Any = None) -> Buffer:
    """A column- or row-parallel layer and its adapter on a tape. The unit adds the bias of a row-parallel layer."""
    if any(isinstance(module, Packed) and not module.is_packed for module in layer.modules()):
        raise NotLowered("a parameter that shared one packed matrix with others was replaced or moved")
    is_column = isinstance(layer, ColumnParallelLinear)
    bias = layer.bias() if is_column and layer.bias is not None else None
    y = tape.matmul(x, layer.weight() if is_column else layer.weight, bias)
    if isinstance(adapter, PartsProduct):
        add_parts(tape, y, x, adapter)
    elif adapter is not None:
        add_low_rank(tape, y, x, adapter.down, adapter.up(), adapter.scale)
    return y


def add_parts(tape: Builder, y: Buffer, x: Buffer, parts: PartsProduct | None) -> None:
    """Write to a tape: for each layer merged into one matrix, add its low-rank product to the columns of y that are its
    output.
    """
    for first, product in parts.products_by_first_column if parts else ():
        add_low_rank(tape, y.columns(first, product.rows), x, product.down, product.up(), product.scale)


def add_low_rank(tape: Builder, y: Buffer, x: Buffer, down: torch.Tensor, up: torch.Tensor, scale: float = 1.0) -> None:
    """y += scale * (x down^T) up^T on a tape, with the product in the factors' dtype (see `layers.low_rank`)."""
    wide = x if x.dtype is down.dtype else tape.converted(x, down.dtype)
    low = tape.matmul(wide, down)
    product = tape.matmul(low, up)
    tape.add(y, product, scale, into=True)
    tape.release(low, product, *(() if wide is x else (wide,)))


def as_input(x: torch.Tensor, ranks: Ranks) -> AbstractContextManager[torch.Tensor]:
    """A context whose value is the whole input (batch, seq, hidden) of column-parallel layers.

    Without sequence parallelism it is x, and backward all-reduces its gradient. With sequence parallelism, x has this rank's
    share of the tokens; forward all-gathers them, and backward reduce-scatters the gradient.
    """
    if ranks.sequence_parallel:
        return all_gathered_tokens(x, ranks)
    return nullcontext(copy_to_ranks(x, ranks.group, ranks.all_reduce_exact))


def mix_with_rollback(operator: Operator, projected: Any, call: Call, state: State | None) -> Partial:
    """Call `operator.mix`. In speculative calls, keep the information that rollback needs (`read_speculatively`)."""
    if call.speculative and state is not None and state.fixed:
        return read_speculatively(operator.mix, projected, call, state, operator.ranks.recomputation)
    return operator.mix(projected, call, state)


def run(operator: Operator, x: torch.Tensor, call: Call, state: State | None = None) -> torch.Tensor:
    """The whole output (batch, seq, hidden) of one operator alone. Sends the message of `sum_of`."""
    with as_input(x, operator.ranks) as whole:
        projected = operator.project(whole)
        del whole
    return sum_of([mix_with_rollback(operator, projected, call, state)], operator.ranks)


def sum_of(
    partials: Sequence[Partial], ranks: Ranks, scales: Sequence[float] = (), keep_for_recomputation: bool = False
) -> torch.Tensor:
    """The sum over ranks and operators of each operator's output times its scale: (batch, seq, hidden).

    It sends one message. Before it, the outputs of operators without `finish` are added into one tensor. The message
    concatenates that tensor, the output of each other operator, and all columns along the last dimension. Without sequence
    parallelism the message is an all-reduce in the model's wire format; with it, an exact reduce-scatter, and the result has
    this rank's tokens.

    Args:
        partials: The output of `mix` of each operator.
        scales: The scale of each output; by default 1.
        keep_for_recomputation: True to store the sum, because recomputation of later operations needs it.
    """
    scales = scales or [1.0] * len(partials)
    without_finish = [
        _scaled(partial.out, scale) for partial, scale in zip(partials, scales, strict=True) if partial.finish is None
    ]
    if all(partial.finish is None for partial in partials):
        whole = _reduce(_added(without_finish), ranks, keep_for_recomputation)
    else:
        whole = _sum_with_columns(partials, without_finish, scales, ranks)
    for partial, scale in zip(partials, scales, strict=True):
        if partial.bias is not None:
            whole = whole + _scaled(replicated(partial.bias, ranks), scale)
    return whole


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x * scale


def _added(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _reduce(part: torch.Tensor, ranks: Ranks, keep: bool) -> torch.Tensor:
    if ranks.sequence_parallel:
        return reduce_scatter_tokens(part, ranks, keep)
    return reduce_from_ranks(part, ranks.group, ranks.all_reduce_in_format_once if keep else ranks.all_reduce_in_format)


def _sum_with_columns(
    partials: Sequence[Partial], without_finish: Sequence[torch.Tensor], scales: Sequence[float], ranks: Ranks
) -> torch.Tensor:
    """`sum_of` without the biases, for operators of which at least one has a `finish` function."""
    finished = [(partial, scale) for partial, scale in zip(partials, scales, strict=True) if partial.finish is not None]
    dtype, hidden = partials[0].out.dtype, partials[0].out.shape[-1]
    columns = torch.cat([partial.columns for partial, _ in finished if partial.columns is not None], dim=-1)
    outs = [partial.out for partial, _ in finished] + ([_added(without_finish)] if without_finish else [])

    def finish(sums: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        parts, first, outputs = sums.split(hidden, dim=-1), 0, []  # parts: (batch, seq, hidden)
        for (partial, scale), part in zip(finished, parts, strict=False):
            width = partial.columns.shape[-1] if partial.columns is not None else 0
            assert partial.finish is not None
            outputs.append(_scaled(partial.finish(part, exact[..., first : first + width]).to(dtype), scale))
            first += width
        return _added(outputs + [part.to(dtype) for part in parts[len(finished) :]])

    if len(outs) == 1 and not ranks.sequence_parallel:
        reduce = lambda part, exact: finish(*reduce_beside(part.to(exact.dtype), exact, ranks))  # noqa: E731
        return in_pieces(reduce, outs[0], columns)
    message = torch.cat([out.to(columns.dtype) for out in outs], dim=-1)
    if ranks.sequence_parallel:
        both = reduce_scatter_tokens(torch.cat([message, columns], dim=-1), ranks, keep_for_recomputation=True)
        return finish(both[..., : message.shape[-1]], both[..., message.shape[-1] :])
    return finish(*reduce_beside(message, columns, ranks))
