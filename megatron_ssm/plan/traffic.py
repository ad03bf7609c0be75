"""Counts the messages of a training step, of a prompt and of a decoded token, and predicts their time on a fabric.

Each token causes the tensor-parallel sums of `model.advise`. Backward sums the gradients of the same activations
(Megatron's f and g), where the attention's input is twice as wide, and the gradients of replicated parameters. Context
ranks pass states (see `parallel.state_passing`). DDP sums the gradients of all data x context ranks.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attention2d.cost.volume import messages
from attention2d.layout.grid import Grid
from attention2d.layout.token_order import local_length
from attention2d.schedules.choosing import Candidate
from commfabric import FORMATS, Fabric
from commfabric.collectives.wire_formats import BLOCK, wire_format
from megatron_ssm.model.advise import SUM_BYTES, inner_sums
from megatron_ssm.model.memory import sizes_of
from megatron_ssm.spec.sizes import Workload
from megatron_ssm.spec.stack import Stack

TOKEN_BYTES, AGREEMENT_BYTES = 8, 16
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of the first and of the further buckets of torch's DDP


Outputs = Sequence[tuple[int, int]]  # pairs (bytes per token, count) of sums in a wire format, such as `block_outputs`
WIRE_FORMATS = tuple(name for name in FORMATS if name != "auto")  # the most exact first


@dataclass(frozen=True)
class Sums:
    """The sums of tensor-parallel ranks.

    Attributes:
        fabric: The times of messages, over a network or in memory that the ranks share.
        wait: Seconds that each message takes in addition to its time on the fabric.
        formats: The wire formats in which the ranks can sum.
    """

    fabric: Fabric
    wait: float = 0.0
    formats: tuple[str, ...] = WIRE_FORMATS

    def seconds(self, messages: "Iterable[Message]") -> float:
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
    """Seconds of messages that are sent one after the other, each with `wait` seconds in addition to its time on the fabric.

    Numbers of ranks that were never measured are extrapolated.
    """
    known, total = {curve.operation for curve in fabric.curves}, 0.0
    for message in messages:
        if message.nbytes and message.count and message.ranks > 1:
            operation, nbytes, ranks, share = _measured_instead(message, known)
            total += message.count * (wait + share * fabric.time(operation, nbytes, ranks, extrapolate=True))
    return total


def _measured_instead(message: Message, known: Collection[str]) -> tuple[str, float, int, float]:
    """(operation, bytes, ranks, share of its time) of the measured operation by which a message is estimated.

    If the message's own operation was not measured, another one that sends the same bytes in the same number of steps is
    used, or half of an all-reduce, which sends twice as many.
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
    """Seconds of the sums of outputs in a forward pass over `tokens` tokens, in a wire format.

    Exact sums are all-reduces. Other formats exchange pieces and all-gather their sums, or all-gather everything, whichever
    is faster.
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
    """Seconds of the messages of a grid of context ranks in one attention; training: forward and backward.

    A step is a message between two ranks if these were measured, else a step of an all-gather. shape: (batch, heads,
    kv_heads, head_dim). fabric, wait: see `seconds_of`.
    """
    grid = Grid(0, schedule.ulysses, schedule.rows, schedule.cols)
    passes = messages(grid, local_length("zigzag", seq, ranks), *shape, itemsize=SUM_BYTES)
    sent = [*passes.forward, *(passes.backward if training else ())]
    if "p2p" in {curve.operation for curve in fabric.curves}:
        return seconds_of([Message("p2p", nbytes, ranks, steps) for steps, nbytes in sent], fabric, wait)
    return seconds_of([Message("all_gather", nbytes, steps + 1) for steps, nbytes in sent], fabric, wait)


def exact_sums(config: Stack, ranks: int, tokens: int) -> Iterator[Message]:
    """The exact sums of a forward pass: of the embedding, and of x_proj or of norms whose groups span ranks."""
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
    """The means, once per step, of the gradients of parameters that several tensor-parallel ranks have, such as norms."""
    sizes: Counter[int] = Counter()  # numbers of a rank, by the number of ranks that have them
    for each in config.fields():
        if ".idle." not in each.name:
            copies = each.copies(ranks)
            sizes[copies] += math.prod(each.shape) * copies // ranks
    yield from (Message("all_reduce", SUM_BYTES * size, ranks) for copies, size in sizes.items() if copies > 1)


def passed_states(config: Stack, tensor: int, context: int, batch: int, training: bool) -> Iterator[Message]:
    """The messages of `context` ranks in all recurrent layers for `batch` sequences: states and inputs of convolutions.

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
    """Pairs (bytes per token, count) of the sums over expert-parallel ranks that have the same tokens."""
    for sizes, count in sizes_of(config, Workload(tensor, expert_ranks=experts)):
        if sizes.summed:
            yield SUM_BYTES * sizes.summed, count


def dispatched_tokens(config: Stack, tensor: int, experts: int, tokens: int) -> Iterator[Message]:
    """The exchanges of expert-parallel ranks with `tokens` tokens each in a forward and a backward pass, in fp32.

    A layer exchanges the number of tokens for each rank, the tokens, their outputs, and the gradients of both. All choices
    of experts are assumed to be equally likely.
    """
    for sizes, count in sizes_of(config, Workload(tensor, expert_ranks=experts)):
        if sizes.reached:
            yield Message("all_to_all", TOKEN_BYTES * experts, experts, count)
            for nbytes in (sizes.dispatched, sizes.returned, sizes.returned, sizes.dispatched_gradients):
                yield Message("all_to_all", tokens * sizes.reached * nbytes, experts, count)


def expert_gradients(config: Stack, tensor: int, experts: int, ranks: int) -> Iterator[Message]:
    """The sums, once per step, of the gradients of divided experts over the `ranks` ranks with the same experts."""
    for field in config.fields():
        if field.by_expert:
            yield Message("all_reduce", SUM_BYTES * math.prod(field.local_shape(0, tensor, 0, experts)), ranks)


def chosen_tokens(batch: int, tensor: int) -> Iterator[Message]:
    """The message that chooses next tokens of `batch` sequences: each tensor-parallel rank's largest logit and its id."""
    yield Message("all_gather", batch * 2 * SUM_BYTES, tensor)


def agreed_tokens(batch: int, ranks: int) -> Iterator[Message]:
    """The messages by which context or expert-parallel ranks agree on the next token of `batch` sequences."""
    yield Message("all_gather", batch * TOKEN_BYTES, ranks)


def attended_tokens(config: Stack, batch: int, tensor: int, context: int) -> Iterator[Message]:
    """The messages in which tokens of `batch` sequences attend to the keys of all context ranks (`attention2d.Tree`)."""
    for attention in config.attentions:
        part = batch * attention.heads / tensor * (attention.head_dim + 1) * SUM_BYTES
        for nbytes in (part, AGREEMENT_BYTES):
            yield Message("all_gather", nbytes, context)


def gradient_sums(weights: float, ranks: int, embedding: float = 0.0) -> Iterator[Message]:
    """The sums of DDP's buckets of gradients in order, over `ranks` data x context ranks.

    weights: bytes of all gradients. embedding: bytes of the embedding's gradient, which is complete last and stays in one
    bucket.
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
    """Seconds from the end of the backward pass to the end of the sums of gradients that overlap with it.

    Gradients are assumed to be complete at an even rate, the embedding's at the end. The sum of a bucket begins when all its
    gradients are complete and the previous bucket is summed. So a model with one or two buckets hides almost nothing.

    Args:
        weights, embedding, ranks: See `gradient_sums`.
        backward: Seconds of the backward pass.
        fabric, wait: See `seconds_of`.
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
