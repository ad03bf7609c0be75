"""What a rank of a model needs in memory: its weights, its sequences' states, and what a prefill works in. No torch.

A prefill of a whole batch at once, prompts of equal length, without gradients:

    weights + cache + tokens * max(moments) + logits

weights: every parameter, split as its `Field` says. cache: per sequence and layer the convolution's last inputs and the
state (in at least fp32), and of layers that use the shared block, keys and values. tokens = batch * prompt. moments: what
of each token is in memory at once, at the times that matter (`moments`); the largest is what counts. logits: of one
position per sequence. A prompt read in chunks has the cache and the tokens of one chunk: there, sequences are limited by
their states, not by their length (of models without attention).

It holds for the C kernels; `on_cuda`, as read in their source and not measured, for mamba-ssm's and causal-conv1d's, whose
selective scan wants channels first and whose SSD keeps a state for every 256 tokens. torch's scans need more. Attention is
taken not to need a matrix of seq x seq.
"""

import math
from dataclasses import dataclass

from megatron_ssm.configs.config import Config
from megatron_ssm.configs.layouts import Field, layout

CUDA_SSD_CHUNK = 256  # tokens for which mamba_chunk_scan_combined keeps a state


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that has most: one of `ranks` that share a model of `itemsize` bytes per number.

    on_cuda: by mamba-ssm's and causal-conv1d's kernels. amx: on a CPU with AMX, where torch's attention in 16 bits works on
    copies of keys and values.
    """

    config: Config
    ranks: int = 1
    itemsize: int = 2
    on_cuda: bool = False
    amx: bool = False

    def __post_init__(self):
        self.config.check_ranks(self.ranks)

    @property
    def wide(self) -> int:
        """Bytes of a number that is at least fp32."""
        return max(4, self.itemsize)

    @property
    def weights(self) -> int:
        """Of all parameters (rank 0's: the last ranks have fewer rows of the vocabulary)."""
        return sum(map(self._bytes_of, layout(self.config)))

    def _bytes_of(self, field: Field) -> int:
        return math.prod(field.local_shape(0, self.ranks)) * (self.wide if field.fp32 else self.itemsize)

    @property
    def read(self) -> int:
        """Of weights, for one decoded token: a shared block's at each use, of an untied embedding next to nothing."""
        fields = layout(self.config)
        again = len(self.config.hybrid_layers) / max(1, self.config.shared_copies) - 1
        shared = sum(self._bytes_of(field) for field in fields if field.name.startswith("shared."))
        looked_up = 0 if self.config.tie_embeddings else self._bytes_of(fields[0])
        return int(self.weights + shared * again) - looked_up

    @property
    def state(self) -> int:
        """Of one sequence: states and the convolution's inputs of all layers."""
        config = self.config
        history = (config.conv_kernel - 1) * self._convolved * self.itemsize
        return config.num_layers * (history + config.state_size * self._inner * self.wide)

    @property
    def keys_and_values(self) -> int:
        """Of one token, in all layers that use the shared block."""
        shared = self.config.shared
        if shared is None:
            return 0
        return 2 * len(self.config.hybrid_layers) * shared.kv_heads // self.ranks * shared.head_dim * self.itemsize

    def cache(self, batch: int, length: int) -> int:
        """Of `batch` sequences of `length` tokens, as `model.new_cache(batch, length)` makes it."""
        return batch * (self.state + length * self.keys_and_values)

    def prefill(self, batch: int, prompt: int, before: int = 0) -> int:
        """Beside the weights: the cache, and what reading `prompt` tokens of each sequence after `before` works in."""
        return self.cache(batch, before + prompt) + batch * (prompt * max(self.moments().values()) + self._logits)

    def longest_prompt(self, budget: float, batch: int) -> int:
        """Tokens of each of `batch` sequences that can be read at once within a budget in bytes (0: none)."""
        _at_least_one(batch=batch)
        left = budget - self.weights - batch * (self.state + self._logits)
        return max(0, int(left // (batch * (max(self.moments().values()) + self.keys_and_values))))

    def largest_batch(self, budget: float, prompt: int, chunk: int) -> int:
        """Sequences of `prompt` tokens within a budget in bytes, all read together, `chunk` tokens of each at a time."""
        _at_least_one(prompt=prompt, chunk=chunk)
        each = self.cache(1, prompt) + min(chunk, prompt) * max(self.moments().values()) + self._logits
        return max(0, int((budget - self.weights) // each))

    def moments(self) -> dict[str, int]:
        """{what is being done: bytes per token of what is in memory then}, in the layer that needs most.

        Without hybrid layers that is the first, whose input is there beside its fp32 copy.
        """
        config, s, H = self.config, self.itemsize, self.config.hidden_size
        residual = (self.wide if config.residual_in_fp32 else s) * H
        if config.hybrid_layers:
            kept, x = residual + s * H, s * H  # the embeddings; x with what the shared block gave
        else:
            kept, x = residual, s * H if residual != s * H else 0
        normed, bias = s * H, s * H if config.use_bias else 0
        scanned, projected = self._mamba2() if config.groups else self._mamba()
        found = {
            "mixer": kept + x + normed + scanned,  # the norm of its input is there until it ends
            "out_proj": kept + x + normed + projected + s * H + bias,
            "sum": kept + x + s * H + residual,
        }
        shared = self._shared_block() if config.hybrid_layers else {}
        return found | {name: kept + size for name, size in shared.items()}

    def _mamba(self) -> tuple[int, int]:
        """At the scan: x and z, the convolution's output, whose place y takes, dt, and what dt, B and C come from.

        On CUDA copies of x, dt, z, B and C with channels first, y, and y through its gate.
        """
        config, s, i = self.config, self.itemsize, self._inner
        heads = max(1, config.heads // self.ranks)
        parameters = s * (config.dt_rank + 2 * config.state_size)
        copies = s * (5 * i // heads + 2 * config.state_size) if self.on_cuda else 0  # one head after the other
        return s * (4 if heads == 1 else 5) * i + parameters + copies, s * i

    def _mamba2(self) -> tuple[int, int]:
        """At the recurrence: z, x, B, C, dt; the convolution's outputs; dt twice, wide; y. Then the norm's output.

        On CUDA the states of all chunks, in fp32, without and with what came before them, and C B^T within them.
        """
        config, s, i = self.config, self.itemsize, self._inner
        heads = config.heads // self.ranks
        rows = i + self._convolved + heads
        scan = s * (rows + self._convolved + i) + 2 * self.wide * heads
        if self.on_cuda:
            groups = (self._convolved - i) // (2 * config.state_size)
            scan += 4 * (2 * i * config.state_size // CUDA_SSD_CHUNK + groups * CUDA_SSD_CHUNK)
        return max(scan, s * (rows + 2 * i)), s * i

    def _shared_block(self) -> dict[str, int]:
        """Attention, whose input is twice as wide and stays, then the MLP. Adapters are as wide as what they add to."""
        shared, H = self.config.shared, self.config.hidden_size
        q, kv = (heads // self.ranks * shared.head_dim for heads in (shared.heads, shared.kv_heads))
        mlp, low = shared.feed_forward_size // self.ranks, shared.adapter_rank
        turned = q + kv if shared.rope_theta else 0
        copied = 2 * q if self.amx and self.itemsize == 2 else 0
        numbers = {
            "shared norm": 4 * H,
            "attention": 2 * H + 2 * q + 2 * kv + turned + copied,
            "attention's adapters": 2 * H + 3 * (q + 2 * kv) + 3 * low if shared.attention_adapters else 0,
            "MLP": H + 4 * mlp,
            "MLP's adapter": 2 * H + 4 * mlp + low if low else 0,
        }
        return {name: self.itemsize * count for name, count in numbers.items()}

    @property
    def _inner(self) -> int:
        return self.config.intermediate_size // self.ranks

    @property
    def _convolved(self) -> int:
        """Channels that go through the convolution."""
        config = self.config
        groups = max(1, config.groups // self.ranks) if config.groups else 0
        return self._inner + 2 * groups * config.state_size

    @property
    def _logits(self) -> int:
        """Of one position: this rank's slice, all slices, and they as one."""
        width = -(-self.config.vocab_size // self.ranks)
        return self.wide * (width if self.ranks == 1 else width + 2 * width * self.ranks)


def _at_least_one(**numbers) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
