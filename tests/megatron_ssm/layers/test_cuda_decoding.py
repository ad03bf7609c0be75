"""Models on a GPU. Oracles: the same model on the CPU, and without CUDA graphs. The tests need CUDA."""

import copy
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import megatron_ssm
from cases import oracle
from megatron_ssm.layers import cuda_graphs
from megatron_ssm.layers.mamba1 import MambaMixer
from megatron_ssm.parallel.groups import Groups
from serving import checkpoint
from tiny import batches, options, trainer

__all__ = ["oracle"]
pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
@torch.no_grad()
def test_logits_and_greedy_tokens(name, oracle):
    oracle = oracle(name)
    cpu = megatron_ssm.load(oracle.directory)
    gpu = megatron_ssm.load(oracle.directory, device="cuda")
    cache = gpu.new_cache(len(oracle.ids))
    parts = [gpu(part.cuda(), cache=cache) for part in oracle.ids.split([40, 1, 29], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1).cpu(), cpu(oracle.ids), rtol=0, atol=2e-3)
    tokens = [megatron_ssm.generate(model, oracle.ids.to(model.device), max_new_tokens=8) for model in (cpu, gpu)]
    assert torch.equal(*tokens)


def test_a_training_step():
    run = options()
    cpu, gpu = trainer(run, Groups()), trainer(run, Groups())
    gpu.model.cuda()
    for step in range(3):
        ours, theirs = (t.step(batches(run), step) for t in (gpu, cpu))
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)


@pytest.mark.parametrize("name", ("mamba", "falcon", "mamba2-2-groups", "zamba-2-heads-biases", "zamba2-1-group"))
@torch.no_grad()
def test_graphs_decode_as_the_model_does(name, oracle, monkeypatch):
    """Decodes rows of a larger cache until the number of keys grows, with several graphs that share their memory."""
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 8)
    model = megatron_ssm.load(oracle(name).directory, device="cuda")
    tokens, usual = oracle(name).ids.cuda(), copy.deepcopy(model)
    usual.graphs, caches = False, [model.new_cache(4, 32) for _ in range(2)]
    kept = []
    for rows in ([1, 2], [3], [1, 2], [0, 1]):
        pieces = [1] * 4 if kept else [3, *[1] * 11]
        for cache in caches:
            cache.reset(0)
            model(tokens[:1, :3], None, cache.select([0]))
        for part in tokens[: len(rows), : sum(pieces)].split(pieces, dim=1):
            logits = [each(part, None, cache.select(rows)) for each, cache in zip((model, usual), caches, strict=True)]
            torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
            kept.append((logits[0], logits[0].clone()))
        for layer, other_layer in zip(*(cache.states.values() for cache in caches), strict=True):
            for tensor, other in zip(layer.tensors(), other_layer.tensors(), strict=True):
                torch.testing.assert_close(tensor, other, rtol=0, atol=1e-4)
    assert model.graphs and all(torch.equal(*each) for each in kept)
    assert sum(len(rows.graphs_by_keys) for rows in model._graphs._in_thread.recent) >= 2


def waits(x):
    """Synchronizes with the GPU, which CUDA refuses during a capture."""
    return x * (x.sum().item() < 1e9)


def refuses(x):
    """Raises an error that leaves CUDA's capture intact, so that it can be ended."""
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("not in a graph")
    return x


@pytest.mark.parametrize("offence", (waits, refuses))
@torch.no_grad()
def test_a_capture_that_fails_leaves_all_as_it_was(offence, oracle, monkeypatch, caplog):
    """The model decodes without graphs on its previous stream, after one warning; another model's graphs still work."""
    model, other = (megatron_ssm.load(oracle("mamba").directory, device="cuda") for _ in range(2))
    usual = copy.deepcopy(model)
    usual.graphs, forward, stream = False, MambaMixer.forward, torch.cuda.current_stream()
    monkeypatch.setattr(MambaMixer, "forward", lambda mixer, x, *given: forward(mixer, offence(x), *given))
    tokens = oracle("mamba").ids.cuda()
    caches = [each.new_cache(2) for each in (model, usual, other)]
    for t in range(8):
        logits = [
            each(tokens[:, t : t + 1], None, cache) for each, cache in zip((model, usual), caches[:2], strict=True)
        ]
        torch.testing.assert_close(*logits, rtol=0, atol=0)
    assert [record.message[:28] for record in caplog.records].count("decoding without CUDA graphs") == 1
    assert not model.graphs and torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    monkeypatch.undo()
    for t in range(8):
        logits = other(tokens[:, t : t + 1], None, caches[2])
    assert other.graphs and other._graphs._in_thread.recent[0].graphs_by_keys
    torch.testing.assert_close(logits, usual(tokens[:, :8])[:, -1:], rtol=0, atol=1e-3)


@torch.no_grad()
def test_closing_releases_graphs(oracle):
    """Even a graph that is still referenced is reset; the model continues to decode without graphs."""
    model = megatron_ssm.load(oracle("mamba").directory, device="cuda")
    tokens, cache = oracle("mamba").ids.cuda(), model.new_cache(2)
    for t in range(4):
        model(tokens[:, t : t + 1], None, cache)
    ((graph, *_),) = model._graphs._in_thread.recent[0].graphs_by_keys.values()
    graph.pool()
    model.close()
    with pytest.raises(RuntimeError):  # it has been reset
        graph.pool()
    for t in range(4, 8):
        logits = model(tokens[:, t : t + 1], None, cache)
    assert not model._graphs._in_thread.recent
    torch.testing.assert_close(logits, model(tokens[:, :8])[:, -1:], rtol=0, atol=1e-3)


def test_threads_capture_graphs_at_once(oracle):
    """Each thread has its own model."""
    models = [megatron_ssm.load(oracle("mamba").directory, device="cuda") for _ in range(4)]
    tokens, start = oracle("mamba").ids.cuda(), threading.Barrier(len(models))

    @torch.no_grad()
    def decode(model):
        cache = model.new_cache(2)
        start.wait(60)
        return [model(tokens[:, t : t + 1], None, cache) for t in range(12)][-1].cpu(), model._graphs._in_thread.recent[
            0
        ].graphs_by_keys

    with ThreadPoolExecutor(len(models)) as threads:
        results = list(threads.map(decode, models))
    assert all(model.graphs for model in models) and all(steps for _, steps in results)
    expected = models[0](tokens[:, :12])[:, -1:].cpu()
    for logits, _ in results:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ("mamba2", "zamba2"))
def test_a_command_on_two_gpus_ends(family):
    """NCCL must not wait for graphs at the end; the tokens are those of one GPU."""
    command = [sys.executable, "-m", "megatron_ssm", "generate", "--model", checkpoint(family), "--prompt", "ab"]
    more = ["--max-new-tokens", "16", "--ignore-eos", "--json", "--device", "cuda"]
    outs = [
        subprocess.run([*command, *more, "--tp", tp], stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
        for tp in "12"
    ]
    first, second = map(json.loads, outs)
    assert first["tokens"] == second["tokens"] and second["tp"] == 2
