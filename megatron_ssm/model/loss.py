"""Cross-entropy of logits that are split along the vocabulary over the tensor-parallel ranks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.kernels.matrices import linear
from megatron_ssm.layers.operator import as_input
from megatron_ssm.parallel.layers import VocabularyParallel
from megatron_ssm.parallel.operators import reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.spec.sizes import LARGE_LOGITS, LOGITS_PIECE

POSITIONS = 256  # the number of positions per sequence whose log-sum-exps are computed at once


def cross_entropy(
    x: torch.Tensor, head: VocabularyParallel, labels: torch.Tensor, ranks: Ranks, scale: float = 1.0
) -> torch.Tensor:
    """-log p(label) of each position, in nats: (batch, seq), the same on every rank.

    If there are more than LARGE_LOGITS logits, they are computed in pieces, and once more in backward. Sends the messages of
    the head, and per position an all-reduce of 1 value (maximum) and one of 2 values (sum). Backward sends nothing for these
    all-reduces.

    Args:
        x: (batch, seq, hidden), the input of the head. With sequence parallelism, it has this rank's share of the tokens;
            tokens after the labels are padding.
        head: The language-model head.
        labels: (batch, seq).
        scale: The constant that multiplies the logits.
    """
    is_local, index = _local_labels(labels, range(head.start, head.stop))
    if labels.numel() * head.width <= LARGE_LOGITS:
        local = head.logits(x)[:, : labels.shape[1]]
        log_sum, label_logit = _LogSumAndLabel.apply(local if scale == 1.0 else local * scale, index)
    else:
        with as_input(x.to(head.weight.dtype), ranks) as whole:
            log_sum, label_logit = _InPieces.apply(whole, head.weight, index, scale)
    return _nats(log_sum, label_logit, is_local, ranks)


def _local_labels(labels: torch.Tensor, vocabulary: range) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask of the labels that are in this rank's slice of the vocabulary, their indices in the slice): (batch, seq)."""
    is_local = (labels >= vocabulary.start) & (labels < vocabulary.stop)
    return is_local, (labels - vocabulary.start).where(is_local, 0)


def _nats(log_sum: torch.Tensor, label_logit: torch.Tensor, is_local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The log-sum-exp of all ranks' logits minus the logit of the label: (batch, seq)."""
    label_logit = label_logit.masked_fill(~is_local, 0)
    if ranks.group is None:
        return log_sum - label_logit
    largest = ranks.all_reduce_max(log_sum)
    summands = torch.stack([(log_sum - largest).exp(), label_logit])  # (2, batch, seq)
    total, label_logit = reduce_from_ranks(summands, ranks.group, ranks.all_reduce_exact)
    return total.log() + largest - label_logit


class _InPieces(torch.autograd.Function):
    """`_LogSumAndLabel` of the logits of x (batch, tokens, hidden) and weight (width, hidden), at index (batch, seq).

    At most about LOGITS_PIECE logits exist at a time. Tokens after the first `seq` are ignored.
    """

    @staticmethod
    def forward(ctx, x, weight, index, scale):
        ctx.scale, ctx.seq = scale, index.shape[1]
        log_sums, labels = [], []
        for rows, row_index in _pieces(x, weight, index):
            logits = _scaled_logits(rows, weight, scale)  # (rows, width)
            log_sums.append(logits.logsumexp(-1))
            labels.append(logits.gather(-1, row_index.unsqueeze(-1)).squeeze(-1))
        log_sum, label = torch.cat(log_sums).view_as(index), torch.cat(labels).view_as(index)
        ctx.save_for_backward(x, weight, index, log_sum)
        return log_sum, label

    @staticmethod
    @once_differentiable
    def backward(ctx, d_log_sum, d_label):
        x, weight, index, log_sum = ctx.saved_tensors
        dx, dweight = [], torch.zeros_like(weight, dtype=log_sum.dtype) if ctx.needs_input_grad[1] else None
        terms = (t.flatten().split(_piece_size(weight)) for t in (log_sum, d_log_sum, d_label))
        for (rows, row_index), total, d_total, d_row_label in zip(_pieces(x, weight, index), *terms, strict=True):
            grad = _scaled_logits(rows, weight, ctx.scale).sub_(total.unsqueeze(-1)).exp_().mul_(d_total.unsqueeze(-1))
            grad.scatter_add_(-1, row_index.unsqueeze(-1), d_row_label.unsqueeze(-1))
            grad = grad.mul_(ctx.scale).to(weight.dtype)  # (rows, width)
            dx.append(grad @ weight)
            if dweight is not None:
                dweight += grad.t() @ rows
        without_padding = torch.cat(dx).view(*index.shape, -1)  # (batch, seq, hidden)
        return (
            F.pad(without_padding, (0, 0, 0, x.shape[1] - ctx.seq)),
            None if dweight is None else dweight.to(weight.dtype),
            None,
            None,
        )


def _piece_size(weight: torch.Tensor) -> int:
    return max(1, LOGITS_PIECE // len(weight))


def _pieces(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows of x, elements of the index) of each piece: (rows, hidden) and (rows,)."""
    count = _piece_size(weight)
    return zip(x[:, : index.shape[1]].flatten(0, 1).split(count), index.flatten().split(count), strict=True)


def _scaled_logits(rows: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    logits = linear(rows, weight)
    return logits.to(at_least_fp32(logits.dtype)).mul_(scale)


class _LogSumAndLabel(torch.autograd.Function):
    """logits (batch, seq, width), index (batch, seq) -> log-sum-exp (batch, seq), logit at the index (batch, seq).

    The logits are often the largest tensor of a training step. The only other tensor of this size is their gradient:
    forward computes POSITIONS positions at a time, and backward recomputes the exponentials.
    """

    @staticmethod
    def forward(ctx, logits, index):
        log_sum = torch.cat([part.logsumexp(-1) for part in logits.split(POSITIONS, dim=1)], dim=1)
        ctx.save_for_backward(logits, index, log_sum)
        return log_sum, logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_log_sum, d_label):
        logits, index, log_sum = ctx.saved_tensors
        log_sum = log_sum.clamp(min=torch.finfo(log_sum.dtype).min)  # -inf on a rank with an empty slice
        grad = torch.sub(logits, log_sum.unsqueeze(-1)).exp_().mul_(d_log_sum.unsqueeze(-1))
        return grad.scatter_add_(-1, index.unsqueeze(-1), d_label.unsqueeze(-1)), None
