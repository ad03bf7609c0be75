"""The memory of a rank, and its compute time from the rates of its GPU: time = FLOPs / rate + bytes / bandwidth.

The times hold for large models: products of matrices reach a share of the peak; everything else, decoding included,
reaches a share of the memory's bandwidth. `measured.MeasuredDevice` has the same methods, but times parts of the model.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from commfabric import Fabric
from commfabric.foundation.command_line import did_you_mean, shortened
from commfabric.foundation.json_files import read_json
from megatron_ssm.model.activations import TrainingMemory
from megatron_ssm.model.flops import BF16_TFLOPS, expert_elements, forward_flops
from megatron_ssm.model.memory import Memory
from megatron_ssm.spec.sizes import Workload
from megatron_ssm.spec.stack import Stack

from .traffic import Sums

MEMBERSHIP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # the files of this process and of its host
KERNELS = 20  # kernels that the forward pass of a layer launches, about
MOVES = 3  # number of times that a forward pass writes or reads an activation, about


@dataclass(frozen=True)
class Device:
    """The rates of the processor of a rank.

    Attributes:
        name: The name of the device.
        memory: Bytes of memory.
        flops: Operations per second in products of large matrices.
        bandwidth: Bytes of memory per second.
        launch: Seconds in which the host launches a kernel.
        itemsize: Bytes of an element of weights and activations in generation.
        wait: Seconds that a message takes in addition to its time on the fabric.
        graph: Seconds that the kernels of a layer take to decode a token in a CUDA graph, in addition to the time for the
            bytes that they move: (Mamba-1, Mamba-2).
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    launch: float = 5e-6
    itemsize: int = 2
    wait: float = 0.0
    graph: tuple[float, float] = (0.0, 0.0)

    def sums(self, fabric: Fabric, ranks: int) -> Sums:
        return Sums(fabric, self.wait)

    def forward(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int, experts: int = 1) -> float:
        """Seconds of a forward pass on one of `ranks` tensor-parallel ranks, over `tokens` of the `seq` tokens of each
        sequence.

        Each of `experts` expert-parallel ranks is assumed to compute an equal number of tokens.
        """
        rows = batch * tokens
        stored = TrainingMemory(config, ranks).stored
        elsewhere = (1 - 1 / experts) * 2 * expert_elements(config)
        products = rows * (forward_flops(config, seq) - elsewhere) / ranks
        moved = rows * stored * MOVES * self.itemsize
        return products / self.flops + moved / self.bandwidth + KERNELS * config.num_layers * self.launch

    def micro_batch(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass in training; see `forward` for the arguments."""
        forward = self.forward(config, ranks, batch, tokens, seq)
        return forward, 2 * forward

    def passing(self, config: Stack, ranks: int, batch: int, tokens: int) -> tuple[float, float]:
        """Seconds, forward and backward, in which a context rank reads the inputs of its scans once more."""
        seconds = 0.0
        for spec, count in Counter(spec for _, spec in config.operators).items():
            if spec.recurrence is not None:
                channels = spec.recurrence.heads * spec.recurrence.head_dim // ranks
                read = batch * tokens * (2 * channels + spec.sizes(Workload(ranks)).convolved) * self.itemsize
                seconds += count * (read / self.bandwidth + self.launch)
        return seconds, seconds

    def optimizer(self, config: Stack, ranks: int, experts: int = 1) -> float:
        """Seconds of the gradient norm, clipping and AdamW, in fp32.

        AdamW reads weights, gradients and two moments, and writes weights and moments (7). The norm reads the gradients,
        and writes and reads their squares (3); clipping reads and writes the gradients (2), which are then set to zero (1).
        """
        return (7 + 3 + 2 + 1) * Memory(config, ranks, 4, expert_ranks=experts).weights / self.bandwidth

    def token(self, config: Stack, ranks: int, batch: int, length: int, experts: int = 1) -> float:
        """Seconds to decode one token of `batch` sequences in a CUDA graph.

        length: the number of tokens of each sequence whose keys and values are on this rank. With experts, the time is that
        of the rank with the most chosen experts.
        """
        memory = Memory(config, ranks, self.itemsize, expert_ranks=experts)
        kernels = sum(self.graph[sizes.head_dim > 1] for sizes in config.recurrences)
        return kernels + (memory.weights_read(batch) + batch * memory.moved_per_token(length)) / self.bandwidth


# Decoding with batch 1 on an H200 (docs/results/index.md) takes 0.87 ms per token for Mamba-1 130m and 1.46 ms for Mamba-2
# 130m; moving the bytes of the 24 layers takes 0.08 ms of it at the rate below. Other GPUs are assumed to take as long.
GRAPH = (0.79e-3 / 24, 1.38e-3 / 24)
PRODUCTS, STREAMS = 0.5, 0.7  # assumed shares of the peaks that products of matrices, and everything else, reach


def of_data_sheet(
    name: str, memory_gb: float, tflops: float, bandwidth_gb_s: float, graph: tuple[float, float] = GRAPH
) -> Device:
    """A device with the rates of its vendor's data sheet. tflops: the peak of dense products in bf16."""
    return Device(name, memory_gb * 1e9, PRODUCTS * tflops * 1e12, STREAMS * bandwidth_gb_s * 1e9, graph=graph)


DEVICES = {
    "a100": of_data_sheet("A100 80 GB", 80, BF16_TFLOPS["A100"], 2000),
    "h100": of_data_sheet("H100 SXM", 80, BF16_TFLOPS["H100"], 3350),
    "h200": of_data_sheet("H200 SXM", 141, BF16_TFLOPS["H200"], 4800),
}
REQUIRED = ("memory_gb", "tflops", "bandwidth_gb_s")
SMALLEST, LARGEST = 1e-6, 1e12  # limits of these numbers, with which predicted times are finite
OPTIONAL = ("mamba1_layer_us", "mamba2_layer_us")  # `Device.graph`, in microseconds


def read_device(path: str) -> Device:
    """The device that a JSON file describes: its `name`, the arguments REQUIRED of `of_data_sheet`, and OPTIONAL numbers.

    ValueError, which names the file, the field and the rule, if the description is wrong.
    """
    try:
        content = read_json(path)
    except OSError as error:
        names = ", ".join(DEVICES)
        raise ValueError(
            f"unknown --device {path}: expected {names}, measured, or a JSON file ({error.strerror})"
        ) from None
    name = str(content.pop("name", Path(path).stem))
    for field in content:
        if field not in REQUIRED + OPTIONAL:
            known = ("name", *REQUIRED, *OPTIONAL)
            raise ValueError(f"--device {path}: unknown field {field!r}{did_you_mean(field, known)}")
    memory_gb, tflops, bandwidth_gb_s = (_number(path, content, field) for field in REQUIRED)
    mamba1, mamba2 = (
        1e-6 * _number(path, content, field, least=0.0) if field in content else seconds
        for field, seconds in zip(OPTIONAL, GRAPH, strict=True)
    )
    return of_data_sheet(name, memory_gb, tflops, bandwidth_gb_s, (mamba1, mamba2))


def _number(path: str, content: dict[str, Any], field: str, least: float = SMALLEST) -> float:
    """The value of a field. ValueError unless it is a number from `least` to LARGEST."""
    value = content.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= LARGEST:
        shown = shortened(json.dumps(value) if isinstance(value, str) else value)
        raise ValueError(f"--device {path}: {field} {shown} must be a number from {least:g} to {LARGEST:g}")
    return float(value)


def own_memory(ranks_on_host: int, device: torch.device) -> float:
    """Bytes of memory of one rank: that of its GPU, or 1/ranks_on_host of the host's memory or of the cgroup's limit."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(physical, memory_limit()) / ranks_on_host


def memory_limit(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> float:
    """The smallest limit, in bytes, of this process's cgroups and of their parents; inf if there is none.

    Docker, Kubernetes and Slurm set such limits. The kernel kills processes that exceed one, even if the host has memory.

    Args:
        membership: The file with a line `number:controllers:path` for each hierarchy of cgroups.
        cgroups: The folder where cgroups are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no Linux, or no cgroups
        return math.inf
    limits = [limit for line in lines if line.count(":") >= 2 for limit in _limits(cgroups, *line.split(":", 2)[1:])]
    return min(limits, default=math.inf)


def _limits(cgroups: Path, controllers: str, path: str) -> Iterator[float]:
    """The limits of a cgroup and of its parents, in version 2 (which names no controllers) or in version 1.

    In a container, the path may be one of the host, which is not mounted; the container's own cgroup is then the root.
    """
    if not controllers:
        top, name = cgroups, "memory.max"
    elif "memory" in controllers.split(","):
        top, name = cgroups / "memory", "memory.limit_in_bytes"
    else:
        return
    own = top / path.lstrip("/")
    for folder in (own, *own.parents):
        try:
            yield float((folder / name).read_text())
        except (OSError, ValueError):  # not mounted, or "max"
            pass
        if folder == top:
            return
