"""Cross-entropy over logits that are split by vocabulary over the tensor-parallel ranks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_ssm.operators.operator import as_input
from megatron_ssm.ops.matrices import linear
from megatron_ssm.parallel.layers import VocabularyParallel
from megatron_ssm.parallel.operators import reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.stack.sizes import LARGE_LOGITS, LOGITS_PIECE
from sparsefusion.collectives.wire_formats import at_least_fp32

POSITIONS = 256  # of each sequence, whose log-sum-exps are computed at once


def cross_entropy(
    x: torch.Tensor, head: VocabularyParallel, labels: torch.Tensor, ranks: Ranks, scale: float = 1.0
) -> torch.Tensor:
    """-log p(label) of each position, in nats: (batch, seq), the same on every rank.

    x: (batch, seq, hidden), the head's input; with sequence parallelism this rank's share of the tokens, of which those
    after the labels are padding. labels: (batch, seq). scale: of the logits. If they are more than LARGE_LOGITS numbers,
    they are computed piece by piece, and in backward once more. Sends what the head sends, and all-reduces of 1 value
    (maximum) and of 2 values (sum) per position; backward sends nothing for these.
    """
    vocabulary = range(head.start, head.stop)
    if labels.numel() * head.width <= LARGE_LOGITS:
        local = head.logits(x)[:, : labels.shape[1]]
        return vocabulary_parallel_cross_entropy(local if scale == 1.0 else local * scale, labels, vocabulary, ranks)
    is_local, index = _local_labels(labels, vocabulary)
    with as_input(x.to(head.weight.dtype), ranks) as whole:
        log_sum, label_logit = _InPieces.apply(whole, head.weight, index, scale)
    return _nats(log_sum, label_logit, is_local, ranks)


def vocabulary_parallel_cross_entropy(
    local: torch.Tensor, labels: torch.Tensor, vocabulary: range, ranks: Ranks
) -> torch.Tensor:
    """`cross_entropy` of logits: local (batch, seq, width), this rank's slice of them. vocabulary: the ids of the slice.

    The log-sum-exp is shifted by the largest of the slices' log-sum-exps.
    """
    is_local, index = _local_labels(labels, vocabulary)
    log_sum, label_logit = _LogSumAndLabel.apply(local, index)
    return _nats(log_sum, label_logit, is_local, ranks)


def _local_labels(labels: torch.Tensor, vocabulary: range) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of the labels in this rank's part of the vocabulary, and their places in it."""
    is_local = (labels >= vocabulary.start) & (labels < vocabulary.stop)
    return is_local, (labels - vocabulary.start).where(is_local, 0)


def _nats(log_sum: torch.Tensor, label_logit: torch.Tensor, is_local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The log-sum-exp of all ranks' logits minus the logit of the label."""
    label_logit = label_logit.masked_fill(~is_local, 0)
    if ranks.group is None:
        return log_sum - label_logit
    largest = ranks.all_reduce_max(log_sum)
    parts = torch.stack([(log_sum - largest).exp(), label_logit])
    total, label_logit = reduce_from_ranks(parts, ranks.group, ranks.all_reduce_exact)
    return total.log() + largest - label_logit


class _InPieces(torch.autograd.Function):
    """x (batch, tokens, hidden), weight (width, hidden), index (batch, seq) -> what `_LogSumAndLabel` gives of their logits.

    There are never more than about LOGITS_PIECE of the logits. Tokens after the first `seq` count for nothing.
    """

    @staticmethod
    def forward(ctx, x, weight, index, scale):
        ctx.scale, ctx.seq = scale, index.shape[1]
        log_sums, labels = [], []
        for rows, where in _pieces(x, weight, index):
            logits = _scaled_logits(rows, weight, scale)
            log_sums.append(logits.logsumexp(-1))
            labels.append(logits.gather(-1, where.unsqueeze(-1)).squeeze(-1))
        log_sum, label = torch.cat(log_sums).view_as(index), torch.cat(labels).view_as(index)
        ctx.save_for_backward(x, weight, index, log_sum)
        return log_sum, label

    @staticmethod
    @once_differentiable
    def backward(ctx, d_log_sum, d_label):
        x, weight, index, log_sum = ctx.saved_tensors
        dx, dweight = [], torch.zeros_like(weight, dtype=log_sum.dtype) if ctx.needs_input_grad[1] else None
        terms = (t.flatten().split(_rows(weight)) for t in (log_sum, d_log_sum, d_label))
        for (rows, where), total, d_total, d_of_label in zip(_pieces(x, weight, index), *terms, strict=True):
            grad = _scaled_logits(rows, weight, ctx.scale).sub_(total.unsqueeze(-1)).exp_().mul_(d_total.unsqueeze(-1))
            grad = grad.scatter_add_(-1, where.unsqueeze(-1), d_of_label.unsqueeze(-1)).mul_(ctx.scale).to(weight.dtype)
            dx.append(grad @ weight)
            if dweight is not None:
                dweight += grad.t() @ rows
        whole = torch.cat(dx).view(*index.shape, -1)
        return (
            F.pad(whole, (0, 0, 0, x.shape[1] - ctx.seq)),
            None if dweight is None else dweight.to(weight.dtype),
            None,
            None,
        )


def _rows(weight: torch.Tensor) -> int:
    """The tokens of a piece."""
    return max(1, LOGITS_PIECE // len(weight))


def _pieces(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows of x, their index) of each piece."""
    count = _rows(weight)
    return zip(x[:, : index.shape[1]].flatten(0, 1).split(count), index.flatten().split(count), strict=True)


def _scaled_logits(rows: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    logits = linear(rows, weight)
    return logits.to(at_least_fp32(logits.dtype)).mul_(scale)


class _LogSumAndLabel(torch.autograd.Function):
    """logits (batch, seq, width), index (batch, seq) -> their log-sum-exp, and the logit at the index: (batch, seq) each.

    The logits are often the largest tensor of a training step. So there is never a second one of their size, except their
    gradient: what torch would store or compute for all positions is computed for some at a time.
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
        log_sum = log_sum.clamp(min=torch.finfo(log_sum.dtype).min)  # it is -inf on a rank without vocabulary
        grad = torch.sub(logits, log_sum.unsqueeze(-1)).exp_().mul_(d_log_sum.unsqueeze(-1))
        return grad.scatter_add_(-1, index.unsqueeze(-1), d_label.unsqueeze(-1)), None
