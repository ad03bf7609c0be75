"""The memory of a rank: that of its GPU, or its share of the memory of the host, or of its container or job."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

MEMBERSHIP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def own_memory(ranks_on_host: int, device: torch.device) -> float:
    """Bytes of memory of one rank: that of its GPU, or 1/ranks_on_host of the host's memory or of the cgroup's limit."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(physical, memory_limit()) / ranks_on_host


def memory_limit(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> float:
    """The smallest limit, in bytes, of this process's cgroups and of their parents; inf if there is none.

    Docker, Kubernetes and Slurm set such limits. The kernel kills processes that exceed one, even if the host has memory.

    Args:
        membership: The file with a line `number:controllers:path` for each hierarchy of cgroups.
        cgroups: The folder where cgroups are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no Linux, or no cgroups
        return math.inf
    limits = [limit for line in lines if line.count(":") >= 2 for limit in _limits(cgroups, *line.split(":", 2)[1:])]
    return min(limits, default=math.inf)


def _limits(cgroups: Path, controllers: str, path: str) -> Iterator[float]:
    """The limits of a cgroup and of its parents, in version 2 (which names no controllers) or in version 1.

    In a container, the path may be one of the host, which is not mounted; the container's own cgroup is then the root.
    """
    if not controllers:
        top, name = cgroups, "memory.max"
    elif "memory" in controllers.split(","):
        top, name = cgroups / "memory", "memory.limit_in_bytes"
    else:
        return
    own = top / path.lstrip("/")
    for folder in (own, *own.parents):
        try:
            yield float((folder / name).read_text())
        except (OSError, ValueError):  # not mounted, or "max"
            pass
        if folder == top:
            return
