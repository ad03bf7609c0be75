"""The OpenAPI description. Oracles: the reference, the checks of requests."""

import json
import re
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.openapi import GENERATING, description
from megatron_ssm.server.request_models import parse_body

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "http.md"
FORM = {"type": "json_schema", "json_schema": {"schema": {}}}
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLACES = [
    # endpoint, where the schema of an object is, a body with such an object, where it is
    (COMPLETIONS, (), {"prompt": "a"}, ()),
    (CHAT, (), MESSAGES, ()),
    (CHAT, ("properties", "messages", "items"), MESSAGES, ("messages", 0)),
    (CHAT, ("properties", "tools", "anyOf", 0, "items"), {**MESSAGES, "tools": [TOOL]}, ("tools", 0)),
    (
        CHAT,
        ("properties", "tools", "anyOf", 0, "items", "properties", "function"),
        {**MESSAGES, "tools": [TOOL]},
        ("tools", 0, "function"),
    ),
    (
        CHAT,
        ("properties", "messages", "items", "properties", "tool_calls", "anyOf", 0, "items"),
        {"messages": [CALLING]},
        ("messages", 0, "tool_calls", 0),
    ),
    (CHAT, ("properties", "stream_options", "anyOf", 0), {**MESSAGES, "stream_options": {}}, ("stream_options",)),
    (CHAT, ("properties", "response_format", "anyOf", 0), {**MESSAGES, "response_format": FORM}, ("response_format",)),
    (
        CHAT,
        ("properties", "response_format", "anyOf", 0, "properties", "json_schema", "anyOf", 0),
        {**MESSAGES, "response_format": FORM},
        ("response_format", "json_schema"),
    ),
]


def body_schema(endpoint):
    operation = description("1")["paths"][endpoint]["post"]
    return operation["requestBody"]["content"]["application/json"]["schema"]


def allows_null(schema):
    """Whether null is valid."""
    if "anyOf" in schema:
        return any(map(allows_null, schema["anyOf"]))
    if "enum" in schema and None not in schema["enum"]:
        return False
    return "type" not in schema or "null" in schema["type"]


def changed(value, path, name):
    """A copy of a JSON value in which the field `name` of the object at `path` is null."""
    if not path:
        return {**value, name: None}
    (key, *rest), copy = path, value.copy()
    copy[key] = changed(value[key], rest, name)
    return copy


@pytest.mark.parametrize("endpoint, where, body, path", PLACES)
def test_null_is_valid_where_requests_may_have_it(endpoint, where, body, path):
    schema = reduce(getitem, where, body_schema(endpoint))
    model, *_ = GENERATING[endpoint]
    for name, each in schema["properties"].items():
        try:
            parse_body(model, json.dumps(changed(body, path, name)))
            is_accepted = True
        except ApiError:
            is_accepted = False
        assert allows_null(each) == is_accepted, name


def test_the_paths_are_those_of_the_reference():
    section = PAGE.read_text().split("## Paths")[1].split("## Parameters")[0]
    documented = {path.replace("NAME", "{model}") for path in re.findall(r"`(?:GET|POST) (\S+)`", section)}
    assert set(description("1")["paths"]) == documented - {"/openapi.json"}
