"""The command `python -m megatron_ssm advise`: predicts times of a model on a fabric. Rank 0 prints them."""

import json
import os
import zlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commfabric import Fabric
from commfabric.collectives.agreement import together
from commfabric.collectives.counted import all_reduce
from commfabric.foundation.command_line import Failure, Printer, check_number
from commfabric.foundation.launcher import launched_ranks, this_rank
from megatron_ssm.checkpoints.quantized_files import format_of
from megatron_ssm.layers import families
from megatron_ssm.parallel.groups import device_of_rank, join, shut_down
from megatron_ssm.spec.stack import Stack

from .devices import DEVICES, LARGEST, SMALLEST, Device, own_memory, read_device
from .divisions import Division, Generation, Processor, Training, generation_divisions, training_divisions
from .measured import MeasuredDevice

MEASURED = "measured"
RANKS_LIMIT = 2**20  # for so many ranks, comparing all divisions takes seconds
MILLI = 1e3
# Fields of an excluded division that are null.
UNKNOWN = ("parts", "seconds", "ttft", "tpot", "format", "attention", "schedule", "gradients", "recompute")


@dataclass(frozen=True)
class _Inputs:
    """The inputs of the advice: a model, the times of messages, and what is to be divided over `ranks`.

    device: the device with known rates; None if this machine is measured. kind: "cpu" or "cuda", on which it is. memory:
    bytes of memory of a rank; None for that of the device.
    """

    config: Stack
    fabric: Fabric
    training: Training
    generation: Generation
    ranks: int
    device: Device | None
    kind: str
    memory: float | None

    @classmethod
    def read(cls, arguments: Namespace) -> "_Inputs":
        """Read the inputs on this rank. ValueError if a file is wrong or a number is out of range.

        The default device is an H100, or this machine if the fabric was measured between CPUs.
        """
        _check_numbers(arguments)
        config, fabric = families.read(arguments.model), _read_fabric(arguments.fabric)
        on_cpu = fabric.description.get("device") == "cpu"
        name = arguments.device or (MEASURED if on_cpu else "h100")
        measured = max((curve.ranks for curve in fabric.curves), default=1)
        ranks = measured if arguments.ranks is None else arguments.ranks
        check_number("--ranks", ranks, 1, RANKS_LIMIT)
        if arguments.draft_head:
            config.with_draft_head()  # ValueError if there is none
        return cls(
            config,
            fabric,
            Training(arguments.seq_length, arguments.global_batch_size, arguments.micro_batch_size),
            Generation(arguments.prompt, arguments.new_tokens, arguments.batch, arguments.draft_head),
            ranks,
            None if name == MEASURED else DEVICES.get(name) or read_device(name),
            "cpu" if on_cpu or not torch.cuda.is_available() else "cuda",
            arguments.memory_gb and arguments.memory_gb * 1e9,
        )

    def fingerprint(self) -> dict[str, object]:
        """The values that must be equal on all ranks, with a checksum of each file, so that an error names the file."""
        files = {name: zlib.crc32(repr(getattr(self, name)).encode()) for name in ("config", "fabric")}
        return files | {field.name: getattr(self, field.name) for field in fields(self) if field.name not in files}


def advise(arguments: Namespace) -> None:
    """Print the advice, as text or as one JSON object.

    If this machine is measured under torchrun, all ranks time the model's parts at the same time, as they would compute.
    ValueError on all ranks if a file is wrong on one of them, a number is out of range, or inputs differ across ranks.
    Failure if neither training nor generation is possible, after the advice is printed.
    """
    try:
        group = _join() if arguments.device in (None, MEASURED) else None
        inputs = together(lambda: _Inputs.read(arguments), [group], _Inputs.fingerprint)
        device = _device(inputs, group)
        config, fabric, ranks = inputs.config, inputs.fabric, inputs.ranks
        training, generation = inputs.training, inputs.generation
        for_training = training_divisions(config, ranks, training, fabric, device)
        for_generation = generation_divisions(config, ranks, generation, fabric, device)
    finally:
        shut_down()
    printer = Printer(is_enabled=this_rank() == 0)
    if arguments.json:
        content = {"device": device.name, "ranks": ranks, "parameters": config.elements}
        content |= {"active_parameters": config.active_elements, "weights": format_of(config.raw)}
        content["training"] = as_json(for_training, training)
        content["generation"] = as_json(for_generation, generation)
        printer.print(json.dumps(content) + "\n")
    else:
        title = f"{config.family} on {ranks} rank{'s' * (ranks > 1)}, {device.name}: predictions, the fastest first"
        is_bf16 = device.itemsize == 2
        texts = (
            training_text(for_training, training, is_bf16),
            generation_text(for_generation, generation, is_bf16),
        )
        printer.print("\n".join([title, _parameters(config), *texts, ""]))
    if all(division.excluded for division in (*for_training, *for_generation)):
        raise Failure(f"no division over {ranks} rank{'s' * (ranks > 1)} is possible")


