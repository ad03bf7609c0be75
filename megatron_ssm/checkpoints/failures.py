"""Errors of files as one line, for `together` and `on_first`: what the user did, and the cause."""

from collections.abc import Iterator
from contextlib import contextmanager

from sparsefusion.foundation.command_line import Failure


@contextmanager
def in_one_line(failure: str, kind: type[Exception] = Failure) -> Iterator[None]:
    """Raise `kind`, with `failure` and the cause, in place of an OSError or a `kind`; also a decorator of functions.

    A Failure is not changed: it has a line of its own.
    """
    kinds = (OSError,) if kind is Failure else (OSError, kind)
    try:
        yield
    except kinds as error:
        raise kind(f"{failure}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The text of an error in one line: an OSError's reason without its file, or the name of an error without a text."""
    return getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
