"""Replaces file errors by one-line errors that name the failed operation and the cause."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from commfabric.foundation.command_line import INPUT_ERRORS, Failure, first_line


@contextmanager
def in_one_line(operation: str, error_type: type[Exception] = Failure) -> Iterator[None]:
    """Context or decorator: replace an OSError, or an `error_type`, by an `error_type` with the text "operation: cause".

    operation: The text that names the failed operation. A Failure passes through, because its message is already complete.
    """
    replaced = (OSError,) if error_type is Failure else (OSError, error_type)
    try:
        yield
    except replaced as error:
        raise error_type(f"{operation}: {first_line(error)}") from error


@contextmanager
def os_errors_as(operation: str, error_type: type[Exception]) -> Iterator[None]:
    """Context: replace an error of the disk or of safetensors by an `error_type` with the text "operation: cause".

    INPUT_ERRORS, such as FileNotFoundError, pass through.
    """
    try:
        yield
    except INPUT_ERRORS:
        raise
    except (OSError, SafetensorError) as error:
        raise error_type(f"{operation}: {first_line(error)}") from None
