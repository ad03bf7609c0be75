"""All divisions of a model and its batch over ranks, with their predicted times and memory, the fastest first.

A division has `tensor` x `context` x `data` ranks. `expert` of the context x data ranks divide the experts of a model that
has some; in generation, of the data ranks alone, which then have the same tokens. A training step takes

    micro-batches * (forward + backward [+ forward, with recomputation] + tensor-parallel sums + messages of context ranks
                     + tokens that go to other ranks' experts and back)
    + what backward does not hide of the sums of gradients + the gradient norm, clipping and AdamW
    + the sums of the gradients of what every tensor-parallel rank has, and of divided experts

and a reply takes the time to its first token (TTFT) and of each token that follows (TPOT), all of them of the slowest rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from attention2d.layout.token_order import local_length
from attention2d.schedules.choosing import candidates
from attention2d.schedules.family import named_grids
from megatron_ssm.context.blocks import check_sequence_length
from megatron_ssm.sizing.activations import TrainingMemory
from megatron_ssm.sizing.advise import block_outputs
from megatron_ssm.sizing.memory import Memory
from megatron_ssm.stack.stack import Stack
from sparsefusion import Fabric

from .traffic import (
    Sums,
    agreed_tokens,
    attended_tokens,
    backward_sums,
    chosen_tokens,
    dispatched_tokens,
    exact_sums,
    expert_gradients,
    expert_outputs,
    passed_states,
    replicated_gradients,
    seconds_after_backward,
    seconds_of,
    seconds_of_attention,
)

WORTHWHILE = 0.9  # a less exact format must reduce the time of a step to this share
SPARSE = 0.2  # the share of a step from which on the sums of gradients are worth fusing sparsely
FP32 = 4  # bytes


class Computes(Protocol):
    """The processor of a rank: `devices.Device` or `measured.MeasuredDevice`.

    `ranks` ranks split each layer, and `experts` groups of these divide the experts.
    """

    @property
    def name(self) -> str:
        """What it is."""

    @property
    def memory(self) -> float:
        """Bytes of a rank."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of weights and activations in generation."""

    @property
    def wait(self) -> float:
        """Seconds that each message takes longer than on the fabric alone."""

    def sums(self, fabric: Fabric, ranks: int) -> Sums:
        """How `ranks` tensor-parallel ranks sum: over the fabric, or in memory that they share."""

    def forward(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int, experts: int = 1) -> float:
        """Seconds to read `tokens` tokens of each of `batch` prompts of `seq` tokens."""

    def micro_batch(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass in training."""

    def passing(self, config: Stack, ranks: int, batch: int, tokens: int) -> tuple[float, float]:
        """Seconds that a context rank computes in addition, forward and backward: what its blocks contribute to others."""

    def optimizer(self, config: Stack, ranks: int, experts: int = 1) -> float:
        """Seconds of the gradient norm, clipping and AdamW."""

    def token(self, config: Stack, ranks: int, batch: int, length: int, experts: int = 1) -> float:
        """Seconds to decode one token of `batch` sequences, of which this rank holds `length` tokens."""


@dataclass(frozen=True)
class Training:
    """A training step: global_batch sequences of seq tokens, of which a rank computes micro_batch at a time."""

    seq: int
    global_batch: int
    micro_batch: int = 1


@dataclass(frozen=True)
class Generation:
    """Replies of `new` tokens to `batch` prompts of `prompt` tokens, which are generated together.

    draft_head: whether the model has its draft head, of which the memory counts, but not the time that it saves.
    """

    prompt: int
    new: int
    batch: int = 1
    draft_head: bool = False


@dataclass(frozen=True)
class Division:
    """One division and its prediction, or why it is excluded.

    parts: {what: seconds}, of which `seconds` is the sum. memory: bytes on the rank that needs most. format: of the sums of
    block outputs. attention: the grid of context ranks. schedule: its name in --context-schedule. gradients: the gradient
    mode. For generation also ttft and tpot. Of an excluded one, only the memory may be known (0: it is not).
    """

    tensor: int
    context: int
    data: int
    expert: int = 1
    parts: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    format: str = "fp32"
    attention: str = ""
    schedule: str = "auto"
    gradients: str = "dense"
    recompute: bool = False
    ttft: float = 0.0
    tpot: float = 0.0
    excluded: str = ""

    @property
    def seconds(self) -> float:
        """Of a training step, or of a reply."""
        return sum(self.parts.values())

    @property
    def sizes(self) -> str:
        """The numbers of ranks, in words."""
        divided = f", EP {self.expert}" * (self.expert > 1)
        return f"TP {self.tensor} x CP {self.context} x DP {self.data}{divided}"

    @property
    def replicas(self) -> int:
        """The number of copies of the model that reply to prompts of their own."""
        return self.data // self.expert


def training_divisions(config: Stack, ranks: int, job: Training, fabric: Fabric, device: Computes) -> list[Division]:
    """All divisions for training: those that fit, the fastest first, and then those that are excluded."""
    found = [
        _training(config, *sizes, expert, job, fabric, device)
        for sizes in _sizes(ranks)
        for expert in _expert_ranks(config, sizes[1] * sizes[2])
    ]
    return sorted(found, key=lambda each: (bool(each.excluded), each.seconds))


def generation_divisions(
    config: Stack, ranks: int, job: Generation, fabric: Fabric, device: Computes
) -> list[Division]:
    """All divisions for generation, as in `training_divisions`; `replicas` each generate a batch of their own."""
    config = config.with_draft_head() if job.draft_head else config
    found = [
        _generation(config, *sizes, expert, job, fabric, device)
        for sizes in _sizes(ranks)
        for expert in _expert_ranks(config, sizes[2] if sizes[1] == 1 else 1)
    ]
    return sorted(found, key=lambda each: (bool(each.excluded), each.seconds, -each.replicas))


def _sizes(ranks: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, context, data) whose product is `ranks`."""
    for tensor in _divisors(ranks):
        for context in _divisors(ranks // tensor):
            yield tensor, context, ranks // tensor // context


def _expert_ranks(config: Stack, ranks: int) -> list[int]:
    """The numbers of ranks, of `ranks` with the same part of the layers, that can divide the experts."""
    counts = [spec.experts for _, spec in config.operators if spec.experts]
    return _divisors(math.gcd(ranks, *counts)) if counts else [1]


def _divisors(number: int) -> list[int]:
    """Those of a number, the smallest first, found in as many steps as its square root."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _training(
    config: Stack, tensor: int, context: int, data: int, expert: int, job: Training, fabric: Fabric, device: Computes
) -> Division:
    """The prediction of one division."""
    sizes, per_step = (tensor, context, data, expert), job.micro_batch * data
    try:
        config.check_ranks(tensor)
        if job.global_batch % per_step:
            raise ValueError(
                f"a batch of {job.global_batch} does not divide over {data} x micro-batches of {job.micro_batch}"
            )
        tokens = _tokens(config, job.seq, context)
        attention, schedule, attention_seconds = _attention(
            config, tensor, context, job.seq, job.micro_batch, True, fabric, device.wait
        )
    except ValueError as error:
        return Division(*sizes, excluded=str(error))
    shape = TrainingMemory(config, tensor, expert_ranks=expert)
    recompute = shape.step(job.micro_batch, tokens) > device.memory
    shape = replace(shape, recompute=recompute)
    needed = shape.step(job.micro_batch, tokens)
    if needed > device.memory:
        return Division(*sizes, memory=needed, excluded=_too_large(needed, device, " with --recompute-activations"))
    forward, backward = device.micro_batch(config, tensor, job.micro_batch, tokens, job.seq)
    passing = sum(device.passing(config, tensor, job.micro_batch, tokens)) if context > 1 else 0.0
    micro_batches, rows = job.global_batch // per_step, job.micro_batch * tokens
    compute = micro_batches * (forward * (1 + recompute) + backward + passing)
    between = device.sums(fabric, tensor)
    rest = between.seconds([*exact_sums(config, tensor, rows), *backward_sums(config, tensor, rows)])
    by_format = between.by_format([*block_outputs(config, tensor)], tensor, rows)
    format = _format({name: compute + micro_batches * (rest + time) for name, time in by_format.items()})
    weights = Memory(config, tensor, FP32, expert_ranks=expert).weights
    of_experts = [*expert_gradients(config, tensor, expert, context * data // expert)] if expert > 1 else []
    weights -= int(sum(each.nbytes for each in of_experts))
    embedding = FP32 * config.vocab_size * config.hidden_size / tensor
    parts = {
        "compute": compute,
        "tensor-parallel sums": micro_batches * (rest + by_format[format])
        + between.seconds(replicated_gradients(config, tensor)),
        "context ranks": micro_batches * (
            attention_seconds
            + seconds_of(passed_states(config, tensor, context, job.micro_batch, True), fabric, device.wait)
        ),
        "sums of gradients": seconds_after_backward(weights, embedding, context * data, backward, fabric, device.wait)
        + seconds_of(of_experts, fabric, device.wait),
        "norm, clipping, AdamW": device.optimizer(config, tensor, expert),
    }  # fmt: skip
    if expert > 1:  # whose gradients are always dense
        dispatched = seconds_of(dispatched_tokens(config, tensor, expert, rows), fabric, device.wait)
        parts["tokens to experts"] = micro_batches * dispatched
        return Division(*sizes, parts, needed, format, attention, schedule, "dense", recompute)
    residuals = shape.step(job.micro_batch, tokens, has_residuals=True)
    if parts["sums of gradients"] > SPARSE * sum(parts.values()) and residuals <= device.memory:
        return Division(*sizes, parts, residuals, format, attention, schedule, "auto", recompute)
    return Division(*sizes, parts, needed, format, attention, schedule, "dense", recompute)


def _generation(
    config: Stack, tensor: int, context: int, data: int, expert: int, job: Generation, fabric: Fabric, device: Computes
) -> Division:
    """The prediction of one division."""
    sizes = (tensor, context, data, expert)
    try:
        config.check_ranks(tensor)
        if job.draft_head and context > 1:
            raise ValueError("speculative decoding is not supported on context ranks")
        tokens = _tokens(config, job.prompt, context)
        attention, schedule, attention_seconds = _attention(
            config, tensor, context, job.prompt, job.batch, False, fabric, device.wait
        )
    except ValueError as error:
        return Division(*sizes, excluded=str(error))
    shape = Memory(config, tensor, device.itemsize, expert_ranks=expert)
    needed = _memory_of_reply(shape, job, tokens, context)
    if needed > device.memory:
        return Division(*sizes, memory=needed, excluded=_too_large(needed, device))
    compute = device.forward(config, tensor, job.batch, tokens, job.prompt, expert)
    if context > 1:
        compute += device.passing(config, tensor, job.batch, tokens)[0]
    token = device.token(config, tensor, job.batch, tokens, expert)

    across = device.sums(fabric, tensor * expert)
    between = device.sums(fabric, tensor) if tensor > 1 else across

    def sums(rows: int) -> dict[str, float]:
        """{wire format: seconds of the tensor-parallel sums of a forward pass over `rows` tokens}."""
        exact = between.seconds(exact_sums(config, tensor, rows))
        outputs = between.by_format([*block_outputs(config, tensor)], tensor, rows)
        return {name: exact + time for name, time in outputs.items()}

    def sums_of_experts(rows: int) -> dict[str, float]:
        """{wire format: seconds of the sums of experts' outputs over expert-parallel ranks, for `rows` tokens}."""
        return across.by_format([*expert_outputs(config, tensor, expert)], expert, rows)

    states = (
        seconds_of(passed_states(config, tensor, context, job.batch, False), fabric, device.wait) + attention_seconds
    )
    of_prompt, of_token = sums(job.batch * tokens), sums(job.batch)
    experts_of_prompt, experts_of_token = sums_of_experts(job.batch * tokens), sums_of_experts(job.batch)
    choice = between.seconds(chosen_tokens(job.batch, tensor))
    choice += seconds_of(agreed_tokens(job.batch, context * expert), fabric, device.wait)
    attended = seconds_of(attended_tokens(config, job.batch, tensor, context), fabric, device.wait)
    times = {
        name: (
            compute + states + of_prompt[name] + experts_of_prompt[name] + choice,
            token + of_token[name] + experts_of_token[name] + attended + choice,
        )
        for name in between.formats
    }
    format = _format({name: ttft + (job.new - 1) * tpot for name, (ttft, tpot) in times.items()})
    ttft, tpot = times[format]
    parts = {
        "prompt, computed": compute,
        "prompt, tensor-parallel sums": of_prompt[format],
        "prompt, context ranks": states,
        "tokens, computed": (job.new - 1) * token,
        "tokens, tensor-parallel sums": (job.new - 1) * of_token[format],
        "tokens, context ranks": (job.new - 1) * attended,
        "tokens, choice": job.new * choice,
    }
    if expert > 1:
        parts["prompt, sums of experts"] = experts_of_prompt[format]
        parts["tokens, sums of experts"] = (job.new - 1) * experts_of_token[format]
    return Division(*sizes, parts, needed, format, attention, schedule, ttft=ttft, tpot=tpot)


def _memory_of_reply(shape: Memory, job: Generation, tokens: int, context: int) -> int:
    """Bytes of a rank that reads `tokens` tokens of each prompt: weights, activations, and the cache of prompt and reply.

    Context ranks share the keys and values of all tokens.
    """
    new = -(-job.new // context)
    activations = shape.prefill(job.batch, tokens) - shape.cache(job.batch, tokens)
    return shape.weights + activations + shape.cache(job.batch, tokens + new)


def _tokens(config: Stack, seq: int, context: int) -> int:
    """The tokens of a sequence on each of `context` ranks, which have two blocks; ValueError if these are too short."""
    check_sequence_length(seq, context, config.history)
    return local_length("zigzag", seq, context)


def _attention(
    config: Stack, tensor: int, context: int, seq: int, batch: int, training: bool, fabric: Fabric, wait: float
) -> tuple[str, str, float]:
    """(the grid of context ranks, its name in --context-schedule, the seconds of its messages in all hybrid layers).

    For training, the fastest of the grids that the option can select. `generate` has no such option: it always takes the
    one that `auto` selects, by bytes.
    """
    if context == 1 or not config.attentions:
        return "", "auto", 0.0
    local = config.attentions[0].on_ranks(tensor)
    shape = batch, local.heads, local.kv_heads, local.head_dim
    default, *others = candidates(context, *shape[1:], seq, training, batch=batch, itemsize=FP32)
    names = {grid[:3]: name for name, grid in reversed(named_grids(context).items())}  # of several, the first name
    names[default.rows, default.cols, default.ulysses] = "auto"
    found = [default, *(each for each in others if training and (each.rows, each.cols, each.ulysses) in names)]
    times = [seconds_of_attention(each, context, seq, shape, training, fabric, wait) for each in found]
    seconds, best = min(zip(times, found, strict=True), key=lambda pair: pair[0])
    grid = f"{best.rows} x {best.cols}" + f", {best.ulysses} ranks divide the heads" * (best.ulysses > 1)
    return grid, names[best.rows, best.cols, best.ulysses], len(config.attentions) * seconds


def _format(times: dict[str, float]) -> str:
    """The most exact format, unless a less exact one reduces the time to WORTHWHILE."""
    chosen = "fp32"
    for name, time in times.items():
        if time < WORTHWHILE * times[chosen]:
            chosen = name
    return chosen


def _too_large(needed: float, device: Computes, how: str = "") -> str:
    return f"needs {needed / 1e9:.3g} GB{how}; a rank has {device.memory / 1e9:.3g} GB"
