"""Models whose scans exchange channels between context ranks, and the choice of it. Oracles: transformers, formulas."""

import copy

import pytest
import torch
import torch.distributed as dist
from chosen import by_default, full
from gradients import assert_near, gradients, shifted, transformers_loss, whole

import megatron_ssm
from attention2d import Ring
from cases import SCHEDULES, groups_of, oracle
from commfabric.fabric.curve import Curve
from commir import Mesh, Schedule, verify
from commir.programs import gated_delta, selective_scan
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import place
from megatron_ssm import families
from megatron_ssm.model.context import check_schedule, plan_to_verify, scan_plan
from serving import attempt, checkpoint
from sparsefusion import Fabric

__all__ = ["oracle"]

EXACT = 5e-11


@pytest.mark.parametrize("name, tp, cp, schedule", [
    ("mamba", 1, 2, "ring"), full("mamba-biases-untied", 1, 4, "ring"), ("falcon", 2, 2, "contiguous"),
    full("mamba2-1-group", 1, 4, "ring"), ("mamba2-2-groups", 2, 3, "ring"), full("zamba2-1-group", 1, 4, "2d"),
    full("zamba-4-heads-grouped-untied", 1, 3, "ring"),
    pytest.param("mamba2-2-groups", 1, 2, "ring", marks=pytest.mark.full),
    pytest.param("zamba-2-heads-biases", 1, 2, "ring", marks=pytest.mark.full),
    ("zamba2-2-groups-adapters-rope", 1, 2, "2d"),
])  # fmt: skip
def test_both_forms_equal_one_rank(ranks, name, tp, cp, schedule, oracle):
    """Logits, loss and gradients of sequences of 69 tokens, which are padded."""
    oracle = oracle(name, torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.2)

    def run(rank):
        tensor, context = groups_of(rank, tp, cp)
        spread = SCHEDULES[schedule](context)
        options = dict(context=spread, dtype=torch.float64)
        forms = [
            megatron_ssm.load(oracle.directory, tensor, **options, exchange_channels=each) for each in (True, False)
        ]
        logits = [spread.unshard(form(spread.shard(inputs), seq=69), 1, 69).detach() for form in forms]
        loss = forms[0].loss(spread.shard(inputs), spread.shard(labels), seq=69)
        loss.backward()
        found = gradients(forms[0])
        for gradient in found.values():
            dist.all_reduce(gradient, group=context)
        return loss.detach(), found, logits, forms[0].counter.sent != forms[1].counter.sent

    results = ranks(run, tp * cp)
    loss, theirs = transformers_loss(oracle, ignored=0.2)
    expected = oracle.logits(inputs)
    for ours, _, (exchanged, passed), is_other in results:
        assert is_other
        torch.testing.assert_close(ours, loss, rtol=EXACT, atol=0)
        torch.testing.assert_close(exchanged, passed, rtol=0, atol=1e-10)
        torch.testing.assert_close(exchanged, expected, rtol=0, atol=oracle.tolerance)
    assert_near(whole(oracle, [found for _, found, *_ in results[:tp]]), theirs, EXACT)


@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_copies_and_recomputation_send_and_compute_the_same(ranks, name, cp, oracle):
    oracle = oracle(name, torch.float64)

    def run(rank):
        spread, found = Ring(dist.group.WORLD), []
        for recompute in (False, True):
            options = dict(dtype=torch.float64, recompute=recompute, exchange_channels=True)
            model = copy.deepcopy(megatron_ssm.load(oracle.directory, context=spread, **options))
            before = model.counter.sent
            ids = spread.shard(oracle.ids[:, : 16 * cp])
            model.loss(ids, ids).backward()
            found.append((model.counter.sent - before, gradients(model)))
        return found

    for (sent, first), (sent_again, second) in ranks(run, cp):
        assert sent == sent_again > 0
        assert_near(second, first, 1e-12)


