"""Command lines whose errors are one line, for `python -m` of the packages and for the examples. Loads no torch."""

import argparse
import difflib
import errno
import logging
import math
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from .launcher import LauncherError, this_rank

RANK_0_GRACE_S = 5.0  # time for rank 0 to print an error before another rank exits
FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk
LIMIT = 2**31  # the default upper limit of numeric options, exclusive
# Errors that the user's input causes. All others are failures of the run or of the program.
INPUT_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failure(Exception):
    """The run cannot continue; it ends with one line and exit code 1."""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line from rank 0, with exit code 2 and a suggestion for a misspelled word.

    examples: Command lines that end its help.
    """

    def __init__(self, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.examples = examples

    def format_help(self) -> str:
        lines = ["", "examples:", *(f"  {line}" for line in self.examples)] if self.examples else []
        return super().format_help() + "".join(f"{line}\n" for line in lines)

    def error(self, message: str) -> NoReturn:
        print_on_rank_0(f"{self.prog}: {message}")
        sys.exit(2)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Like argparse's method, but an unknown flag is an error; a parser of commands without any word prints its help."""
        words = sys.argv[1:] if args is None else list(args)
        words = words or ["--help"] * bool(self._subparsers)
        arguments, unknown = self.parse_known_args(words, namespace)
        before = dict(zip(words, ["", *words], strict=False)).get(unknown[0]) if unknown else None
        if before in self._switches():
            self.error(f"unknown argument {unknown[0]}: {before} takes no value")
        self._refuse(unknown)
        return arguments

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Like argparse's method, but an unknown flag is an error.

        It is reported before a missing flag, because the unknown one may be the missing one, misspelled.
        """
        args = sys.argv[1:] if args is None else list(args)
        self._refuse(self._unknown_flags(args))
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Like argparse's method, but the error for an unknown command suggests a similar one."""
        if isinstance(action.choices, dict) and value not in action.choices:
            hint = did_you_mean(value, action.choices)
            self.error(f"unknown command {shortened(value)}{hint}: expected one of {', '.join(action.choices)}")
        super()._check_value(action, value)

    def _refuse(self, unknown: Sequence[str]) -> None:
        if unknown:
            flag = unknown[0].split("=")[0]
            owners = [parser.prog.split()[-1] for parser in self._commands() if flag in parser.flags()]
            if owners:
                self.error(f"{flag} is an option of {', '.join(owners)}: write it after the command")
            self.error(f"unknown argument {unknown[0]}{did_you_mean(unknown[0], self.flags())}")

    def _unknown_flags(self, words: Sequence[str]) -> list[str]:
        """The words that argparse would read as flags but does not know, up to `--` or to the name of a command."""
        known = {flag for action in self._actions for flag in action.option_strings}
        own = takewhile(lambda w: w != "--" and (w.startswith("-") or not self._subparsers), words)
        return [w for w in own if w.startswith("--") and " " not in w and w.split("=")[0] not in known]

    def flags(self) -> list[str]:
        """Every --flag of this parser and of its commands, except those that the help does not show."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        own = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
        return own + [flag for parser in self._commands() for flag in parser.flags()]

    def _commands(self) -> list["Parser"]:
        return [parser for a in self._actions if isinstance(a.choices, dict) for parser in a.choices.values()]

    def _switches(self) -> set[str]:
        own = {flag for action in self._actions if action.nargs == 0 for flag in action.option_strings}
        return own.union(*(parser._switches() for parser in self._commands()))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the known name of which `name` is a misspelling or the beginning; '' if there is none."""
    bare = name.split("=")[0].lstrip("-")
    names = {each.lstrip("-"): each for each in known}
    begun = [each for each in names if len(bare) > 2 and each.startswith(bare)]
    close = difflib.get_close_matches(bare, names, 1, 0.75) or begun
    return f" (did you mean {names[close[0]]}?)" if close else ""


def check_number(name: str, value: float, least: float, limit: float = LIMIT) -> None:
    """ValueError, with the name of the option and the rule, unless least <= value < limit."""
    if not least <= value < limit:  # also refuses NaN
        upper = "finite" if limit == math.inf else "below 2^31" if limit == LIMIT else f"below {limit}"
        rule = f"at least {least}" + f" and {upper}" * (value >= limit)
        raise ValueError(f"{name} {shortened(value)} must be {rule}")


