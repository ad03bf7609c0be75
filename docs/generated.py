"""A hook of mkdocs: fills the pages' comments `<!-- generated: NAME -->` with tables that are made from the code."""

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from megatron_ssm.cli import main as megatron_ssm_commands
from megatron_ssm.server.request_models import IGNORED, NOT_IMPLEMENTED
from megatron_ssm.train import megatron_flags, options
from sparsefusion.cli import commands as sparsefusion_commands


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """{name: parser} of the commands of a program."""
    return next(dict(action.choices) for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def command_options(parser: argparse.ArgumentParser) -> str:
    """A table of the arguments of a command that its help shows."""
    rows = ["| option | meaning |", "| --- | --- |"]
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or "--help" in action.option_strings:
            continue
        meaning = action.help + (" (required)" if action.required and action.option_strings else "")
        choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
        value = "" if action.nargs == 0 else f" {choices or action.metavar or action.dest.upper()}"
        name = ", ".join(action.option_strings) + value if action.option_strings else str(action.metavar or action.dest)
        rows.append(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def examples_of(parser: argparse.ArgumentParser) -> str:
    """A block with the command lines that end the help of a command."""
    lines = "\n".join(getattr(parser, "examples", ()))
    return f"```sh\n{lines}\n```"


def command_of(parser: argparse.ArgumentParser, name: str) -> str:
    """The description of a command, its examples and its options."""
    command = commands_of(parser)[name]
    parts = [command.description or "", examples_of(command), command_options(command)]
    return "\n\n".join(part for part in parts if part)


def ignored_parameters() -> str:
    """The parameters of HTTP requests that have no effect."""
    return ", ".join(f"`{name}`" for name in sorted(IGNORED)) + "."


def parameters_not_implemented() -> str:
    """A table of the parameters of HTTP requests, by the values that are accepted."""
    names: dict[str, list[str]] = {}
    for name, values in sorted(NOT_IMPLEMENTED.items()):
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in values) or "`null`"
        names.setdefault(accepted, []).append(f"`{name}`")
    rows = ["| parameters | values that change nothing |", "| --- | --- |"]
    return "\n".join(rows + [f"| {', '.join(each)} | {accepted} |" for accepted, each in names.items()])


GENERATORS: dict[str, Callable[[], str]] = {
    "training options": options.table,
    "flags of Megatron and DeepSpeed": megatron_flags.table,
    "parameters without effect": ignored_parameters,
    "parameters not implemented": parameters_not_implemented,
}


def generated(name: str) -> str:
    """The text of a name: one of GENERATORS, or a command such as "megatron-ssm serve"."""
    if name in GENERATORS:
        return GENERATORS[name]()
    program, command = name.split()
    module: Any = {"megatron-ssm": megatron_ssm_commands, "sparsefusion": sparsefusion_commands}[program]
    return command_of(module.parser(), command)


def filled(markdown: str) -> str:
    """A page with all of its comments filled."""
    return re.sub(r"^<!-- generated: (.+) -->$", lambda match: generated(match[1]), markdown, flags=re.MULTILINE)


def on_page_markdown(markdown: str, **context: Any) -> str:
    """What mkdocs calls for each page."""
    return filled(markdown)
