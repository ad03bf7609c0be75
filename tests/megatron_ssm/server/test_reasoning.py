"""Reasoning in replies, however their text is split, and fields of the chat template. Oracle: transformers' template."""

import json
from dataclasses import asdict, astuple

import pytest
from transformers import AutoTokenizer

from megatron_ssm.engine.options import GenerationOptions
from megatron_ssm.engine.text import load_tokenizer, write_byte_tokenizer
from megatron_ssm.server.chat_template import ChatTemplate
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.prepared_request import ServedModel, prepare_request
from megatron_ssm.server.reasoning import ReasoningSplitter
from megatron_ssm.server.replies import Replies
from megatron_ssm.server.request_models import ChatRequest
from megatron_ssm.server.response_request import ResponseRequest
from megatron_ssm.server.sequences import Update
from megatron_ssm.server.tool_calls import HermesParser

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>\n{% endif %}{# </think> #}{% endif %}"
)
REPLIES = [
    # whether the prompt has begun the reasoning, text, reasoning, answer
    (False, "<think>\nSo  what?\n</think>\n\nYes. ", "So  what?", "Yes. "),
    (False, "\n<think>a < b</think></think>", "a < b", "</think>"),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (False, "<think> cut o", "cut o", ""),
    (False, "<think", "", "<think"),
    (False, " <b>Yes</b> <think>no</think>", "", " <b>Yes</b> <think>no</think>"),
    (False, " ", "", " "),
    (True, "So what?\n</think>\nYes.", "So what?", "Yes."),
    (True, "\n<think>So</think>Yes", "So", "Yes"),
    (True, "<thin", "<thin", ""),
    (True, "cut off </thin", "cut off </thin", ""),
    (True, "</think> ", "", ""),
]


@pytest.mark.parametrize("is_open, text, reasoning, answer", REPLIES)
def test_replies_are_split_the_same_way_however_they_come(is_open, text, reasoning, answer):
    for pieces in ([text], list(text), *([text[:place], text[place:]] for place in range(len(text)))):
        splitter = ReasoningSplitter(is_open)
        parts = [*map(splitter.push, pieces), splitter.finish()]
        assert tuple(map("".join, zip(*parts, strict=True))) == (reasoning, answer)


def served(directory, template=TEMPLATE):
    write_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    (directory / "config.json").write_text('{"model_type": "mamba2"}')
    tokenizer = load_tokenizer(directory)
    return ServedModel("model", tokenizer, 257, (256,), 4000, ChatTemplate(directory), tool_parser=HermesParser)


def prepared(model, messages=({"role": "user", "content": "a"},), **changes):
    return prepare_request(ChatRequest, json.dumps({"messages": list(messages), **changes}), "", model)


