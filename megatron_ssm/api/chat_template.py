"""Chat templates: from a conversation to the text of a prompt, as transformers' `apply_chat_template` does it."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_ssm.inference.special_tokens import read_tokenizer_config, special_tokens
from megatron_ssm.inference.text import read_text

from .errors import bad_request


class ChatTemplate:
    """The template of a checkpoint: chat_template.jinja, or the field chat_template of tokenizer_config.json.

    It is code from a file that may come from other people, so it runs in Jinja's sandbox. path: the file with the template,
    or None if there is none. ValueError if the template, or tokenizer_config.json, cannot be read.
    """

    def __init__(self, directory: str | Path):
        config = read_tokenizer_config(directory)
        path = Path(directory) / "chat_template.jinja"
        if path.is_file():
            text: str | None = read_text(path)
        else:
            path = Path(directory) / "tokenizer_config.json"
            text = _default(config.get("chat_template"), path)
        self.path = None if text is None else path
        self._special_tokens = special_tokens(directory)
        try:
            self._template = None if text is None else _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.path}: the chat template is not valid: {error}") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The text of a prompt for the assistant's next message.

        messages: with "role" and "content". ApiError 400 if there is no template, or if it refuses the messages.
        """
        if self._template is None:
            raise bad_request("the model has no chat template, so there is no chat: use /v1/completions", "messages")
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:  # of any kind: templates are code
            raise bad_request(f"the chat template refuses the messages: {error}", "messages") from None


class _Generation(Extension):
    """The tag {% generation %}, which marks the assistant's text for training; only its contents are rendered."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """The nodes between the tag and {% endgeneration %}."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja's sandbox with what transformers gives to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _default(template: Any, path: Path) -> str | None:
    """The template itself, or the one named "default" in a list or an object of named templates; None if there is none."""
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    if template is None:
        return None
    if not all(isinstance(each, dict) and _are_texts(each.get("name"), each.get("template")) for each in named):
        raise ValueError(f"{path}: chat_template must be a text, or a list of objects with the texts name and template")
    return {each["name"]: each["template"] for each in named}.get("default")


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)
