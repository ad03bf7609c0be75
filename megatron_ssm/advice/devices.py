"""What one rank computes with: estimates from the rates of a GPU, as time = FLOPs / rate + bytes / bandwidth.

They are estimates of large models: products of matrices at a share of the peak, everything else and decoding at a share of
the memory's bandwidth. `measured.MeasuredDevice` has the same methods and times the model's own parts instead.
"""

from dataclasses import dataclass

from megatron_ssm.configs.config import Config
from megatron_ssm.sizing.activations import TrainingMemory
from megatron_ssm.sizing.advise import decoding_shape
from megatron_ssm.sizing.flops import BF16_TFLOPS, forward_flops
from megatron_ssm.sizing.memory import Memory

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

    def forward(self, config: Config, ranks: int, batch: int, tokens: int, seq: int) -> float:
        """Seconds to compute `tokens` tokens of each of `batch` sequences of `seq` tokens on one of `ranks` ranks."""
        rows = batch * tokens
        stored = config.num_layers * TrainingMemory(config, ranks).stored_by_layer
        products = rows * forward_flops(config, seq) / ranks
        moved = rows * stored * MOVES * self.itemsize
        return products / self.flops + moved / self.bandwidth + KERNELS * config.num_layers * self.launch

    def micro_batch(self, config: Config, ranks: int, batch: int, tokens: int, seq: int) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass in training; arguments as in `forward`."""
        forward = self.forward(config, ranks, batch, tokens, seq)
        return forward, 2 * forward

    def passing(self, config: Config, ranks: int, batch: int, tokens: int) -> tuple[float, float]:
        """Seconds that a context rank computes in addition, forward and backward: it reads a scan's inputs once more."""
        shape = Memory(config, ranks, self.itemsize)
        read = batch * tokens * (2 * shape.inner + shape.convolved) * self.itemsize
        seconds = config.num_layers * (read / self.bandwidth + self.launch)
        return seconds, seconds

    def optimizer(self, config: Config, ranks: int) -> float:
        """Seconds of AdamW, which reads weights, gradients and two moments in fp32, and writes three of them."""
        return 7 * Memory(config, ranks, 4).weights / self.bandwidth

    def token(self, config: Config, ranks: int, batch: int, length: int) -> float:
        """Seconds to decode one token of `batch` sequences, of which this rank holds `length` tokens, in a CUDA graph."""
        shape = decoding_shape(self.name, config, ranks, self.itemsize, length)
        kernels = config.num_layers * self.graph[config.groups > 0]
        return kernels + (shape.weight_bytes + batch * shape.state_bytes) / (ranks * self.bandwidth)


# Decoding with batch 1 on an H200 (docs/results/gpu.md): 0.87 ms a token for Mamba-1 130m and 1.46 ms for Mamba-2 130m, of
# which the bytes of the 24 layers take 0.08 ms at the rate below. The other GPUs have not been measured, and get the same.
GRAPH = (0.79e-3 / 24, 1.38e-3 / 24)
# Half of the peak in bf16, and 70 % of the memory's bandwidth, of the vendor's data sheets.
DEVICES = {
    "a100": Device("A100 80 GB", 80e9, 0.5e12 * BF16_TFLOPS["A100"], 0.7 * 2.0e12, graph=GRAPH),
    "h100": Device("H100 SXM", 80e9, 0.5e12 * BF16_TFLOPS["H100"], 0.7 * 3.35e12, graph=GRAPH),
    "h200": Device("H200 SXM", 141e9, 0.5e12 * BF16_TFLOPS["H200"], 0.7 * 4.8e12, graph=GRAPH),
}
