"""Models whose sequences are spread over context ranks. Oracle: transformers' autograd in float64.

Sequences of 69 tokens do not divide over the ranks, so they are padded.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from chosen import full
from gradients import assert_near, gradients, shifted, transformers_loss, whole

import megatron_ssm
from attention2d import Attention2D, Ring, Tree
from cases import SCHEDULES, TOLERANCE, groups_of, oracle
from serving import attempt

__all__ = ["oracle"]

EXACT = 5e-11
NAMES = (
    "mamba", "mamba-biases-untied", "falcon", "mamba2-1-group", "mamba2-2-groups", "mamba2-dt-limit", "zamba-2-heads-biases",
    "zamba-4-heads-grouped-untied", "zamba2-1-group", "zamba2-2-groups-adapters-rope",
)  # fmt: skip
DEFAULT = (
    ("mamba-biases-untied", 1, 3, "ring"), full("mamba", 2, 2, "ring"), ("falcon", 2, 3, "contiguous"),
    ("mamba2-1-group", 2, 2, "ring"), full("mamba2-2-groups", 1, 4, "usp"), ("mamba2-dt-limit", 1, 1, "ring"),
    ("zamba-2-heads-biases", 2, 2, "all-gather"), ("zamba-4-heads-grouped-untied", 1, 2, "ulysses"),
    full("zamba2-1-group", 1, 4, "2d"), ("zamba2-2-groups-adapters-rope", 2, 4, "2d-overlapped"),
)  # fmt: skip


def check_loss_and_gradients(ranks, oracle, tp, cp, schedule):
    """Assert that the context ranks' loss, and the sum of their gradients, are those of the whole sequence.

    A fifth of the labels is ignored.
    """
    inputs, labels = shifted(oracle.ids, ignored=0.2)

    def run(rank):
        tensor, context = groups_of(rank, tp, cp)
        spread = SCHEDULES[schedule](context)
        model = megatron_ssm.load(oracle.directory, tensor, context=spread, dtype=torch.float64)
        loss = model.loss(spread.shard(inputs), spread.shard(labels), seq=inputs.shape[1])
        loss.backward()
        found = gradients(model)
        for gradient in found.values():
            dist.all_reduce(gradient, group=context)
        return loss.detach(), found

    results = ranks(run, tp * cp)
    loss, theirs = transformers_loss(oracle, ignored=0.2)
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    torch.testing.assert_close(results[0][0], loss, rtol=EXACT, atol=0)
    assert_near(whole(oracle, [shard for _, shard in results[:tp]]), theirs, EXACT)


@pytest.mark.parametrize("name, tp, cp, schedule", DEFAULT)
def test_loss_and_gradients_equal_those_of_one_rank(ranks, name, tp, cp, schedule, oracle):
    """Tensor-parallel times context-parallel ranks."""
    check_loss_and_gradients(ranks, oracle(name, torch.float64), tp, cp, schedule)


@pytest.mark.full
@pytest.mark.parametrize("tp, cp", ((1, 2), (1, 4)))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_with_every_schedule(ranks, name, tp, cp, schedule, oracle):
    """Zamba's four tensor-parallel heads or fewer do not divide over all cells; such schedules are refused."""
    oracle = oracle(name, torch.float64)
    heads = oracle.model.config.to_dict().get("num_key_value_heads")
    cells = {"ulysses": cp, "usp": 2}.get(schedule, 1)
    if name.startswith("zamba") and heads // tp % cells:
        pytest.skip(f"{heads} key/value heads on {tp} x {cells} ranks")
    check_loss_and_gradients(ranks, oracle, tp, cp, schedule)


def embedding_gradients(model, loss):
    """The gradients of the embeddings that the first block gets, (batch, tokens, hidden)."""
    found = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    return torch.autograd.grad(loss(), found)[0]


@pytest.mark.parametrize("cp, order", ((2, "zigzag"), (4, "zigzag"), (3, "contiguous")))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups", "zamba2-1-group"))
def test_gradients_of_the_tokens_before_each_block(ranks, name, cp, order, oracle):
    """The K-1 tokens before a block also get a gradient from the convolution of the next block, on another rank."""
    oracle = oracle(name, torch.float64)
    inputs, labels = (t[:, :48] for t in shifted(oracle.ids))
    one = megatron_ssm.load(oracle.directory, dtype=torch.float64)
    expected = embedding_gradients(one, lambda: one.loss(inputs, labels))
    block = 48 // (cp * (2 if order == "zigzag" else 1))
    near = [token for token in range(48 - block) if token % block >= block - one.config.history]

    def run(rank):
        spread = Ring(dist.group.WORLD, order)
        model = megatron_ssm.load(oracle.directory, context=spread, dtype=torch.float64)
        found = embedding_gradients(model, lambda: model.loss(spread.shard(inputs), spread.shard(labels)))
        return spread.unshard(found, 1, 48)

    for found in ranks(run, cp):
        for token in near:
            assert_near({"gradient": found[:, token]}, {"gradient": expected[:, token]}, 1e-12)


@pytest.mark.parametrize("name, cp", (("mamba", 2), ("zamba2-2-groups-adapters-rope", 2), ("mamba2-2-groups", 3)))
def test_a_batch_without_rows(ranks, name, cp, oracle):
    """Its loss and gradients are 0."""
    oracle = oracle(name, torch.float64)

    def run(rank):
        spread = Ring(dist.group.WORLD)
        model = megatron_ssm.load(oracle.directory, context=spread, dtype=torch.float64)
        part = spread.shard(oracle.ids[:0])
        loss = model.loss(part, part, seq=oracle.ids.shape[1])
        loss.backward()
        return loss.item(), any(gradient.any() for gradient in gradients(model).values())

    assert ranks(run, cp) == [(0, False)] * cp


