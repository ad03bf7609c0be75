"""Loss and gradients. Oracle: transformers' autograd, entirely in float64, or in fp32.

In float64, any number of ranks is within 5e-11 of transformers, so any two are within 1e-10 of each other.
"""

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from gradients import (
    assert_near,
    cross_entropy,
    errors,
    gradients,
    shifted,
    transformers_gradients,
    transformers_loss,
    whole,
)

import megatron_ssm
from cases import MARKED, oracle
from hf import precisely
from megatron_ssm.model import loss as loss_module

__all__ = ["oracle"]

EXACT, FP32 = 5e-11, 5e-6
FEW = (
    "mamba-biases-untied", "mamba2-1-group-biases-tied", "mamba2-2-groups-biases-tied",
    "zamba2-4-groups-biases-adapters-untied",
)  # fmt: skip


def run_loss(oracle, inputs, labels, group=None, dtype=torch.float64, **keywords):
    """The loss of our model, and this rank's gradients."""
    model = megatron_ssm.load(oracle.directory, group, dtype=dtype)
    loss = model.loss(inputs, labels, **keywords)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("tp", (pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", MARKED)
def test_every_gradient_of_the_loss(ranks, tp, name, oracle):
    """A fifth of the labels is ignored."""
    oracle = oracle(name, torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.2)
    results = ranks(lambda rank: run_loss(oracle, inputs, labels, dist.group.WORLD), tp)
    loss, theirs = transformers_loss(oracle, ignored=0.2)
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    torch.testing.assert_close(results[0][0], loss, rtol=EXACT, atol=0)
    assert_near(whole(oracle, [shard for _, shard in results]), theirs, EXACT)


@pytest.mark.parametrize("tp", (1, 2))
def test_a_sequence_longer_than_what_is_computed_at_once(ranks, tp, oracle, monkeypatch):
    oracle = oracle("mamba-biases-untied", torch.float64)
    inputs, labels = shifted(oracle.ids)
    whole_at_once = ranks(lambda rank: run_loss(oracle, inputs, labels, dist.group.WORLD), tp)
    monkeypatch.setattr(loss_module, "POSITIONS", 7)
    for (mine, found), (theirs, expected) in zip(
        ranks(lambda rank: run_loss(oracle, inputs, labels, dist.group.WORLD), tp), whole_at_once, strict=True
    ):
        assert torch.equal(mine, theirs) and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("sequence_parallel", (False, True))
@pytest.mark.parametrize("name", ("qwen3.5-1-key-head-tied-biases", "granite-1-group"))
@pytest.mark.parametrize("tp", (1, 2))
def test_logits_in_pieces(ranks, tp, name, sequence_parallel, oracle, monkeypatch):
    """Of a large vocabulary, a tied or a scaled one; 69 tokens do not divide over the ranks or the pieces."""
    monkeypatch.setattr(loss_module, "LARGE_LOGITS", 0)
    monkeypatch.setattr(loss_module, "LOGITS_PIECE", 13 * 61)
    oracle = oracle(name, torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.2)

    def run(rank):
        group = dist.group.WORLD
        model = megatron_ssm.load(
            oracle.directory, group, dtype=torch.float64, sequence_parallel=sequence_parallel and tp > 1
        )
        loss = model.loss(inputs, labels)
        loss.backward()
        return loss.detach(), gradients(model)

    results = ranks(run, tp)
    loss, theirs = transformers_loss(oracle, ignored=0.2)
    torch.testing.assert_close(results[0][0], loss, rtol=EXACT, atol=0)
    assert_near(whole(oracle, [shard for _, shard in results]), theirs, EXACT)


@pytest.mark.parametrize("tp", by_default((1, 2), (1, 2, 4)))
@pytest.mark.parametrize("name", FEW)
def test_every_gradient_in_fp32(ranks, tp, name, oracle):
    """Our largest error against float64 is about as small as that of transformers in fp32."""
    exact = transformers_loss(oracle(name, torch.float64))[1]
    oracle = oracle(name)
    inputs, labels = shifted(oracle.ids)
    results = ranks(lambda rank: run_loss(oracle, inputs, labels, dist.group.WORLD, torch.float32), tp)
    found = whole(oracle, [shard for _, shard in results])
    ours, theirs = (max(errors(g, exact).values()) for g in (found, transformers_loss(oracle)[1]))
    assert ours <= 2.5 * theirs


@pytest.mark.parametrize("tp", (1, 2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", FEW)
def test_gradients_through_whole_logits(ranks, tp, name, oracle):
    """model(ids) gathers the logits on every rank, and each rank computes the same loss from them."""
    oracle = oracle(name, torch.float64)
    shape = (*oracle.ids.shape, oracle.vocab)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD, dtype=torch.float64)
        (model(oracle.ids) * weights).sum().backward()
        return gradients(model)

    found = whole(oracle, ranks(run, tp))
    oracle.model.zero_grad(set_to_none=True)
    with precisely(oracle.dtype):
        (oracle.model(oracle.ids, use_cache=False).logits * weights).sum().backward()
    assert_near(found, transformers_gradients(oracle.model), EXACT)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups", "zamba-2-heads-biases", "zamba2-1-group"))
def test_loss_is_that_of_transformers(ranks, tp, name, oracle):
    """transformers shifts the labels itself; ours are already shifted."""
    oracle = oracle(name)
    with torch.no_grad():
        expected = oracle.model(oracle.ids, labels=oracle.ids, use_cache=False).loss
    for loss, _ in ranks(lambda rank: run_loss(oracle, *shifted(oracle.ids), dist.group.WORLD, torch.float32), tp):
        torch.testing.assert_close(loss, expected, rtol=FP32, atol=0)


@pytest.mark.parametrize("tp", by_default((1, 2), (1, 2, 4)))
def test_ignored_labels(ranks, tp, oracle):
    """The ignored value may be an id. If all labels are ignored, the loss is 0, not NaN."""
    oracle = oracle("mamba2-2-groups", torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.5, value=7)

    def run(rank):
        seven, _ = run_loss(oracle, inputs, labels, dist.group.WORLD, ignore_index=7)
        minus_one, _ = run_loss(oracle, inputs, labels.masked_fill(labels == 7, -1), dist.group.WORLD, ignore_index=-1)
        return seven, minus_one, *run_loss(oracle, inputs, torch.full_like(labels, -100), dist.group.WORLD)

    with torch.no_grad():
        expected = cross_entropy(oracle.logits(inputs), labels, ignore_index=7)
    for seven, minus_one, none, none_gradients in ranks(run, tp):
        torch.testing.assert_close(seven, expected, rtol=EXACT, atol=0)
        assert torch.equal(seven, minus_one)
        assert none == 0 and all(not grad.any() for grad in none_gradients.values())


@pytest.mark.parametrize("tp", (1, 2, pytest.param(4, marks=pytest.mark.full)))
def test_labels_outside_the_vocabulary(ranks, tp, oracle):
    oracle = oracle("mamba")
    inputs, labels = shifted(oracle.ids)
    labels[1, 3] = oracle.vocab

    def run(rank):
        with pytest.raises(ValueError) as caught:
            run_loss(oracle, inputs, labels, dist.group.WORLD)
        return str(caught.value)

    assert ranks(run, tp) == ["label 61 is outside the vocabulary of 61"] * tp


@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 2), (1, 3)])
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups", "zamba2-2-groups-adapters-rope"))
def test_loss_over_data_parallel_ranks(ranks, tp, dp, name, oracle):
    """Replicas have different rows and numbers of ignored labels, but the loss and gradients are those of one batch."""
    ids = torch.randint(61, (dp, 30), generator=torch.Generator().manual_seed(4))
    rows = [shifted(ids[i : i + 1], ignored=0.4 * i, seed=i) for i in range(dp)]
    counts = torch.cat([labels for _, labels in rows]).ne(-100).sum(1)
    assert counts[0] != counts[-1] > 0
    check_replicas(ranks, oracle(name, torch.float64), tp, rows)


