"""The protocol of an operator, which maps a stream of tokens to one of the same shape, split over the tensor-parallel ranks.

A unit (`unit.py`) gives its operators their input, whole on every rank, and adds up what they return, over the operators and
over the ranks. So an operator sends nothing but what its own mathematics needs inside.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ssm.context.blocks import ContextRanks
from megatron_ssm.parallel.layers import ColumnParallelLinear, Packed, apply_layer, is_altered
from megatron_ssm.parallel.operators import copy_to_ranks, in_pieces, reduce_beside, reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.sequence_parallel import all_gathered_tokens, reduce_scatter_tokens, replicated
from megatron_ssm.parallel.tracked import TrackedModule
from megatron_ssm.tape.builder import Buffer, Builder, NotLowered

from .call import Call
from .low_rank import Adapters, PartsProduct, adapter_of
from .state import State, read_speculatively


@dataclass
class Place:
    """The place where an operator is built: its ranks, and the dtype and device of its parameters.

    ranks: over which its parameters are split. experts: those that divide the experts of the model besides; each of them has
    all other parameters that this rank has. context: the ranks that hold the other tokens of the sequence; None: there
    are none. core: the attention between the projections, with the arguments of `attention.attend_with_cache`.
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
        """The dtype and the device, as arguments of a layer."""
        return dict(dtype=self.dtype, device=self.device)

    @property
    def part(self) -> tuple[int, int, int, int]:
        """The part of each field that is here: the arguments of `Field.piece`."""
        return self.ranks.rank, self.ranks.size, self.experts.rank, self.experts.size

    def ranks_with_same_piece(self, pieces: int) -> Ranks:
        """See `Ranks.with_same_piece`. All ranks call it together; the operators of a model share the result."""
        if pieces not in self._sharing:
            self._sharing[pieces] = self.ranks.with_same_piece(pieces)
        return self._sharing[pieces]

    @property
    def all_ranks(self) -> list[Ranks]:
        """The ranks, those of `ranks_with_same_piece`, and those that divide the experts."""
        return [self.ranks, self.experts, *(each for each in self._sharing.values() if each is not self.ranks)]


@dataclass(frozen=True)
class Partial:
    """The output of an operator: this rank's summand, and what follows the sum over the ranks.

    out: (batch, seq, hidden), partial. columns: (batch, seq, n) in at least fp32, partial, which are summed exactly in the
    same message; None: there are none. finish: a function of both sums that returns the output, token by token; None: it is
    the sum of `out`. bias: (hidden), the same on every rank, which is added afterwards.
    """

    out: torch.Tensor
    columns: torch.Tensor | None = None
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Lowered:
    """`Partial` on a tape. columns: the sums of squares that normalize the output; `group` numbers, with `eps`, make one."""

    out: Buffer
    columns: Buffer | None = None
    bias: torch.Tensor | None = None
    group: int = 1
    eps: float = 0.0


