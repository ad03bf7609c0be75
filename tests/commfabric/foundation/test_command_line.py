"""Errors of commands in one line, and the numbers of their options. Oracle: the expected lines and exit codes."""

import errno
import math
import os

import pytest
import torch

from commfabric.foundation.command_line import Failure, check_number, did_you_mean, run, shortened


@pytest.mark.parametrize(
    "name, known, suggested",
    [
        ("--prot", ["--host", "--port"], "--port"),
        ("--max-new=3", ["--model", "--max-new-tokens"], "--max-new-tokens"),
        ("hidden_sise", ["hidden_size", "hidden"], "hidden_size"),
        ("genrate", ["serve", "generate"], "generate"),
        ("--lora", ["--port", "--tp", "--model"], ""),
        ("--version", ["--json", "--help"], ""),
        ("--cp", ["--tp", "--ep"], ""),
        ("to", ["top_k", "top_p"], ""),
    ],
)
def test_only_a_near_name_is_suggested(name, known, suggested):
    """A misspelling of few letters, or the beginning of the name."""
    assert did_you_mean(name, known) == (f" (did you mean {suggested}?)" if suggested else "")


@pytest.mark.parametrize("allocate", (lambda: bytearray(2**60), lambda: torch.empty(2**60)))
def test_a_lack_of_memory_is_one_line(allocate, capsys):
    assert run("train", allocate) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: rank 0 has not enough memory")


@pytest.mark.parametrize(
    "error, text",
    [
        (MemoryError(), ""),
        (MemoryError("Unable to allocate 8 EiB\nfor an array"), ": Unable to allocate 8 EiB"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), ": Cannot allocate memory"),
    ],
)
def test_the_line_of_a_lack_of_memory(error, text, capsys):
    def fail():
        raise error

    assert run("train", fail) == 1
    assert capsys.readouterr().err == f"train: rank 0 has not enough memory{text}\n"


def test_exit_codes(capsys):
    def refuse(error):
        raise error

    assert run("train", lambda: None) == 0
    assert run("train", lambda: refuse(ValueError("--lr\nis wrong"))) == 2
    assert run("train", lambda: refuse(Failure("it diverged"))) == 1
    assert capsys.readouterr().err == "train: --lr is wrong\ntrain: it diverged\n"
    assert run("train", lambda: refuse(RuntimeError("a bug"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1]) == ("train: rank 0 failed", "RuntimeError: a bug")


@pytest.mark.parametrize(
    "value, least, limit, rule",
    [
        (0, 1, 10, "--n 0 must be at least 1"),
        (math.nan, 0, 10, "--n nan must be at least 0"),
        (10, 1, 10, "--n 10 must be at least 1 and below 10"),
        (math.inf, 0, math.inf, "--n inf must be at least 0 and finite"),
        (2**31, 1, 2**31, "--n 2147483648 must be at least 1 and below 2^31"),
        (10**100, 1, 2**31, f"--n 1{'0' * 59}... must be at least 1 and below 2^31"),
    ],
)
def test_numbers_out_of_range(value, least, limit, rule):
    with pytest.raises(ValueError) as error:
        check_number("--n", value, least, limit)
    assert str(error.value) == rule
    check_number("--n", least, least, limit)
    check_number("--n", 9, least, limit)


def test_long_values_are_shortened():
    """Also whole numbers of which Python writes no decimal digits."""
    assert shortened("a" * 60) == "a" * 60
    assert shortened("a" * 61) == "a" * 60 + "..."
    assert shortened(16**5000) == "0x1" + "0" * 57 + "..."
