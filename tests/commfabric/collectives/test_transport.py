"""Models whose ranks communicate in shared memory; oracle: the same models over gloo, whose counts test_counts.py tests."""

import functools
import re
from collections import Counter
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

import megatron_ssm
from commfabric.collectives import shared_memory
from commfabric.reduction import quantized
from hf import save_hf
from megatron_ssm.layers.tape_run import BoundCall
from shared import die, error_of

HIDDEN, VOCAB, LAYERS = 32, 61, 2
MODELS = {  # name: (family, changes)
    "mamba": ("mamba", dict(num_hidden_layers=LAYERS)),
    "mamba2-1-group": ("mamba2", dict(num_hidden_layers=LAYERS, n_groups=1)),
    "mamba2-2-groups": ("mamba2", dict(num_hidden_layers=LAYERS, n_groups=2)),
    "zamba-2-heads": ("zamba", dict(n_mamba_heads=2)),  # on 4 ranks, each head is split over a subgroup of 2 ranks
}
worlds = pytest.mark.parametrize("tp", (2, 4))
IDS = torch.arange(14).view(2, 7) % VOCAB

pytestmark = pytest.mark.skipif(not shared_memory.kernels(), reason=f"no C library: {shared_memory.kernels().why}")


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """directory_of(name): the checkpoint of one of MODELS, created once."""

    @functools.cache
    def create(name):
        (family, changes), directory = MODELS[name], tmp_path_factory.mktemp(name)
        save_hf(directory, family, hidden_size=HIDDEN, vocab_size=VOCAB, **changes)
        return directory

    return create


def results_and_counts(model):
    """([loss, gradients, logits of a prompt and of one decoded token, greedy tokens], the counts of communication)."""
    loss = model.loss(IDS, IDS)
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    with torch.no_grad():
        cache = model.new_cache(2, 20)
        logits = torch.cat([model(IDS, cache=cache), model(IDS[:, :1], cache=cache)], dim=1)
    tokens = megatron_ssm.generate(model, IDS, max_new_tokens=5)
    return [loss.detach(), gradients, logits, tokens], (model.counter.calls, model.counter.nbytes, model.counter.sent)


@worlds
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", by_default((torch.float64,), (torch.float64, torch.bfloat16)), ids=str)
def test_shared_memory_gives_what_gloo_gives(ranks, tp, name, dtype, directory_of):
    directory = directory_of(name)

    def run(rank):
        load = partial(megatron_ssm.load, directory, dist.group.WORLD, dtype=dtype)
        shared, gloo = load(), load(shared_memory=False)
        assert (shared.ranks.transport, gloo.ranks.transport) == (
            "shared memory",
            "gloo (rank 0: shared_memory=False)",
        )
        assert all(each.memory is not None or each.size == 1 for each in shared.place.all_ranks)
        (ours, counted), (theirs, counted_there) = results_and_counts(shared), results_and_counts(gloo)
        assert counted == counted_there and sum(counted[0].values()) > 0
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-10 if dtype == torch.float64 else 0.05)
        return ours[:1] + ours[2:]

    first, *others = ranks(run, tp)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@worlds
def test_auto_is_exact_in_shared_memory(ranks, tp, directory_of, monkeypatch):
    """It measures nothing. A caller's own function is called for the sums; exact sums still go through shared memory."""
    directory = directory_of("mamba2-1-group")
    monkeypatch.setattr(quantized, "measure", None)

    @torch.no_grad()
    def run(rank):
        load = partial(megatron_ssm.load, directory, dist.group.WORLD)
        exact, auto = load(), load(reduce="auto")
        assert torch.equal(exact(IDS), auto(IDS))
        shapes = []
        custom = load(
            reduce=lambda tensor, group: shapes.append(tensor.shape) or exact.ranks.all_reduce_exact(tensor, group)
        )
        torch.testing.assert_close(custom(IDS), exact(IDS), rtol=0, atol=1e-5)
        assert shapes == [(2, 7, HIDDEN)] * LAYERS
        return custom.counter.calls - Counter({"all_gather": 1})

    assert ranks(run, tp) == [Counter({"all_reduce": 1 + LAYERS})] * tp  # for the embedding and for each gated norm


@worlds
def test_a_model_that_one_rank_has_closed(ranks, tp, directory_of):
    """That rank's error says so. The others' errors name the rank, or another one that has given up because of it."""
    directory = directory_of("mamba")

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD)
        model(IDS)
        if rank == tp - 1:
            model.close()
            model.close()
        with pytest.raises(RuntimeError) as caught:
            model(IDS)
        dist.barrier()
        return str(caught.value)

    *messages, last = ranks(run, tp)
    assert "closed" in last
    assert all(f"rank {tp - 1} of {tp}" in message or "given up" in message for message in messages)
    assert any(f"rank {tp - 1} of {tp}" in message for message in messages)


