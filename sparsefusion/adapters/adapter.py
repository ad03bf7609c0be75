"""What an adapter of a framework provides. Adapters differ in which of the framework's methods they replace."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup

from sparsefusion.gradients.session import Session, most_common_dtype


class Adapter:
    """Attaches a session to a framework's object.

    Attributes:
        module: The model.
        group: The ranks that average gradients.
        parameters: {name: parameter} of all gradients that the framework averages over this group.
        dtype: The dtype of most gradients.
        sent_itemsize: Bytes of an element in the framework's own messages.
        can_wait_for_buffer: True if an atom may wait for other atoms before it is sent.
        can_send_early: True if gradients may be sent before their atom is complete.
        sends_before_first_atom: True if gradients may be sent before the first atom of a step is handed over.
        dense_operation: The collective with which the framework sends gradients, all_reduce or reduce_scatter.
        model_group, loss_scale, skipped_steps: Arguments of `Session` that the framework knows, or None.
    """

    can_wait_for_buffer, can_send_early, sends_before_first_atom = True, False, False
    dense_operation = "all_reduce"
    model_group: ProcessGroup | None = None
    loss_scale: Callable[[], float] | None = None
    skipped_steps: Callable[[], int] | None = None
    _session: Session  # set while the adapter is installed

    def __init__(self, module: nn.Module, group: ProcessGroup, parameters: Mapping[str, nn.Parameter]):
        self.module, self.group, self.parameters = module, group, parameters
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                raise ValueError(f"{name} has sparse=True: SparseFusion needs dense gradients")
        for name, parameter in parameters.items():
            if parameter.is_complex():
                raise ValueError(f"{name} is {parameter.dtype}: SparseFusion needs real gradients")
        self.dtype: torch.dtype = most_common_dtype(parameters.values())
        self.sent_itemsize = self.dtype.itemsize

    def install(self, session: Session) -> None:
        """Let gradients go to `session`. ValueError if the framework's object accepts no session."""
        raise NotImplementedError

    def remove(self) -> None:
        """Let the framework reduce gradients itself again."""
        raise NotImplementedError


class NotCopied:
    """Holds an object for a target that may be copied or pickled; the copy holds None instead."""

    def __init__(self, object: object):
        self.object = object

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()
