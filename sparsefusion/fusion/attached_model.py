"""A model whose gradients a `SparseFusion` reduces: the facts about it that planning needs."""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from sparsefusion.adapters.dispatch import Adapter
from sparsefusion.gradients.session import Session, most_common_dtype


@dataclass
class AttachedModel:
    """The facts about an attached model.

    Attributes:
        adapter: The adapter of its framework.
        session: The session that reduces its gradients.
        dtype: The dtype of its gradients.
        sent_itemsize: Bytes of an element in the framework's own messages.
        dense_operation: The collective with which the framework sends gradients, all_reduce or reduce_scatter.
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
        """The number of ranks over which gradients are averaged."""
        return self.session.reducer.group.size()

    @property
    def can_send_early(self) -> bool:
        """True if gradients may be sent before their atom is complete."""
        return getattr(self.adapter, "can_send_early", False)

    @property
    def sends_before_first_atom(self) -> bool:
        """True if gradients may be sent before the framework has handed over the first atom of a step."""
        return getattr(self.adapter, "sends_before_first_atom", False)

    @property
    def groups(self) -> tuple[ProcessGroup, ProcessGroup | None]:
        """(the group of replicas, the group of the parts of a divided model or None)."""
        return self.session.reducer.group, self.session.model_group


def gradient_dtype(adapter: Adapter) -> torch.dtype:
    """The dtype of most gradients."""
    return getattr(adapter, "dtype", None) or most_common_dtype(adapter.parameters.values())


def dense_operation(adapter: Adapter) -> str:
    """The collective with which the framework sends gradients."""
    return "reduce_scatter" if getattr(adapter, "reduce_scatters", False) else "all_reduce"
