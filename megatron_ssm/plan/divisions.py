"""Predicts the time and memory of every division of a model and its batch over ranks, and sorts them by time.

A division has `tensor` x `context` x `data` ranks. If the model has experts, they are split over `expert` ranks: in
training, of the context x data ranks; in generation, of the data ranks, which then compute the same tokens. A training step
takes

    micro-batches * (forward + backward [+ forward, with recomputation] + tensor-parallel sums + messages of context ranks
                     + exchange of tokens between expert-parallel ranks)
    + sums of gradients, as far as backward does not hide them + gradient norm, clipping and AdamW
    + sums of the gradients of replicated parameters, and of divided experts

A reply takes the time to its first token (TTFT) and the time of each following token (TPOT). All times are those of the
slowest rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from attention2d.layout.token_order import local_length
from attention2d.schedules.choosing import candidates
from attention2d.schedules.family import named_grids
from commfabric import Fabric
from megatron_ssm.checkpoints.quantized_files import format_of
from megatron_ssm.model.activations import TrainingMemory
from megatron_ssm.model.advise import block_outputs
from megatron_ssm.model.memory import Memory
from megatron_ssm.parallel.blocks import check_sequence_length
from megatron_ssm.spec.stack import Stack

from .devices import Device
from .measured import MeasuredDevice
from .traffic import (
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

FORMAT_TIME_RATIO = 0.9  # a less exact format is chosen if it reduces the time of a step to this share
SPARSE_SHARE = 0.2  # sparse gradients are recommended if sums of gradients take more than this share of a step
FP32 = 4  # bytes
QUANTIZED_BITS = {"int8": 8, "int4": 4, None: 0}
Processor = Device | MeasuredDevice  # the processor of a rank


@dataclass(frozen=True)
class Training:
    """A training step over `global_batch` sequences of `seq` tokens; a rank computes `micro_batch` of them at a time."""

    seq: int
    global_batch: int
    micro_batch: int = 1


@dataclass(frozen=True)
class Generation:
    """Replies of `new` tokens to `batch` prompts of `prompt` tokens, generated together.

    With `draft_head`, the memory of the model's draft head is counted, but not the time that it saves.
    """

    prompt: int
    new: int
    batch: int = 1
    draft_head: bool = False


@dataclass(frozen=True)
class Division:
    """A division and its prediction. For an excluded division, only the memory may be known.

    Attributes:
        tensor, context, data, expert: The numbers of ranks.
        parts: {part of the time: seconds}.
        memory: Bytes on the rank that needs most; 0 if unknown.
        format: The wire format of the sums of block outputs.
        attention: The grid of context ranks, or "".
        schedule: The name of this grid in --context-schedule.
        gradients: The gradient mode.
        recompute: True if activations must be recomputed.
        ttft, tpot: Seconds to the first token, and seconds per following token, in generation.
        excluded: The reason why the division is excluded, or "".
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
        return sum(self.parts.values())

    @property
    def sizes(self) -> str:
        divided = f", EP {self.expert}" * (self.expert > 1)
        return f"TP {self.tensor} x CP {self.context} x DP {self.data}{divided}"

    @property
    def replicas(self) -> int:
        """The number of copies of the model that reply to prompts of their own."""
        return self.data // self.expert

    def throughput(self, job: "Generation") -> float:
        """New tokens per second of all replicas, each of which replies to one batch after another."""
        return self.replicas * job.batch * job.new / self.seconds


def training_divisions(config: Stack, ranks: int, job: Training, fabric: Fabric, device: Processor) -> list[Division]:
    """All divisions for training: the possible ones, the fastest first, then the excluded ones."""
    divisions = [
        training_division(config, *sizes, expert, job, fabric, device)
        for sizes in _sizes(ranks)
        for expert in _expert_ranks(config, sizes[1] * sizes[2])
    ]
    return sorted(divisions, key=lambda division: (bool(division.excluded), division.seconds))


def generation_divisions(
    config: Stack, ranks: int, job: Generation, fabric: Fabric, device: Processor
) -> list[Division]:
    """All divisions for generation, sorted as by `training_divisions`. Each replica generates a batch of its own."""
    config = config.with_draft_head() if job.draft_head else config
    divisions = [
        _generation(config, *sizes, expert, job, fabric, device)
        for sizes in _sizes(ranks)
        for expert in _expert_ranks(config, sizes[2] if sizes[1] == 1 else 1)
    ]
    return sorted(divisions, key=lambda division: (bool(division.excluded), division.seconds, -division.replicas))


