"""examples/long_context.py trains a model of transformers on several ranks. Oracle: transformers' own attention."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[3]
SCRIPT, TEXT = "examples/long_context.py", "README.md"  # a text of bytes, which are its token ids
TOKENS, STEPS = 101, 2  # a length that neither 2 nor 4 ranks divide


def losses(ranks, *flags):
    """The losses that the script prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    sizes = ["--text", TEXT, "--seq-length", str(TOKENS), "--steps", str(STEPS)]
    result = subprocess.run([*launcher, SCRIPT, *sizes, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [float(number) for number in re.findall(r"loss ([\d.]+)", result.stdout)]


def losses_of_transformers():
    """The losses of the same model and text in plain steps of AdamW."""
    model = runpy.run_path(ROOT / SCRIPT)["small_llama"]()
    ids = torch.tensor([list((ROOT / TEXT).read_bytes()[: TOKENS + 1])])
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "world_size, flags", ((2, []), pytest.param(4, ["--rows", "2", "--cols", "2"], marks=pytest.mark.full))
)
def test_losses_are_those_of_transformers(world_size, flags):
    assert losses(world_size, *flags) == pytest.approx(losses_of_transformers(), abs=2e-4)