@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_autocast(ranks, name, cp, oracle):
    """In bf16, in which x and the step sizes may have different dtypes, both forms agree within rounding."""
    oracle = oracle(name, torch.float32)
    ids = oracle.ids[:, : 16 * cp]
    expected = megatron_ssm.load(oracle.directory, dtype=torch.float64).loss(ids, ids)

    def run(rank):
        spread, found = Ring(dist.group.WORLD), []
        for exchange in (True, False):
            model = megatron_ssm.load(oracle.directory, context=spread, exchange_channels=exchange)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss(spread.shard(ids), spread.shard(ids))
            loss.backward()
            for gradient in (mine := gradients(model)).values():
                dist.all_reduce(gradient)
            found.append((loss.detach(), mine))
        return found

    for (exchanged, ours), (passed, theirs) in ranks(run, cp):
        torch.testing.assert_close(exchanged.double(), expected, rtol=1e-2, atol=0)
        torch.testing.assert_close(exchanged, passed, rtol=2e-3, atol=0)
        assert_near(ours, theirs, 0.1)


@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("family", ("mamba", "zamba2"))
def test_a_cache_passes_states(ranks, family, cp):
    directory, ids = checkpoint(family), torch.arange(40).view(1, -1) % 61

    def run(rank):
        options = dict(dtype=torch.float64, exchange_channels=True)
        model = megatron_ssm.load(directory, context=Ring(dist.group.WORLD), **options)
        return megatron_ssm.generate(model, ids, max_new_tokens=4)

    expected = megatron_ssm.generate(megatron_ssm.load(directory, dtype=torch.float64), ids, max_new_tokens=4)
    assert all(torch.equal(tokens, expected) for tokens in ranks(run, cp))


