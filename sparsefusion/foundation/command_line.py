"""Command lines that fail in one line, and print: for the packages' `python -m` and the examples. Imports no torch."""

import argparse
import difflib
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from itertools import takewhile

RANK_0_SPEAKS_S = 5.0
INPUT_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failure(Exception):
    """A run that cannot go on: one line, exit code 1."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line (from rank 0) and exit code 2, and which suggests the flag that was meant."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message):
        """Print the line and leave with 2."""
        say(f"{self.prog}: {message}")
        sys.exit(2)

    def parse_args(self, args=None, namespace=None):
        """As argparse's, with a suggestion for an unknown flag."""
        arguments, unknown = self.parse_known_args(args, namespace)
        self._refuse(unknown)
        return arguments

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, but an unknown flag is an error, told before that of a missing one: it may be the one meant."""
        args = sys.argv[1:] if args is None else args
        self._refuse(self._unknown_flags(args))
        return super().parse_known_args(args, namespace)

    def _refuse(self, unknown) -> None:
        if unknown:
            self.error(f"unknown argument {unknown[0]}{did_you_mean(unknown[0], self.flags())}")

    def _unknown_flags(self, words) -> list[str]:
        """The words, up to -- or a command, that argparse takes for flags (with a space: for a value) and that are none."""
        known = {flag for action in self._actions for flag in action.option_strings}
        own = takewhile(lambda w: w != "--" and (w.startswith("-") or not self._subparsers), words)
        return [w for w in own if w.startswith("--") and " " not in w and w.split("=")[0] not in known]

    def flags(self) -> list[str]:
        """Every --flag this parser and its commands take and show."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        below = [p for a in shown if isinstance(a.choices, dict) for p in a.choices.values()]
        own = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
        return own + [flag for parser in below for flag in parser.flags()]


def did_you_mean(name: str, known) -> str:
    """' (did you mean X?)' for the known name closest to `name`, or nothing."""
    close = difflib.get_close_matches(name.split("=")[0], list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def this_rank() -> int:
    """The rank the launcher gave this process (0 when it runs alone)."""
    return int(os.environ.get("RANK", "0"))


def say(line: str) -> None:
    """One line on stderr, from rank 0, before an end that all ranks have in common.

    Launchers end all ranks with the first that leaves, so the others wait for that: rank 0 could be late to speak.
    """
    if this_rank() == 0:
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(RANK_0_SPEAKS_S)


def quiet() -> None:
    """Keep third parties' warnings off the terminal, in Python and in C++; ours are logged, by rank 0. Before torch."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    for package in ("sparsefusion", "megatron_ssm"):
        logging.getLogger(package).setLevel(logging.INFO if this_rank() == 0 else logging.ERROR)


class Printer:
    """UTF-8 on stdout, flushed at once; a reader who has gone is no error, and the ranks finish together."""

    def __init__(self, speaks: bool):
        self.speaks = speaks and sys.stdout is not None  # None: closed before the start

    def print(self, text: str) -> None:
        """Write `text`, or nothing on the ranks that are silent."""
        if not self.speaks or not text:
            return
        try:
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            self.speaks = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave_on_interrupt() -> None:
    """Let Ctrl-C end this process at once with 130: as an exception it gets lost in imports and in collectives."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def run(name: str, command) -> int:
    """Run `command()`; the exit code: 0; 2 and one line for bad input; 130 after Ctrl-C; else 1 and a traceback."""
    try:
        command()
        return 0
    except INPUT_ERRORS as error:
        say(f"{name}: {' '.join(str(error).split())}")
        return 2
    except Failure as error:
        say(f"{name}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception:
        print(f"{name}: rank {this_rank()} failed", file=sys.stderr)
        traceback.print_exc()
        return 1
