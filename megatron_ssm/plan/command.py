"""The command `python -m megatron_ssm advise`: predicts times of a model on a fabric; rank 0 prints them."""

import json
import os
import zlib
from argparse import Namespace
from dataclasses import dataclass, fields, replace

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

from .devices import DEVICES, LARGEST, SMALLEST, Device, read_device
from .divisions import Generation, Processor, Training, generation_divisions, training_divisions
from .host_memory import own_memory
from .measured import MeasuredDevice
from .report import as_json, generation_text, training_text

MEASURED = "measured"
RANKS_LIMIT = 2**20  # for so many ranks, comparing all divisions takes seconds


@dataclass(frozen=True)
class _Inputs:
    """The inputs of the advice.

    Attributes:
        config: The model.
        fabric: The times of messages.
        training, generation: The sizes of a training step, and of the replies to prompts.
        ranks: The number of ranks to divide.
        device: The device with known rates; None if this machine is measured.
        kind: "cpu" or "cuda", on which this machine is measured.
        memory: Bytes of memory of a rank; None for that of the device.
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
    """A line about the number of parameters, and about quantized matrices."""
    active = f", {config.active_elements:,} of them active for a token" * (config.active_elements < config.elements)
    line = f"{config.elements:,} parameters{active}"
    stored = format_of(config.raw)
    note = f"; matrices in {stored}, which only CPUs compute: memory as stored, times as if they were not quantized"
    return line + note * (stored is not None)


def _check_numbers(arguments: Namespace) -> None:
    """ValueError if a number is out of range."""
    for name in ("seq_length", "global_batch_size", "micro_batch_size", "prompt", "new_tokens", "batch"):
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), 1)
    if arguments.memory_gb is not None and not SMALLEST <= arguments.memory_gb <= LARGEST:
        raise ValueError(f"--memory-gb {arguments.memory_gb:g} must be from {SMALLEST:g} to {LARGEST:g}")


def _read_fabric(path: str) -> Fabric:
    """The fabric in a file. ValueError if the file cannot be read."""
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
