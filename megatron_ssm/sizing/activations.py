"""The memory of a training step, above all its activations: what forward stores for backward. Loads no torch.

A step in which this rank has `tokens` tokens of each sequence needs, besides parameters, gradients and optimizer state,

    itemsize * batch * tokens * (stored + the largest of (head, each layer while backward runs through it))

- stored: the numbers that all layers store for each token. With recomputation these are the inputs of blocks, and what
  ranks have sent each other.
- head: the last norm, and the logits with their gradient.
- a layer in backward: the gradients of its activations, minus the stored ones that are freed by then. With recomputation
  also what the layer stores otherwise, because it is computed again.

The formula is that of the C kernels in float32. Memory that does not grow with the tokens is not counted: states that
context ranks pass, temporary gradients of weights, messages. Neither is what an attention schedule keeps besides queries,
keys and values, which is `schedule.memory(...).saved` for each hybrid layer; nor are B and C of all tokens of the sequence,
if context ranks exchange channels.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron_ssm.configs.config import Config

from .memory import Memory

# Tokens for which the C kernels keep one state: SSD_CHUNK, or SELECTIVE_NUMBERS / N in Mamba-1's scan.
SSD_CHUNK, SELECTIVE_NUMBERS = 16, 256


@dataclass(frozen=True)
class TrainingMemory:
    """What a rank holds, if `ranks` tensor-parallel ranks split a model. Its properties are numbers for each token.

    sequence_parallel, recompute: as for `load`. itemsize: bytes of an element. P context ranks need no argument: each has
    1/P of the tokens. ValueError if the model cannot be split over so many ranks.
    """

    config: Config
    ranks: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    itemsize: int = 4

    def __post_init__(self) -> None:
        self.config.check_ranks(self.ranks)

    def step(self, batch: int, tokens: int, has_residuals: bool = False) -> int:
        """Bytes of a step: parameters, gradients, AdamW's two moments, and the activations of a micro-batch.

        batch: sequences of the micro-batch. tokens: of each on this rank. has_residuals: of sparse gradients, which are as
        large as the parameters.
        """
        copies = 5 if has_residuals else 4
        return copies * Memory(self.config, self.ranks, self.itemsize).weights + self.peak(batch, tokens)

    def peak(self, batch: int, tokens: int) -> int:
        """Bytes of activations at the worst moment of a step. tokens: of each sequence on this rank."""
        stored = (
            self.config.num_layers * self.stored_by_layer
            + len(self.config.hybrid_layers) * self._stored_by_shared_block
        )
        return int(self.itemsize * batch * tokens * (stored + max(self._head, self._backward)))

    @property
    def stored_by_layer(self) -> float:
        """What the norm and the mixer of a layer store from forward to backward."""
        return self._hidden + self._kept if self.recompute else self._norm(1) + self._mixer

    @property
    def _stored_by_shared_block(self) -> float:
        """What a hybrid layer's use of the shared block stores from forward to backward."""
        if self.config.shared is None:
            return 0
        if self.recompute:
            return 2 * self._hidden + self._attention + self._kept_of_shared
        return self._projected + self._attention + self._mlp

    @property
    def _backward(self) -> float:
        """What exists in the worst moment of a layer's backward, besides what layers store in forward."""
        config, mixer = self.config, self._mixer_gradients
        if not self.recompute:
            return mixer
        mixer += self._norm(1) - self._hidden + self._mixer
        mixer += config.hidden_size - self._hidden  # the gathered output of the norm, if tokens are divided
        if config.shared is None:
            return mixer
        mlp = self._mlp + 2 * (config.shared.feed_forward_size // self.ranks)
        return max(mixer, self._projected + 2 * self._hidden, mlp)

    @property
    def _share(self) -> float:
        """The share of the tokens that a rank has between the layers."""
        return 1 / self.ranks if self.sequence_parallel else 1

    @property
    def _hidden(self) -> float:
        """The hidden state of a token."""
        return self.config.hidden_size * self._share

    def _norm(self, width: int) -> float:
        """A norm over `width` hidden states: its input, the normalized input, the output, and one factor per token."""
        return 3 * width * self._hidden + self._share

    @property
    def _head(self) -> float:
        """The last norm with its gradients, or with the logits and their gradient."""
        logits = -(-self.config.vocab_size // self.ranks)
        return self._norm(1) + max(2 * logits, 3 * self._hidden)

    @cached_property
    def _inner(self) -> int:
        """This rank's channels of a mixer."""
        return Memory(self.config, self.ranks).inner

    @property
    def _parameters(self) -> int:
        """dt, B and C of Mamba-1's channels on this rank, before dt is projected."""
        config = self.config
        return max(1, config.heads // self.ranks) * (config.dt_rank + 2 * config.state_size)

    @property
    def _bc(self) -> int:
        """B and C of Mamba-2's groups on this rank."""
        return Memory(self.config, self.ranks).convolved - self._inner

    @cached_property
    def _mixer(self) -> float:
        """What a mixer stores."""
        config, i = self.config, self._inner
        if not config.groups:
            normalized = self._parameters + 3 if config.inner_norm_eps is not None else 0
            states = i * config.state_size / max(1, SELECTIVE_NUMBERS // config.state_size)
            return 5 * i + self._parameters + normalized + states  # in_proj (2), convolution, dt, y
        heads = config.heads // self.ranks
        steps = 2 if config.dt_limit == (0.0, float("inf")) else 3
        return 2 * i + self._bc + heads + i + self._bc + steps * heads + self._gated

    @property
    def _gated(self) -> float:
        """What Mamba-2 stores after the scan: y, silu(z), their product, the norm's products, and a sum over the ranks."""
        i = self._inner
        if self._is_fused:
            return 4 * i + 1 + self._hidden + 2 * self._share
        return 5 * i + max(1, self.config.groups // self.ranks)

    @property
    def _is_fused(self) -> bool:
        """Whether the gated norm's sum of squares is a column in the sum of out_proj."""
        return self.config.groups == 1 and self.ranks > 1

    @property
    def _mixer_gradients(self) -> float:
        """The gradients within a mixer's backward, minus what is freed by then."""
        config, i = self.config, self._inner
        if not config.groups:
            return self._hidden + 3 * i + self._parameters
        heads = config.heads // self.ranks
        norm = 2 * i + (config.hidden_size - self._hidden if self._is_fused else 0)
        scan = 3 * i - self._gated + i * config.state_size / SSD_CHUNK + 2 * self._bc + 4 * heads
        return self._hidden + max(norm, scan)

    @property
    def _kept(self) -> float:
        """What tensor-parallel ranks have summed in a mixer, and store if it is recomputed."""
        config = self.config
        if self.ranks == 1:
            return 0
        if config.groups:
            return self._hidden + self._share if config.groups == 1 else 0
        return self._parameters if config.heads < self.ranks else 0  # Mamba-1 has 0 heads

    @property
    def _kept_of_shared(self) -> float:
        """What tensor-parallel ranks have summed in the shared block's MLP, and store if it is recomputed."""
        return self._hidden if self.ranks > 1 else 0

    @cached_property
    def _projected(self) -> float:
        """The norm and the projections of the shared block, and low-rank activations; without their output."""
        assert self.config.shared is not None
        low = 3 * self.config.shared.adapter_rank if self.config.shared.attention_adapters else 0
        return self._norm(2) + low

    @cached_property
    def _attention(self) -> float:
        """Queries, keys and values, the output, and one number for each head."""
        shared = self.config.shared
        assert shared is not None
        q, kv = (heads // self.ranks * shared.head_dim for heads in (shared.heads, shared.kv_heads))
        rotated = q + kv + shared.head_dim if shared.rope_theta else 0
        return q + 2 * kv + rotated + q + shared.heads // self.ranks

    @cached_property
    def _mlp(self) -> float:
        """The norm, the two projections, their product, and the sum over the ranks."""
        assert self.config.shared is not None
        low = self.config.shared.adapter_rank
        return self._norm(1) + 4 * (self.config.shared.feed_forward_size // self.ranks) + self._hidden + low
