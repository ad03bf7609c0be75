"""The devices of inputs, on ranks that exchange tensors on the CPU. Oracle: the text of the errors."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from commir.execution.devices import check_devices


def on(**devices):
    """Inputs on these devices, of which this machine may have none."""
    return {name: SimpleNamespace(device=torch.device(device)) for name, device in devices.items()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "inputs, message",
    [
        (on(q="xla", k="xla"), "q is on xla, and ranks cannot exchange its tensors by gloo"),
        (on(q="cpu", k="xla"), "k is on xla, and q on cpu; all inputs must be on one device"),
        (on(q="cpu", k="meta"), "k is on meta, whose tensors have no data to compute with"),
        (on(q="meta", k="meta"), "q is on meta, whose tensors have no data to compute with"),
    ],
)
def test_inputs_that_ranks_cannot_exchange(ranks, world, inputs, message):
    def run(rank):
        with pytest.raises(ValueError) as error:
            check_devices(inputs, dist.group.WORLD)
        return str(error.value)

    assert ranks(run, world) == [message] * world


def test_inputs_on_different_devices_of_one_process():
    with pytest.raises(ValueError, match="k is on cuda:1, and q on cuda:0; all inputs must be on one device"):
        check_devices(on(q="cuda:0", k="cuda:1"), None)
    check_devices(on(q="cuda:1", k="cuda:1"), None)
