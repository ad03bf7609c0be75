"""What a request's JSON asks for. Oracle: the interface's documentation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ssm.api import prepared_request
from megatron_ssm.api.chat_template import ChatTemplate
from megatron_ssm.api.errors import ApiError
from megatron_ssm.api.prepared_request import Served, prepare_request
from megatron_ssm.api.request_models import ChatRequest, CompletionRequest
from megatron_ssm.inference.text import load_tokenizer, write_byte_tokenizer

CHAT, COMPLETIONS = ChatRequest, CompletionRequest
CHATTING = {"messages": [{"role": "user", "content": "Hi"}]}
LENGTH, VOCABULARY = 30, 10
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "http.md"
CASES = [
    # endpoint, chat template, body, param and message of the error
    (COMPLETIONS, "", {"prompt": "a", "logprobs": 20}, "logprobs", "logprobs=20 exceeds the vocabulary of 10"),
    (CHAT, "a", {**CHATTING, "logprobs": True, "top_logprobs": 20}, "top_logprobs", "top_logprobs=20 exceeds"),
    (CHAT, "a", {**CHATTING, "top_logprobs": 1}, "top_logprobs", "top_logprobs needs logprobs to be true"),
    (CHAT, None, CHATTING, "messages", "the model has no chat template"),
    (CHAT, "a" * LENGTH, CHATTING, "messages", "the prompt has 30 tokens, which are too many: a request may have 30"),
    (CHAT, "a" * LENGTH, {**CHATTING, "max_tokens": 5}, "messages", "the prompt has 30 tokens, which are too many"),
    (CHAT, "a" * 20, {**CHATTING, "max_tokens": 11}, "max_tokens", "20 tokens, and 11 new ones do not fit"),
    (CHAT, "a" * 20, {**CHATTING, "max_completion_tokens": 11}, "max_completion_tokens", "11 new ones do not fit"),
    (COMPLETIONS, "", {"prompt": "a" * 20}, "max_tokens", "20 tokens, and 16 new ones do not fit"),
    (
        COMPLETIONS,
        "",
        {"prompt": "a" * 391},
        "prompt",
        "the prompt has 391 characters, which are too many: a request may",
    ),
    (
        COMPLETIONS,
        "",
        {"prompt": "a" * 390},
        "prompt",
        "the prompt has 390 tokens",
    ),  # a token has at most 13 characters
    (COMPLETIONS, "", {"prompt": "a", "n": 2, "best_of": 3}, "best_of", "best_of is not implemented"),
    *(
        (
            COMPLETIONS,
            "",
            {"prompt": "a", "logit_bias": {"1": 100, name: -100}},
            "logit_bias",
            f"'{name}' is not a token id",
        )
        for name in ("01", "00", "10", "-1", " 1", "1.0", "\u0661")
    ),
    (COMPLETIONS, "", {"prompt": [10**6] * 31}, "prompt", "the prompt has 31 tokens, which are too many"),
    (CHAT, "a" * 391, CHATTING, "messages", "the prompt has 391 characters, which are too many"),
]


def served(directory, template):
    write_byte_tokenizer(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return Served("model", load_tokenizer(directory), VOCABULARY, (256,), LENGTH, ChatTemplate(directory))


def prepared(model, body, served_model):
    return prepare_request(model, json.dumps(body), "", served_model)


@pytest.mark.parametrize("endpoint, template, body, param, message", CASES)
def test_errors_name_the_parameter(tmp_path, endpoint, template, body, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        prepared(endpoint, body, served(tmp_path, template))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.code == ("context_length_exceeded" if "request may have" in str(refused.value) else None)


def test_how_many_tokens_there_may_be(tmp_path):
    model = served(tmp_path, "a" * 20)

    def most(endpoint, **body):
        return prepared(endpoint, body, model).sequences[0].arguments.max_new_tokens

    assert most(CHAT, **CHATTING) == 10 and most(CHAT, **CHATTING, max_tokens=10) == 10
    assert most(COMPLETIONS, prompt="a" * 14) == 16
    assert most(COMPLETIONS, prompt="a" * LENGTH, max_tokens=0, echo=True) == 1  # the engine always makes one


def test_empty_fields_of_messages_are_not_given_to_the_template(tmp_path):
    """Templates ask whether they are there. Nor is the type, which clients such as lm-eval's send."""
    model = served(tmp_path, "{{ messages[0] | list | join(',') }}")
    empty = {"tool_calls": [], "refusal": None, "type": "text"}
    message = {**empty, "role": "assistant", "content": [{"type": "text", "text": "a"}]}
    (prompt,) = prepared(CHAT, {"messages": [message]}, model).prompts
    assert prompt[0] == "role,content"


def test_ids_become_text_only_to_be_repeated(tmp_path):
    model, body = served(tmp_path, None), {"prompt": [1, 2], "max_tokens": 5}
    assert prepared(COMPLETIONS, {**body, "echo": True}, model).prompts == [("\x01\x02", [1, 2])]
    assert prepared(COMPLETIONS, body, replace(model, tokenizer=None)).prompts == [("", [1, 2])]


def test_as_many_candidates_as_replies(tmp_path):
    body = {"prompt": "a", "n": 2, "best_of": 2}
    assert len(prepared(COMPLETIONS, body, served(tmp_path, None)).sequences) == 2


TWO_PROMPTS = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 5, "logprobs": 4}


@pytest.mark.parametrize(
    "endpoint, body, count",
    [
        (COMPLETIONS, TWO_PROMPTS, 2 * (5 + 5) * (1 + 4)),
        (COMPLETIONS, {**TWO_PROMPTS, "logprobs": 0}, 2 * (5 + 5)),
        (COMPLETIONS, {**TWO_PROMPTS, "echo": True}, 2 * (3 + 5 + 2 + 5) * (1 + 4)),
        (COMPLETIONS, {**TWO_PROMPTS, "echo": True, "max_tokens": 0}, 2 * (3 + 2) * (1 + 4)),
        (CHAT, {**CHATTING, "n": 3, "logprobs": True, "top_logprobs": 4}, 3 * 10 * (1 + 4)),  # a prompt of 20 tokens
        (CHAT, {**CHATTING, "n": 3, "logprobs": True, "max_tokens": 5}, 3 * 5),
    ],
)
def test_how_many_log_probabilities_there_may_be(tmp_path, monkeypatch, endpoint, body, count):
    model = served(tmp_path, "a" * 20)
    assert f"at most {prepared_request.MAX_LOGPROBS} log-probabilities" in PAGE.read_text()
    monkeypatch.setattr(prepared_request, "MAX_LOGPROBS", count)
    prepared(endpoint, body, model)
    monkeypatch.setattr(prepared_request, "MAX_LOGPROBS", count - 1)
    with pytest.raises(ApiError, match=f"more than the {count - 1} log-probabilities that a request may") as refused:
        prepared(endpoint, body, model)
    assert refused.value.param == ("top_logprobs" if endpoint == CHAT else "logprobs")
