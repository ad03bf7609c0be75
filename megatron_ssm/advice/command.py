"""`python -m megatron_ssm advise`: predictions for a model on a fabric, printed by rank 0."""

import json
import math
import os
from argparse import Namespace
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_ssm.configs.config import Config
from megatron_ssm.parallel.groups import device_of_rank, join, launched_ranks, shut_down
from sparsefusion import Fabric
from sparsefusion.foundation.command_line import Failure, Printer

from .devices import DEVICES
from .divisions import Computes, Generation, Training, generation_divisions, training_divisions
from .measured import MeasuredDevice, own_memory
from .report import as_json, generation_text, training_text

MEASURED = "measured"


def advise(arguments: Namespace) -> None:
    """Print the advice, as text or as one JSON object.

    With the device `measured`, and under torchrun, all ranks time the model's parts at the same time, as they will compute.
    ValueError: a file is wrong, or a number is too small. Failure, after the advice is printed, if neither training nor
    generation is possible.
    """
    for name in ("ranks", "seq_length", "global_batch_size", "micro_batch_size", "prompt", "new_tokens", "batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if arguments.memory_gb is not None and not 0 < arguments.memory_gb < math.inf:
        raise ValueError(f"--memory-gb {arguments.memory_gb:g} must be above 0 and finite")
    config, fabric = Config.read(arguments.model), _read_fabric(arguments.fabric)
    ranks = arguments.ranks or max((curve.ranks for curve in fabric.curves), default=1)
    training = Training(arguments.seq_length, arguments.global_batch_size, arguments.micro_batch_size)
    generation = Generation(arguments.prompt, arguments.new_tokens, arguments.batch)
    try:
        device = _device(arguments, fabric)
        trains = training_divisions(config, ranks, training, fabric, device)
        generates = generation_divisions(config, ranks, generation, fabric, device)
    finally:
        shut_down()
    printer = Printer(is_enabled=int(os.environ.get("RANK", 0)) == 0)
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


def _read_fabric(path: str) -> Fabric:
    """The fabric in a file; ValueError if there is none."""
    try:
        return Fabric.load(path)
    except OSError as error:
        hint = "torchrun --nproc-per-node N -m sparsefusion measure --out F writes such a file"
        raise ValueError(f"cannot read --fabric {path}: {error.strerror}; {hint}") from None


def _device(arguments: Namespace, fabric: Fabric) -> Computes:
    """The device that --device names; by default an H100, or this machine if the fabric was measured between CPUs."""
    on_cpu = fabric.description.get("device") == "cpu"
    name = arguments.device or (MEASURED if on_cpu else "h100")
    memory = arguments.memory_gb and arguments.memory_gb * 1e9
    if name != MEASURED:
        return replace(DEVICES[name], memory=memory) if memory else DEVICES[name]
    kind = "cpu" if on_cpu or not torch.cuda.is_available() else "cuda"
    join(1, kind)
    where = device_of_rank(kind)
    group = dist.group.WORLD if dist.is_initialized() else None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", launched_ranks()))
    return MeasuredDevice(memory or own_memory(here, where), group, device=where)
