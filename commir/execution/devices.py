"""The devices of a group of ranks, whose tensors they can exchange."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commir.ir.checks import shown
from commir.lowering.text import one_line


def device_type(device: torch.device | str) -> str:
    """The type of a device. ValueError: torch does not know it, or cannot use it on this machine, or it is meta."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={shown(device)}: it must be a device of torch, such as 'cpu'") from None
    if found.type == "meta":
        raise ValueError("device='meta': its tensors have no data to compute with")
    try:
        torch.empty(0, device=found)
    except Exception as error:  # of a kind that depends on the device
        reason = f"{one_line(error):.90}"
        raise ValueError(f"device='{found}': torch cannot use it on this machine ({reason})") from None
    return found.type


def check_devices(inputs: Mapping[str, torch.Tensor], group: ProcessGroup | None) -> None:
    """ValueError: inputs are on meta, on different devices, or on one whose tensors ranks of the group cannot exchange."""
    for name, x in inputs.items():
        if x.device.type == "meta":
            raise ValueError(f"{name} is on meta, whose tensors have no data to compute with")
        first, device = next((name, x.device) for name, x in inputs.items())
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, and {first} on {device}; all inputs must be on one device")
        if group is not None and device.type not in _device_types(group):
            backend = dist.get_backend(group)
            raise ValueError(f"{name} is on {device}, and ranks cannot exchange its tensors by {backend}")


def _device_types(group: ProcessGroup) -> list[str]:
    """The types of devices whose tensors the ranks of a group can exchange; torch lists them as "cpu:gloo,cuda:nccl"."""
    return [each.split(":")[0] for each in dist.get_backend_config(group).split(",")]