@pytest.mark.parametrize("name, tp", [(name, 1) for name in (*FEW, "zamba-2-heads-biases", "falcon")] + [(FEW[2], 2)])
def test_a_replica_without_rows(ranks, name, tp, oracle):
    """It adds nothing to the loss and the gradients, and sends what the others send."""
    ids = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(4))
    check_replicas(ranks, oracle(name, torch.float64), tp, [shifted(ids), shifted(ids[:0])])


def check_replicas(ranks, oracle, tp, rows):
    """Assert that the loss, and the replicas' sum of gradients, are those of one rank.

    rows: each replica's (inputs, labels).
    """
    dp = len(rows)
    inputs, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))

    def run(rank):
        tensor = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)][rank // tp]
        data = [dist.new_group(range(i, tp * dp, tp)) for i in range(tp)][rank % tp]
        model = megatron_ssm.load(oracle.directory, tensor, dtype=torch.float64, data_group=data)
        loss = model.loss(*rows[rank // tp])
        loss.backward()
        for grad in (found := gradients(model)).values():
            dist.all_reduce(grad, group=data)
        return loss.detach(), found

    expected, alone = run_loss(oracle, inputs, labels)
    results = ranks(run, tp * dp)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected, rtol=2 * EXACT, atol=0)
        assert torch.equal(loss, results[0][0])
    for replica in range(dp):
        shards = [shard for _, shard in results[replica * tp : (replica + 1) * tp]]
        assert_near(whole(oracle, shards), whole(oracle, [alone]), 2 * EXACT)


@pytest.mark.parametrize("shape", [(2, 1), (1, 5), (2, 4), (10,)], ids=str)
def test_labels_of_another_shape(shape, oracle):
    """Some of these shapes would be broadcast and give a wrong loss."""
    model = megatron_ssm.load(oracle(FEW[0]).directory)
    with pytest.raises(ValueError, match=r"labels \(.*\) are not shaped like input_ids \(2, 5\)"):
        model.loss(torch.ones(2, 5, dtype=torch.int64), torch.ones(shape, dtype=torch.int64))
