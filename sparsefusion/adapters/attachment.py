"""References from a framework's object to our objects, which copies of the framework's object must not have."""


class NotCopied:
    """Holds an object for a target that may be copied or pickled; the copy holds None instead."""

    def __init__(self, object: object):
        self.object = object

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()
