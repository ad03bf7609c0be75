"""Tool calls in replies, however their text is split. Oracles: the calls that the texts were written for, llguidance."""

import json

import pytest
from tokenizers import AddedToken

from megatron_ssm.engine.grammar import GrammarMatcher, GrammarTokens, json_schema
from megatron_ssm.engine.text import load_tokenizer, write_byte_tokenizer
from megatron_ssm.server.chat_template import ChatTemplate
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.prepared_request import ServedModel, prepare_request
from megatron_ssm.server.replies import Replies
from megatron_ssm.server.request_models import ChatRequest
from megatron_ssm.server.sequences import Update
from megatron_ssm.server.tool_calls import PARSERS, ForcedCallParser, ToolCall, calls_schema, detect_parser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "hourly": {"type": "boolean"}, "at": {"type": "object"},
        "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]}, "what": {},
    },
    "required": ["city"],
}  # fmt: skip
TOOLS = {"weather": WEATHER, "now": {"type": "object"}}
ROME = ("weather", {"city": "Rome é 🦀", "days": 3})
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome é 🦀\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
OBJECT = '{"name": "weather", "arguments": {"city": "Rome é 🦀", "days": 3}}'
NOW = '{"name": "now", "arguments": {}}'
REPLIES = [
    # parser, text of a reply, its content, its calls
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", "", [ROME]),
    ("hermes", f"Let me see.\n<tool_call>{NOW}</tool_call>\n<tool_call>{OBJECT}</tool_call>\n", "Let me see.",
     [("now", {}), ROME]),
    ("hermes", f"<tool_call>{OBJECT}", "", [ROME]),  # a model may end the text at once
    ("hermes", '<tool_call>{"name": "now", "parameters": "{\\"a\\": \\"}\\"}"}</tool_call>', "", [("now", {"a": "}"})]),
    ("hermes", "1 < 2, <tool> and </tool_call>, \n", "1 < 2, <tool> and </tool_call>, \n", []),
    ("qwen3_coder", f"Yes.\n\n{XML}\n{XML}", "Yes.", [ROME, ROME]),
    ("qwen3_coder",
     "<tool_call><function=weather><parameter=city>12</parameter><parameter=hourly>True</parameter>"
     "<parameter=unit>null</parameter><parameter=at>\n{\"a\": [1]}\n</parameter><parameter=days>a\n\nb</parameter>"
     "<parameter=what>[1]</parameter><parameter=other>x</parameter></function></tool_call>",
     "", [("weather", {"city": "12", "hourly": True, "unit": None, "at": {"a": [1]}, "days": "a\n\nb", "what": [1],
                       "other": "x"})]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    ("granite", f"<|tool_call|>[{OBJECT}, {NOW}]", "", [ROME, ("now", {})]),
    ("granite", f"So: <|tool_call|> [{NOW}]\n", "So:", [("now", {})]),
    ("nemotron", f"<TOOLCALL>[{NOW}, {OBJECT}]</TOOLCALL> \n", "", [("now", {}), ROME]),
]  # fmt: skip
MALFORMED = [
    ("hermes", "a <tool_call>{\"name\": \"now\"</tool_call> b"),
    ("hermes", "<tool_call>[1]</tool_call>"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>\n'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("hermes", "<tool_call"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n1"),
    ("qwen3_coder", "<tool_call><function=now>a</function></tool_call>"),
    ("qwen3_coder", f"<tool_call>{OBJECT}</tool_call>"),
    ("granite", f"<|tool_call|>[{NOW}, "),
    ("granite", "<|tool_call|>[]"),
    ("nemotron", f"<TOOLCALL>{NOW}</TOOLCALL>"),
]  # fmt: skip


def read(parser, pieces):
    """The content and the calls [(name, text of the arguments)] of a reply that comes in these pieces."""
    content, calls = "", []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        if isinstance(part, str):
            content += part
        elif part.name:
            assert part.index == len(calls) and part.id.startswith("call_")
            calls.append((part.name, part.arguments))
        else:
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    return content, calls


def splits(text):
    """The text whole, in characters, and in two pieces at every place."""
    return [[text], list(text), *([text[:place], text[place:]] for place in range(min(len(text), 500)))]


@pytest.mark.parametrize("name, text, content, calls", REPLIES)
def test_replies_are_split_the_same_way_however_they_come(name, text, content, calls):
    for pieces in splits(text):
        found, called = read(PARSERS[name][0](TOOLS), pieces)
        assert (found, [(name, json.loads(arguments)) for name, arguments in called]) == (content, calls)


@pytest.mark.parametrize("name, text", MALFORMED)
def test_malformed_calls_are_content(name, text):
    for pieces in splits(text):
        assert read(PARSERS[name][0](TOOLS), pieces) == (text, [])


@pytest.mark.parametrize(
    "schema", ({"properties": []}, {"properties": {"a": 1}}, {"properties": {"a": {"type": 3, "enum": 4}}})
)
def test_schemas_that_are_none_tell_no_types(schema):
    call = "<tool_call><function=now><parameter=a>1</parameter></function></tool_call>"
    assert read(PARSERS["qwen3_coder"][0]({"now": schema}), [call]) == ("", [("now", '{"a": 1}')])


def test_at_most_as_many_calls_as_the_request_allows():
    for name, text, _, calls in REPLIES:
        _, found = read(PARSERS[name][0](TOOLS, max_calls=1), [text])
        assert [name for name, _ in found] == [name for name, _ in calls[:1]]


@pytest.mark.parametrize("cut", (0, 1))
def test_forced_calls(cut):
    """Arguments come in pieces; those of a reply that is cut off are incomplete, and content if no call has begun."""
    text = f'[ {NOW},\n{{"name" : "weather", "arguments": {{"city": "}}\\"]{{\\\\", "at": {{"a": [1]}}}}\n}}]'
    expected = [("now", "{}"), ("weather", '{"city": "}\\"]{\\\\", "at": {"a": [1]}}')]
    for pieces in splits(text):
        assert read(ForcedCallParser(), pieces) == ("", expected)
    for place in range(len(text)):
        content, calls = read(ForcedCallParser(), list(text[:place]))
        assert (content == text[:place] and not calls) or not content
        assert all(whole.startswith(part) for (_, part), (_, whole) in zip(calls, expected, strict=False))


def test_arguments_of_forced_calls_are_streamed():
    parser = ForcedCallParser()
    parser.push('[{"name": "weather", "arguments": ')
    assert [part.arguments for part in parser.push('{"city": "Ro')] == ["", '{"city": "Ro']
    assert parser.push("me") == [ToolCall(0, "me")]


def test_formats_are_known_by_their_templates():
    for name, (parser, mark) in PARSERS.items():
        assert detect_parser(f"a {mark} b") is parser, name
    assert detect_parser("<tool_call>\n<function=x>") is PARSERS["qwen3_coder"][0]
    assert detect_parser("{{ messages }}") is None


def test_references_are_to_the_schema_of_the_tool(tmp_path):
    write_byte_tokenizer(tmp_path)
    tokens = GrammarTokens(load_tokenizer(tmp_path), 257)
    tree = {
        "type": "object",
        "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    }
    text = {"type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "string"}}}
    grammar = json_schema(calls_schema({"tree": tree, "text": text}, 1))

    def matches(calls):
        """Return True if the grammar allows these calls."""
        matcher = GrammarMatcher(grammar, tokens)
        return all(matcher.allowed[byte] and matcher.advance(byte) is None for byte in json.dumps(calls).encode())

    assert matches([{"name": "tree", "arguments": {"a": {"b": 1}}}]) and matches(
        [{"name": "text", "arguments": {"b": "x"}}]
    )
    wrong = ([], [{"name": "tree", "arguments": {"a": {"b": "x"}}}], [{"name": "text", "arguments": {"b": 1}}],
             [{"name": "tree", "arguments": {}}] * 2)  # fmt: skip
    assert not any(map(matches, wrong))


# Requests and replies

FUNCTION = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}}
OTHER = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "tools": [FUNCTION, OTHER]}


def served(directory, template="{{ tools | tojson if tools else 'none' }}", parser="hermes", special=()):
    write_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(directory)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    format = PARSERS[parser][0] if parser else None
    return ServedModel("model", tokenizer, 300, (256,), 4000, ChatTemplate(directory), tool_parser=format)


def prepared(model, **changes):
    return prepare_request(ChatRequest, json.dumps({**CHAT, **changes}), "", model)


def test_the_template_gets_the_tools(tmp_path):
    (prompt,) = prepared(served(tmp_path)).prompts
    assert json.loads(prompt[0]) == [FUNCTION, OTHER]
    assert prepared(served(tmp_path), tool_choice="none").prompts[0][0] == "none"


def test_the_template_gets_calls_and_their_results(tmp_path):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    cut, null = ({**call, "function": {"name": "now", "arguments": text}} for text in ('{"a": "b', "null"))
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}, cut, null]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12"}]},
    ]
    ((text, _),) = prepared(served(tmp_path, "{{ messages | tojson }}"), messages=messages).prompts
    assistant, tool = json.loads(text)
    made = [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {"arguments": '{"a": "b'}},
            {"name": "now", "arguments": {}}]  # fmt: skip
    calls = [{**call, "function": function} for function in made]
    assert assistant == {"role": "assistant", "content": "", "tool_calls": calls}
    assert tool == {"role": "tool", "content": "12", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    "changes, param, message",
    [
        ({"tools": [OTHER, OTHER]}, "tools", "two of them have the same name"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "there is no tool 'weather'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice=required needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice=any: Input should be 'none', 'auto' or 'required'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Input should be 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "match pattern"),
        ({"guided_regex": "a"}, "guided_regex", "tools and guided_regex exclude each other"),
    ],
)
def test_errors_name_the_parameter(tmp_path, changes, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        prepared(served(tmp_path), **changes)
    assert refused.value.param == param


def test_tools_need_a_known_format_unless_calls_are_forced(tmp_path):
    model = served(tmp_path, parser=None)
    with pytest.raises(ApiError, match="tools need a chat template that writes calls in a known format"):
        prepared(model)
    assert prepared(model, tool_choice="required") and prepared(model, tool_choice="none")


def accepted(model, **changes):
    """A function that returns True if the grammar of a request allows a text as the whole reply."""
    grammar = prepared(model, **changes).sequences[0].options.grammar
    tokens = GrammarTokens(model.tokenizer, model.vocab_size)

    def accepts(reply):
        matcher = GrammarMatcher(grammar, tokens)
        ids = model.tokenizer.encode(reply, add_special_tokens=False).ids
        return all(matcher.allowed[token] and matcher.advance(token) is None for token in ids) and matcher.accepts

    return accepts


ANSWER = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}}}
JSON_CALL, OTHER_CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}', '{"name":"now","arguments":{}}'
XML_CALL = XML.replace("Rome é 🦀", "Rome")
# parser, texts of calls, texts that are neither calls nor the answer
WITH_SCHEMA = [
    ("hermes", [f"<tool_call>\n{JSON_CALL}\n</tool_call>"], ["<tool_call>\n{}\n</tool_call>"]),
    ("qwen3_coder", [XML_CALL, "<tool_call>\n<function=now>\n</function>\n</tool_call>"],
     [XML_CALL.replace("weather", "other"), XML_CALL.replace("city", "other"), XML_CALL[:-12],
      "<tool_call>\n<function=weather>\n</function>\n</tool_call>"]),
    ("granite", [f"<|tool_call|>[{JSON_CALL}, {OTHER_CALL}]"], ["<|tool_call|>[]"]),
    ("nemotron", [f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>"], [f"<TOOLCALL>[{JSON_CALL}]", "<TOOLCALL>[{}]</TOOLCALL>"]),
]  # fmt: skip


@pytest.mark.parametrize("parser, calls, wrong", WITH_SCHEMA)
def test_beside_a_schema_a_reply_is_calls_or_the_answer(tmp_path, parser, calls, wrong):
    """Also with a mark that is a special token."""
    model = served(tmp_path, parser=parser, special=("<|tool_call|>",))
    accepts = accepted(model, **SCHEMA)
    assert all(map(accepts, calls)) and accepts('{"sum": 3}')
    assert not any(map(accepts, [*wrong, '{"sum": "3"}', f'{{"sum": 3}}{calls[0]}', f"So: {calls[0]}", *OBJECT]))
    for call in calls:
        assert read(PARSERS[parser][0](TOOLS), [call])[1]
    if parser in ("hermes", "qwen3_coder"):
        assert accepts(f"{calls[0]}\n{calls[-1]}")
        assert not accepted(model, **SCHEMA, parallel_tool_calls=False)(f"{calls[0]}\n{calls[-1]}")


def test_forced_calls_have_the_properties_of_the_schema_on_one_line(tmp_path):
    """Whatever the schema says of the reply."""
    parameters = {
        "type": "object", "properties": {"properties": {"$ref": "#/$defs/Point"}, "free": {"type": "object"}},
        "$defs": {"Point": {"properties": {"x": {"type": "integer"}}}},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    accepts = accepted(served(tmp_path), tools=[tool], tool_choice=NAMED, **SCHEMA)

    def accepts_arguments(text):
        return accepts(f'[{{"name": "weather", "arguments": {text}}}]')

    assert accepts_arguments('{"properties": {"x": 1}, "free": {"y": {"z": 2}}}') and accepts_arguments("{}")
    assert not accepts('{"sum": 3}')
    assert not any(map(accepts_arguments, ['{"other": 1}', '{"properties": {"x": 1, "y": 2}}', '{"free":\n{}}']))


def test_forced_calls_of_a_schema_that_combines_others(tmp_path):
    """Each part lists some of the properties; keywords that the grammar does not know are ignored."""
    a, b = ({"properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab")
    model = served(tmp_path)
    for parameters in ({"allOf": [a, b]}, {**a, "anyOf": [b]}, {"$defs": {"a": a}, "allOf": [{"$ref": "#/$defs/a"}, b]},
                       {"properties": {**a["properties"], **b["properties"]}, "not": {"required": ["c"]}}):  # fmt: skip
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", **parameters}}}
        accepts = accepted(model, tools=[tool], tool_choice=NAMED)
        assert accepts('[{"name": "weather", "arguments": {"a": 1, "b": 2}}]'), parameters
        assert not accepts('[{"name": "weather", "arguments": {"a": "1", "b": 2}}]'), parameters


def replied(model, tokens, size, **changes):
    """The choice of a whole reply of these tokens, `size` at a time, and the deltas of its stream joined."""
    request = prepared(model, **changes)
    replies, (sequence,) = Replies(request, model), request.sequences
    parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    pieces = [replies.add_update(Update(sequence, part, None)) for part in parts]
    pieces.append(replies.add_update(Update(sequence, [], "stop")))
    chunks = [json.loads(replies.events(piece)[0].to_json())["choices"][0] for piece in pieces]
    for piece in pieces[1:]:
        pieces[0].extend(piece)
    whole = json.loads(replies.whole(pieces[:1]).to_json())["choices"][0]
    return whole, chunks


@pytest.mark.parametrize("size", (1, 2, 7, 1000))
def test_calls_in_replies(tmp_path, size):
    text = f"Let me see. <tool_call>{OBJECT}</tool_call><tool_call>{NOW}</tool_call>"
    whole, chunks = replied(served(tmp_path), list(text.encode()), size)
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    message, deltas = whole["message"], [chunk["delta"] for chunk in chunks]
    assert message["content"] == "Let me see." == "".join(delta.get("content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == [0, 1] and message["tool_calls"] == calls
    assert [(call["type"], call["function"]["name"]) for call in calls] == [
        ("function", "weather"),
        ("function", "now"),
    ]
    assert json.loads(calls[0]["function"]["arguments"]) == ROME[1]


@pytest.mark.parametrize("size", (1, 1000))
def test_forced_calls_in_replies(tmp_path, size):
    whole, chunks = replied(served(tmp_path), list(f"[{OBJECT}]".encode()), size, tool_choice=NAMED)
    (call,) = whole["message"]["tool_calls"]
    first, *rest = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert whole["message"]["content"] is None and (first["id"], first["index"]) == (call["id"], 0)
    assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in rest)
    joined = first["function"]["arguments"] + "".join(piece["function"]["arguments"] for piece in rest)
    assert joined == call["function"]["arguments"] == json.dumps(ROME[1], ensure_ascii=False)


def test_marks_may_be_special_tokens(tmp_path):
    model = served(tmp_path, parser="granite", special=("<|tool_call|>", "<|other|>"))
    mark, other = map(model.tokenizer.token_to_id, ("<|tool_call|>", "<|other|>"))
    whole, _ = replied(model, [mark, *f"[{NOW}]".encode(), other], 3)
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    whole, _ = replied(model, [mark, *b"[]"], 3, tool_choice="none")
    assert whole["message"] == {"role": "assistant", "content": "[]", "refusal": None}
