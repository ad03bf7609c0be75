"""Errors of files as one line, for `together` and `on_first`: what the user did, and the cause."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from sparsefusion.foundation.command_line import INPUT_ERRORS, Failure


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


@contextmanager
def os_errors_as(kind: type[Exception], failure: str) -> Iterator[None]:
    """Raise `kind`, with `failure` and the cause, in place of an error of the disk or of safetensors.

    INPUT_ERRORS, such as that of a missing file, are not changed.
    """
    try:
        yield
    except INPUT_ERRORS:
        raise
    except (OSError, SafetensorError) as error:
        raise kind(f"{failure}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text: of an OSError, its reason without the file; without a text, the error's name."""
    return getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
