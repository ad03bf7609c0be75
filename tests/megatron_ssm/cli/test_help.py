"""The help and the version of the commands. Oracle: argparse's own lists of options, and importlib.metadata."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_ssm.cli.main import parser
from megatron_ssm.train import options
from sparsefusion.cli import commands

ROOT = Path(__file__).resolve().parents[3]


def pretrain_parser(monkeypatch):
    """The parser that `parse_options` makes."""
    made = []
    monkeypatch.setattr(options._Parser, "parse_args", lambda self, words: made.append(self) or sys.exit(0))
    with pytest.raises(SystemExit):
        options.parse_options([])
    return made[0]


def test_every_option_has_a_text_and_every_command_examples(monkeypatch):
    commands_of_all = [parser(), commands.parser(), pretrain_parser(monkeypatch)]
    for each in commands_of_all:
        commands_of_all += each._commands()  # the list grows
        assert 1 <= len(each.examples) <= 3 and each.format_help().endswith(f"  {each.examples[-1]}\n"), each.prog
        assert max(map(len, each.examples)) <= 78
        silent = [action.dest for action in each._actions if not action.help]
        assert silent in ([], ["command"]), each.prog  # `command`: each of its choices has a text
    assert len(commands_of_all) >= 13


@pytest.mark.parametrize("program", ("megatron_ssm", "sparsefusion"))
def test_without_a_command_it_prints_its_help(program, capsys):
    own = {"megatron_ssm": parser, "sparsefusion": commands.parser}[program]()
    with pytest.raises(SystemExit) as end:
        own.parse_args([])
    assert (end.value.code, capsys.readouterr().out) == (0, own.format_help())


def test_version():
    """It is that of the installed distribution, and loads no torch; without one, a version that packaging can parse."""
    installed = metadata.version("megatron-ssm")
    for program in ("megatron_ssm", "sparsefusion"):
        line = subprocess.check_output([sys.executable, "-m", program, "--version"], cwd=ROOT, text=True)
        assert line == f"{program.replace('_', '-')} {installed}\n"
    code = (
        "import sys, attention2d, commir, megatron_ssm, sparsefusion\n"
        "versions = {p.__version__ for p in (attention2d, commir, megatron_ssm, sparsefusion)}\n"
        "assert 'torch' not in sys.modules\n"
        "from importlib import metadata\n"
        "metadata.Distribution.from_name = classmethod(lambda cls, name: exec('raise metadata.PackageNotFoundError'))\n"
        "print(*versions, megatron_ssm.__version__)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed == f"{installed} 0+unknown\n"


@pytest.mark.parametrize(
    "words, suggested",
    [
        ("generate --modl", "--model"),
        ("generate --max-new", "--max-new-tokens"),
        ("generate --max_new_tokens", "--max-new-tokens"),
        ("generate --temp", "--temperature"),
        ("generate --sede", "--seed"),
        ("generate --version", ""),
        ("generate --dp", ""),
        ("generate --quantize", ""),
        ("serve --prot", "--port"),
        ("serve --hosts", "--host"),
        ("serve --model-dir", ""),
        ("doctor --version", ""),
        ("doctor --verbose", ""),
        ("doctor --jsno", "--json"),
        ("convert --verbos", "--verbose"),
        ("--verison", "--version"),
        ("genrate", "generate"),
        ("gen", "generate"),
        ("docter", "doctor"),
        ("train", ""),
        ("run", ""),
        ("quantize", ""),
    ],
)
def test_a_suggestion_is_near(words, suggested, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words.split())
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"unknown {'argument' if '--' in words else 'command'} {words.split()[-1]}" in line
    assert line.partition(" (did you mean ")[2].partition("?)")[0] == suggested
