"""What hangs on somebody else's object, of which there may be copies."""

import weakref


class NotCopied:
    """Holds an object beside which a target is copied or pickled: the copy holds None in its place."""

    def __init__(self, object):
        self.object = object

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return type(None), ()


class KeptHook(NotCopied):
    """What torch's DDP keeps for ever as its hook's state, where Python sees no cycle: so the door is held weakly.

    whole: DDP's own reduction. object: a weak reference to the door, or None.
    """

    def __init__(self):
        self.door = self.whole = None

    @property
    def door(self):
        """Through which gradients go, while somebody holds it; or None."""
        return self.object and self.object()

    @door.setter
    def door(self, door):
        """Held weakly."""
        self.object = door and weakref.ref(door)