def _parameters(config: Stack) -> str:
    active = f", {config.active_elements:,} of them active for a token" * (config.active_elements < config.elements)
    line = f"{config.elements:,} parameters{active}"
    stored = format_of(config.raw)
    note = f"; matrices in {stored}, which only CPUs compute: memory as stored, times as if they were not quantized"
    return line + note * (stored is not None)


def _check_numbers(arguments: Namespace) -> None:
    for name in ("seq_length", "global_batch_size", "micro_batch_size", "prompt", "new_tokens", "batch"):
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), 1)
    if arguments.memory_gb is not None and not SMALLEST <= arguments.memory_gb <= LARGEST:
        raise ValueError(f"--memory-gb {arguments.memory_gb:g} must be from {SMALLEST:g} to {LARGEST:g}")


def _read_fabric(path: str) -> Fabric:
    try:
        return Fabric.load(path)
    except OSError as error:
        hint = "torchrun --nproc-per-node N -m sparsefusion measure --out F writes such a file"
        raise ValueError(f"cannot read --fabric {path}: {error.strerror}; {hint}") from None


def _join() -> ProcessGroup | None:
    join(1)
    return dist.group.WORLD if dist.is_initialized() else None


def _device(inputs: _Inputs, group: ProcessGroup | None) -> Processor:
    """The device, with the memory of --memory-gb. A measured device has by default the memory of the rank with the least."""
    memory = inputs.memory
    if inputs.device is not None:
        return replace(inputs.device, memory=memory) if memory else inputs.device
    device = device_of_rank(inputs.kind)
    own = own_memory(int(os.environ.get("LOCAL_WORLD_SIZE", launched_ranks())), device)
    smallest = float(all_reduce(torch.tensor(own, dtype=torch.float64), group, op=dist.ReduceOp.MIN))
    if group is not None and inputs.kind == "cuda":
        group = dist.new_group(backend="nccl")
    return MeasuredDevice(memory or smallest, group, device=device)


def why(first: Division, second: Division) -> str:
    """A sentence that says how much longer the second division takes, and which part of its time accounts for most of it."""
    lost = {name: time - first.parts.get(name, 0.0) for name, time in second.parts.items()}
    part = max(lost, key=lambda name: lost[name])
    ratio = second.seconds / first.seconds
    if ratio < 1.01:
        return f"{second.sizes} is as fast within 1 %"
    return f"{second.sizes} takes {ratio:.2f} times as long: {part} takes {lost[part] * MILLI:.3g} ms more"


def as_json(divisions: list[Division], job: Training | Generation) -> dict[str, Any]:
    """The best division, the next one, the reason for their order, and all divisions as JSON values; times are seconds.

    Fields that do not apply to the job, and unknown fields of an excluded division, are null.
    """
    inapplicable = ("ttft", "tpot") if isinstance(job, Training) else ("gradients", "recompute", "schedule")
    contents = [
        asdict(division) | {"seconds": division.seconds} | dict.fromkeys(inapplicable) for division in divisions
    ]
    if isinstance(job, Generation):
        for content, division in zip(contents, divisions, strict=True):
            content["tokens_per_s"] = None if division.excluded else division.throughput(job)
    for content in contents:
        if content["excluded"]:
            content |= dict.fromkeys(UNKNOWN) | {"memory": content["memory"] or None}
    possible = [division for division in divisions if not division.excluded]
    no_second = "no other division is possible" if possible else _none_possible(divisions, job)
    return {
        "best": contents[0] if possible else None,
        "runner_up": contents[1] if len(possible) > 1 else None,
        "reason": why(*possible[:2]) if len(possible) > 1 else no_second,
        "all": contents,
    }


def _none_possible(divisions: list[Division], job: Training | Generation) -> str:
    """A sentence that no division is possible, with a hint if one of them needs more memory than a rank has."""
    smaller = "--micro-batch-size or --seq-length" if isinstance(job, Training) else "--batch or --prompt"
    hint = f"; a rank needs less memory with more ranks, or a smaller {smaller}"
    return "no division is possible" + hint * any(division.memory for division in divisions)


