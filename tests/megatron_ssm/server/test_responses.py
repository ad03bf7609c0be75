"""Requests to /v1/responses, and their replies. Oracles: OpenAI's Python types, the calls that texts were written for."""

import json
from dataclasses import replace

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from megatron_ssm.engine.text import load_tokenizer, write_byte_tokenizer
from megatron_ssm.server.chat_template import ChatTemplate
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.prepared_request import ServedModel, prepare_request
from megatron_ssm.server.response_replies import ResponseReplies
from megatron_ssm.server.response_request import ResponseRequest
from megatron_ssm.server.sequences import Update
from megatron_ssm.server.tool_calls import HermesParser

TEMPLATE = "{{ messages | tojson }}{% if enable_thinking %}<think>{% else %}{# </think> #}{% endif %}"
TOOL = {"type": "function", "name": "f", "description": "", "parameters": {"type": "object"}, "strict": True}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": None,
}


SPACE = {"type": "namespace", "name": "agents", "description": "", "tools": [TOOL]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.", "format": GRAMMAR}


def served(directory):
    write_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "config.json").write_text('{"model_type": "mamba2"}')
    tokenizer = load_tokenizer(directory)
    return ServedModel("model", tokenizer, 257, (256,), 4000, ChatTemplate(directory), tool_parser=HermesParser)


def prepared(model, **changes):
    return prepare_request(ResponseRequest, json.dumps({"input": "a", **changes}), "", model)


def messages(tmp_path, **changes):
    """The messages that the template gets."""
    return json.loads(prepared(served(tmp_path), **changes).prompts[0][0])


def test_a_text_is_the_users_message(tmp_path):
    user = {"role": "user", "content": "a"}
    assert messages(tmp_path) == [user]
    assert messages(tmp_path, instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, user]


def test_items_become_messages(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    tool = {"role": "tool", "tool_call_id": "c", "content": "1"}
    found = messages(tmp_path, input=[SAID, CALLED, CALLED, OUTPUT, THOUGHT, CALLED, OUTPUT, THOUGHT, SAID])
    thought = {"reasoning": "hm", "reasoning_content": "hm"}
    assert found == [
        {"role": "assistant", "content": "b", "tool_calls": [call, call]}, tool,
        {"role": "assistant", "content": "", "tool_calls": [call], **thought}, tool,
        {"role": "assistant", "content": "b", **thought},
    ]  # fmt: skip


def test_instructions_are_joined(tmp_path):
    """Those of Codex: a system message, developers' messages."""
    parts = [{"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]
    expected = [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    assert messages(tmp_path, instructions="a", input=items) == expected


def test_items_of_custom_tools_and_namespaces_become_calls(tmp_path):
    called = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "patch", "input": 'a "b"'}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    summary = {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "x",
    }
    search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}}
    found = messages(tmp_path, input=[summary, search, called, output, {**CALLED, "namespace": "agents"}, OUTPUT])
    function = found[0]["tool_calls"][0]["function"]
    assert function == {"name": "patch", "arguments": {"input": 'a "b"'}} and found[0]["reasoning_content"] == "hm"
    assert found[1] == {"role": "tool", "tool_call_id": "c", "content": "ok"}
    assert found[2]["tool_calls"][0]["function"] == {"name": "agents__f", "arguments": {"a": 1}}


def test_a_grammar_of_vllms(tmp_path):
    pytest.importorskip("llguidance")
    (sequence,) = prepared(served(tmp_path), structured_outputs={"regex": "a"}).sequences
    assert sequence.options.grammar is not None


def test_codex_sends_tools_as_an_item(tmp_path):
    added = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [SPACE, PATCH]}
    user = {"role": "user", "content": "a"}
    whole, _ = replied(served(tmp_path), PATCHED, 1000, input=[added, user])
    assert messages(tmp_path, input=[added, user]) == [user] and whole["output"][0]["type"] == "custom_tool_call"


