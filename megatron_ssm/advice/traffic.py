"""What ranks send in a training step, for a prompt and for a decoded token, and how long it takes on a fabric.

The tensor-parallel sums are those of `sizing.advise`, for every token. Backward sums the gradients of the same
activations (Megatron's f and g), where the attention's input is twice as wide, and the gradients of parameters that several
ranks hold. Context ranks pass states as `context.state_passing` says. DDP sums the gradients of all data x context ranks.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attention2d.cost.volume import messages
from attention2d.layout.grid import Grid
from attention2d.layout.token_order import local_length
from attention2d.schedules.choosing import Candidate
from megatron_ssm.sizing.advise import SUM_BYTES, inner_sums
from megatron_ssm.sizing.memory import sizes_of
from megatron_ssm.stack.sizes import Workload
from megatron_ssm.stack.stack import Stack
from sparsefusion import FORMATS, Fabric
from sparsefusion.collectives.wire_formats import BLOCK, wire_format

TOKEN_BYTES, AGREEMENT_BYTES = 8, 16
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of gradients after which torch's DDP sums them: at first, and later


Outputs = Sequence[tuple[int, int]]  # (bytes of a token, count) of sums in a wire format, such as `block_outputs`
WIRE_FORMATS = tuple(name for name in FORMATS if name != "auto")  # the most exact first


@dataclass(frozen=True)
class Sums:
    """How tensor-parallel ranks exchange tensors: over a fabric, or in memory that they share, which then is its "fabric".

    wait: seconds that each message takes longer than on the fabric alone. formats: those in which they may sum.
    """

    fabric: Fabric
    wait: float = 0.0
    formats: tuple[str, ...] = WIRE_FORMATS

    def seconds(self, messages: "Iterable[Message]") -> float:
        """The time of messages one after the other."""
        return seconds_of(messages, self.fabric, self.wait)

    def by_format(self, outputs: "Outputs", ranks: int, tokens: int) -> dict[str, float]:
        """{wire format: seconds of the sums of outputs in a forward pass over `tokens` tokens}."""
        return {name: seconds_of_outputs(outputs, ranks, tokens, name, self.fabric, self.wait) for name in self.formats}


@dataclass(frozen=True)
class Message:
    """`count` collectives of a `Fabric`, each of `nbytes` among `ranks` ranks."""

    operation: str
    nbytes: float
    ranks: int
    count: float = 1


def seconds_of(messages: Iterable[Message], fabric: Fabric, wait: float = 0.0) -> float:
    """The time of messages one after the other, each `wait` seconds longer than the fabric says.

    Numbers of ranks that were never measured are extrapolated.
    """
    known, total = {curve.operation for curve in fabric.curves}, 0.0
    for each in messages:
        if each.nbytes and each.count and each.ranks > 1:
            operation, nbytes, ranks, share = _measured_instead(each, known)
            total += each.count * (wait + share * fabric.time(operation, nbytes, ranks, extrapolate=True))
    return total


def _measured_instead(message: Message, known: Collection[str]) -> tuple[str, float, int, float]:
    """(operation, bytes, ranks, share of its time) by which a message is estimated whose operation was not measured.

    The other operation sends as many bytes in as many steps, or, an all-reduce, twice as many.
    """
    operation, nbytes, ranks = message.operation, message.nbytes, message.ranks
    if operation not in known and operation == "p2p":
        operation, ranks = "all_gather", 2
    elif operation not in known and operation == "all_to_all":
        operation = "reduce_scatter"
    if operation in known or "all_reduce" not in known:
        return operation, nbytes, ranks, 1.0
    return "all_reduce", nbytes * (ranks if operation == "all_gather" else 1), ranks, 0.5


def seconds_of_outputs(
    outputs: Outputs, ranks: int, tokens: int, format: str, fabric: Fabric, wait: float = 0.0
) -> float:
    """The time of the sums of outputs in a forward pass over `tokens` tokens, in a wire format.

    Exact ones are all-reduces. The others are an exchange of pieces and an all-gather of their sums, or an all-gather of
    everything, whichever is faster.
    """
    total = 0.0
    for nbytes, count in ((tokens * nbytes, count) for nbytes, count in outputs):
        sent = nbytes / SUM_BYTES * wire_format(format, torch.float32).nbytes(BLOCK) / BLOCK
        exact = [Message("all_reduce", nbytes, ranks, count)]
        two_shot = [Message("all_to_all", sent, ranks, count), Message("all_gather", sent / ranks, ranks, count)]
        ways = [exact] if format == "fp32" else [two_shot, [Message("all_gather", sent, ranks, count)]]
        total += min(seconds_of(way, fabric, wait) for way in ways)
    return total


def seconds_of_attention(
    schedule: Candidate, ranks: int, seq: int, shape: tuple[int, int, int, int], training: bool, fabric: Fabric,
    wait: float = 0.0,
) -> float:  # fmt: skip
    """The time of what a grid of `ranks` context ranks exchanges to attend `seq` tokens once.

    shape: (batch, heads, kv_heads, head_dim). training: forward and backward. Steps are messages between pairs if these were
    measured, and otherwise the all-gathers that take as many steps. wait: as for `seconds_of`.
    """
    grid = Grid(0, schedule.ulysses, schedule.rows, schedule.cols)
    passes = messages(grid, local_length("zigzag", seq, ranks), *shape, itemsize=SUM_BYTES)
    sent = [*passes.forward, *(passes.backward if training else ())]
    if "p2p" in {curve.operation for curve in fabric.curves}:
        return seconds_of([Message("p2p", nbytes, ranks, steps) for steps, nbytes in sent], fabric, wait)
    return seconds_of([Message("all_gather", nbytes, steps + 1) for steps, nbytes in sent], fabric, wait)


def exact_sums(config: Stack, ranks: int, tokens: int) -> Iterator[Message]:
    """The other sums of a forward pass: of the embedding, and of x_proj or of norms over several ranks."""
    if ranks > 1:
        yield Message("all_reduce", SUM_BYTES * config.hidden_size * tokens, ranks)
        for nbytes, count in inner_sums(config, ranks):
            yield Message("all_reduce", nbytes * tokens, ranks, count)


def backward_sums(config: Stack, ranks: int, tokens: int) -> Iterator[Message]:
    """The sums of a backward pass, and of the loss."""
    if ranks == 1:
        return
    row, units = SUM_BYTES * config.hidden_size * tokens, sum(map(len, config.layers))
    yield Message("all_reduce", row, ranks, units + 1)  # of the inputs of units, and of the head
    for sizes, count in sizes_of(config, Workload(ranks)):
        for width in sizes.backward:
            yield Message("all_reduce", SUM_BYTES * width * tokens, ranks, count)
        for numbers in sizes.parameters:
            yield Message("all_reduce", SUM_BYTES * numbers, ranks, count)
    yield Message("all_reduce", SUM_BYTES * tokens, ranks, 3)  # largest logit, sum of exponentials, logit of the label


def replicated_gradients(config: Stack, ranks: int) -> Iterator[Message]:
    """The mean, once per step, of the gradients of what every tensor-parallel rank has: norms, some biases, ..."""
    sizes = [math.prod(f.shape) for f in config.fields() if f.split is None and ".idle." not in f.name]
    if ranks > 1:
        yield Message("all_reduce", SUM_BYTES * sum(sizes), ranks)


def passed_states(config: Stack, tensor: int, context: int, batch: int, training: bool) -> Iterator[Message]:
    """What `context` ranks exchange in all state-space layers for `batch` sequences: states, and inputs of convolutions.

    After a prompt, the ranks also gather the final states.
    """
    if context == 1:
        return
    for sizes, count in sizes_of(config, Workload(tensor)):
        times, state = count * (2 if training else 1), SUM_BYTES * batch * sizes.passed
        yield Message("all_to_all", 2 * state, context, 2 * times)
        yield Message("all_to_all", 2 * SUM_BYTES * batch * sizes.mapped, context, count)
        if not training:
            yield Message("all_gather", state / context, context, times)
        yield Message("p2p", SUM_BYTES * batch * 2 * config.history * sizes.convolved, context, times)


def expert_outputs(config: Stack, tensor: int, experts: int) -> Iterator[tuple[int, int]]:
    """(bytes of a token, count) of the sums over expert-parallel ranks that have the same tokens."""
    for sizes, count in sizes_of(config, Workload(tensor, expert_ranks=experts)):
        if sizes.summed:
            yield SUM_BYTES * sizes.summed, count


def dispatched_tokens(config: Stack, tensor: int, experts: int, tokens: int) -> Iterator[Message]:
    """The exchanges of expert-parallel ranks with `tokens` tokens each in a forward and a backward pass, in fp32.

    In each layer: how many tokens each rank gets; the tokens, and their sums back; their gradients. All choices of experts
    are taken to be equally likely.
    """
    for sizes, count in sizes_of(config, Workload(tensor, expert_ranks=experts)):
        if sizes.reached:
            yield Message("all_to_all", TOKEN_BYTES * experts, experts, count)
            for nbytes in (sizes.dispatched, sizes.returned, sizes.returned, sizes.dispatched_gradients):
                yield Message("all_to_all", tokens * sizes.reached * nbytes, experts, count)


def expert_gradients(config: Stack, tensor: int, experts: int, ranks: int) -> Iterator[Message]:
    """The sums, once per step, of the gradients of divided experts over the `ranks` ranks that have the same."""
    for field in config.fields():
        if field.by_expert:
            yield Message("all_reduce", SUM_BYTES * math.prod(field.local_shape(0, tensor, 0, experts)), ranks)


def chosen_tokens(batch: int, tensor: int) -> Iterator[Message]:
    """What chooses the next token of `batch` sequences: each tensor-parallel rank's largest logit and its id."""
    yield Message("all_gather", batch * 2 * SUM_BYTES, tensor)


