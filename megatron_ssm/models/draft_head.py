"""The draft head that some checkpoints ship: one more layer, which guesses the token after the next one.

It reads the embedding of token p and the model's final hidden state of token p-1, both normalized, and gives a hidden
state; with the model's own head, that is a guess of token p+1. To guess further, its own hidden state takes the place of the
model's. Token 1 has position 0 in its attention, because there is no hidden state before token 0.
Source: DeepSeek-V3 (2024), section 2.2, multi-token prediction; transformers' `MtpModel`.
"""

import math
from typing import Any

import torch

from megatron_ssm.native import products
from megatron_ssm.native.products import BLOCK
from megatron_ssm.operators.cache import Cache
from megatron_ssm.operators.call import EVERY_ROW, Call, Positions
from megatron_ssm.operators.operator import Partial, Place, as_input, check_plain, lowered_linear, sum_of
from megatron_ssm.operators.state import State
from megatron_ssm.operators.unit import Layer
from megatron_ssm.ops.huge_pages import HugePages
from megatron_ssm.ops.matrices import linear
from megatron_ssm.ops.quantized_matrices import Int4Weight, QuantizedMatrix, in_4_bits
from megatron_ssm.parallel.layers import RMSNorm, RowParallelLinear, VocabularyParallel, rows_at
from megatron_ssm.parallel.tracked import TrackedModule
from megatron_ssm.stack.stack import Stack
from megatron_ssm.tape.builder import Buffer, Builder

PATH = "draft_head.layer."  # of its states in the cache of the model
CANDIDATES = 8  # tokens that are compared by exact logits


class DraftHead(TrackedModule):
    """The layer of a `stack.DraftHead`, between the embeddings and the head of the model, which it shares.

    Its projection is split by input column over the tensor-parallel ranks, and its layer as the model's. Forward sends the
    sum of the projection and those of the layer. vocabulary: see `copy_vocabulary`.
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
        """The keys and values of `batch` sequences, for the cache of the model."""
        modules: dict[str, Any] = dict(self.layer.named_children())
        return {PATH + name: modules[name].new_state(batch) for name in self.layer.names_with_state}

    def copy_vocabulary(self, layer: VocabularyParallel) -> None:
        """Copy this rank's rows of the model's head in 4 bits, if C multiplies by these: a guess then reads less memory."""
        weight, columns = layer.weight, layer.weight.shape[1]
        has_kernel = weight.device.type == "cpu" and products.has_kernel(Int4Weight.stored, weight.dtype, 1, columns)
        if has_kernel and weight.shape[0] and columns % BLOCK == 0 and not isinstance(weight, Int4Weight):
            with HugePages():
                self.vocabulary = in_4_bits(weight)

    def logits(self, hidden: torch.Tensor, layer: VocabularyParallel) -> torch.Tensor:
        """This rank's logits (batch, width) of hidden states (batch, hidden) by the model's head, for greedy search.

        With a copy of the vocabulary only CANDIDATES logits are finite: those that are the largest by the copy. Sends
        nothing.
        """
        if self.vocabulary is None:
            return layer.logits(hidden)
        count = min(CANDIDATES, layer.weight.shape[0])
        likely = linear(hidden, self.vocabulary).topk(count).indices  # (batch, count)
        exact = (rows_at(layer.weight, likely).float() * hidden.unsqueeze(1).float()).sum(-1)
        return hidden.new_full((len(hidden), layer.width), -math.inf, dtype=torch.float32).scatter_(1, likely, exact)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The hidden states (batch, seq, hidden), normalized: the input of the model's head.

        embeddings: of consecutive tokens, the first token of a sequence left out. hidden: the final hidden state,
        normalized, of the token before each; the same shape. cache: one with the states of the model's cache, whose lengths
        say how many tokens of each row the head has read. They stay as they are.
        """
        both = torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], dim=-1)
        with as_input(both, self.ranks) as whole:
            own = whole.chunk(self.ranks.size, dim=-1)[self.ranks.rank]
            part = self.fc(own)
        x = sum_of([Partial(part)], self.ranks)
        starts = None if cache is None else cache.lengths[cache.rows]
        positions = Positions.of(starts, x.shape[0], x.shape[1], None, x.device)
        rows = EVERY_ROW if cache is None else cache.rows
        call = Call(rows=rows, positions=positions, same_tokens=True)
        states = None
        if cache is not None:
            cache.allocate(positions.longest)
            states = {n.removeprefix(PATH): state for n, state in cache.states.items() if n.startswith(PATH)}
        return self.norm_f(self.layer(x, call, states))

    def lower(self, tape: Builder, embeddings: Buffer, hidden: Buffer) -> Buffer:
        """`forward` on a tape. NotLowered if C does not compute all of it."""
        check_plain(self)
        tape.path = "draft_head"
        normed = tape.norm(embeddings, self.embedding_norm), tape.norm(hidden, self.hidden_norm)
        both = tape.concat(*normed)
        tape.release(embeddings, hidden, *normed)
        width = both.width // self.ranks.size
        part = lowered_linear(tape, self.fc, both.columns(self.ranks.rank * width, width))
        tape.sum(self.ranks, part)
        x = tape.converted(part, tape.sum_dtype)
        tape.release(both, part)
        self.layer.lower(tape, PATH, x, None, ())
        tape.path = "draft_head"
        return tape.norm(x, self.norm_f)
