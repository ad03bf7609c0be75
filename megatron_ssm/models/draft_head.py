"""The draft head that some checkpoints ship: one more layer, which guesses the token after the next one.

At position p it reads the embedding of token p and the model's final hidden state of token p-1, both normalized, and gives a
hidden state; with the model's own head, that is a guess of token p+1. To guess further, its own hidden state takes the place
of the model's. Source: DeepSeek-V3 (2024), section 2.2, multi-token prediction; transformers' `MtpModel`.
"""

from typing import Any

import torch

from megatron_ssm.operators.cache import Cache
from megatron_ssm.operators.call import Call, Positions, Rows
from megatron_ssm.operators.operator import Partial, Place, as_input, sum_of
from megatron_ssm.operators.state import State
from megatron_ssm.operators.unit import Layer
from megatron_ssm.parallel.layers import RMSNorm, RowParallelLinear
from megatron_ssm.parallel.tracked import TrackedModule
from megatron_ssm.stack.stack import Stack

PATH = "draft_head.layer."  # of its states in the cache of the model


class DraftHead(TrackedModule):
    """The layer of a `stack.DraftHead`, between the embeddings and the head of the model, which it shares.

    Its projection is split by input column over the tensor-parallel ranks, and its layer as the model's. Forward sends the
    sum of the projection and those of the layer.
    """

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

    def new_states(self, batch: int) -> dict[str, State]:
        """The keys and values of `batch` sequences, for the cache of the model."""
        modules: dict[str, Any] = dict(self.layer.named_children())
        return {PATH + name: modules[name].new_state(batch) for name in self.layer.names_with_state}

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Cache | None = None,
        rows: Rows = slice(None),
    ) -> torch.Tensor:  # fmt: skip
        """The hidden states (batch, seq, hidden), normalized: the input of the model's head.

        embeddings: of the tokens at `positions` (batch, seq), from 1 on. hidden: the final hidden state, normalized, of the
        token before each; the same shape. cache: that of the model, with what was read at earlier positions of its rows
        `rows`.
        """
        both = torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], dim=-1)
        with as_input(both, self.ranks) as whole:
            own = whole.chunk(self.ranks.size, dim=-1)[self.ranks.rank]
            part = self.fc(own)
        x = sum_of([Partial(part)], self.ranks)
        longest = int(positions.max()) + 1
        keys = torch.arange(longest, device=x.device) if cache is not None else positions.unsqueeze(1)
        seen = (keys <= positions.unsqueeze(2)) & (keys > 0)  # nothing is read at position 0
        about = Call(rows=rows, positions=Positions(positions, longest, False, seen.unsqueeze(1)), same_tokens=True)
        states = None
        if cache is not None:
            cache.allocate(longest)
            states = {n.removeprefix(PATH): state for n, state in cache.states.items() if n.startswith(PATH)}
        return self.norm_f(self.layer(x, about, states))
