"""The draft head that some checkpoints have: one more layer, which guesses the token after the next one.

It reads the embedding of token p and the model's final hidden state of token p-1, both normalized. Its output is a hidden
state, from which the model's own head predicts token p+1. To guess further tokens, the draft head reads its own output
instead of the model's hidden state. In its attention, token 1 has position 0: token 0 has no hidden state before it.
Source: DeepSeek-V3 (2024), section 2.2, multi-token prediction; transformers' `MtpModel`.
"""

import math
from typing import Any

import torch

from megatron_ssm.kernels import products
from megatron_ssm.kernels.huge_pages import HugePages
from megatron_ssm.kernels.matrices import linear
from megatron_ssm.kernels.products import BLOCK
from megatron_ssm.kernels.quantized_matrices import Int4Weight, QuantizedMatrix, in_4_bits
from megatron_ssm.layers.cache import Cache
from megatron_ssm.layers.call import EVERY_ROW, Call, Positions
from megatron_ssm.layers.operator import Partial, Place, as_input, check_plain, lowered_linear, sum_of
from megatron_ssm.layers.state import State
from megatron_ssm.layers.tape_builder import Buffer, Builder
from megatron_ssm.layers.unit import Layer
from megatron_ssm.parallel.layers import RMSNorm, RowParallelLinear, VocabularyParallel, rows_at
from megatron_ssm.parallel.tracked import TrackedModule
from megatron_ssm.spec.stack import Stack

PATH = "draft_head.layer."  # the prefix of its states in the cache of the model
CANDIDATES = 8  # the number of tokens whose logits are computed with the exact weights


class DraftHead(TrackedModule):
    """The module of a `stack.DraftHead`. It shares the embeddings and the head of the model.

    The input columns of its projection are split over the tensor-parallel ranks, and its layer is split like those of the
    model. Forward sends the sum of the projection, and the sums of the layer. `vocabulary` has this rank's rows of the
    model's head in 4 bits, or is None; see `copy_vocabulary`.
    """

    vocabulary: QuantizedMatrix | None

    def __init__(self, config: Stack, place: Place):
        super().__init__()
        head, hidden, self.ranks = config.draft_head, config.hidden_size, place.ranks
        assert head is not None, "the model has no draft head"
        norms: dict[str, Any] = dict(dtype=place.dtype, device=place.device, ranks=place.ranks, offset=head.offset)
        self.embedding_norm = RMSNorm(hidden, head.eps, **norms)
        self.hidden_norm = RMSNorm(hidden, head.eps, **norms)
        self.fc = RowParallelLinear(2 * hidden // place.ranks.size, hidden, False, place.ranks, **place.where)
        self.layer = Layer(head.units, hidden, config.residual_in_fp32, place)
        self.norm_f = RMSNorm(hidden, head.eps, **norms)
        self.register_module("vocabulary", None)

    def new_states(self, batch: int) -> dict[str, State]:
        modules: dict[str, Any] = dict(self.layer.named_children())
        return {PATH + name: modules[name].new_state(batch) for name in self.layer.names_with_state}

    def copy_vocabulary(self, layer: VocabularyParallel) -> None:
        """Copy this rank's rows of the model's head in 4 bits, if there is a C kernel for them. Guesses read less memory."""
        weight, columns = layer.weight, layer.weight.shape[1]
        has_kernel = weight.device.type == "cpu" and products.has_kernel(Int4Weight.stored, weight.dtype, 1, columns)
        if has_kernel and weight.shape[0] and columns % BLOCK == 0 and not isinstance(weight, Int4Weight):
            with HugePages():
                self.vocabulary = in_4_bits(weight)

    def logits(self, hidden: torch.Tensor, layer: VocabularyParallel) -> torch.Tensor:
        """This rank's logits (batch, width) of hidden states (batch, hidden), for greedy search. Sends nothing.

        If there is a copy of the vocabulary, only the CANDIDATES tokens with the largest logits by the copy have finite
        logits, which are computed with the exact weights. layer: the head of the model.
        """
        if self.vocabulary is None:
            return layer.logits(hidden)
        count = min(CANDIDATES, layer.weight.shape[0])
        likely = linear(hidden, self.vocabulary).topk(count).indices  # (batch, width) -> (batch, count)
        # (batch, count, hidden) * (batch, 1, hidden) -> (batch, count)
        exact = (rows_at(layer.weight, likely).float() * hidden.unsqueeze(1).float()).sum(-1)
        return hidden.new_full((len(hidden), layer.width), -math.inf, dtype=torch.float32).scatter_(1, likely, exact)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The normalized hidden states (batch, seq, hidden), which are the input of the model's head.

        Args:
            embeddings: (batch, seq, hidden), of consecutive tokens without the first token of a sequence.
            hidden: (batch, seq, hidden), the normalized final hidden states of the tokens before them.
            cache: A cache with the states of the model's cache; its lengths are the numbers of tokens that the draft head
                has read. The lengths do not change.
        """
        both = torch.cat(
            [self.embedding_norm(embeddings), self.hidden_norm(hidden)], dim=-1
        )  # (batch, seq, 2 * hidden)
        with as_input(both, self.ranks) as whole:
            columns = whole.chunk(self.ranks.size, dim=-1)[self.ranks.rank]  # (batch, seq, 2 * hidden / ranks)
            summand = self.fc(columns)  # (batch, seq, hidden)
        x = sum_of([Partial(summand)], self.ranks)
        starts = None if cache is None else cache.lengths[cache.rows]
        positions = Positions.of(starts, x.shape[0], x.shape[1], None, x.device)
        rows = EVERY_ROW if cache is None else cache.rows
        call = Call(rows=rows, positions=positions, same_tokens=True)
        states = None
        if cache is not None:
            cache.allocate(positions.longest)
            states = {path.removeprefix(PATH): state for path, state in cache.states.items() if path.startswith(PATH)}
        return self.norm_f(self.layer(x, call, states))

    def lower(self, tape: Builder, embeddings: Buffer, hidden: Buffer) -> Buffer:
        """Write `forward` to a tape. Raises NotLowered if C cannot compute all of it."""
        check_plain(self)
        tape.path = "draft_head"
        normed = tape.norm(embeddings, self.embedding_norm), tape.norm(hidden, self.hidden_norm)
        both = tape.concat(*normed)
        tape.release(embeddings, hidden, *normed)
        width = both.width // self.ranks.size
        summand = lowered_linear(tape, self.fc, both.columns(self.ranks.rank * width, width))
        tape.sum(self.ranks, summand)
        x = tape.converted(summand, tape.sum_dtype)
        tape.release(both, summand)
        self.layer.lower(tape, PATH, x, None, ())
        tape.path = "draft_head"
        return tape.norm(x, self.norm_f)
