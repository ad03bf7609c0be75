"""Requests to /v1/responses, and their replies. Oracles: OpenAI's Python types, the calls that texts were written for."""

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from megatron_ssm.api.chat_template import ChatTemplate
from megatron_ssm.api.errors import ApiError
from megatron_ssm.api.prepared_request import ServedModel, prepare_request
from megatron_ssm.api.response_replies import ResponseReplies
from megatron_ssm.api.response_request import ResponseRequest
from megatron_ssm.api.sequences import Update
from megatron_ssm.api.tool_calls import HermesParser
from megatron_ssm.inference.text import load_tokenizer, write_byte_tokenizer

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


@pytest.mark.parametrize(
    "changes, param, message",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not stored"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [THOUGHT]}, "input", "input has no message"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "an item of type message, function_call"),
        ({"input": [{**SAID, "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "'input_text'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Input should be 'function'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "there is no tool 'g'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs the field schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "'medium'"),
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
        text={"format": {"type": "text"}, "verbosity": "medium"}, max_tool_calls=None,
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
