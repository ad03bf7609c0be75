"""One GPU; oracle: the same model on the CPU. Needs CUDA."""

import pytest
import torch

import megatron_ssm
from cases import oracle
from megatron_ssm.parallel import Groups
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
