"""Tools, reasoning and embeddings. Oracles: OpenAI's Python client; replies on one and on two ranks are the same."""

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
    options = dict(
        **OPTIONS | {"seed": 4}, messages=[{"role": "user", "content": "a"}], tools=TOOLS, tool_choice="required"
    )
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
            usage = {"include_usage": True}
            with client.chat.completions.create(
                **options, extra_body=extra, stream=True, stream_options=usage
            ) as stream:
                *chunks, last = stream
                deltas = [chunk.choices[0].delta for chunk in chunks]
            details = reply.usage.completion_tokens_details
            assert last.usage.completion_tokens_details == details
            assert budget <= details.reasoning_tokens <= budget + len("</think>")
            assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == reasoning
            found.append(ids)
        assert found[0] == found[1]


def test_penalties_beside_tools(servers):
    """The tokens on one and on two ranks are the same, of forced and of free calls."""
    sampled = dict(temperature=1.1, seed=5, frequency_penalty=1.5, presence_penalty=-0.5, repetition_penalty=1.2,
                   min_p=0.001, logit_bias={"97": 2.0}, max_tokens=60)  # fmt: skip
    messages = [{"role": "user", "content": "aaa"}]
    for choice in (FORCED, "auto"):
        body = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "n": 2, **sampled}
        one, two = (each.tokens(body, "/v1/chat/completions") for each in servers)
        assert one == two and all(map(len, one))
        plain, _ = (each.tokens({**body, "frequency_penalty": 0}, "/v1/chat/completions") for each in servers)
        assert plain != one


def test_embeddings(servers, clients):
    """Those of the client, which asks for base64, of token ids, and of more texts than slots; on one and on two ranks."""
    texts = [f"text {number}" * number for number in range(1, 20)]
    found = []
    for running, client in zip(servers, clients, strict=True):
        reply = client.embeddings.create(model="mamba2", input=texts)
        vectors = [each.embedding for each in reply.data]
        assert [each.index for each in reply.data] == list(range(len(texts)))
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, texts))
        ids = [list(text.encode()) for text in texts]
        plain = running.post("/v1/embeddings", {"input": ids, "encoding_format": "float"}).json()["data"]
        for vector, other in zip(vectors, plain, strict=True):
            assert vector == pytest.approx(other["embedding"], abs=1e-5)
            assert sum(number**2 for number in vector) == pytest.approx(1, abs=1e-5)
        mean = running.post("/v1/embeddings", {"input": texts[0], "pooling": "mean"}).json()["data"][0]["embedding"]
        assert mean != pytest.approx(vectors[0], abs=1e-3)
        sized = client.embeddings.create(model="mamba2", input=texts[0], dimensions=len(mean)).data[0].embedding
        assert sized == pytest.approx(vectors[0], abs=1e-5)
        found.append([*vectors, mean])
    for one, two in zip(*found, strict=True):
        assert one == pytest.approx(two, abs=1e-4)


def test_embeddings_refuse_what_is_wrong(servers):
    one, _ = servers
    for body, param in (
        ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [300]}, "input"), ({"input": "a" * 5000}, "input"),
        ({"input": [97] * 4097}, "input"), ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"), ({}, "input"),
    ):  # fmt: skip
        reply = one.post("/v1/embeddings", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


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
