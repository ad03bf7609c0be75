"""References from a framework's object to ours, of which copies of the framework's object must not have their own."""

import weakref


class NotCopied:
    """Holds an object for a target that may be copied or pickled; in the copy, None stands in its place."""

    def __init__(self, object: object):
        self.object = object

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return type(None), ()


class HookState(NotCopied):
    """The state of the communication hook, which torch's DDP keeps for its lifetime.

    The garbage collector does not see that DDP holds it, so the adapter is referenced weakly. dense: DDP's own
    reduction, which runs when there is no adapter.
    """

    def __init__(self):
        self.adapter = self.dense = None

    @property
    def adapter(self):
        """The adapter that takes the gradients, or None."""
        return self.object and self.object()

    @adapter.setter
    def adapter(self, adapter):
        """Reference an adapter weakly, or None."""
        self.object = adapter and weakref.ref(adapter)
