"""What an evaluator asks of a model on several ranks. Oracle: the logits of each sequence alone."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

from megatron_ssm import load
from megatron_ssm.integrations.evaluation_ranks import continuations, log_likelihoods
from serving import FAMILIES, checkpoint, ids


@cache
def sequences():
    """Sequences of several lengths, how many of their last tokens count, and requests for new ones."""
    texts = [ids(length, seed=length).tolist() for length in (3, 9, 2, 30, 9)]
    requests = [dict(prompt=text, max_new_tokens=5, temperature=0.7 * (i % 2), seed=i) for i, text in enumerate(texts)]
    return texts, [1, 8, 1, 12, 3], requests


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("family", by_default(("mamba2", "zamba"), FAMILIES))
def test_on_several_ranks(ranks, world, family):
    directory, (texts, counts, requests) = checkpoint(family), sequences()

    def run(rank):
        model = load(directory, dist.group.WORLD, dtype=torch.float64)
        found = [log_likelihoods(model, texts, counts, batch_size) for batch_size in (1, 2, 8)]
        expected = []
        for text, count in zip(texts, counts, strict=True):
            with torch.no_grad():
                scores = model(torch.tensor([text[:-1]]))[0, -count:].log_softmax(-1)
            tokens = torch.tensor(text[-count:])
            total = scores.gather(1, tokens.unsqueeze(1)).sum().item()
            expected.append((total, torch.equal(scores.argmax(-1), tokens)))
        return found, expected, [continuations(model, requests, batch_size) for batch_size in (1, 3)]

    for found, expected, (alone, together) in ranks(run, world):
        for each in found:
            assert [greedy for _, greedy in each] == [greedy for _, greedy in expected]
            assert [total for total, _ in each] == pytest.approx([total for total, _ in expected], abs=1e-9)
        assert alone == together and [len(tokens) for tokens in alone] == [5] * len(requests)


@pytest.mark.parametrize("world", (1, 2))
def test_empty_continuations(ranks, world):
    """They are certain: in a batch of their own, and beside others."""
    directory, texts = checkpoint("mamba2"), [[1, 2, 3], [4, 5], [6]]

    def run(rank):
        model = load(directory, dist.group.WORLD, dtype=torch.float64)
        return [log_likelihoods(model, texts, [1, 0, 0], batch_size) for batch_size in (1, 3)]

    for alone, together in ranks(run, world):
        assert alone[1:] == together[1:] == [(0.0, True)] * 2
        assert alone[0][0] == pytest.approx(together[0][0], abs=1e-9) and alone[0][0] < 0