def test_the_model_sees_functions(tmp_path):
    model = served(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }}{# <tool_call> #}")
    model = replace(model, template=ChatTemplate(tmp_path))
    tools = [TOOL, PATCH, SPACE, {"type": "mcp", "server_label": "a"}]
    function, patch, agent = (tool["function"] for tool in json.loads(prepared(model, tools=tools).prompts[0][0]))
    assert function == {"name": "f", "description": "", "parameters": {"type": "object"}, "strict": True}
    assert agent == {**function, "name": "agents__f"}
    assert patch["name"] == "patch" and patch["description"].startswith("Edits files.")
    assert "start: /a+/" in patch["description"] and patch["parameters"]["required"] == ["input"]


@pytest.mark.parametrize(
    "changes, param, message",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not stored"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [THOUGHT]}, "input", "input has no message"),
        ({"input": [{**SAID, "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "'input_text'"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "an item of type message, function_call"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name", "String should match"),
        ({"tools": [SPACE | {"name": "n" * 128}]}, "tools[0].function.name", "String should match"),
        ({"tools": [{**SPACE, "tools": [{}]}]}, "tools[0].tools[0].name", "is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "there is no tool 'g'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs the field schema"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort", "'low', 'medium', 'high'"),
        ({"max_output_tokens": 4000}, "max_output_tokens", "4000 new ones do not fit"),
        ({"input": "a" * 4000}, "input", "too many"),
        ({"messages": []}, "messages", "there is no parameter messages"),
    ],
)
def test_errors_name_the_parameter(tmp_path, changes, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        prepared(served(tmp_path), **changes)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_values_that_change_nothing_are_accepted(tmp_path):
    shared = dict(user="me", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="b")
    own = dict(
        previous_response_id=None, background=False, truncation="disabled", include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False}, top_logprobs=0, reasoning={"effort": None, "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"}, max_tool_calls=None, client_metadata={"a": "b"},
        tools=[{"type": "web_search", "external_web_access": True}],
    )  # fmt: skip
    assert prepared(served(tmp_path), **shared, **own)


def replied(model, text, size, finished="stop", **changes):
    """(the whole response, the events) of a reply with this text, `size` tokens at a time."""
    request = prepared(model, **changes)
    (sequence,), tokens = request.sequences, list(text.encode())
    parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]

    def updates():
        return [*(Update(sequence, list(part)) for part in parts), Update(sequence, [], finished)]

    replies = ResponseReplies(request, model)
    pieces = [replies.add_update(update) for update in updates()]
    for piece in pieces[1:]:
        pieces[0].extend(piece)
    whole = json.loads(replies.whole(pieces[:1]).to_json())
    streamed = ResponseReplies(request, model)
    events = streamed.first_events()
    for update in updates():
        events += streamed.events(streamed.add_update(update))
    return whole, [json.loads(event.to_json()) for event in events + streamed.last_events()]


def shape(output):
    """Items without their ids."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


@pytest.mark.parametrize("size", (1, 3, 1000))
def test_events_add_up_to_the_response(tmp_path, size):
    """OpenAI's types accept each event; the deltas of each item are its text."""
    text = f"So </think>Let me see. {CALL}{CALL}"
    whole, events = replied(served(tmp_path), text, size, tools=[TOOL], **THINKING)
    Response.model_validate(whole)
    for number, event in enumerate(events):
        TypeAdapter(ResponseStreamEvent).validate_python(event)
        assert event["sequence_number"] == number
    last = events[-1]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert last["type"] == "response.completed" and whole["status"] == last["response"]["status"] == "completed"
    assert shape(whole["output"]) == shape(last["response"]["output"])
    reasoning, message, *calls = whole["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "So")
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert [(call["name"], json.loads(call["arguments"]), call["status"]) for call in calls] == [
        ("f", {"a": 1}, "completed")
    ] * 2
    for index, item in enumerate(last["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[-1]["type"] == "response.output_item.done"
        assert {event["item_id"] for event in own[1:-1]} == {own[0]["item"]["id"]} and own[-1]["item"] == item
        expected = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in own if event["type"].endswith(".delta")) == expected
    usage = whole["usage"]
    assert usage == last["response"]["usage"] and usage["output_tokens"] == len(text)
    assert usage["output_tokens_details"]["reasoning_tokens"] == len("So </think")


PATCHED = '<tool_call>{"name": "patch", "arguments": {"input": "+a\\n\\"b\\""}}</tool_call>'
FORCED = '[{"name": "patch", "arguments": {"input": "+a\\n\\"b\\""}}'


@pytest.mark.parametrize("size", (1, 1000))
@pytest.mark.parametrize(
    "text, finished, choice, expected",
    [
        (PATCHED, "stop", "auto", '+a\n"b"'),
        (FORCED + "]", "stop", "required", '+a\n"b"'),
        (FORCED + "]", "stop", {"type": "custom", "name": "patch"}, '+a\n"b"'),
        (FORCED[:-5], "length", "required", '+a\n"b'),
        (PATCHED.replace("input", "text"), "stop", "auto", '{"text": "+a\\n\\"b\\""}'),
    ],
)
def test_calls_of_custom_tools(tmp_path, size, text, finished, choice, expected):
    """Their input is text: that of the argument `input`, or whatever the model wrote instead."""
    whole, events = replied(served(tmp_path), text, size, finished, tools=[PATCH], tool_choice=choice)
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    (item,) = Response.model_validate(whole).output
    assert (item.type, item.name, item.input, item.namespace) == ("custom_tool_call", "patch", expected, None)
    assert shape(whole["output"]) == shape(events[-1]["response"]["output"])
    names = [event["type"].removeprefix("response.") for event in events[2:-1]]
    made = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert names == ["output_item.added", *made, "output_item.done"]
    assert events[3]["delta"] == events[4]["input"] == expected and events[2]["item"]["input"] == ""


@pytest.mark.parametrize("choice, text", [("auto", CALL), ({"type": "function", "name": "f"}, f"[{CALL[11:-12]}]")])
def test_calls_of_a_namespace_keep_it(tmp_path, choice, text):
    text = text.replace('"f"', '"agents__f"')
    whole, events = replied(served(tmp_path), text, 1000, tools=[SPACE, {"type": "web_search"}], tool_choice=choice)
    (item,) = Response.model_validate(whole).output
    assert (item.namespace, item.name, json.loads(item.arguments)) == ("agents", "f", {"a": 1})
    assert whole["tools"] == [SPACE] and shape(events[-1]["response"]["output"]) == shape(whole["output"])


@pytest.mark.parametrize("finished, status", [("length", "incomplete"), ("error", "failed")])
def test_responses_that_end_early(tmp_path, finished, status):
    whole, events = replied(served(tmp_path), "ab", 1, finished)
    assert events[-1]["type"] == f"response.{status}" and whole["status"] == status
    assert whole["output"][0]["status"] == "incomplete" and whole["output"][0]["content"][0]["text"] == "ab"
    assert (whole["incomplete_details"] is None) == (whole["error"] is not None) == (finished == "error")


def test_a_reply_without_text_is_an_empty_message(tmp_path):
    whole, events = replied(served(tmp_path), "", 1)
    assert shape(whole["output"]) == shape(events[-1]["response"]["output"])
    assert Response.model_validate(whole).output_text == "" and whole["output"][0]["type"] == "message"


def test_an_error_in_a_stream_is_an_event(tmp_path):
    model = served(tmp_path)
    event = json.loads(ResponseReplies(prepared(model), model).error_event(ApiError(503, "no", code="gone")).to_json())
    found = TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert (found.type, found.code, found.message) == ("error", "gone", "no")
