"""Two ranks on one machine that wait for each other in a loop, without sleeping.

The scheduler may wake processes that have slept on the same core or on neighbouring ones, which changes what is measured.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing


def launch(rank_main: Callable, *arguments: Any) -> Any:
    """Start two processes, each calling rank_main(rank, folder, arrived, *arguments).

    Returns what rank 0 has saved (torch.save) in folder/measured. arrived: the counters that `meet` needs.
    """
    with tempfile.TemporaryDirectory() as folder:
        arrived = torch.zeros(2, dtype=torch.int64).share_memory_()
        multiprocessing.spawn(rank_main, (folder, arrived, *arguments), 2)
        return torch.load(Path(folder, "measured"), weights_only=True)


def meet(arrived: torch.Tensor, rank: int) -> None:
    """Wait for the other rank without sleeping; arrived: the shared tensor that `launch` passes to both."""
    counters = arrived.numpy()
    counters[rank] += 1
    while counters[1 - rank] < counters[rank]:
        pass
