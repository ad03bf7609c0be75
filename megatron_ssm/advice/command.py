"""`python -m megatron_ssm advise`: predictions for a model on a fabric, printed by rank 0."""

import json
import os
import zlib
from argparse import Namespace
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_ssm import families
from megatron_ssm.parallel.groups import device_of_rank, join, shut_down
from megatron_ssm.stack.stack import Stack
from sparsefusion import Fabric
from sparsefusion.collectives.agreement import together
from sparsefusion.collectives.counted import all_reduce
from sparsefusion.foundation.command_line import Failure, Printer, check_number
from sparsefusion.foundation.launcher import launched_ranks, this_rank

from .devices import DEVICES, LARGEST, SMALLEST, Device, read_device
from .divisions import Computes, Generation, Training, generation_divisions, training_divisions
from .host_memory import own_memory
from .measured import MeasuredDevice
from .report import as_json, generation_text, training_text

MEASURED = "measured"
RANKS_LIMIT = 2**20  # of ranks: all their divisions are looked at in seconds


@dataclass(frozen=True)
class _Inputs:
    """What the advice depends on.

    device: None: `measured`. kind: cpu or cuda, where that computes. memory: bytes, if it is given.
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
        """Read them on this rank; ValueError if a file is wrong, or a number is out of its range.

        The device is by default an H100, or this machine if the fabric was measured between CPUs.
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
        """What must be equal on all ranks; of the files, checksums, so that an error shows which one differs."""
        files = {name: zlib.crc32(repr(getattr(self, name)).encode()) for name in ("config", "fabric")}
        return files | {each.name: getattr(self, each.name) for each in fields(self) if each.name not in files}


def advise(arguments: Namespace) -> None:
    """Print the advice, as text or as one JSON object.

    With the device `measured`, and under torchrun, all ranks time the model's parts at the same time, as they will compute.
    They first compare what they have read. ValueError on all ranks: a file is wrong on one of them, a number is out of its
    range, or the ranks were given different ones. Failure, after the advice is printed, if neither training nor generation
    is possible.
    """
    try:
        group = _join() if arguments.device in (None, MEASURED) else None
        inputs = together(lambda: _Inputs.read(arguments), [group], _Inputs.fingerprint)
        device = _device(inputs, group)
        config, fabric, ranks = inputs.config, inputs.fabric, inputs.ranks
        training, generation = inputs.training, inputs.generation
        trains = training_divisions(config, ranks, training, fabric, device)
        generates = generation_divisions(config, ranks, generation, fabric, device)
    finally:
        shut_down()
    printer = Printer(is_enabled=this_rank() == 0)
    if arguments.json:
        content = {"device": device.name, "ranks": ranks, "training": as_json(trains, training)}
        content["generation"] = as_json(generates, generation)
        printer.print(json.dumps(content) + "\n")
    else:
        title = f"{config.family} on {ranks} rank{'s' * (ranks > 1)}, {device.name}: predictions, the fastest first"
        is_bf16 = device.itemsize == 2
        texts = training_text(trains, training, is_bf16), generation_text(generates, generation, is_bf16)
        printer.print("\n".join([title, *texts, ""]))
    if all(each.excluded for each in (*trains, *generates)):
        raise Failure(f"no division over {ranks} rank{'s' * (ranks > 1)} is possible")


def _check_numbers(arguments: Namespace) -> None:
    """ValueError if a number is too small or too large."""
    for name in ("seq_length", "global_batch_size", "micro_batch_size", "prompt", "new_tokens", "batch"):
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), 1)
    if arguments.memory_gb is not None and not SMALLEST <= arguments.memory_gb <= LARGEST:
        raise ValueError(f"--memory-gb {arguments.memory_gb:g} must be from {SMALLEST:g} to {LARGEST:g}")


def _read_fabric(path: str) -> Fabric:
    """The fabric in a file; ValueError if there is none."""
    try:
        return Fabric.load(path)
    except OSError as error:
        hint = "torchrun --nproc-per-node N -m sparsefusion measure --out F writes such a file"
        raise ValueError(f"cannot read --fabric {path}: {error.strerror}; {hint}") from None


def _join() -> ProcessGroup | None:
    """The ranks that torchrun started, connected by gloo, over which they compare what they have read; None: only one."""
    join(1)
    return dist.group.WORLD if dist.is_initialized() else None


def _device(inputs: _Inputs, group: ProcessGroup | None) -> Computes:
    """The device, with the given memory; the one that is measured has the memory of the rank with the least."""
    memory = inputs.memory
    if inputs.device is not None:
        return replace(inputs.device, memory=memory) if memory else inputs.device
    where = device_of_rank(inputs.kind)
    mine = own_memory(int(os.environ.get("LOCAL_WORLD_SIZE", launched_ranks())), where)
    least = float(all_reduce(torch.tensor(mine, dtype=torch.float64), group, op=dist.ReduceOp.MIN))
    if group is not None and inputs.kind == "cuda":
        group = dist.new_group(backend="nccl")
    return MeasuredDevice(memory or least, group, device=where)