@worlds
def test_models_on_one_group_have_memory_of_their_own(ranks, tp, directory_of):
    """One may be closed while the other is used. Subgroups can share memory, too; a single rank has nothing to share."""
    directory = directory_of("mamba")

    @torch.no_grad()
    def run(rank):
        first, second = (megatron_ssm.load(directory, dist.group.WORLD) for _ in range(2))
        expected = second(IDS)
        first.close()
        del first
        assert torch.equal(second(IDS), expected)
        pair = dist.new_subgroups(tp // 2)[0]
        with megatron_ssm.load(directory, pair) as half:
            torch.testing.assert_close(half(IDS), expected, rtol=0, atol=1e-5)
            return half.ranks.transport

    assert ranks(run, tp) == ["shared memory" if tp > 2 else ""] * tp


def decode(model, cache, tokens=6):
    """Decode one token after the other: (the last logits, the counts of communication, all-reduces called by Python)."""
    before, memory, calls = deepcopy(model.counter), model.ranks.memory, []
    memory.all_reduce = lambda *args, **kwargs: calls.append(1) or type(memory).all_reduce(memory, *args, **kwargs)
    for _ in range(tokens):
        logits = model(IDS[:, :1], cache=cache)
    counts = (
        model.counter.calls - before.calls,
        model.counter.nbytes - before.nbytes,
        model.counter.sent - before.sent,
    )
    return logits, counts, len(calls)


# All-reduces of a mixer, on 2 and 4 ranks. Those in a subgroup use its memory, not the model's.
OF_A_MIXER = {"mamba": (2, 2), "mamba2-1-group": (1, 1), "mamba2-2-groups": (1, 2), "zamba-2-heads": (1, 2)}


@worlds
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", by_default(("fp32", "int8"), ("fp32", "fp16", "bf16", "int8", "auto")))
def test_sums_while_decoding(ranks, tp, name, format, directory_of):
    """C performs all all-reduces. Oracle: layers with hooks, whose all-reduces Python calls."""
    directory, of_a_mixer = directory_of(name), OF_A_MIXER[name][tp > 2]

    @torch.no_grad()
    def run(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD, reduce=format)
        caches = [model.new_cache(2) for _ in "ab"]
        for cache in caches:
            model(IDS, cache=cache)
        ours, counted, by_python = decode(model, caches[0])
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: None)
        theirs, counted_there, by_python_there = decode(model, caches[1])
        assert counted == counted_there
        subgroups = name == "zamba-2-heads" and tp > 2
        others = 1 + sum(
            2 for layer in model.layers if hasattr(layer, "use")
        )  # embeddings, and of uses of shared blocks
        is_in_python = name == "mamba2-2-groups" and tp > 2  # a norm over a group that spans ranks
        assert by_python == (by_python_there if is_in_python else 0)
        assert by_python_there == 6 * (len(model.layers) * (of_a_mixer - subgroups) + others)
        assert counted[0]["all_reduce"] == 6 * (len(model.layers) * of_a_mixer + others)
        # The shared blocks of Zamba amplify rounding, above all a number that is rounded to the neighbour in fp16.
        atol = 1e-5 if "zamba" not in name else 1e-2 if format == "fp16" else 5e-5
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
        return ours

    first, *others = ranks(run, tp)
    assert all(torch.equal(first, other) for other in others)


@worlds
@pytest.mark.parametrize("ending", ("comes late", "closes", "dies"))
@pytest.mark.parametrize("name", ("mamba", "mamba2-1-group", "zamba-2-heads"))
def test_the_last_rank_arrives_after_c_has_stopped_waiting(ranks, tp, name, ending, directory_of, monkeypatch):
    """The C code of the other ranks returns to Python, which goes on waiting. Only then the last rank arrives.

    If it is merely late, the token is decoded. If it closes or dies, the others' errors name it, or another rank that has
    given up because of it, and nothing can be decoded any more.
    """
    directory = directory_of(name)

    def end(model):
        if ending == "closes":
            model.close()
        elif ending == "dies":
            die()
            raise RuntimeError("its fork does not go on")

    @torch.no_grad()
    def run(rank):
        model, message = megatron_ssm.load(directory, dist.group.WORLD), torch.zeros(1)
        cache = model.new_cache(2)
        model(IDS, cache=cache)
        expected = decode(model, deepcopy(cache), 1)[0]
        original_wait, original_call = shared_memory.SharedMemory.wait, BoundCall.run
        done = []

        def tell_the_last_rank_and_wait(memory, code):
            if not done:
                done.append(dist.send(message, tp - 1))
            original_wait(memory, code)

        def arrive_after_the_others(self, *args):
            if not done:
                done.extend(dist.recv(message, other) for other in range(tp - 1))
                end(model)
            return original_call(self, *args)

        if rank < tp - 1:
            monkeypatch.setattr(shared_memory.SharedMemory, "wait", tell_the_last_rank_and_wait)
        else:
            monkeypatch.setattr(BoundCall, "run", arrive_after_the_others)
        if ending == "comes late":
            logits = decode(model, cache, 1)[0]
            assert done and torch.equal(logits, expected)
            return None
        first = error_of(lambda: decode(model, cache, 1))
        assert first[0] is RuntimeError
        if rank < tp - 1:
            assert error_of(lambda: decode(model, cache, 1))[0] is RuntimeError
        return first[1]

    for rank, message in enumerate(ranks(run, tp)):
        if ending != "comes late" and rank < tp - 1:
            last = rf"rank ({tp - 1} of {tp}|1 of 2) "  # its rank in the model's group, or in a subgroup
            assert re.search(rf"{last}.*(has died|has closed)|has given up", message), message
