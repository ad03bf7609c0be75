"""Tools and reasoning. Oracles: OpenAI's Python client; replies on one and on two ranks are the same."""

import json

import openai
import pytest

from servers import LIMIT_S, server, with_template

SIZE, COLOURS = {"type": "integer", "maximum": 99}, {"enum": ["red", "green"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object", "properties": {"size": SIZE, "colour": {"$ref": "#/$defs/c"}},
                "required": ["size", "colour"], "additionalProperties": False, "$defs": {"c": COLOURS},
            },
        },
    }
    for name in ("paint", "draw")
]  # fmt: skip
OPTIONS = dict(model="mamba2", temperature=1.2, seed=3, max_tokens=400)
FORCED = {"type": "function", "function": {"name": "draw"}}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Servers of one model on one and on two ranks."""
    folder, directory = tmp_path_factory.mktemp("servers"), with_template("mamba2")
    with server(directory, folder / "1") as one, server(directory, folder / "2", "--dtype", "float32", tp=2) as two:
        yield one, two


@pytest.fixture(scope="module")
def clients(servers):
    """A client of each."""
    return [
        openai.OpenAI(base_url=each.url + "/v1", api_key="none", max_retries=0, timeout=LIMIT_S) for each in servers
    ]


def arguments_of(call):
    """The arguments of a call, which match the schema."""
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"size", "colour"} and arguments["size"] <= 99 and arguments["colour"] in COLOURS["enum"]
    return arguments


def test_an_agent_of_two_turns(clients):
    """The calls of a random model are forced; all ranks follow one grammar."""
    found = []
    for client in clients:
        messages = [{"role": "user", "content": "Draw."}]
        reply = client.chat.completions.create(**OPTIONS, messages=messages, tools=TOOLS, tool_choice=FORCED)
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "draw" and reply.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        messages += [reply.choices[0].message.model_dump(exclude_none=True), result]
        last = client.chat.completions.create(**OPTIONS | {"max_tokens": 9}, messages=messages, tools=TOOLS)
        assert last.choices[0].finish_reason in ("stop", "length") and not last.choices[0].message.tool_calls
        found.append((arguments_of(call), last.choices[0].message.content))
    assert found[0] == found[1]


def test_several_forced_calls_as_a_stream(clients):
    options = dict(**OPTIONS, messages=[{"role": "user", "content": "a"}], tools=TOOLS, tool_choice="required")
    for client in clients:
        whole = client.chat.completions.create(**options).choices[0].message.tool_calls
        with client.chat.completions.stream(**options) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert [(c.function.name, c.function.arguments) for c in whole] == [
            (c.function.name, c.function.arguments) for c in streamed
        ]
        assert arguments_of(whole[0]) and "tool_calls.function.arguments.delta" in kinds
        alone = client.chat.completions.create(**options, parallel_tool_calls=False).choices[0].message.tool_calls
        assert len(alone) == 1


def test_reasoning_with_a_budget_before_a_call(clients):
    """The prompt begins the reasoning; after its tokens, the call follows the grammar."""
    options = dict(**OPTIONS, messages=[{"role": "user", "content": "a"}], tools=TOOLS, tool_choice=FORCED)
    for budget in (0, 12):
        extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget}
        found = []
        for client in clients:
            extra["return_token_ids"] = True
            reply = client.chat.completions.create(**options, extra_body=extra)
            message, ids = reply.choices[0].message, reply.choices[0].token_ids
            assert bytes(ids[budget : budget + 8]) == b"</think>" and arguments_of(message.tool_calls[0])
            reasoning = bytes(token for token in ids[:budget] if token < 256).decode("utf-8", "replace").strip()
            assert getattr(message, "reasoning_content", "") == getattr(message, "reasoning", "") == reasoning
            with client.chat.completions.create(**options, extra_body=extra, stream=True) as stream:
                deltas = [chunk.choices[0].delta for chunk in stream]
            assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == reasoning
            found.append(ids)
        assert found[0] == found[1]


def test_tokens_of_texts_and_conversations(servers, clients):
    """Those that replies count, and the text that they came from."""
    one, _ = servers
    chat = {"messages": [{"role": "user", "content": "é"}], "tools": TOOLS}
    found = one.post("/tokenize", {**chat, "return_token_strs": True}).json()
    reply = clients[0].chat.completions.create(**chat, **OPTIONS | {"max_tokens": 1})
    assert found["count"] == reply.usage.prompt_tokens == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 4096 and reply.system_fingerprint.startswith("fp_")
    text = one.post("/detokenize", {"tokens": found["tokens"]}).json()
    assert text == {"prompt": "<tool_call>paintdraw<|endoftext|>[user]é[assistant]"}
    alone = one.post("/tokenize", {"prompt": "é"}).json()
    assert alone == {"count": 2, "max_model_len": 4096, "tokens": list("é".encode()), "token_strs": None}
    for path, body, param in (("/tokenize", {}, "prompt"), ("/detokenize", {"tokens": [300]}, "tokens")):
        assert one.post(path, body).json()["error"]["param"] == param
    assert one.post("/tokenize", {"prompt": "a", "model": "b"}).status_code == 404