def training_text(divisions: list[Division], job: Training, is_bf16: bool) -> str:
    """The advice for training as lines. If `is_bf16`, its options include --bf16."""
    best, *_ = divisions
    options = [f"--tensor-model-parallel-size {best.tensor}", f"--context-parallel-size {best.context}"]
    options += [f"--expert-model-parallel-size {best.expert}"] * (best.expert > 1)
    options += [
        f"--seq-length {job.seq}",
        f"--global-batch-size {job.global_batch}",
        f"--micro-batch-size {job.micro_batch}",
    ]
    options += ["--bf16"] * is_bf16
    options += [f"--context-schedule {best.schedule}"] if best.schedule != "auto" else []
    options += [f"--reduce {best.format}"] if best.tensor > 1 and best.format != "fp32" else []
    options += [f"--gradient-mode {best.gradients}"] if best.gradients != "dense" else []
    options += ["--recompute-activations"] if best.recompute else []
    facts = [f"{best.seconds * MILLI:.4g} ms per step", f"{best.memory / 1e9:.3g} GB"]
    facts += [f"attention in a grid of {best.attention}"] if best.attention else []
    value: Callable[[Division], str] = lambda division: f"{division.seconds * MILLI:.4g}"  # noqa: E731
    return _text("training", divisions, job, facts, options, "ms per step", value)


def generation_text(divisions: list[Division], job: Generation, is_bf16: bool) -> str:
    """The advice for generation as lines. If `is_bf16`, its options include --dtype bfloat16."""
    best, *_ = divisions
    options = _options_of_ranks(best)
    options += [f"--reduce {best.format}"] if best.tensor * best.expert > 1 and best.format != "fp32" else []
    options += ["--draft-head"] * job.draft_head + ["--dtype bfloat16"] * is_bf16
    if best.excluded:
        return _text("generation", divisions, job, [], options, "", str)
    facts = [_reply(best, job), f"{best.memory / 1e9:.3g} GB"]
    facts += [f"attention in a grid of {best.attention}"] if best.attention else []
    text = _text("generation", divisions, job, facts, options, "TTFT, TPOT, throughput", partial(_reply, job=job))
    first, command, *rest = text.splitlines()
    most = max((division for division in divisions if not division.excluded), key=lambda d: d.throughput(job))
    notes = [f"  {_start(best)}"] * (best.replicas > 1)
    if most is not best:
        notes += [f"  most tokens per second: {most.sizes}: {_reply(most, job)}, {_gigabytes(most)} GB; {_start(most)}"]
    return "\n".join([first, command, *notes, *rest])


def _start(division: Division) -> str:
    """How to start the replicas of a division, each of which answers its share of the requests."""
    count, ranks = division.replicas, division.tensor * division.context * division.expert
    served = f"serve --replicas {count} {' '.join(_options_of_ranks(division))}"
    command = served if division.context == 1 else f"start generate {count} times"  # `serve` has no context ranks
    return f"{count} replicas, each on {ranks} rank{'s' * (ranks > 1)} of its own: {command}"


def _options_of_ranks(division: Division) -> list[str]:
    options = [f"--tp {division.tensor}"] + [f"--cp {division.context}"] * (division.context > 1)
    return options + [f"--ep {division.expert}"] * (division.expert > 1)


def _reply(division: Division, job: Generation) -> str:
    times = f"TTFT {division.ttft * MILLI:.4g} ms, TPOT {division.tpot * MILLI:.4g} ms"
    return f"{times}, {division.throughput(job):,.0f} tokens/s"


def _text(
    name: str, divisions: list[Division], job: Training | Generation, facts: list[str], options: list[str], unit: str,
    value: Callable[[Division], str],
) -> str:  # fmt: skip
    """The best division with its options, the reason why the next one is slower, and a table of all divisions."""
    possible = [division for division in divisions if not division.excluded]
    excluded = [division for division in divisions if division.excluded]
    reasons = [f"  {division.sizes}: {division.excluded}" for division in excluded]
    if not possible:
        return "\n".join([f"{name}: {_none_possible(divisions, job)}", *reasons])
    lines = [f"{name}: {possible[0].sizes}: {', '.join(facts)}", f"  {' '.join(options)}"]
    lines += [f"  next: {why(*possible[:2])}"] if len(possible) > 1 else []
    rows = [
        (division.sizes, value(division), _parts(division), division.format, _gigabytes(division))
        for division in possible
    ]
    rows += [(division.sizes, "-", "-", "-", _gigabytes(division)) for division in excluded]
    table = [("", unit, "parts", "sums in", "GB"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join([*lines, *reasons])


def _gigabytes(division: Division) -> str:
    return f"{division.memory / 1e9:.3g}" if division.memory else "-"


def _parts(division: Division) -> str:
    shares = {name: time / division.seconds for name, time in division.parts.items() if division.seconds}
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.01)
