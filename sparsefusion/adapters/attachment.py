"""References from a framework's object to ours, of which copies of the framework's object must not have their own."""

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ddp_reduction import DenseBuckets
    from .torch_ddp import TorchDDP


class NotCopied:
    """Holds an object for a target that may be copied or pickled; in the copy, None stands in its place."""

    def __init__(self, object: object):
        self.object = object

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()


class HookState(NotCopied):
    """The state of the communication hook, which torch's DDP keeps for its lifetime.

    The garbage collector does not see that DDP holds it, so the adapter is referenced weakly. dense: DDP's own
    reduction, which runs when there is no adapter.
    """

    dense: "DenseBuckets"  # since DDP has taken the hook

    def __init__(self) -> None:
        super().__init__(None)
        self._adapter: weakref.ref[TorchDDP] | None = None

    @property
    def adapter(self) -> "TorchDDP | None":
        """The adapter that takes the gradients, or None."""
        return None if self._adapter is None else self._adapter()

    @adapter.setter
    def adapter(self, adapter: "TorchDDP | None") -> None:
        """Reference an adapter weakly, or None."""
        self._adapter = None if adapter is None else weakref.ref(adapter)
