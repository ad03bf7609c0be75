"""What a request's parameters may be. Oracle: OpenAI's documentation of its own, and the table's for the others."""

import json
import re
from pathlib import Path

import pytest

from megatron_ssm.api.errors import ApiError
from megatron_ssm.api.parameters import CHAT, COMPLETIONS, checked, table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "http.md"

TOOL_CALL = {"role": "assistant", "content": "a", "tool_calls": [{"type": "function"}]}
PROMPT = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}


@pytest.mark.parametrize("endpoint", (COMPLETIONS, CHAT))
def test_null_stands_for_the_default(endpoint):
    defaults = checked(endpoint, PROMPT[endpoint])
    assert (defaults["temperature"], defaults["n"], defaults["stop"], defaults["stream"]) == (1.0, 1, None, False)
    assert checked(endpoint, {name: None for name in defaults} | PROMPT[endpoint]) == defaults


def test_fields_that_are_null_count_as_left_out():
    """Also those that are not implemented: clients send messages back with all fields of OpenAI's."""
    message = {"role": "assistant", "content": "a", "name": None, "refusal": None, "audio": None}
    assert checked(CHAT, {"messages": [message], "stream_options": {"include_usage": None}})["messages"] == [message]


@pytest.mark.parametrize(
    "endpoint, name, value, message",
    [
        (COMPLETIONS, "temperature", 2.5, "temperature=2.5 must be at most 2"),
        (COMPLETIONS, "temperature", "1", "temperature=1 must be of type number"),
        (COMPLETIONS, "temperature", True, "temperature=true must be of type number"),
        (COMPLETIONS, "temperature", float("inf"), "must be of type number"),
        (COMPLETIONS, "max_tokens", 1.0, "max_tokens=1.0 must be of type integer"),
        (COMPLETIONS, "top_p", 0, "top_p=0 must be above 0"),
        (COMPLETIONS, "seed", 2**63, "seed=9223372036854775808 must be at most 9223372036854775807"),
        (COMPLETIONS, "stop", ["a", ""], r"stop\[1\]= must be at least 1 character"),
        (COMPLETIONS, "stop", 3, "stop=3 must be a text that ends the reply"),
        (COMPLETIONS, "prompt", [], "prompt=.* must be a list of at least 1 element"),
        (COMPLETIONS, "prompt", ["a", 1], r"prompt\[1\]=1 must be of type string"),
        (COMPLETIONS, "prompt", [[1, -1]], r"prompt\[0\]\[1\]=-1 must be at least 0"),
        (COMPLETIONS, "prompt", {}, "prompt={} must be a text, a list of texts"),
        (COMPLETIONS, "suffix", "b", "suffix is not implemented"),
        (COMPLETIONS, "frequency_penalty", 0.5, "frequency_penalty is not implemented"),
        (COMPLETIONS, "temprature", 1, r"there is no parameter temprature \(did you mean temperature\?\)"),
        (COMPLETIONS, "logit_bias", {"5": 101}, r"logit_bias\.5=101 must be at most 100"),
        (COMPLETIONS, "logit_bias", {"5": None}, r"logit_bias\.5=null must be of type number"),
        (CHAT, "tools", [{}], "tools is not implemented"),
        (CHAT, "echo", True, "there is no parameter echo"),
        (CHAT, "messages", [{"content": "a"}], r"messages\[0\] needs the field role"),
        (CHAT, "messages", [{"role": "user"}], r"messages\[0\] needs the field content"),
        (CHAT, "messages", [{"role": "assistant", "content": None}], r"messages\[0\] needs the field content"),
        (
            CHAT,
            "messages",
            [{"role": "user", "content": []}],
            r"messages\[0\].content=\[\] must be a list of at least 1",
        ),
        (
            CHAT,
            "messages",
            [{"role": "tool", "content": "a"}],
            r'messages\[0\].role=tool must be one of "system", "dev',
        ),
        (CHAT, "messages", [TOOL_CALL], r"messages\[0\].tool_calls is not implemented"),
        (CHAT, "messages", [{"role": "user", "content": "a", "type": "image"}], r"\[0\].type is not implemented"),
        (CHAT, "parallel_tool_calls", 1, "parallel_tool_calls is not implemented"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "text": ""}]}], 'must be one of "text"'),
        (CHAT, "response_format", {"type": "xml"}, r'response_format.type=xml must be one of "text", "json_object"'),
        (CHAT, "stream_options", {"chunk": 1}, r"stream_options.chunk is not implemented"),
        (CHAT, "stream_options", {"include_obfuscation": True}, "include_obfuscation is not implemented"),
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
    with pytest.raises(ApiError, match="must be a JSON object"):
        checked(endpoint, [1])


def test_every_parameter_is_documented():
    section = PAGE.read_text().split("## Parameters")[1].split("## Errors")[0]
    assert set(table(COMPLETIONS)) | set(table(CHAT)) <= set(re.findall(r"`(\w+)`", section))


def test_values_that_change_nothing_are_accepted():
    neutral = dict(presence_penalty=0.0, frequency_penalty=0, tools=[], parallel_tool_calls=True, user="me")
    assert checked(CHAT, PROMPT[CHAT] | neutral)["user"] == "me"
    assert checked(CHAT, {"messages": [TOOL_CALL | {"tool_calls": []}]})
    assert checked(CHAT, PROMPT[CHAT] | {"stream_options": {"include_obfuscation": False}})


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": "a", "x" * 10**6: 1}]},
        {"logit_bias": {"x" * 10**6: "y" * 10**6}},
        {"stop": ["語" * 10**6]},
        {"语" * 10**6: 1},
    ],
    ids=["a field", "a bias", "a stop string", "a parameter"],
)
def test_errors_do_not_repeat_megabytes(changes):
    with pytest.raises(ApiError) as refused:
        checked(CHAT, PROMPT[CHAT] | changes)
    assert len(json.dumps(refused.value.body)) < 15_000
