"""What a request's parameters may be. Oracle: OpenAI's documentation of its own, and the reference for the others."""

import json
import re
from pathlib import Path

import pytest

from docs.generated import filled
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    parse_body,
)
from megatron_ssm.server.response_request import ResponseRequest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "http.md"

CHAT, COMPLETIONS = ChatRequest, CompletionRequest
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}
TOOL_CALL = {"role": "assistant", "content": "a", "tool_calls": [{"type": "function"}]}


def checked(model, body):
    return parse_body(model, json.dumps(body))


PROMPT = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}


@pytest.mark.parametrize("endpoint", (COMPLETIONS, CHAT))
def test_null_stands_for_the_default(endpoint):
    defaults = checked(endpoint, PROMPT[endpoint])
    assert (defaults.temperature, defaults.n, defaults.stop, defaults.stream) == (1.0, 1, [], False)
    assert checked(endpoint, {name: None for name in endpoint.model_fields} | PROMPT[endpoint]) == defaults


def test_fields_that_are_null_count_as_left_out():
    """Also those that are not implemented: clients send messages back with all fields of OpenAI's."""
    message = {"role": "assistant", "content": "a", "name": None, "refusal": None, "audio": None}
    (found,) = checked(CHAT, {"messages": [message], "stream_options": {"include_usage": None}}).messages
    assert found.for_template() == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "endpoint, name, value, message",
    [
        (COMPLETIONS, "temperature", 2.5, "temperature=2.5: Input should be less than or equal to 2"),
        (COMPLETIONS, "temperature", "1", "temperature=1: Input should be a valid number"),
        (COMPLETIONS, "temperature", True, "temperature=true: Input should be a valid number"),
        (COMPLETIONS, "temperature", float("inf"), "Input should be a finite number"),
        (COMPLETIONS, "max_tokens", 1.0, "max_tokens=1.0: Input should be a valid integer"),
        (COMPLETIONS, "max_tokens", True, "max_tokens=true: Input should be a valid integer"),
        (COMPLETIONS, "top_p", 0, "top_p=0: Input should be greater than 0"),
        (COMPLETIONS, "seed", 2**63, "seed=9223372036854775808: Input should be less than 9223372036854775808"),
        (COMPLETIONS, "stop", ["a", ""], r"stop\[1\]=: String should have at least 1 character"),
        (COMPLETIONS, "stop", 3, "stop=3: Input should be a valid array"),
        (COMPLETIONS, "prompt", [], r"prompt=\[\]: Input should be a text, a list of texts"),
        (COMPLETIONS, "prompt", ["a", 1], r"prompt\[1\]=1: Input should be a valid string"),
        (COMPLETIONS, "prompt", [[1, -1]], r"prompt\[0\]\[1\]=-1: Input should be greater than or equal to 0"),
        (COMPLETIONS, "prompt", {}, "prompt={}: Input should be a text, a list of texts"),
        (COMPLETIONS, "suffix", "b", "suffix=b is not implemented"),
        (COMPLETIONS, "temprature", 1, r"there is no parameter temprature \(did you mean temperature\?\)"),
        (COMPLETIONS, "logit_bias", {"5": 101}, r"logit_bias\.5=101: Input should be less than or equal to 100"),
        (COMPLETIONS, "logit_bias", {"5": None}, r"logit_bias\.5=null: Input should be a valid number"),
        (CHAT, "tools", [{}], r"tools\[0\]\.type is missing"),
        (CHAT, "functions", [{}], r"functions=\[{}\] is not implemented"),
        (CHAT, "echo", True, "echo=true is not implemented"),
        (CHAT, "messages", [{"content": "a"}], r"messages\[0\]\.role is missing"),
        (CHAT, "messages", [{"role": "user"}], r"messages\[0\]\.content is missing"),
        (CHAT, "messages", [{"role": "user", "content": None}], r"messages\[0\]\.content is missing"),
        (
            CHAT,
            "messages",
            [{"role": "user", "content": 1}],
            r"\.content=1: Input should be a text, or a list of texts",
        ),
        (CHAT, "messages", [{"role": "user", "content": []}], r"\.content=\[\]: List should have at least 1 item"),
        (
            CHAT,
            "messages",
            [{"role": "function", "content": "a"}],
            r"\.role=function: Input should be 'system', 'developer', 'us",
        ),
        (CHAT, "messages", [TOOL_CALL], r"messages\[0\]\.tool_calls\[0\]\.function is missing"),
        (CHAT, "messages", [{"role": "user", "content": "a", "type": "image"}], r"\[0\]\.type=image: .* be 'text'"),
        (CHAT, "messages", [IMAGE], r"messages\[0\]\.content\[0\]\.type=image_url: Input should be 'text'"),
        (CHAT, "parallel_tool_calls", 1, "parallel_tool_calls=1: Input should be a valid boolean"),
        (CHAT, "response_format", {"type": "xml"}, "response_format.type=xml: Input should be 'text', 'json_object'"),
        (
            CHAT,
            "stream_options",
            {"other": True},
            r"_options\.other=true: Input should be False",
        ),
        (CHAT, "response_format", {"type": "text", "x": 1}, r"there is no parameter response_format\.x"),
        (CHAT, "reasoning_effort", "most", "reasoning_effort=most: Input should be 'none', 'minimal', 'low'"),
        (CHAT, "function_call", {"name": "a"}, "function_call={.* is not implemented"),
        (CHAT, "guided_json", "{", "guided_json={: Input should be a JSON schema, or its text"),
        (COMPLETIONS, "top_k", -2, "top_k=-2: Input should be greater than or equal to -1"),
        (COMPLETIONS, "frequency_penalty", 2.5, "frequency_penalty=2.5: Input should be less than or equal to 2"),
    ],
)
def test_errors_name_the_parameter(endpoint, name, value, message):
    with pytest.raises(ApiError, match=message) as refused:
        checked(endpoint, PROMPT[endpoint] | {name: value})
    assert refused.value.status == 400 and refused.value.param.startswith(name)


