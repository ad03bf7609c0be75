"""The causal convolution before a recurrence, over this rank's channels."""

from collections.abc import Iterable, Mapping

import torch

from megatron_ssm.kernels.convolution import causal_conv
from megatron_ssm.parallel.layers import Packed
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.tracked import TrackedModule

from .call import Call
from .state import State


class Convolution(TrackedModule):
    """The depthwise causal convolution over this rank's channels, followed by SiLU.

    Args:
        channels: {field: this rank's number of channels}.
        kernel: The number of taps K.
        shared, pieces: See `Packed`.
    """

    def __init__(
        self,
        channels: Mapping[str, int],
        kernel: int,
        bias: bool,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        shared: Iterable[str] = (),
        pieces: int = 1,
    ):
        super().__init__()
        self.weight = Packed(channels, (1, kernel), ranks, dtype, device, shared, pieces)
        self.bias = Packed(channels, (), ranks, dtype, device, shared, pieces) if bias else None

    def forward(
        self, x: torch.Tensor, history: torch.Tensor | None = None, overwrite: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (batch, seq, channels) -> the same shape, and the last K-1 inputs (batch, K-1, channels).

        history: The K-1 inputs before x; None: zeros. overwrite: True if history may be overwritten; see `causal_conv`.
        """
        return causal_conv(x, *self.tensors(), history, overwrite)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight (channels, 1, K) of all fields, and the bias (channels,) or None."""
        return self.weight(), None if self.bias is None else self.bias()


def keep_last_inputs(x: torch.Tensor, call: Call, state: State) -> None:
    """Store the last inputs of the convolution of a sharded chunk: x (batch, this rank's tokens, channels)."""
    assert call.sharding is not None
    conv = state["conv"]
    last = call.sharding.gather_last(x, conv.shape[1])
    conv[call.rows] = torch.cat([conv[call.rows], last], dim=1)[:, last.shape[1] :]