def _sizes(ranks: int) -> Iterator[tuple[int, int, int]]:
    for tensor in _divisors(ranks):
        for context in _divisors(ranks // tensor):
            yield tensor, context, ranks // tensor // context


def _expert_ranks(config: Stack, ranks: int) -> list[int]:
    """The numbers of expert-parallel ranks, among `ranks` ranks with the same part of the layers, that the experts allow."""
    counts = [spec.experts for _, spec in config.operators if spec.experts]
    return _divisors(math.gcd(ranks, *counts)) if counts else [1]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def training_division(
    config: Stack, tensor: int, context: int, data: int, expert: int, job: Training, fabric: Fabric, device: Processor,
    recompute: bool | None = None,
) -> Division:  # fmt: skip
    """The prediction of a division for training. recompute: of activations; None: only if they need too much memory."""
    sizes, per_step = (tensor, context, data, expert), job.micro_batch * data
    try:
        config.check_ranks(tensor)
        if job.global_batch % per_step:
            raise ValueError(
                f"global batch {job.global_batch} is not a multiple of {data} data ranks x micro-batch {job.micro_batch} = "
                f"{per_step}"
            )
        tokens = local_tokens(config, job.seq, context)
        attention, schedule, attention_seconds = _attention(
            config, tensor, context, job.seq, job.micro_batch, True, fabric, device.wait
        )
    except ValueError as error:
        return Division(*sizes, excluded=str(error))
    memory = TrainingMemory(config, tensor, expert_ranks=expert)
    if recompute is None:
        recompute = memory.step(job.micro_batch, tokens) > device.memory
    memory = replace(memory, recompute=recompute)
    needed = memory.step(job.micro_batch, tokens)
    if needed > device.memory:
        return Division(*sizes, memory=needed, excluded=_too_large(needed, device, " with --recompute-activations"))
    forward, backward = device.micro_batch(config, tensor, job.micro_batch, tokens, job.seq)
    passing = sum(device.passing(config, tensor, job.micro_batch, tokens)) if context > 1 else 0.0
    micro_batches, rows = job.global_batch // per_step, job.micro_batch * tokens
    compute = micro_batches * (forward * (1 + recompute) + backward + passing)
    tensor_sums = device.sums(fabric, tensor)
    exact_sum_seconds = tensor_sums.seconds([*exact_sums(config, tensor, rows), *backward_sums(config, tensor, rows)])
    by_format = tensor_sums.by_format([*block_outputs(config, tensor)], tensor, rows)
    format = _format({name: compute + micro_batches * (exact_sum_seconds + time) for name, time in by_format.items()})
    weights = Memory(config, tensor, FP32, expert_ranks=expert).weights
    of_experts = [*expert_gradients(config, tensor, expert, context * data // expert)] if expert > 1 else []
    weights -= int(sum(message.nbytes for message in of_experts))
    embedding = FP32 * config.vocab_size * config.hidden_size / tensor
    parts = {
        "compute": compute,
        "tensor-parallel sums": micro_batches * (exact_sum_seconds + by_format[format])
        + tensor_sums.seconds(replicated_gradients(config, tensor)),
        "context ranks": micro_batches * (
            attention_seconds
            + seconds_of(passed_states(config, tensor, context, job.micro_batch, True), fabric, device.wait)
        ),
        "sums of gradients": seconds_after_backward(weights, embedding, context * data, backward, fabric, device.wait)
        + seconds_of(of_experts, fabric, device.wait),
        "norm, clipping, AdamW": device.optimizer(config, tensor, expert),
    }  # fmt: skip
    if expert > 1:  # gradients of divided experts are always dense
        dispatched = seconds_of(dispatched_tokens(config, tensor, expert, rows), fabric, device.wait)
        parts["tokens to experts"] = micro_batches * dispatched
        return Division(*sizes, parts, needed, format, attention, schedule, "dense", recompute)
    residuals = memory.step(job.micro_batch, tokens, has_residuals=True)
    if parts["sums of gradients"] > SPARSE_SHARE * sum(parts.values()) and residuals <= device.memory:
        return Division(*sizes, parts, residuals, format, attention, schedule, "auto", recompute)
    return Division(*sizes, parts, needed, format, attention, schedule, "dense", recompute)


def _generation(
    config: Stack, tensor: int, context: int, data: int, expert: int, job: Generation, fabric: Fabric, device: Processor
) -> Division:
    sizes = (tensor, context, data, expert)
    try:
        config.check_ranks(tensor)
        if job.draft_head and context > 1:
            raise ValueError("speculative decoding is not supported on context ranks")
        tokens = local_tokens(config, job.prompt, context)
        attention, schedule, attention_seconds = _attention(
            config, tensor, context, job.prompt, job.batch, False, fabric, device.wait
        )
    except ValueError as error:
        return Division(*sizes, excluded=str(error))
    bits = QUANTIZED_BITS[format_of(config.raw)]
    memory = Memory(config, tensor, device.itemsize, quantized_bits=bits, expert_ranks=expert)
    needed = _memory_of_reply(memory, job, tokens, context)
    if needed > device.memory:
        return Division(*sizes, memory=needed, excluded=_too_large(needed, device))
    compute = device.forward(config, tensor, job.batch, tokens, job.prompt, expert)
    if context > 1:
        compute += device.passing(config, tensor, job.batch, tokens)[0]
    token = device.token(config, tensor, job.batch, tokens, expert)

    tensor_and_expert_sums = device.sums(fabric, tensor * expert)
    tensor_sums = device.sums(fabric, tensor) if tensor > 1 else tensor_and_expert_sums

    def sums(rows: int) -> dict[str, float]:
        """{wire format: seconds of the tensor-parallel sums of a forward pass over `rows` tokens}."""
        exact = tensor_sums.seconds(exact_sums(config, tensor, rows))
        outputs = tensor_sums.by_format([*block_outputs(config, tensor)], tensor, rows)
        return {name: exact + time for name, time in outputs.items()}

    def sums_of_experts(rows: int) -> dict[str, float]:
        """{wire format: seconds of the sums of experts' outputs over expert-parallel ranks, for `rows` tokens}."""
        return tensor_and_expert_sums.by_format([*expert_outputs(config, tensor, expert)], expert, rows)

    states = (
        seconds_of(passed_states(config, tensor, context, job.batch, False), fabric, device.wait) + attention_seconds
    )
    of_prompt, of_token = sums(job.batch * tokens), sums(job.batch)
    experts_of_prompt, experts_of_token = sums_of_experts(job.batch * tokens), sums_of_experts(job.batch)
    choice = tensor_sums.seconds(chosen_tokens(job.batch, tensor))
    choice += seconds_of(agreed_tokens(job.batch, context * expert), fabric, device.wait)
    attended = seconds_of(attended_tokens(config, job.batch, tensor, context), fabric, device.wait)
    times = {
        name: (
            compute + states + of_prompt[name] + experts_of_prompt[name] + choice,
            token + of_token[name] + experts_of_token[name] + attended + choice,
        )
        for name in tensor_sums.formats
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


def _memory_of_reply(memory: Memory, job: Generation, tokens: int, context: int) -> int:
    """Bytes of a rank with `tokens` tokens of each prompt: weights, activations, and the cache of prompt and reply.

    The keys and values of the reply are divided over the context ranks.
    """
    new = -(-job.new // context)
    activations = memory.prefill(job.batch, tokens) - memory.cache(job.batch, tokens)
    return memory.weights + activations + memory.cache(job.batch, tokens + new)


def local_tokens(config: Stack, seq: int, context: int) -> int:
    """The tokens of a sequence on each of `context` ranks, in two blocks. ValueError if the blocks are too short."""
    check_sequence_length(seq, context, config.history)
    return local_length("zigzag", seq, context)


def _attention(
    config: Stack, tensor: int, context: int, seq: int, batch: int, training: bool, fabric: Fabric, wait: float
) -> tuple[str, str, float]:
    """(grid of context ranks, its name in --context-schedule, seconds of its messages in all attention layers).

    For training, the fastest of the grids that the option can select. `generate` has no such option; it always uses the
    grid that `auto` selects by bytes.
    """
    if context == 1 or not config.attentions:
        return "", "auto", 0.0
    local = config.attentions[0].on_ranks(tensor)
    shape = batch, local.heads, local.kv_heads, local.head_dim
    default, *others = candidates(context, *shape[1:], seq, training, batch=batch, itemsize=FP32)
    # A grid with several names keeps the first of them.
    names = {grid[:3]: name for name, grid in reversed(named_grids(context).items())}
    names[default.rows, default.cols, default.ulysses] = "auto"
    named = [grid for grid in others if training and (grid.rows, grid.cols, grid.ulysses) in names]
    grids = [default, *named]
    times = [seconds_of_attention(grid, context, seq, shape, training, fabric, wait) for grid in grids]
    seconds, best = min(zip(times, grids, strict=True), key=lambda pair: pair[0])
    text = f"{best.rows} x {best.cols}" + f", {best.ulysses} ranks divide the heads" * (best.ulysses > 1)
    return text, names[best.rows, best.cols, best.ulysses], len(config.attentions) * seconds


def _format(times: dict[str, float]) -> str:
    """The most exact of the formats {format: seconds}, unless a less exact one takes less than FORMAT_TIME_RATIO times its
    time.
    """
    chosen = "fp32"
    for name, time in times.items():
        if time < FORMAT_TIME_RATIO * times[chosen]:
            chosen = name
    return chosen


def _too_large(needed: float, device: Processor, condition: str = "") -> str:
    return f"needs {needed / 1e9:.3g} GB{condition}; a rank has {device.memory / 1e9:.3g} GB"
