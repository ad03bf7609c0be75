"""Attention on context ranks, for tokens that are split over them and for tokens that every rank has."""

import torch

from attention2d import Attention2D, Tree
from attention2d.compute.tile import attend, merge
from commfabric.collectives.counted import Counter
from megatron_ssm.parallel.token_sharding import TokenSharding

from .attention import attend_with_cache
from .call import Call
from .state import State

Result = tuple[torch.Tensor, torch.Tensor]  # out (batch, tokens, heads, head_dim) and lse (batch, tokens, heads)


class ContextAttention:
    """Causal attention on context ranks, with the arguments of `attention.attend_with_cache`.

    The schedule computes the attention of split tokens to each other; if every rank has all tokens, each rank computes it
    alone. Keys and values of earlier calls stay on the ranks that store them (`KeyValuePlacement`), and `Tree` computes the
    attention to them. `counter` counts the messages of `Tree`; the schedule counts its own.
    """

    def __init__(self, schedule: Attention2D, counter: Counter):
        self.schedule, self.earlier = schedule, Tree(schedule.group)
        self.earlier.counter = counter

    def __deepcopy__(self, memo: dict) -> "ContextAttention":
        return self  # process groups are handles

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, call: Call, state: State | None
    ) -> torch.Tensor:
        """q (batch, tokens, heads, head_dim) -> the same shape. k, v: (batch, tokens, kv_heads, head_dim).

        Differentiable for split tokens without a cache. k and v are appended to a state.
        """
        if not len(q) and state is None:  # an empty batch on all context ranks, which schedules reject
            return attend_with_cache(q, k, v, scale, call, state)
        if state is None and call.sharding is not None:
            out = self.schedule(q, k, v, causal=True, scale=scale)
            assert isinstance(out, torch.Tensor)
            return out
        out, lse = self._attend_new(q, k, v, scale, call.sharding)
        if state is None:
            return out.to(q.dtype)
        if not call.begins:
            out, lse = (t.to(lse.dtype, copy=True, memory_format=torch.contiguous_format) for t in (out, lse))
            merge(out, lse, *self._attend_earlier(q, scale, call, state))
        assert call.placement is not None
        state.append(call.placement.local_indices.to(k.device), 0, call.rows, keys=k, values=v)
        return out.to(q.dtype)

    def _attend_new(self, q, k, v, scale: float, sharding: TokenSharding | None) -> Result:
        if sharding is not None:
            result = self.schedule(q, k, v, causal=True, scale=scale, seq=sharding.length, return_lse=True)
            assert isinstance(result, tuple)
            return result
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out, lse = attend(q, k, v, q.shape[0] > 1, scale)
        return out.transpose(0, 1), lse.transpose(0, 1)

    def _attend_earlier(self, q, scale: float, call: Call, state: State) -> Result:
        assert call.lengths is not None
        longest = max(call.lengths)
        k, v = (state[name][call.rows, :longest] for name in ("keys", "values"))
        if call.sharding is not None:
            return self.earlier.attend_own(q, k, v, scale, call.lengths)
        result = self.earlier(q, k, v, scale=scale, return_lse=True, lengths=call.lengths)
        assert isinstance(result, tuple)
        return result
