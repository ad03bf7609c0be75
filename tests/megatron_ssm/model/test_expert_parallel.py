"""Models whose experts are divided over ranks. Oracles: transformers, in float64 for gradients; formulas for bytes."""

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from gradients import assert_near, gradients, shifted, transformers_loss, whole

import megatron_ssm
from attention2d import Ring
from cases import DECODED, SEQ, groups_of, oracle
from commfabric.collectives import counted
from megatron_ssm.kernels.experts import Router
from megatron_ssm.layers.call import Call
from megatron_ssm.layers.operator import run as apply

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
        pytest.param("nemotron-experts", 2, 4, {}, marks=pytest.mark.full),
        ("qwen3-next-experts", 1, 2, {}),
        ("qwen3.5-1-expert-of-4", 1, 4, {}),
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


@pytest.mark.parametrize("ep", (2, pytest.param(4, marks=pytest.mark.full)))
def test_recomputation_sends_nothing_again(ranks, ep, oracle):
    oracle = oracle("nemotron-latent-experts-biases", torch.float64)

    def run(rank):
        sent = []
        for recompute in (False, True):
            world = dist.group.WORLD
            model = megatron_ssm.load(
                oracle.directory, dtype=torch.float64, data_group=world, expert_group=world, recompute=recompute
            )
            mine = rows_of(oracle.ids, rank, ep)
            model.loss(mine, mine).backward()
            sent.append(model.counter)
        return sent

    assert all(plain == recomputed for plain, recomputed in ranks(run, ep))


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


@dataclass(frozen=True)
class Watched(Router):
    """A router that keeps what tokens choose in `seen`; with on_one, all of them choose the first experts."""

    seen: list = field(default_factory=list)
    on_one: bool = False

    def route(self, logits, bias=None):
        weights, index = super().route(logits, bias)
        index = torch.arange(self.chosen).expand_as(index) if self.on_one else index
        self.seen.append(index)
        return weights, index


@pytest.mark.parametrize("name", ("qwen3.5-experts", "nemotron-latent-experts-biases"))
@pytest.mark.parametrize("ep", (2, 4))
@pytest.mark.parametrize("on_one", (False, True))
def test_bytes_of_a_dispatch(ranks, name, ep, on_one, oracle):
    """Rank r has 5r tokens. With on_one, only the first ranks' experts are chosen; the others' gradients are 0."""
    oracle = oracle(name)

    def run(rank):
        model = megatron_ssm.load(oracle.directory, expert_group=dist.group.WORLD)
        path, spec = next((path, spec) for path, spec in model.config.operators if spec.experts)
        operator, router = model.get_submodule(path), Watched(**vars(spec.router), on_one=on_one)
        operator.spec = replace(spec, router=router)
        x = torch.randn(1, 5 * rank, spec.hidden_size, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        y = apply(operator, x, Call())
        sent = [model.counter.sent]
        y.sum().backward()
        sent.append(model.counter.sent - sent[0])
        (index,), held = router.seen, spec.experts // ep
        out = torch.tensor([int((index // held == other).any(-1).sum()) for other in range(ep)])  # tokens to each rank
        out[rank] = 0
        there, back = int(out.sum()), int(counted.all_reduce(out, dist.group.WORLD)[rank])
        row, weights, ids = spec.size * 4, router.chosen * 4, router.chosen * 4
        forward = there * (row + weights + ids) + back * row + 8 * (ep - 1)
        found = [each.weight.grad for each in (operator.up, operator.down)]
        return sent, [forward, there * row + back * (row + weights)], [bool(gradient.any()) for gradient in found]

    results = ranks(run, ep)
    assert all(sent == expected for sent, expected, _ in results)
    if on_one:
        has_any = [first < router_chosen(oracle) for first in range(0, 8, 8 // ep)]
        assert [found for *_, found in results] == [[each, each] for each in has_any]


def router_chosen(oracle):
    """How many of 8 experts each token chooses."""
    return oracle.model.config.num_experts_per_tok
