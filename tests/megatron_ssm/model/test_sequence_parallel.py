"""Models whose tensor-parallel ranks have shares of the tokens between layers. Oracle: transformers' autograd in float64.

Sequences of 69 tokens do not divide over the ranks.
"""

import pytest
import torch
import torch.distributed as dist
from chosen import full
from gradients import assert_near, gradients, shifted, transformers_loss, whole

import megatron_ssm
from attention2d import Ring
from cases import TOLERANCE, groups_of, oracle
from serving import attempt

__all__ = ["oracle"]

EXACT = 5e-11
DEFAULT = (
    ("mamba-biases-untied", 2), ("falcon", 4), ("mamba2-1-group-biases-tied", 2), ("mamba2-2-groups", 4),
    full("zamba-2-heads-biases", 2), ("zamba-4-heads-grouped-untied", 4), full("zamba2-4-groups-biases-adapters-untied", 2),
    ("zamba2-2-groups-adapters-rope", 4),
)  # fmt: skip


def check_loss_and_gradients(ranks, oracle, tp):
    """Assert that the loss and the gradients are those of transformers."""
    inputs, labels = shifted(oracle.ids, ignored=0.2)

    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD, dtype=torch.float64, sequence_parallel=True)
        loss = model.loss(inputs, labels)
        loss.backward()
        return loss.detach(), gradients(model)

    results = ranks(run, tp)
    loss, theirs = transformers_loss(oracle, ignored=0.2)
    torch.testing.assert_close(results[0][0], loss, rtol=EXACT, atol=0)
    assert_near(whole(oracle, [shard for _, shard in results]), theirs, EXACT)


@pytest.mark.parametrize("name, tp", DEFAULT)
def test_loss_and_gradients_equal_those_of_one_rank(ranks, name, tp, oracle):
    check_loss_and_gradients(ranks, oracle(name, torch.float64), tp)


@pytest.mark.parametrize(
    "name, cp",
    (("mamba", 2), ("zamba2-2-groups-adapters-rope", 2), pytest.param("mamba2-1-group", 3, marks=pytest.mark.full)),
)
def test_beside_context_ranks(ranks, name, cp, oracle):
    """Two tensor-parallel times several context ranks; the tokens divide over both."""
    oracle = oracle(name, torch.float64)
    inputs, labels = (t[:, : 20 * cp] for t in shifted(oracle.ids))

    def run(rank):
        tensor, context = groups_of(rank, 2, cp)
        spread = Ring(context)
        model = megatron_ssm.load(oracle.directory, tensor, context=spread, dtype=torch.float64, sequence_parallel=True)
        loss = model.loss(spread.shard(inputs), spread.shard(labels))
        loss.backward()
        for gradient in (found := gradients(model)).values():
            dist.all_reduce(gradient, group=context)
        return loss.detach(), found

    results = ranks(run, 2 * cp)
    one = megatron_ssm.load(oracle.directory, dtype=torch.float64)
    loss = one.loss(inputs, labels)
    loss.backward()
    torch.testing.assert_close(results[0][0], loss.detach(), rtol=EXACT, atol=0)
    assert_near(whole(oracle, [shard for _, shard in results[:2]]), whole(oracle, [gradients(one)]), EXACT)


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_padded_prompts_and_fp32(ranks, tp, oracle):
    """Logits of sequences with padding on the left, and of the last positions alone."""
    oracle = oracle("zamba2-1-group")
    mask = torch.ones_like(oracle.ids)
    mask[0, :7] = 0

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD, sequence_parallel=True)
        return model(oracle.ids, mask), model(oracle.ids, logits_to_keep=3)

    one = megatron_ssm.load(oracle.directory)
    with torch.no_grad():
        expected = one(oracle.ids, mask), one(oracle.ids, logits_to_keep=3)
    real = mask.bool()
    for padded, last in ranks(run, tp):
        torch.testing.assert_close(padded[real], expected[0][real], rtol=0, atol=TOLERANCE["zamba2"])
        torch.testing.assert_close(last, expected[1], rtol=0, atol=TOLERANCE["zamba2"])


def counts_of_layers(oracle, sequence_parallel):
    """Bytes that a rank sends in forward and in backward."""
    model = megatron_ssm.load(
        oracle.directory, dist.group.WORLD, dtype=torch.float64, shared_memory=False,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    ids, counts = oracle.ids[:, :64], []
    loss = model.loss(ids, ids)
    counts.append(model.counter.sent)
    loss.backward()
    return counts[0], model.counter.sent - counts[0], model.config


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_forward_sends_as_many_bytes(ranks, tp, oracle):
    """A reduce-scatter and an all-gather send what an all-reduce sends; the loss's all-gather comes on top."""
    oracle = oracle("mamba2-2-groups", torch.float64)
    plain = ranks(lambda rank: counts_of_layers(oracle, False)[0], tp)
    for sent, expected in zip(ranks(lambda rank: counts_of_layers(oracle, True)[0], tp), plain, strict=True):
        assert sent == expected


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_wrong_calls_are_one_error_on_every_rank(ranks, tp, oracle):
    directory = oracle("mamba", torch.float64).directory

    def run(rank):
        def load(**more):
            return megatron_ssm.load(directory, dist.group.WORLD, sequence_parallel=True, **more)

        model = load()
        calls = {
            "takes no cache": lambda: model(torch.zeros(1, 3, dtype=torch.int64), cache=model.new_cache(1)),
            "sums in fp32": lambda: load(reduce="int8"),
            "without sequence_parallel": lambda: load(weights="int8"),
        }
        return {words: attempt(call) for words, call in calls.items()}

    for errors in ranks(run, tp):
        for words, error in errors.items():
            assert error is not None and error[0] == "ValueError" and words in error[1], (words, error)
