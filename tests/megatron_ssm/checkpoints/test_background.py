"""The copies from which checkpoints are written in the background. Oracle: the tensors that are copied."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron_ssm.train.pending_gradients import PendingFile
from megatron_ssm.train.saving import BackgroundWriter


class Kept:
    """In place of a snapshot: the entry, as it is when it is written."""

    def __init__(self, entry):
        self.entry = entry

    def write(self, group):
        """Keep what a checkpoint would hold."""
        self.written = self.entry.clone()


@pytest.mark.parametrize("other", [torch.arange(5.0), torch.arange(3.0, dtype=torch.float64) / 3, torch.zeros(3, 1)])
def test_copies_follow_shapes_and_dtypes(other):
    """The memory of a copy is used again only for a tensor like the one before."""
    writer, kept = BackgroundWriter(timedelta(minutes=1)), []
    first = torch.arange(3.0)
    for tensor in (first, first + 1, other):
        writer.write(lambda stage, tensor=tensor: kept.append(Kept(stage("x", tensor, lambda copy: copy))) or kept[-1])
        writer.wait()
        assert torch.equal(kept[-1].written, tensor) and kept[-1].written.dtype == tensor.dtype
    assert kept[0].entry is kept[1].entry is not kept[2].entry


class OnDevice:
    """In place of a residual on a GPU, which has no room for a further copy."""

    def cpu(self):
        """It in the host's memory."""
        return torch.ones(3)

    def __deepcopy__(self, memo):
        raise AssertionError("a further copy on the GPU")


def test_residuals_are_moved_to_the_host():
    """`state_dict` has copied them; the rest of the state is copied, because training goes on."""
    trial = {"samples": [1.0]}
    fusion = SimpleNamespace(state_dict=lambda: {"candidates": trial, "residuals": {"weight": OnDevice()}})
    pending = PendingFile.of(SimpleNamespace(fusion=fusion, groups=None), copies=True)
    trial["samples"].append(2.0)
    assert pending.state["candidates"] == {"samples": [1.0]}
    assert torch.equal(pending.state["residuals"]["weight"], torch.ones(3))