def shortened(value: object, length: int = 60) -> str:
    """str(value) for an error message, cut after `length` characters with "..."."""
    # Python converts integers of at most 4300 digits to decimal.
    text = hex(value) if isinstance(value, int) and abs(value) >= 10**4000 else str(value)
    return text if len(text) <= length else f"{text[:length]}..."


def first_line(error: BaseException) -> str:
    """One line for an error: `strerror` of an OSError, else the first line of its message, else the name of its type."""
    return getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or type(error).__name__


def print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_on_rank_0(line: str, report: Callable[[str], object] = print_error) -> None:
    """Print a line to stderr on rank 0, before all ranks exit for the same reason. report: in place of `print_error`.

    Launchers end all ranks when the first one exits. So the other ranks wait RANK_0_GRACE_S, in case rank 0 is late.
    """
    if this_rank() == 0:
        report(line)
    else:
        time.sleep(RANK_0_GRACE_S)


def silence_third_parties() -> None:
    """Turn off the warnings of other packages, in Python and C++, and log our own messages on rank 0 only.

    Call it before torch is imported, because torch's C++ library reads the environment then.
    """
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    for package in ("commfabric", "megatron_ssm"):
        logging.getLogger(package).setLevel(logging.INFO if this_rank() == 0 else logging.ERROR)


class Printer:
    """Prints UTF-8 to stdout and flushes it at once. If the reader has closed the pipe, the run continues silently.

    The first other error, such as a full disk, is raised as OSError; later text is dropped.
    """

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled and sys.stdout is not None  # None: stdout was closed before the program began

    def print(self, text: str) -> None:
        """Write `text`, if this printer is enabled."""
        if not self.is_enabled or not text:
            return
        try:
            encoded = text.encode("utf-8", "replace")
            if hasattr(sys.stdout, "buffer"):
                sys.stdout.buffer.write(encoded)
            else:  # in a notebook, or redirected to a StringIO
                sys.stdout.write(encoded.decode("utf-8"))
            sys.stdout.flush()
        except BrokenPipeError:
            self.discard()
        except OSError:
            self.discard()
            raise

    def discard(self) -> None:
        """Drop all further text, and text that stdout has buffered: Python would write it again when it exits."""
        self.is_enabled = False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave_on_interrupt() -> None:
    """Make Ctrl-C end this process at once with code 130; a KeyboardInterrupt could be lost in imports or collectives."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def run(name: str, command: Callable[[], object], report: Callable[[str], object] = print_error) -> int:
    """Run `command()` and return the exit code of the process. report: prints, in place of `print_error`.

    | code | outcome | printed |
    |---|---|---|
    | 0 | success | |
    | 2 | one of INPUT_ERRORS | one line on rank 0; a `LauncherError` on each rank that has it |
    | 1 | a `Failure` | one line on rank 0 |
    | 1 | a full disk, or out of memory | one line with the rank |
    | 1 | any other exception | its traceback and the rank |
    | 130 | Ctrl-C | |

    Lines begin with `name`.
    """
    try:
        command()
        return 0
    except LauncherError as error:
        report(f"{name}: {error}")
        return 2
    except INPUT_ERRORS as error:
        print_on_rank_0(f"{name}: {' '.join(str(error).split())}", report)
        return 2
    except Failure as error:
        print_on_rank_0(f"{name}: {error}", report)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            place = "" if error.filename is None else f" {error.filename}"
            report(f"{name}: rank {this_rank()} cannot write{place}: {error.strerror}")
            return 1
        if is_lack_of_memory(error):
            first = str(error) and first_line(error)
            report(f"{name}: rank {this_rank()} has not enough memory{first and f': {first}'}")
            return 1
        report(f"{name}: rank {this_rank()} failed\n{traceback.format_exc().rstrip()}")
        return 1


def is_lack_of_memory(error: BaseException) -> bool:
    """Return True if an error means out of memory, on CPU or GPU; on CPUs, torch raises a RuntimeError."""
    is_of_cpu = isinstance(error, RuntimeError) and re.search("[Cc]an(no|')t allocate memory", str(error)) is not None
    is_of_system = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return is_of_cpu or is_of_system or type(error).__name__ == "OutOfMemoryError"
