"""Command lines that fail in one line: shared by `python -m megatron_ssm` and the examples. Imports no torch."""

import argparse
import difflib
import logging
import os
import signal
import sys
import time
import traceback
import warnings

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
        if unknown:
            self.error(f"unknown argument {unknown[0]}{did_you_mean(unknown[0], self.flags())}")
        return arguments

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

    torchrun ends all ranks with the first that leaves, so the others wait for it: rank 0 could be late to speak.
    """
    if this_rank() == 0:
        print(line, file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(RANK_0_SPEAKS_S)


def quiet() -> None:
    """Keep third parties' warnings off the terminal, in Python and in C++; ours come through logging. Before torch."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("megatron_ssm").setLevel(logging.INFO)


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
