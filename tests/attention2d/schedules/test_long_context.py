"""examples/long_context.py trains a model of transformers on several ranks. Oracle: its losses on one rank."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ONE_RANK = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # torchrun sets its own
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def losses(ranks, *flags):
    """The losses of two steps on 101 tokens, a length that neither 2 nor 4 ranks divide."""
    program = ["examples/long_context.py", "--seq-length", "101", "--steps", "2", *flags]
    command = [*COMMAND, str(ranks), "--"] if ranks > 1 else [sys.executable]
    result = subprocess.run(
        [*command, *program], cwd=ROOT, env=os.environ | ONE_RANK, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return [float(number) for number in re.findall(r"loss ([\d.]+)", result.stdout)]


@pytest.fixture(scope="module")
def one_rank():
    return losses(1)


@pytest.mark.parametrize(
    "world_size, flags", ((2, []), pytest.param(4, ["--rows", "2", "--cols", "2"], marks=pytest.mark.full))
)
def test_losses_are_those_of_one_rank(world_size, flags, one_rank):
    assert len(one_rank) == 2 and losses(world_size, *flags) == pytest.approx(one_rank, abs=2e-4)