@pytest.mark.parametrize("cp, schedule", ((2, "ring"), (4, "2d")))
@pytest.mark.parametrize("name", ("mamba", "zamba2-2-groups-adapters-rope"))
def test_logits_and_gradients_in_fp32(ranks, name, cp, schedule, oracle):
    """The C kernels, which compute in fp32, give those of one rank within rounding."""
    oracle = oracle(name)

    def run(rank):
        spread = SCHEDULES[schedule](dist.group.WORLD)
        model = megatron_ssm.load(oracle.directory, context=spread)
        ids, seq = spread.shard(oracle.ids), oracle.ids.shape[1]
        with torch.no_grad():
            logits = spread.unshard(model(ids), 1, seq)
        model.loss(ids, ids, seq=seq).backward()
        for gradient in (found := gradients(model)).values():
            dist.all_reduce(gradient)
        return logits, found

    one = megatron_ssm.load(oracle.directory)
    one.loss(oracle.ids, oracle.ids).backward()
    with torch.no_grad():
        expected = one(oracle.ids)
    for logits, found in ranks(run, cp):
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE[oracle.family])
        assert_near(found, gradients(one), 2e-5)


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_wrong_calls_are_one_error_on_every_rank(ranks, world, oracle):
    oracle = oracle("zamba2-1-group", torch.float64)

    def run(rank):
        spread = Ring(dist.group.WORLD)
        model = megatron_ssm.load(oracle.directory, context=spread, dtype=torch.float64)
        ids = spread.shard(oracle.ids[:, : 16 * world])
        wrong_id = ids.clone()
        wrong_id[0, 0] = 10_000
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        calls = {
            "token id 10000 is outside": lambda: model(wrong_id),
            "label 10000 is outside": lambda: model.loss(ids, wrong_id),
            "attention_mask has zeros": lambda: model(ids, mask),
            "make blocks of 2, shorter than the convolution's halo of 3": lambda: model(ids[:, :4]),
            "seq=7: expected": lambda: model.loss(ids, ids, seq=7),
            "have no gradient": lambda: model(ids, cache=model.new_cache(2)),
            "logits_to_keep=-1 must be": lambda: model(ids, logits_to_keep=-1),
            "token ids must be whole numbers": lambda: model(ids.double()),
        }
        return {words: attempt(call) for words, call in calls.items()}, model(ids).isfinite().all()

    for errors, goes_on in ranks(run, world):
        assert goes_on
        for words, error in errors.items():
            assert error is not None and error[0] == "ValueError" and words in error[1], (words, error)


@pytest.mark.parametrize("world", (4, pytest.param(6, marks=pytest.mark.full)))
def test_context_ranks_hold_the_same_part_of_the_model(ranks, world, oracle):
    """Neighbours are tensor-parallel ranks; the last context group has the two parts the other way round."""
    directory = oracle("mamba2-2-groups", torch.float64).directory
    tensor = [[first, first + 1] for first in range(0, world, 2)]
    context = [[*range(0, world - 2, 2), world - 1], [*range(1, world - 2, 2), world - 2]]

    def run(rank):
        mine = [
            group for ranks in (tensor, context) for each in ranks if (group := dist.new_group(each)) and rank in each
        ]
        return attempt(megatron_ssm.load, directory, mine[0], context=Ring(mine[1]))

    for error in ranks(run, world):
        assert error[0] == "ValueError" and "part 0 of the model" in error[1]


@pytest.mark.parametrize("cp", (2, pytest.param(3, marks=pytest.mark.full)))
def test_a_copy_of_a_model(ranks, cp, oracle):
    """It computes and sends the same, with activations recomputed too."""
    oracle = oracle("zamba2-1-group", torch.float64)

    def run(rank):
        spread = Ring(dist.group.WORLD)
        model = megatron_ssm.load(oracle.directory, context=spread, dtype=torch.float64, recompute=True)
        ids, results = spread.shard(oracle.ids[:, : 16 * cp]), []
        for each in (model, copy.deepcopy(model)):
            before = each.counter.sent
            loss = each.loss(ids, ids)
            loss.backward()
            results.append((loss.item(), each.counter.sent - before))
        return results

    for of_model, of_copy in ranks(run, cp):
        assert of_model == of_copy


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_schedules_that_do_not_fit_are_refused_by_load(ranks, world, oracle):
    directory = oracle("zamba2-1-group", torch.float64).directory

    def run(rank):
        group = dist.group.WORLD
        load, others = functools.partial(attempt, megatron_ssm.load, directory), Attention2D(group, 1, world)
        return {
            "expected a schedule of attention2d": load(context=Tree(group)),
            "and tensor-parallel ranks": load(group, context=Ring(group)),
            "and data-parallel ranks": load(context=Ring(group), data_group=group),
            "not in cyclic order": load(context=Ring(group, "cyclic")),
            "rank 1 got context=Attention2D(": load(context=others if rank else Ring(group)),
        }

    for errors in ranks(run, world):
        for words, error in errors.items():
            assert error is not None and error[0] == "ValueError" and words in error[1], (words, error)