@pytest.mark.parametrize("world", (3, pytest.param(4, marks=pytest.mark.full)))
def test_wrong_requests_are_one_error_on_every_rank(ranks, world, oracle):
    directory = oracle("mamba2-1-group", torch.float64).directory

    def run(rank):
        spread = Ring(dist.group.WORLD)
        raw = families.read(directory).raw
        config = families.from_dict(raw | dict(num_heads=2, head_dim=raw["expand"] * raw["hidden_size"] // 2))
        return (
            attempt(megatron_ssm.load, directory, context=spread, exchange_channels=rank == 0),
            attempt(check_schedule, spread, config, None, exchange_channels=True),
        )

    for differ, too_few in ranks(run, world):
        assert differ is not None and "rank 1 got exchange_channels=False, rank 0 got " in differ[1], differ
        assert too_few == ("ValueError", f"exchange_channels=True: 2 heads are too few for {world} context ranks")


# The choice


def forms(config, ranks, seq, batch):
    """Bytes that a rank sends in fp32, by the formulas of docs/concepts/passing-states.md: (states, channels or None)."""
    mixer = config.layers[0][0].operators[0].spec
    if is_mapped := hasattr(mixer, "key_dim"):
        heads, groups, n = mixer.value_heads, mixer.key_heads, mixer.key_dim
        channels, numbers, d = heads * mixer.value_dim, 2 * heads, batch * heads * n * n
    else:
        channels, n = mixer.channels, mixer.state_size
        heads = mixer.heads if hasattr(mixer, "groups") else channels
        groups = mixer.groups if hasattr(mixer, "groups") else mixer.heads
        numbers, d = heads, batch * heads
    s, tokens = batch * channels * n, batch * (2 * ranks * -(-seq // (2 * ranks))) // ranks
    is_sliced = (ranks > 2 or is_mapped) and heads % ranks == 0
    states = (ranks - 1) * (4 * s + 2 * d) // ranks if is_sliced else 2 * (ranks - 1) * (s + d)
    if heads % ranks or (groups > 1 and groups % ranks):
        return 4 * states, None
    shared = 2 * n * groups * tokens * (ranks - 1) // (1 if groups == 1 else ranks)
    return 4 * states, 4 * ((2 * channels + numbers) * tokens * (ranks - 1) // ranks + shared)


@pytest.mark.parametrize("world", by_default((2, 3, 4), (2, 3, 4, 5)))
def test_a_search_takes_the_form_that_sends_less(ranks, world):
    """In every family; sizes that do not divide over 3 or 5 ranks pass states."""
    names = "mamba", "mamba2", "zamba", "zamba2", "qwen3_5_text"
    configs = {family: families.read(checkpoint(family)) for family in names}
    lengths = (8 * world, 64 * world + 1)

    def run(rank):
        found = {}
        for family, config in configs.items():
            for seq in lengths:
                plan, exchanges = scan_plan(dist.group.WORLD, config, 1, seq, 2)
                found[family, seq] = exchanges, plan.bytes_per_rank, plan.hash
        return found

    results = ranks(run, world)
    assert all(found == results[0] for found in results)
    for (family, seq), (exchanges, sent, _) in results[0].items():
        states, channels = forms(configs[family], world, seq, 2)
        assert sent == (channels if exchanges else states), (family, seq)
        assert exchanges == (channels is not None and channels < states), (family, seq)
    assert {exchanges for exchanges, *_ in results[0].values()} == ({True, False} if world in (2, 4) else {False})


@pytest.mark.parametrize("make, sizes", (
    (selective_scan, {"dim": 64}), (selective_scan, {"dim": 64, "groups": 2}), (selective_scan, {"heads": 5120}),
    (gated_delta, {}), (gated_delta, {"groups": 2}),
), ids=lambda each: getattr(each, "__name__", str(each)))  # fmt: skip
@pytest.mark.parametrize("count", (17, 34, 64, 97, 128, 300))
def test_a_large_plan_is_verified_with_the_same_messages(count, make, sizes):
    """As it is, or on at least three ranks, which send what the large number does."""
    program = make(1, 2 * count, **{"heads": 2 * count} | sizes)
    for axis in ("seq", "heads"):
        try:
            plan = place(Schedule(program, Mesh(rank=count)), rank=axis).lower()
        except IllegalSchedule:
            continue
        verified = plan_to_verify(plan)
        assert verified is plan if count <= 64 else verified.mesh.ranks in range(3, 17)
        kinds = [[type(step) for step in each.steps] for each in (plan, verified)]
        assert kinds[0] == kinds[1]
        if count != 64:  # which takes long
            verify(verified)


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_the_choice_follows_the_fabric(ranks, world):
    """Exchanging channels sends fewer bytes here, in more messages: it is best behind slow links of low latency."""
    config, fabrics = families.read(checkpoint("mamba2")), {}
    for name, latency, rate in (("slow", 1e-6, 1e6), ("far", 1e-2, 1e10)):
        points = [(nbytes, latency + nbytes / rate) for nbytes in (1e3, 1e6)]
        fabrics[name] = Fabric((Curve.fit("p2p", world, points),))

    def run(rank):
        plans = {name: scan_plan(dist.group.WORLD, config, 1, 8 * world, 1, each) for name, each in fabrics.items()}
        return {name: (exchanges, plan.hash, plan.explain()) for name, (plan, exchanges) in plans.items()}

    results = ranks(run, world)
    assert all(found == results[0] for found in results)
    assert [exchanges for exchanges, *_ in results[0].values()] == [True, False]


@pytest.mark.parametrize("cp", (2, 4))
@pytest.mark.parametrize("name", ("mamba", "mamba2-1-group", "qwen3.5-3-values-of-a-key"))
def test_layers_send_what_the_plans_say(ranks, name, cp, oracle):
    """The two forms of a model differ by the bytes by which the plans of its layers differ."""
    oracle = oracle(name, torch.float32)
    config, seq = families.read(oracle.directory), 8 * cp

    def run(rank):
        spread, sent = Ring(dist.group.WORLD), []
        for exchange in (True, False):
            model = megatron_ssm.load(oracle.directory, context=spread, exchange_channels=exchange)
            before = model.counter.sent
            with torch.no_grad():
                model(spread.shard(oracle.ids[:, :seq]))
            sent.append(model.counter.sent - before)
        return sent, scan_plan(dist.group.WORLD, config, 1, seq, len(oracle.ids))

    states, channels = forms(config, cp, seq, len(oracle.ids))
    step_sizes = 0 if cp > 2 or config.recurrences[0].is_mapped else 4 * len(oracle.ids) * config.recurrences[0].heads
    for (exchanging, passing), (plan, exchanges) in ranks(run, cp):
        assert exchanges and plan.bytes_per_rank == channels
        # On two ranks the plan gathers step sizes, of which the model sends half.
        assert passing - exchanging == len(config.recurrences) * (states - step_sizes - channels)
