"""Passing an affine state from block to block of a sequence that is split over context ranks, with gradients.

A block of the recurrence S_t = A_t S_{t-1} + u_t, with matrices A_t, maps its incoming state to M S + F: M is the product of
its A_t, F its final state from zeros. Every rank gathers M and F of all blocks and computes the incoming states of its own
blocks. The size of the messages does not depend on the length of the sequence. (`state_passing` sends less for diagonal
A_t.)
"""

import torch

from commfabric.collectives import counted
from megatron_ssm.parallel.blocks import ContextRanks
from megatron_ssm.parallel.operators import differentiable


def entering_states(
    transition: torch.Tensor, final: torch.Tensor, context: ContextRanks, initial: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the incoming states of this rank's blocks, like `final`; the final state of the sequence, (batch, heads, n, m)).

    Forward sends one all-gather, backward one reduce-scatter.

    Args:
        transition: (batch * blocks of a rank, heads, n, n), M of this rank's blocks.
        final: (batch * blocks of a rank, heads, n, m), F of this rank's blocks.
        context: The context ranks.
        initial: (batch, heads, n, m), the incoming state of the sequence; None: zeros.
    """
    both = _gathered(torch.cat([transition, final], dim=-1).unflatten(0, (-1, context.blocks_per_rank)), context)
    size = transition.shape[-1]
    state = torch.zeros_like(both[0][..., size:]) if initial is None else initial
    entering = []
    for block in both:
        entering.append(state)
        state = block[..., :size] @ state + block[..., size:]
    own = torch.stack([entering[block] for block in context.blocks_of_rank(context.rank)], dim=1)
    return own.flatten(0, 1), state


def _gathered(values: torch.Tensor, context: ContextRanks) -> torch.Tensor:
    """(batch, blocks of a rank, ...) of each rank -> (blocks of the sequence, batch, ...), on every rank."""
    order = [context.rank_of_block(block) for block in range(context.blocks)]
    flat = [rank * context.blocks_per_rank + place for rank, place in order]

    def gather(x: torch.Tensor) -> torch.Tensor:
        whole = counted.all_gather(x.transpose(0, 1).contiguous(), context.group, context.counter)
        return whole.flatten(0, 1)[flat]

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        by_rank = torch.empty_like(grad)
        by_rank[flat] = grad
        parts = by_rank.unflatten(0, (context.size, -1)).contiguous()
        return counted.reduce_scatter(parts, context.group, context.counter).transpose(0, 1)

    return differentiable(values, lambda x: context.recomputation.communicate_once(lambda: gather(x)), scatter)
