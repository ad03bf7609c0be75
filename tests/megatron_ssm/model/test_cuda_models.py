"""Models on several NCCL ranks. Oracles: the same model on one CPU rank, and transformers. The tests need CUDA."""

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
import tiny
from cases import oracle
from ranks import run_cuda_ranks

__all__ = ["oracle"]
pytestmark = pytest.mark.cuda

NEW = 12


@torch.no_grad()
def generated(rank, directory, ids, format):
    """Logits of the prompt, decoded tokens with and without CUDA graphs, and the number of graphs."""
    where = dict(group=dist.group.WORLD, device="cuda", reduce=format)
    with megatron_ssm.load(directory, **where) as model, megatron_ssm.load(directory, graphs=False, **where) as usual:
        logits = model(ids.cuda()).cpu()
        tokens = [megatron_ssm.generate(each, ids.cuda(), max_new_tokens=NEW).cpu() for each in (model, usual)]
        return logits, tokens, sum(len(rows.graphs_by_keys) for rows in model._graphs._in_thread.recent)


EXACT = ("mamba", "falcon", "mamba2-2-groups", "zamba-4-heads-grouped-untied", "zamba2-1-group")
QUANTIZED = ("mamba", "mamba2-2-groups")  # the logits of the other random models depend more on small changes


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("format, name", [("fp32", name) for name in EXACT] + [("int8", name) for name in QUANTIZED])
def test_logits_and_tokens(world, format, name, oracle):
    ids = oracle(name).ids[:, :20]
    with megatron_ssm.load(oracle(name).directory) as model:
        expected, chosen = model(ids), megatron_ssm.generate(model, ids, max_new_tokens=NEW)
    for logits, tokens, graphs in run_cuda_ranks(generated, world, oracle(name).directory, ids, format):
        assert (logits - expected).abs().max() <= (2e-3 if format == "fp32" else 0.2)
        assert torch.equal(*tokens) and graphs
        assert format != "fp32" or torch.equal(tokens[0], chosen)


def trained(rank, tp, changes):
    """The losses and gradient norms of a training run."""
    return tiny.curve(tiny.trainer_on(tp, tiny.options(**changes), device="cuda"), 8)


RUNS = {
    "mamba2, tp 2": (2, 2, {}),
    "mamba2, dp 2": (2, 1, {}),
    "mamba2, context 2": (2, 1, dict(context_parallel_size=2)),
    "mamba, tp 2, context 2": (4, 2, dict(model_type="mamba", context_parallel_size=2)),
    "zamba, tp 2, dp 2": (4, 2, tiny.ZAMBA),
    "zamba2, tp 2, context 2": (4, 2, dict(tiny.ZAMBA2, context_parallel_size=2)),
    "zamba2, tp 2, sequence parallel": (2, 2, dict(tiny.ZAMBA2, sequence_parallel=True)),
    "mamba2, tp 2, recompute": (2, 2, dict(recompute_activations=True)),
}


@pytest.mark.parametrize("name", RUNS)
def test_training(name):
    world, tp, changes = RUNS[name]
    single = {n: v for n, v in changes.items() if n not in ("context_parallel_size", "sequence_parallel")}
    expected = tiny.curve(tiny.trainer(tiny.options(**single)), 8)
    for found in run_cuda_ranks(trained, world, tp, changes):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
