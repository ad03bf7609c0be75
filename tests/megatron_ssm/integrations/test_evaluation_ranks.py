"""What an evaluator asks of a model on several ranks. Oracle: the logits of each sequence alone."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

from megatron_ssm import load
from megatron_ssm.integrations.evaluation_ranks import (
    DEFAULT_BATCH,
    batch_size_of,
    check_integer,
    check_switch,
    continuations,
    log_likelihoods,
)
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


# Arguments


def test_sizes_of_batches():
    assert [batch_size_of(value) for value in (1, 64, "1", "64")] == [1, 64] * 2
    assert {batch_size_of(value) for value in (None, "auto", "auto:4")} == {DEFAULT_BATCH}


@pytest.mark.parametrize("value", (0, -1, "0", "-1", "abc", "", "automatic", 1.5, "1.5", True, [8]))
def test_wrong_sizes_of_batches(value):
    with pytest.raises(ValueError) as refused:
        batch_size_of(value)
    assert str(refused.value) == f"batch_size={value} must be auto or an integer of at least 1"


@pytest.mark.parametrize("value", (0, -1, "x", "5", 5.0, True, None))
def test_wrong_integers(value):
    check_integer("max_length", 1)
    with pytest.raises(ValueError) as refused:
        check_integer("max_length", value)
    assert str(refused.value) == f"max_length={value} must be an integer of at least 1"


@pytest.mark.parametrize("value", ("yes", "", 0, 1))
def test_wrong_switches(value):
    assert [check_switch("add_bos_token", right) for right in (None, True, False)] == [None] * 3
    with pytest.raises(ValueError) as refused:
        check_switch("add_bos_token", value)
    assert str(refused.value) == f"add_bos_token={value} must be True or False"
