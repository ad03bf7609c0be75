"""Compares arguments, and shares errors, among the replicas of a model and among the parts of a divided model."""

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed import ProcessGroup

from sparsefusion.collectives.agreement import agree
from sparsefusion.collectives.counted import all_gather_small


def compare_ranks_of(group: ProcessGroup | None, asked: Callable[[], object], device: torch.device) -> None:
    """ValueError on every rank of `group` if asked() differs between them, or what it raises. None: this rank only."""
    if group is None:
        asked()
    else:
        agree(partial(all_gather_small, group=group), device, asked, "ranks of SparseFusion")


def compare_everywhere(
    asked: Callable[[], object], group: ProcessGroup | None, model_group: ProcessGroup | None, device: torch.device
) -> None:
    """Compare asked() among the replicas (`group`), and then whether they agreed among the parts of a divided model.

    All ranks of both groups call this at the same point. Gathers 16 bytes per rank of each group, and a few hundred
    more where ranks differ. ValueError on all of them: asked() differs between replicas, or it raised an error on some
    ranks; an error that occurs on all ranks of a group is raised as it is.
    """
    compare_ranks_of(model_group, lambda: compare_ranks_of(group, asked, device), device)