class Operator(TrackedModule):
    """The base of operators. Its parameters are the fields of its specification, under the same names.

    A call has two steps, so that operators of one unit share their input, and so that recomputation can repeat one of them:
    `project` reads the input, `mix` does the rest. recomputes_mix: whether recomputation repeats `mix` too; not where
    sequences are attended, which would send keys and values again. small_matrices: the names of parameters that a model with
    quantized weights keeps in bfloat16. lora: low-rank products beside its linear layers.
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
        """x (batch, seq, hidden), whole -> what `mix` takes: a tensor (batch, seq, n), or several. Sends nothing.

        The gradient of x is partial; the unit sums it. Unless an operator says otherwise, it is the product with `in_proj`.
        """
        return apply_layer(self.in_proj, x, adapter_of(self.lora, "in_proj"))

    def mix(self, projected: Any, call: Call, state: State | None = None) -> Partial:
        """The output, partial; it reads and updates the rows `call.rows` of the state."""
        raise NotImplementedError

    def lower(self, tape: Builder, x: Buffer) -> "Lowered":
        """Write the operations of `project` and `mix` to a tape. NotLowered: there are none, and Python does it.

        What is not computed in C is called, so an operator is lowered only while it and its modules are the library's own.
        """
        raise NotLowered(f"{type(self).__name__} has no operations")

    def new_state(self, batch: int) -> State | None:
        """An empty state of this rank's part for `batch` sequences; None: the operator has none."""
        return None

    def copied(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that every rank holds and uses for its own channels. Backward sums its gradient over the ranks."""
        return copy_to_ranks(parameter, self.ranks.group, self.ranks.all_reduce_exact)


def check_plain(*modules: torch.nn.Module) -> None:
    """NotLowered unless calling the modules does what the library's classes do, so that nobody notices that C does it."""
    for module in itertools.chain.from_iterable(each.modules() for each in modules):
        if not type(module).__module__.startswith(("megatron_ssm.", "torch.nn.modules.container")) or is_altered(
            module
        ):
            raise NotLowered(f"{type(module).__name__} has hooks or methods of its own")
    if any(type(parameter) is not torch.nn.Parameter for each in modules for parameter in each.parameters()):
        raise NotLowered("parameters of another class")


def lowered_linear(tape: Builder, layer: Any, x: Buffer, adapter: Any = None) -> Buffer:
    """A column- or row-parallel layer on a tape, with low-rank products beside it; a row-parallel layer has no bias here."""
    if any(isinstance(each, Packed) and not each.is_packed for each in layer.modules()):
        raise NotLowered("packed parameters that lie apart")
    is_column = isinstance(layer, ColumnParallelLinear)
    bias = layer.bias() if is_column and layer.bias is not None else None
    y = tape.matmul(x, layer.weight() if is_column else layer.weight, bias)
    if isinstance(adapter, PartsProduct):
        add_parts(tape, y, x, adapter)
    elif adapter is not None:
        add_low_rank(tape, y, x, adapter.down, adapter.up(), adapter.scale)
    return y


def add_parts(tape: Builder, y: Buffer, x: Buffer, parts: PartsProduct | None) -> None:
    """Add low-rank products to the columns of their parts on a tape."""
    for first, each in parts.by_column if parts else ():
        add_low_rank(tape, y.columns(first, each.rows), x, each.down, each.up(), each.scale)


def add_low_rank(tape: Builder, y: Buffer, x: Buffer, down: torch.Tensor, up: torch.Tensor, scale: float = 1.0) -> None:
    """y += scale * (x down^T) up^T on a tape."""
    low = tape.matmul(x, down)
    more = tape.matmul(low, up)
    tape.add(y, more, scale, into=True)
    tape.release(low, more)


def as_input(x: torch.Tensor, ranks: Ranks) -> AbstractContextManager[torch.Tensor]:
    """The input of column-parallel layers in the body of a `with` statement: x (batch, seq, hidden), whole on every rank.

    Sends nothing, and backward all-reduces x's gradient. With sequence parallelism, x has this rank's share of the tokens:
    forward gathers them, backward reduce-scatters the gradient.
    """
    if ranks.sequence_parallel:
        return all_gathered_tokens(x, ranks)
    return nullcontext(copy_to_ranks(x, ranks.group, ranks.all_reduce_exact))


def mix(operator: Operator, projected: Any, call: Call, state: State | None) -> Partial:
    """`operator.mix`, also for tokens that may be taken back."""
    if call.speculative and state is not None and state.fixed:
        return read_speculatively(operator.mix, projected, call, state, operator.ranks.recomputation)
    return operator.mix(projected, call, state)


def run(operator: Operator, x: torch.Tensor, call: Call, state: State | None = None) -> torch.Tensor:
    """The output of one operator alone, whole: x (batch, seq, hidden) -> the same shape. See `sum_of` for what it sends."""
    with as_input(x, operator.ranks) as whole:
        projected = operator.project(whole)
        del whole
    return sum_of([mix(operator, projected, call, state)], operator.ranks)


def sum_of(
    partials: Sequence[Partial], ranks: Ranks, scales: Sequence[float] = (), keep_for_recomputation: bool = False
) -> torch.Tensor:
    """The sum over the ranks, and over the operators, of each one's output times its scale: (batch, seq, hidden), whole.

    One message: the summands that nothing follows are added first, and those of other operators, and all exact columns,
    travel beside it. The sum is in the model's format. With sequence parallelism, a reduce-scatter, exactly; the result
    has this rank's tokens. keep_for_recomputation: store the sum, because backward needs what follows it.
    """
    scales = scales or [1.0] * len(partials)
    plain = [_scaled(each.out, scale) for each, scale in zip(partials, scales, strict=True) if each.finish is None]
    if all(each.finish is None for each in partials):
        whole = _reduce(_added(plain), ranks, keep_for_recomputation)
    else:
        whole = _sum_with_columns(partials, plain, scales, ranks)
    for each, scale in zip(partials, scales, strict=True):
        if each.bias is not None:
            whole = whole + _scaled(replicated(each.bias, ranks), scale)
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
    partials: Sequence[Partial], plain: Sequence[torch.Tensor], scales: Sequence[float], ranks: Ranks
) -> torch.Tensor:
    """`sum_of`, but for biases, where something follows the sum of at least one operator."""
    finished = [(each, scale) for each, scale in zip(partials, scales, strict=True) if each.finish is not None]
    dtype, hidden = partials[0].out.dtype, partials[0].out.shape[-1]
    columns = torch.cat([each.columns for each, _ in finished if each.columns is not None], dim=-1)
    outs = [each.out for each, _ in finished] + ([_added(plain)] if plain else [])

    def finish(sums: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        parts, first, ends = sums.split(hidden, dim=-1), 0, []
        for (each, scale), part in zip(finished, parts, strict=False):
            width = each.columns.shape[-1] if each.columns is not None else 0
            assert each.finish is not None
            ends.append(_scaled(each.finish(part, exact[..., first : first + width]).to(dtype), scale))
            first += width
        return _added(ends + [part.to(dtype) for part in parts[len(finished) :]])

    if len(outs) == 1 and not ranks.sequence_parallel:
        reduce = lambda part, exact: finish(*reduce_beside(part.to(exact.dtype), exact, ranks))  # noqa: E731
        return in_pieces(reduce, outs[0], columns)
    message = torch.cat([out.to(columns.dtype) for out in outs], dim=-1)
    if ranks.sequence_parallel:
        both = reduce_scatter_tokens(torch.cat([message, columns], dim=-1), ranks, keep_for_recomputation=True)
        return finish(both[..., : message.shape[-1]], both[..., message.shape[-1] :])
    return finish(*reduce_beside(message, columns, ranks))
