"""Cross-entropy over logits that are split by vocabulary over the tensor-parallel ranks."""

import torch
from torch.autograd.function import once_differentiable

from megatron_ssm.parallel.operators import reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks

POSITIONS = 256  # of each sequence, whose log-sum-exps are computed at once


def vocabulary_parallel_cross_entropy(
    local: torch.Tensor, labels: torch.Tensor, vocabulary: range, ranks: Ranks
) -> torch.Tensor:
    """-log p(label) of each position, in nats: (batch, seq), the same on every rank.

    local: (batch, seq, width), this rank's slice of the logits. labels: (batch, seq). vocabulary: the ids of the slice. The
    log-sum-exp is shifted by the largest of the slices' log-sum-exps. Sends all-reduces of 1 value (maximum) and of 2 values
    (sum) per position; backward sends nothing.
    """
    is_local = (labels >= vocabulary.start) & (labels < vocabulary.stop)
    log_sum, label_logit = _LogSumAndLabel.apply(local, (labels - vocabulary.start).where(is_local, 0))
    label_logit = label_logit.masked_fill(~is_local, 0)
    if ranks.group is None:
        return log_sum - label_logit
    largest = ranks.all_reduce_max(log_sum)
    parts = torch.stack([(log_sum - largest).exp(), label_logit])
    total, label_logit = reduce_from_ranks(parts, ranks.group, ranks.all_reduce_exact)
    return total.log() + largest - label_logit


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
