"""Cross-entropy over logits that are split by vocabulary over the tensor-parallel ranks."""

import torch

from megatron_ssm.parallel.operators import reduce_from_ranks
from megatron_ssm.parallel.ranks import Ranks


def vocabulary_parallel_cross_entropy(
    local: torch.Tensor, labels: torch.Tensor, vocabulary: range, ranks: Ranks
) -> torch.Tensor:
    """-log p(label) of each position, in nats: (batch, seq), the same on every rank.

    local: (batch, seq, width), this rank's slice of the logits. labels: (batch, seq). vocabulary: the ids of the slice. The
    log-sum-exp is shifted by the largest of the slices' log-sum-exps. Sends all-reduces of 1 value (maximum) and of 2 values
    (sum) per position; backward sends nothing.
    """
    is_local = (labels >= vocabulary.start) & (labels < vocabulary.stop)
    index = (labels - vocabulary.start).where(is_local, 0).unsqueeze(-1)
    label_logit = local.gather(-1, index).squeeze(-1).masked_fill(~is_local, 0)
    log_sum = local.logsumexp(-1)
    if ranks.group is None:
        return log_sum - label_logit
    largest = ranks.largest(log_sum)
    parts = torch.stack([(log_sum - largest).exp(), label_logit])
    total, label_logit = reduce_from_ranks(parts, ranks.group, ranks.exact)
    return total.log() + largest - label_logit
