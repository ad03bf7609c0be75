"""What one rank computes with: estimates from the rates of a GPU, as time = FLOPs / rate + bytes / bandwidth.

They are estimates of large models: products of matrices at a share of the peak, everything else and decoding at a share of
the memory's bandwidth. `measured.MeasuredDevice` has the same methods and times the model's own parts instead.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ssm.sizing.activations import TrainingMemory
from megatron_ssm.sizing.flops import BF16_TFLOPS, expert_elements, forward_flops
from megatron_ssm.sizing.memory import Memory
from megatron_ssm.stack.sizes import Workload
from megatron_ssm.stack.stack import Stack
from sparsefusion import Fabric
from sparsefusion.foundation.command_line import did_you_mean, shortened

from .traffic import Sums

KERNELS = 20  # launched by a layer's forward pass, about
MOVES = 3  # how often an activation is written or read in a forward pass, about


@dataclass(frozen=True)
class Device:
    """memory: bytes. flops: per second, in products of large matrices. bandwidth: bytes per second, of the memory.

    launch: seconds per kernel that the host launches. itemsize: bytes of an element of weights and activations in
    generation. wait: seconds that a message takes longer than on the fabric alone. graph: seconds that a layer's kernels
    take to decode a token in a CUDA graph, besides the bytes that they move: of the Mamba-1 kind, and of the Mamba-2 kind.
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
        """How `ranks` tensor-parallel ranks sum: over the fabric."""
        return Sums(fabric, self.wait)

    def forward(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int, experts: int = 1) -> float:
        """Seconds to compute `tokens` tokens of each of `batch` sequences of `seq` tokens on one of `ranks` ranks.

        experts: the ranks that divide the experts, of which the tokens of a prompt choose equally many.
        """
        rows = batch * tokens
        stored = TrainingMemory(config, ranks).stored
        elsewhere = (1 - 1 / experts) * 2 * expert_elements(config)
        products = rows * (forward_flops(config, seq) - elsewhere) / ranks
        moved = rows * stored * MOVES * self.itemsize
        return products / self.flops + moved / self.bandwidth + KERNELS * config.num_layers * self.launch

    def micro_batch(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass in training; arguments as in `forward`."""
        forward = self.forward(config, ranks, batch, tokens, seq)
        return forward, 2 * forward

    def passing(self, config: Stack, ranks: int, batch: int, tokens: int) -> tuple[float, float]:
        """Seconds that a context rank computes in addition, forward and backward: it reads a scan's inputs once more."""
        seconds = 0.0
        for spec, count in Counter(spec for _, spec in config.operators).items():
            if spec.recurrence is not None:
                channels = spec.recurrence.heads * spec.recurrence.head_dim // ranks
                read = batch * tokens * (2 * channels + spec.sizes(Workload(ranks)).convolved) * self.itemsize
                seconds += count * (read / self.bandwidth + self.launch)
        return seconds, seconds

    def optimizer(self, config: Stack, ranks: int, experts: int = 1) -> float:
        """Seconds of the gradient norm, clipping and AdamW, in fp32.

        AdamW reads weights, gradients and two moments, and writes three of them. The norm reads the gradients, and writes
        and reads their squares; clipping reads and writes them, and they are set to zero.
        """
        return (7 + 3 + 2 + 1) * Memory(config, ranks, 4, expert_ranks=experts).weights / self.bandwidth

    def token(self, config: Stack, ranks: int, batch: int, length: int, experts: int = 1) -> float:
        """Seconds to decode one token of `batch` sequences, of which this rank holds `length` tokens, in a CUDA graph.

        experts: as for `forward`; the rank with the most chosen experts counts.
        """
        memory = Memory(config, ranks, self.itemsize, expert_ranks=experts)
        kernels = sum(self.graph[each.head_dim > 1] for each in config.recurrences)
        return kernels + (memory.weights_read(batch) + batch * memory.moved_per_token(length)) / self.bandwidth


# Decoding with batch 1 on an H200 (docs/results/gpu.md): 0.87 ms a token for Mamba-1 130m and 1.46 ms for Mamba-2 130m, of
# which the bytes of the 24 layers take 0.08 ms at the rate below. The other GPUs have not been measured, and get the same.
GRAPH = (0.79e-3 / 24, 1.38e-3 / 24)
PRODUCTS, STREAMS = 0.5, 0.7  # the shares of the peaks that products of matrices and everything else are taken to reach


def of_data_sheet(
    name: str, memory_gb: float, tflops: float, bandwidth_gb_s: float, graph: tuple[float, float] = GRAPH
) -> Device:
    """A device by its vendor's data sheet. tflops: the peak in bf16, dense. bandwidth_gb_s: the peak of the memory."""
    return Device(name, memory_gb * 1e9, PRODUCTS * tflops * 1e12, STREAMS * bandwidth_gb_s * 1e9, graph=graph)


DEVICES = {
    "a100": of_data_sheet("A100 80 GB", 80, BF16_TFLOPS["A100"], 2000),
    "h100": of_data_sheet("H100 SXM", 80, BF16_TFLOPS["H100"], 3350),
    "h200": of_data_sheet("H200 SXM", 141, BF16_TFLOPS["H200"], 4800),
}
REQUIRED = ("memory_gb", "tflops", "bandwidth_gb_s")
SMALLEST, LARGEST = 1e-6, 1e12  # such a number; predicted times are then finite
OPTIONAL = ("mamba1_layer_us", "mamba2_layer_us")  # `Device.graph`, in microseconds


def read_device(path: str) -> Device:
    """The device that a JSON file describes: its `name`, the numbers REQUIRED as for `of_data_sheet`, and OPTIONAL ones.

    ValueError, which names the file, the field and what is wrong with it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(DEVICES)
        raise ValueError(f"--device {path} is none of {names}, measured, and no file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--device {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--device {path} holds no JSON object with the fields {', '.join(REQUIRED)}")
    name = content.pop("name", Path(path).stem)
    if not isinstance(name, str):
        raise ValueError(f"--device {path}: name {name!r} must be a string")
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
    """A field; ValueError if it is missing, no number, below `least` or above LARGEST."""
    if field not in content:
        raise ValueError(f"--device {path}: there is no field {field}")
    value = content[field]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= LARGEST:
        shown = shortened(json.dumps(value) if isinstance(value, str) else value)
        raise ValueError(f"--device {path}: {field} {shown} must be a number from {least:g} to {LARGEST:g}")
    return float(value)
