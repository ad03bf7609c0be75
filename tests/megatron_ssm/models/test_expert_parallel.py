"""Models whose experts are divided over ranks. Oracles: transformers, in float64 for gradients; formulas for bytes."""

import pytest
import torch
import torch.distributed as dist
from gradients import assert_near, gradients, shifted, transformers_loss, whole

import megatron_ssm
from attention2d import Ring
from cases import DECODED, SEQ, groups_of, oracle
from megatron_ssm.operators.experts import ExpertsSpec

__all__ = ["oracle"]

EXACT = 5e-11
NAMES = (
    "qwen3.5-experts", "qwen3-next-experts", "nemotron-experts", "nemotron-latent-experts-biases", "granite-experts",
    "jamba-experts",
)  # fmt: skip


def rows_of(ids, rank, ranks):
    """This rank's rows of a batch; the last ranks may have none."""
    each = -(-len(ids) // ranks)
    return ids[rank * each : (rank + 1) * each]


def summed_over(group, model):
    """Our gradients, of which those of what all ranks of a group hold are summed over it."""
    found = gradients(model)
    for name, parameter in model.named_parameters():
        if name in found and parameter.allreduce:
            dist.all_reduce(found[name], group=group)
    return found


@pytest.mark.parametrize(
    "name, tp, ep, more",
    [
        ("qwen3.5-experts", 1, 2, {}),
        ("qwen3.5-experts", 2, 2, dict(recompute=True)),
        ("nemotron-latent-experts-biases", 2, 2, dict(sequence_parallel=True, recompute=True)),
        ("jamba-experts", 1, 4, {}),  # two of the ranks have no tokens
        ("granite-experts", 1, 2, dict(recompute=True)),
        ("nemotron-experts", 2, 4, {}),
        ("qwen3-next-experts", 1, 2, {}),
    ],
)
def test_loss_and_gradients_of_ranks_with_other_sequences(ranks, name, tp, ep, more, oracle):
    oracle = oracle(name, torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.2)

    def run(rank):
        tensor, others = groups_of(rank, tp, ep)
        model = megatron_ssm.load(
            oracle.directory, tensor, dtype=torch.float64, data_group=others, expert_group=others, **more
        )
        mine = [rows_of(each, others.rank(), ep) for each in (inputs, labels)]
        loss = model.loss(*mine)
        loss.backward()
        return loss.detach(), summed_over(others, model)

    results = ranks(run, tp * ep)
    loss, theirs = transformers_loss(oracle, ignored=0.2)
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    torch.testing.assert_close(results[0][0], loss, rtol=EXACT, atol=0)
    assert_near(whole(oracle, [shard for _, shard in results], ep), theirs, EXACT)


@pytest.mark.parametrize("name, tp, ep", [("qwen3.5-experts", 1, 2), ("nemotron-experts", 2, 2)])
def test_loss_and_gradients_of_ranks_that_share_sequences(ranks, name, tp, ep, oracle):
    oracle = oracle(name, torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.2)

    def run(rank):
        tensor, others = groups_of(rank, tp, ep)
        spread = Ring(others)
        model = megatron_ssm.load(
            oracle.directory, tensor, context=spread, dtype=torch.float64, expert_group=others, recompute=True
        )
        loss = model.loss(spread.shard(inputs), spread.shard(labels), seq=inputs.shape[1])
        loss.backward()
        return summed_over(others, model)

    assert_near(whole(oracle, ranks(run, tp * ep), ep), transformers_loss(oracle, ignored=0.2)[1], EXACT)


@pytest.mark.parametrize("tp, ep", [(1, 2), (2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_decoding(ranks, tp, ep, name, oracle):
    """All ranks read the same tokens."""
    oracle = oracle(name)
    if oracle.changes.get("num_experts", 8) % ep or oracle.changes.get("num_local_experts", 8) % ep:
        pytest.skip("the experts do not divide over the ranks")

    @torch.no_grad()
    def run(rank):
        tensor, others = groups_of(rank, tp, ep)
        model = megatron_ssm.load(oracle.directory, tensor, expert_group=others)
        cache = model.new_cache(2)
        whole, prompt = model(oracle.ids), model(oracle.ids[:, :-DECODED], cache=cache)
        steps = [model(oracle.ids[:, i : i + 1], cache=cache) for i in range(SEQ - DECODED, SEQ)]
        generated = megatron_ssm.generate(model, oracle.ids[:, :9], max_new_tokens=8, temperature=1.0)
        return whole, prompt, torch.cat(steps, dim=1), model.generate(oracle.ids[:, :9], max_new_tokens=8), generated

    results = ranks(run, tp * ep)
    expected = oracle.whole, oracle.whole[:, :-DECODED], oracle.decoded
    for result in results:
        for ours, theirs in zip(result, expected, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=oracle.tolerance)
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    greedy = oracle.model.generate(oracle.ids[:, :9], max_new_tokens=8, do_sample=False)
    assert torch.equal(results[0][3], greedy)


def reached(spec, model, index, rank, ep):
    """How many pairs of a token and another rank with an expert that it chose there are; index: (tokens, chosen)."""
    owners = [set(each) for each in (index // (spec.experts // ep)).tolist()]
    return sum(len(each - {rank}) for each in owners)


@pytest.mark.parametrize("name, wide", [("qwen3.5-experts", 4), ("nemotron-latent-experts-biases", 4)])
@pytest.mark.parametrize("ep", (2, 4))
@pytest.mark.parametrize("on_one", (False, True))
def test_bytes_of_a_dispatch(ranks, name, wide, ep, on_one, oracle):
    """With on_one, all tokens choose expert 0 first, and one rank's experts get no tokens of it."""
    oracle = oracle(name)

    def run(rank):
        model = megatron_ssm.load(oracle.directory, expert_group=dist.group.WORLD)
        layer = next(each for each in model.layers if any(isinstance(part.spec, ExpertsSpec)
                     for unit in each.units for part in unit.operators))  # fmt: skip
        part = next(p for unit in layer.units for p in unit.operators if isinstance(p.spec, ExpertsSpec))
        operator, spec, chosen = getattr(layer, part.name), part.spec, part.spec.router.chosen
        x = torch.randn(1, 5 * rank, spec.hidden_size, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        seen = []
        route = type(spec.router).route

        def routed(router, logits, bias=None):
            weights, index = route(router, logits, bias)
            index = torch.arange(chosen).expand_as(index) if on_one else index
            seen.append(index)
            return weights, index

        type(spec.router).route = routed
        sent = []
        for step in (lambda: seen.append(megatron_run(operator, x)), lambda: seen.pop().sum().backward()):
            model.counter.reset()
            step()
            sent.append(model.counter.sent)
        pairs = reached(spec, model, seen[0], rank, ep)
        arriving = torch.zeros(ep, dtype=torch.int64)
        for other in range(ep):
            owned = (seen[0] // (spec.experts // ep) == other).any(-1).sum()
            arriving[other] = owned
        arriving[rank] = 0
        dist.all_reduce(arriving)
        back = int(arriving[rank])
        forward = pairs * (spec.size * 4 + chosen * (4 + wide)) + back * spec.size * 4 + 8 * (ep - 1)
        backward = pairs * spec.size * 4 + back * (spec.size * 4 + chosen * wide)
        have = [each.weight.grad for each in (operator.up, operator.down)]
        return sent, [forward, backward], all(grad is not None for grad in have), bool(have[0].any())

    results = ranks(run, ep)
    assert all(sent == expected and is_there for sent, expected, is_there, _ in results)
    if on_one:  # the first ranks have all experts that are chosen
        assert results[0][3] and not results[-1][3]


def megatron_run(operator, x):
    """The output of one operator alone."""
    from megatron_ssm.operators.call import Call
    from megatron_ssm.operators.operator import run

    return run(operator, x, Call())
