"""The memory of a rank: its weights, its sequences' cache, and the activations of a prefill. Loads no torch.

A prefill of a whole batch at once, with prompts of equal length and without gradients, needs

    weights + cache + tokens * max(stages) + logits

- weights: every parameter, split as its `Field` says.
- cache: for each sequence and layer the convolution's last inputs and the state (in at least fp32), and in layers with the
  shared block also keys and values.
- tokens: batch * prompt.
- stages: the bytes of one token's activations at each stage of a layer (`Memory.stages`); the largest counts.
- logits: of one position of each sequence.

Where C reads a prompt through several layers in one call (decoding/native_prompt.py), it needs less: the stages are those of
a piece, and only what enters and leaves the layers has all tokens.

A prompt that is read in chunks needs the cache and the activations of one chunk. In models without attention the number of
sequences is then limited by their states, whatever their length.

The formula is that of the C kernels, and with `on_cuda` that of the kernels of mamba-ssm and causal-conv1d. The latter was
read in their source and not measured: their selective scan needs copies with channels first, and their SSD keeps a state for
every 256 tokens. torch's scans need more. It assumes that attention does not need a matrix of seq x seq.
"""

import math
from dataclasses import dataclass

from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import Field, layout

CUDA_SSD_CHUNK = 256  # mamba_chunk_scan_combined keeps a state for each chunk of so many tokens


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs most, if `ranks` tensor-parallel ranks split a model whose elements have `itemsize`
    bytes.

    on_cuda: with the kernels of mamba-ssm and causal-conv1d. amx: on a CPU with AMX, where torch's attention in 16 bits
    copies keys and values. ValueError if the model cannot be split over so many ranks.
    """

    config: Config
    ranks: int = 1
    itemsize: int = 2
    on_cuda: bool = False
    amx: bool = False

    def __post_init__(self) -> None:
        self.config.check_ranks(self.ranks)

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element in at least fp32."""
        return max(4, self.itemsize)

    @property
    def weights(self) -> int:
        """Bytes of all parameters on rank 0; the last ranks may have fewer rows of the vocabulary."""
        return sum(map(self._bytes_of, layout(self.config)))

    def _bytes_of(self, field: Field) -> int:
        return math.prod(field.local_shape(0, self.ranks)) * (self.wide_itemsize if field.fp32 else self.itemsize)

    @property
    def weights_read_per_token(self) -> int:
        """Bytes of weights that decoding one token reads.

        A shared block is read at each invocation. Of an untied embedding only one row is read, which is not counted.
        """
        fields = layout(self.config)
        repeats = len(self.config.hybrid_layers) / max(1, self.config.shared_copies) - 1
        shared = sum(self._bytes_of(field) for field in fields if field.name.startswith("shared."))
        looked_up = 0 if self.config.tie_embeddings else self._bytes_of(fields[0])
        return int(self.weights + shared * repeats) - looked_up

    @property
    def state_per_sequence(self) -> int:
        """Bytes of one sequence's states and last inputs of convolutions, in all layers."""
        config = self.config
        history = (config.conv_kernel - 1) * self.convolved * self.itemsize
        return config.num_layers * (history + config.state_size * self.inner * self.wide_itemsize)

    @property
    def keys_and_values_per_token(self) -> int:
        """Bytes of one token's keys and values, in all layers that use the shared block."""
        shared = self.config.shared
        if shared is None:
            return 0
        return 2 * len(self.config.hybrid_layers) * shared.kv_heads // self.ranks * shared.head_dim * self.itemsize

    def cache(self, batch: int, length: int) -> int:
        """Bytes of the cache that `model.new_cache(batch, length)` creates for `batch` sequences of `length` tokens."""
        return batch * (self.state_per_sequence + length * self.keys_and_values_per_token)

    def prefill(self, batch: int, prompt: int, before: int = 0) -> int:
        """Bytes besides the weights to read `prompt` tokens of each sequence after `before` earlier ones, cache included."""
        return self.cache(batch, before + prompt) + batch * (prompt * max(self.stages().values()) + self._logits)

    def longest_prompt(self, budget: float, batch: int) -> int:
        """How many tokens of each of `batch` sequences can be read at once within a budget in bytes (0: none)."""
        _check_positive(batch=batch)
        left = budget - self.weights - batch * (self.state_per_sequence + self._logits)
        return max(0, int(left // (batch * (max(self.stages().values()) + self.keys_and_values_per_token))))

    def largest_batch(self, budget: float, prompt: int, chunk: int) -> int:
        """How many sequences of `prompt` tokens fit into a budget in bytes, if they are read in chunks of `chunk` tokens."""
        _check_positive(prompt=prompt, chunk=chunk)
        each = self.cache(1, prompt) + min(chunk, prompt) * max(self.stages().values()) + self._logits
        return max(0, int((budget - self.weights) // each))

    def stages(self) -> dict[str, int]:
        """{stage: bytes of one token's activations that are in memory then}, in the layer that needs most.

        Without hybrid layers that is the first layer, whose input exists next to its fp32 copy.
        """
        config, s, H = self.config, self.itemsize, self.config.hidden_size
        residual = (self.wide_itemsize if config.residual_in_fp32 else s) * H
        if config.hybrid_layers:
            kept, x = residual + s * H, s * H  # the embeddings; x plus the shared block's output
        else:
            kept, x = residual, s * H if residual != s * H else 0
        normed, bias = s * H, s * H if config.use_bias else 0
        scanned, projected = self._mamba2() if config.groups else self._mamba()
        found = {
            "mixer": kept + x + normed + scanned,  # its normed input stays until it ends
            "out_proj": kept + x + normed + projected + s * H + bias,
            "sum": kept + x + s * H + residual,
        }
        shared = self._shared_block() if config.hybrid_layers else {}
        return found | {name: kept + size for name, size in shared.items()}

    def _mamba(self) -> tuple[int, int]:
        """Bytes per token at the scan, and after it.

        At the scan: x and z, the convolution's output (which y overwrites), dt, and the projection that holds dt, B and C.
        On CUDA also copies of x, dt, z, B and C with channels first, y, and the gated y.
        """
        config, s, i = self.config, self.itemsize, self.inner
        heads = max(1, config.heads // self.ranks)
        parameters = s * (config.dt_rank + 2 * config.state_size)
        copies = s * (5 * i // heads + 2 * config.state_size) if self.on_cuda else 0  # heads run one after the other
        return s * (4 if heads == 1 else 5) * i + parameters + copies, s * i

    def _mamba2(self) -> tuple[int, int]:
        """Bytes per token at the scan or the gated norm, whichever needs more, and after them.

        At the scan: z, x, B, C, dt; the convolution's outputs; two copies of dt in at least fp32; y. On CUDA also, in fp32,
        the state of each chunk alone and with all earlier chunks, and C B^T within chunks.
        """
        config, s, i = self.config, self.itemsize, self.inner
        heads = config.heads // self.ranks
        rows = i + self.convolved + heads
        scan = s * (rows + self.convolved + i) + 2 * self.wide_itemsize * heads
        if self.on_cuda:
            groups = (self.convolved - i) // (2 * config.state_size)
            scan += 4 * (2 * i * config.state_size // CUDA_SSD_CHUNK + groups * CUDA_SSD_CHUNK)
        return max(scan, s * (rows + 2 * i)), s * i

    def _shared_block(self) -> dict[str, int]:
        """Bytes per token at the stages of the shared block.

        The input of attention is twice as wide as the model and stays in memory. Adapters are as wide as what they are added
        to.
        """
        assert self.config.shared is not None
        shared, H = self.config.shared, self.config.hidden_size
        q, kv = (heads // self.ranks * shared.head_dim for heads in (shared.heads, shared.kv_heads))
        mlp, low = shared.feed_forward_size // self.ranks, shared.adapter_rank
        rotated = q + kv if shared.rope_theta else 0
        copied = 2 * q if self.amx and self.itemsize == 2 else 0
        elements = {
            "shared norm": 4 * H,
            "attention": 2 * H + 2 * q + 2 * kv + rotated + copied,
            "attention's adapters": 2 * H + 3 * (q + 2 * kv) + 3 * low if shared.attention_adapters else 0,
            "MLP": H + 4 * mlp,
            "MLP's adapter": 2 * H + 4 * mlp + low if low else 0,
        }
        return {name: self.itemsize * count for name, count in elements.items()}

    @property
    def inner(self) -> int:
        """This rank's channels of a mixer."""
        return self.config.intermediate_size // self.ranks

    @property
    def convolved(self) -> int:
        """This rank's channels that go through the convolution."""
        config = self.config
        groups = max(1, config.groups // self.ranks) if config.groups else 0
        return self.inner + 2 * groups * config.state_size

    @property
    def _logits(self) -> int:
        """Bytes of one position's logits: this rank's slice; with several ranks also all slices, and their concatenation."""
        width = -(-self.config.vocab_size // self.ranks)
        return self.wide_itemsize * (width if self.ranks == 1 else width + 2 * width * self.ranks)


def _check_positive(**arguments: int) -> None:
    """ValueError if a number is less than 1."""
    for name, number in arguments.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
