"""What hangs on somebody else's object, of which there may be copies."""


class NotCopied:
    """Holds an object beside which a target is copied or pickled: the copy holds None in its place."""

    def __init__(self, object):
        self.object = object

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return type(None), ()