def test_a_call_after_reasoning(tmp_path):
    model = served(tmp_path)
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = prepared(model, tools=tools, chat_template_kwargs={"enable_thinking": True})
    assert request.is_thinking is True
    replies, (sequence,) = Replies(request, model), request.sequences
    text = b'So.\n</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    piece = replies.add_update(Update(sequence, list(text), "stop"))
    message = json.loads(replies.whole([piece]).to_json())["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] == message["reasoning"] == "So."
    assert message["tool_calls"][0]["function"]["name"] == "f"
    assert replies.usage["completion_tokens_details"] == {"reasoning_tokens": len("So.\n</think")}


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "text, reasoning, answer, names",
    [
        (f"So.\n{CALL}\n", "So.", None, ["f"]),
        (f"So.\n{CALL} Or {CALL}", "So. Or", None, ["f", "f"]),
        (f"So.\n{CALL}</think>Yes.", f"So.\n{CALL}", "Yes.", []),
        (f"So.\n{CALL}</think>{CALL}", f"So.\n{CALL}", None, ["f"]),
        ("Not <tool_call> a", "Not <tool_call> a", "", []),
    ],
)
@pytest.mark.parametrize("size", (1, 1000))
def test_a_call_in_reasoning_without_its_end(tmp_path, text, reasoning, answer, names, size):
    """It is a call only if the end mark does not follow, so that a stream says nothing of it until then."""
    model = served(tmp_path)
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = prepared(model, tools=tools, chat_template_kwargs={"enable_thinking": True})
    replies, (sequence,) = Replies(request, model), request.sequences
    tokens = list(text.encode())
    pieces = [replies.add_update(Update(sequence, tokens[i : i + size], None)) for i in range(0, len(tokens), size)] + [
        replies.add_update(Update(sequence, [], "stop"))
    ]
    if size == 1 and "<tool_call>" in text:
        assert not any(piece.reasoning or piece.calls for piece in pieces[text.index("<") : text.index(">")])
    for piece in pieces[1:]:
        pieces[0].extend(piece)
    choice = json.loads(replies.whole(pieces[:1]).to_json())["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, answer)
    assert [call["function"]["name"] for call in message.get("tool_calls") or []] == names
    assert choice["finish_reason"] == ("tool_calls" if names else "stop")


def test_reasoning_effort_is_a_budget_and_a_variable(tmp_path):
    template = TEMPLATE + "{{ reasoning_effort }}"
    model, think = served(tmp_path, template), {"chat_template_kwargs": {"enable_thinking": True}}

    def budget(effort, **changes):
        request = prepared(model, reasoning_effort=effort, **changes)
        assert request.prompts[0][0].endswith(effort)
        thinking = request.sequences[0].options.thinking
        return thinking and thinking.budget

    assert [budget(effort, **think) for effort in ("low", "medium", "high")] == [1024, 8192, None]
    assert budget("low", thinking_token_budget=7) == 7 and budget("none") == 0
    assert budget("low", thinking_token_budget=-1, **think) is None
    response = {"input": "a", "reasoning": {"effort": "low"}, **think}
    request = prepare_request(ResponseRequest, json.dumps(response), "", model)
    assert request.sequences[0].options.thinking.budget == 1024


def test_what_the_engine_follows(tmp_path):
    model, end, think = served(tmp_path), tuple(b"</think>"), {"chat_template_kwargs": {"enable_thinking": True}}

    def thinking(**changes):
        options = prepared(model, **changes).sequences[0].options
        assert GenerationOptions.from_json(json.loads(json.dumps(asdict(options)))) == options
        return options.thinking and astuple(options.thinking)

    assert thinking() is None and thinking(**think) is None
    assert thinking(thinking_budget=5) == (end, False, 5) and thinking(thinking_token_budget=0, **think) == (
        end,
        True,
        0,
    )
    form = {"response_format": {"type": "json_object"}}
    assert thinking(**form, thinking_budget=5) is None and thinking(**form, **think) == (end, True, None)
    plain = served(tmp_path, "{{ messages[0].content }}")
    assert prepared(plain, thinking_budget=5).sequences[0].options.thinking is None


@pytest.mark.parametrize("content", ("Once upon ", "  a\n\nb", "<think>so"))
def test_the_last_message_is_continued(tmp_path, content):
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    model = served(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    request = prepared(model, chat, continue_final_message=True)
    assert request.prompts[0][0] == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert request.is_thinking is ("<think>" in content)
    request = prepared(model, chat, add_generation_prompt=False)
    assert request.prompts[0][0] == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    with pytest.raises(ApiError, match="exclude each other"):
        prepared(model, chat, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ApiError, match="needs a last message with content that the chat template shows"):
        prepared(model, [{"role": "assistant", "content": " "}], continue_final_message=True)


ONE_INSTRUCTION = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_templates_that_allow_one_instruction(tmp_path):
    """Qwen3.5's. Those at the beginning are joined; a later one is the user's if the template refuses it."""
    roles = ("system", "developer", "user", "system", "developer")
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    ((text, _),) = prepared(served(tmp_path, ONE_INSTRUCTION), messages).prompts
    assert text == "[system]0\n\n1[user]2[user]3[user]4"
    ((text, _),) = prepared(served(tmp_path, "{% for m in messages %}[{{ m.role }}]{% endfor %}"), messages).prompts
    assert text == "[system][user][system][system]"
    with pytest.raises(ApiError, match="refuses the messages: no"):
        prepared(served(tmp_path, "{{ raise_exception('no') }}"), messages)


def test_parts_of_messages(tmp_path):
    """Refusals are text, and thinking is reasoning. Empty content of the assistant and of tools is an empty text."""
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "r"}]
    messages = [{"role": "assistant", "content": parts}, {"role": "assistant", "content": None},
                {"role": "assistant", "content": None, "refusal": "r"}, {"role": "tool", "content": []}]  # fmt: skip
    ((text, _),) = prepared(served(tmp_path, "{{ messages | tojson }}"), messages).prompts
    found = json.loads(text)
    assert [message["content"] for message in found] == ["ar", "", "r", ""] and found[0]["reasoning_content"] == "t"


def test_documents_reach_the_template(tmp_path):
    model = served(tmp_path, "{{ documents | tojson }}")
    ((text, _),) = prepared(model, documents=[{"title": "a", "text": "b"}]).prompts
    assert json.loads(text) == [{"title": "a", "text": "b"}] and prepared(model).prompts[0][0] == "null"


def test_messages_of_developers_and_with_reasoning(tmp_path):
    """A template that does not know developers sees the system."""
    messages = [{"role": "developer", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"}]
    ((text, _),) = prepared(served(tmp_path, "{{ messages | tojson }}"), messages).prompts
    assert [message["role"] for message in json.loads(text)] == ["system", "assistant"]
    assert json.loads(text)[1]["reasoning_content"] == "c"
    ((text, _),) = prepared(served(tmp_path, "{{ messages[0].role }}{# developer #}"), messages).prompts
    assert text == "developer"
