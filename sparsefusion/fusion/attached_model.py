"""A model whose gradients a `SparseFusion` reduces: the facts about it that planning needs, and agreement of its ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import ProcessGroup

from sparsefusion.adapters.dispatch import Adapter
from sparsefusion.collectives.agreement import from_first
from sparsefusion.gradients.rank_comparison import compare_everywhere, compare_ranks_of
from sparsefusion.gradients.session import Session, most_common_dtype


@dataclass
class AttachedModel:
    """dtype: of its gradients. sent_itemsize: bytes of an element in the framework's own messages.

    dense_operation: the collective with which the framework sends gradients, all_reduce or reduce_scatter.
    """

    adapter: Adapter
    session: Session
    dtype: torch.dtype
    sent_itemsize: int
    dense_operation: str

    @classmethod
    def of(cls, adapter: Adapter, session: Session) -> "AttachedModel":
        """Read the facts from the adapter."""
        dtype = gradient_dtype(adapter)
        sent_itemsize = getattr(adapter, "sent_itemsize", dtype.itemsize)
        return cls(adapter, session, dtype, sent_itemsize, dense_operation(adapter))

    @property
    def ranks(self) -> int:
        """Over how many ranks gradients are averaged."""
        return self.session.reducer.group.size()

    @property
    def can_send_early(self) -> bool:
        """True if gradients may be sent before their atom is complete."""
        return getattr(self.adapter, "can_send_early", False)

    def agree(self, group: ProcessGroup | None, asked: Callable[[], object]) -> None:
        """ValueError on every rank of `group` if asked() differs between them, or what it raises. None: this rank only."""
        compare_ranks_of(group, asked, self.session.device)

    def agree_everywhere(self, asked: Callable[[], object]) -> None:
        """`agree` among the replicas, and then among the parts of a divided model."""
        compare_everywhere(asked, self.session.reducer.group, self.session.model_group, self.session.device)

    def run_on_first(self, function: Callable[[], object]) -> object:
        """Run a function on the first rank of all; its result, or its error, is that of all ranks."""
        session = self.session
        first = partial(from_first, function, session.model_group, session.device)
        return from_first(first, session.reducer.group, session.device)


def gradient_dtype(adapter: Adapter) -> torch.dtype:
    """The dtype of most gradients."""
    return getattr(adapter, "dtype", None) or most_common_dtype(adapter.parameters.values())


def dense_operation(adapter: Adapter) -> str:
    """The collective with which the framework sends gradients."""
    return "reduce_scatter" if getattr(adapter, "reduce_scatters", False) else "all_reduce"
