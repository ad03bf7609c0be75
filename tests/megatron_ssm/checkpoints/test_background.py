"""The copies from which checkpoints are written in the background. Oracle: the tensors that are copied."""

from datetime import timedelta

import pytest
import torch

from megatron_ssm.checkpoints.background import BackgroundWriter


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
