"""Mixers whose packed parameters are split into equal ranges of rows, whatever their fields: naive sharding.

A rank has the products of its rows, not the channels that it needs next, so packed activations are gathered. The mixers
have no cache; they compute what the library's mixers compute, whose parameters they use.
"""

from typing import Any

import torch
from torch import nn

from megatron_ssm.kernels import kernels
from megatron_ssm.kernels.convolution import causal_conv
from megatron_ssm.kernels.matrices import linear
from megatron_ssm.kernels.scan import ssd
from megatron_ssm.layers.mamba1 import MambaMixer
from megatron_ssm.layers.mamba2 import Mamba2Mixer
from megatron_ssm.layers.operator import Partial
from megatron_ssm.parallel.operators import gather_last


class NaiveMixer(nn.Module):
    """The parts that both mixers share: in_proj and the convolution on equal ranges of packed rows, then gathered."""

    recomputes_mix = True

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer, self.ranks = mixer, mixer.ranks
        self.in_proj = self._my_range(mixer.in_proj.weight)
        self.conv = self._my_range(mixer.conv.weight)
        self.conv_bias = None if mixer.conv.bias is None else self._my_range(mixer.conv.bias)

    def _my_range(self, packed: Any) -> torch.Tensor:
        """This rank's range of the rows of all fields, as they are packed on one rank."""
        fields = []
        for name, field in zip(packed.sizes, packed.fields, strict=True):
            parts = self.ranks.all_gather(field.detach())
            copies = self.ranks.size // packed.pieces if name in packed.shared else 1  # ranks that hold the same rows
            fields.append(parts[::copies].flatten(0, 1))
        return torch.cat(fields).chunk(self.ranks.size)[self.ranks.rank].clone()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> (batch, seq, all rows of in_proj). One all-gather."""
        return gather_last(linear(x, self.in_proj), self.ranks)

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        """The convolution of all channels (batch, seq, channels). One all-gather."""
        mine = x.chunk(self.ranks.size, dim=-1)[self.ranks.rank].contiguous()
        return gather_last(causal_conv(mine, self.conv, self.conv_bias)[0], self.ranks)

    def _mine(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's channels or heads of a field (batch, seq, n)."""
        return x.chunk(self.ranks.size, dim=-1)[self.ranks.rank].contiguous()


class NaiveMamba1(NaiveMixer):
    """A MambaMixer with two all-gathers, and the all-reduces of x_proj (unless heads are whole) and of the output."""

    def mix(self, projected: torch.Tensor, call: Any, state: Any = None) -> Partial:
        """projected: [x | z] of all ranks."""
        mixer: MambaMixer = self.mixer
        x, z = projected.chunk(2, dim=-1)
        x, z = self._mine(self._convolved(x)), self._mine(z)
        heads = [mixer._scan_inputs(x[..., h], z[..., h], h).scan(None, False, False)[0] for h in mixer._head_slices()]
        return Partial(mixer.out_proj(torch.cat(heads, dim=-1)))


class NaiveMamba2(NaiveMixer):
    """A Mamba2Mixer with three all-gathers, the last before the norm over all channels, and the all-reduce of the output."""

    def __init__(self, mixer: Mamba2Mixer) -> None:
        super().__init__(mixer)
        self.norm_weight = self.ranks.all_gather(mixer.norm_weight.detach()).flatten()

    def mix(self, projected: torch.Tensor, call: Any, state: Any = None) -> Partial:
        """projected: [z | x | B | C | dt] of all ranks."""
        mixer: Mamba2Mixer = self.mixer
        ranks, N, groups = self.ranks, mixer.state_size, mixer.all_groups
        inner, heads = mixer.rows["x"] * ranks.size, mixer.heads * ranks.size
        z, xBC, dt = projected.split([inner, inner + 2 * groups * N, heads], dim=-1)
        x, B, C = self._convolved(xBC).split([inner, groups * N, groups * N], dim=-1)
        first = ranks.rank * groups // ranks.size
        B, C = (t.unflatten(2, (groups, N))[:, :, first : first + mixer.groups] for t in (B, C))
        x = self._mine(x).unflatten(2, (mixer.heads, mixer.head_dim))
        y, _ = ssd(x, mixer._step_sizes(self._mine(dt)), mixer.A_log, B.contiguous(), C.contiguous(), mixer.D, None)
        normed, _ = kernels.gated_norm(gather_last(y.flatten(2), ranks), z, self.norm_weight, groups, mixer.eps)
        return Partial(mixer.out_proj(self._mine(normed)))


def shard_naively(model: Any) -> None:
    """Replace the mixers of a tensor-parallel model. Shared blocks stay: they are split as in Transformers."""
    kinds = {MambaMixer: NaiveMamba1, Mamba2Mixer: NaiveMamba2}
    for layer in model.layers:
        layer.mixer = kinds[type(layer.mixer)](layer.mixer)