@pytest.mark.parametrize("endpoint, name", [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_what_is_missing(endpoint, name):
    for body in ({}, {name: None}):
        with pytest.raises(ApiError, match=f"{name} is missing"):
            checked(endpoint, body)
    with pytest.raises(ApiError, match="the body of the request: Input should be an object"):
        checked(endpoint, [1])


def test_every_parameter_is_documented():
    section = filled(PAGE.read_text()).split("## Parameters")[1].split("## Errors")[0]
    models = (COMPLETIONS, CHAT, TokenizeRequest, DetokenizeRequest, EmbeddingRequest, ResponseRequest)
    assert set().union(*(model.model_fields for model in models)) <= set(re.findall(r"`(\w+)`", section))


def test_values_that_change_nothing_are_accepted():
    shared = dict(
        user="me", metadata={"a": "b"}, store=True, service_tier="flex", safety_identifier="a", prompt_cache_key="b",
        prompt_cache_retention="24h", stream_options={"include_usage": False, "include_obfuscation": True, "other": False},
    )  # fmt: skip
    chat = dict(
        tools=[], tool_choice="auto", functions=[], function_call="none", parallel_tool_calls=True, modalities=["text"],
        reasoning_effort="minimal", verbosity="medium", skip_special_tokens=True, include_stop_str_in_output=False,
    )  # fmt: skip
    assert checked(CHAT, PROMPT[CHAT] | shared | chat) and checked(COMPLETIONS, PROMPT[COMPLETIONS] | shared)
    assert checked(CHAT, {"messages": [TOOL_CALL | {"tool_calls": []}]})
    tool = {"type": "function", "function": {"name": "draw"}}
    cached = tool | {"cache_control": {"type": "ephemeral"}}
    assert (
        checked(CHAT, PROMPT[CHAT] | {"tools": [cached]}).tools == checked(CHAT, PROMPT[CHAT] | {"tools": [tool]}).tools
    )


def test_the_template_gets_the_other_fields_of_messages():
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part, part], "name": "me", "cache_control": {"type": "ephemeral"}}
    (found,) = checked(CHAT, {"messages": [message]}).messages
    assert found.for_template() == message | {"content": "aa"}


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": "a", "tool_calls": ["x" * 10**6]}]},
        {"stream_options": {"x" * 10**6: 1}},
        {"logit_bias": {"x" * 10**6: "y" * 10**6}},
        {"stop": ["語" * 10**6]},
        {"语" * 10**6: 1},
    ],
    ids=["a field", "an option", "a bias", "a stop string", "a parameter"],
)
def test_errors_do_not_repeat_megabytes(changes):
    with pytest.raises(ApiError) as refused:
        checked(CHAT, PROMPT[CHAT] | changes)
    assert len(refused.value.reply.to_json()) < 15_000