def agreed_tokens(batch: int, ranks: int) -> Iterator[Message]:
    """The messages by which context or expert-parallel ranks agree on the next token of `batch` sequences."""
    yield Message("all_gather", batch * TOKEN_BYTES, ranks)


def attended_tokens(config: Stack, batch: int, tensor: int, context: int) -> Iterator[Message]:
    """What `context` ranks exchange to attend tokens of `batch` sequences to the keys of all ranks (`attention2d.Tree`)."""
    for attention in config.attentions:
        part = batch * attention.heads / tensor * (attention.head_dim + 1) * SUM_BYTES
        for nbytes in (part, AGREEMENT_BYTES):
            yield Message("all_gather", nbytes, context)


def gradient_sums(weights: float, ranks: int, embedding: float = 0.0) -> Iterator[Message]:
    """The sums of gradients of `weights` bytes over `ranks` data x context ranks: DDP's buckets, in order.

    A bucket is closed when it has reached its size. embedding: bytes of the gradient that is ready last, and is not divided.
    """
    rest = weights - embedding
    if ranks == 1 or not weights:
        return
    if rest >= FIRST_BUCKET:
        yield Message("all_reduce", FIRST_BUCKET, ranks)
        full, rest = divmod(rest - FIRST_BUCKET, BUCKET)
        yield from itertools.repeat(Message("all_reduce", BUCKET, ranks), int(full))
    if rest + embedding:
        yield Message("all_reduce", rest + embedding, ranks)


def seconds_after_backward(
    weights: float, embedding: float, ranks: int, backward: float, fabric: Fabric, wait: float = 0.0
) -> float:
    """How much longer the sums of gradients take than the `backward` seconds of the backward pass that they run beside.

    The gradients are ready at an even rate, that of the embedding at the end. The sum of a bucket begins when all its
    gradients are ready and the bucket before is done. So a model that fits in a bucket or two hides next to nothing.
    weights, embedding, ranks: as for `gradient_sums`.
    """
    sent = done = 0.0
    seconds: dict[float, float] = {}
    for message in gradient_sums(weights, ranks, embedding):
        sent += message.nbytes
        if message.nbytes not in seconds:
            seconds[message.nbytes] = seconds_of([message], fabric, wait)
        ready = backward * min(1.0, sent / (weights - embedding)) if weights > embedding else backward
        done = max(done, ready) + seconds[message.nbytes]
    return max(0.0, done - backward)
