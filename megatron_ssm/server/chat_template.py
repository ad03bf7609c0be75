"""Chat templates: make the text of a prompt from a conversation, as transformers' `apply_chat_template` does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401 - for the template's process; if it is missing, this import names the extra

from megatron_ssm.engine.special_tokens import special_tokens
from megatron_ssm.engine.text import read_chat_template, read_text
from megatron_ssm.engine.thinking import END

from .errors import ApiError, bad_request
from .template_process import TemplateProcess

LONGEST = 10**6  # characters of a template


class ChatTemplate:
    """The template of a checkpoint: `file`, else chat_template.jinja, or the field chat_template of tokenizer_config.json.

    A template is code from a file that may come from other people, so it runs in Jinja's sandbox, in a process with limits
    (see the module `template_process`). path: the file with the template, or None if there is none. text: the template
    itself. reasons: True if the template contains `</think>`, so that the model reasons before its answers. ValueError if
    the template, or tokenizer_config.json, cannot be read, or if the template exceeds the limits.
    """

    def __init__(self, directory: str | Path, file: str | None = None):
        path, text = read_chat_template(directory) if file is None else (Path(file), read_text(file))
        self.path, self.text = path, text or ""
        self.reasons = END in self.text
        self._special_tokens = special_tokens(directory)
        if text is not None and len(text) > LONGEST:
            raise ValueError(f"{self.path}: the chat template has {len(text)} characters; the limit is {LONGEST}")
        try:
            self._template = None if text is None else TemplateProcess(text)
        except ValueError as error:
            raise ValueError(f"{self.path}: the chat template is not valid: {error}") from None

    def render(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None, param: str = "messages"
    ) -> str:
        """The text of a prompt for the assistant's next message.

        messages: with "role" and "content". variables: further ones of the template, or others than the defaults. param: the
        parameter that errors name. ApiError 400 if there is no template, or if it refuses the messages.
        """
        if self._template is None:
            raise bad_request("the model has no chat template, so there is no chat: use /v1/completions", param)
        defaults = dict(tools=None, documents=None, add_generation_prompt=True)
        try:
            return self._template.render(
                {**defaults, **(variables or {}), "messages": messages, **self._special_tokens}
            )
        except ValueError as error:
            message = "the chat template refuses the messages"
            raise ApiError(400, f"{message}: {error}", param, for_log=message) from None
