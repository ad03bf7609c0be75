"""The server's interface. Oracles: OpenAI's Python client, curl, `generate` with the same arguments."""

import json
import re
import shutil
import subprocess
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from servers import (
    IGNORE_EOS,
    LIMIT_S,
    TEMPLATE,
    events,
    expected,
    log_probabilities,
    server,
    text_of,
    with_template,
)  # fmt: skip

KEY, OTHER_KEY = "sk-of-the-tests-0123456789", "sk-another"
PROMPT = "The import statement"
# A chain of references, and of rules: llguidance would overflow its stack.
CHAIN = {
    "$ref": "#/$defs/a0",
    "$defs": {**{f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(9999)}, "a9999": {"type": "null"}},
}
RULES = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(5998)), 'a5998: "x"'])


@pytest.fixture(scope="module")
def directory():
    return with_template("mamba2")


@pytest.fixture(scope="module")
def running(directory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"# the tests\n\n{OTHER_KEY}\n{KEY}\n")
    flags = ["--slots", 4, "--api-key-file", folder / "keys"]
    with server(directory, folder / "log", *flags, key=KEY, start=subprocess.Popen) as running:
        yield running
        code, log = running.end()
        assert code == 0 and KEY not in log and "Traceback" not in log, log


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.url + "/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:
        yield client


def complete(client, **arguments):
    """A completion of PROMPT that does not end early."""
    return client.completions.create(**{"model": "mamba2", "prompt": PROMPT, "extra_body": IGNORE_EOS, **arguments})


def test_models(client):
    assert [model.id for model in client.models.list()] == ["mamba2"]
    assert client.models.retrieve("mamba2").owned_by == "megatron-ssm"
    with pytest.raises(openai.NotFoundError, match="only 'mamba2'"):
        client.models.retrieve("other")


def test_a_greedy_completion(client, directory):
    reply = complete(client, temperature=0, max_tokens=12)
    (choice,) = reply.choices
    assert choice.text == text_of(expected(directory, PROMPT, 12)) and choice.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (20, 12, 32)
    assert reply.object == "text_completion" and choice.logprobs is None


def test_sampled_replies_to_several_prompts(client, directory):
    """Reply i, those to one prompt together, has the seed of the request + i."""
    sampled = dict(temperature=0.9, top_p=0.8, seed=7)
    reply = complete(client, prompt=["one", "another"], n=2, max_tokens=9, **sampled)
    texts = [expected(directory, p, 9, index=i, **sampled) for i, p in enumerate(["one", "one", "another", "another"])]
    assert [choice.text for choice in reply.choices] == list(map(text_of, texts))
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3] and reply.usage.prompt_tokens == 3 + 7


def test_sampling_options_of_other_servers(running, directory):
    options = dict(temperature=1.2, top_k=5, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.4,
                   presence_penalty=0.2, seed=2)  # fmt: skip
    assert running.tokens({"prompt": PROMPT, "max_tokens": 9, **options}) == [expected(directory, PROMPT, 9, **options)]
    alone = expected(directory, PROMPT, 9, temperature=1.2, seed=3)
    sampled = {"prompt": PROMPT, "max_tokens": 9, "temperature": 1.2, "seed": 3, "top_k": -1}
    end = alone.index(alone[4])
    assert running.tokens({**sampled, "stop_token_ids": [alone[4], 256]}) == [alone[: end + 1]]
    found = running.tokens({**sampled, "stop_token_ids": [alone[4]], "min_tokens": 7})[0]
    assert found[:end] == alone[:end] and len(found) > 7 and alone[4] not in found[:7]
    ids = [1, 200, 256, 3]
    assert running.tokens({"prompt": [ids, ids[:2]], "max_tokens": 3, "temperature": 0}) == [
        expected(directory, ids, 3), expected(directory, ids[:2], 3)
    ]  # fmt: skip


def test_a_stream(client):
    whole = complete(client, temperature=0, max_tokens=12, n=2)
    chunks = list(
        complete(client, temperature=0, max_tokens=12, n=2, stream=True, stream_options={"include_usage": True})
    )
    for choice in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat(client, directory):
    """Whole and as a stream; the content may be a list of parts."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi"},
    ]
    prompt = [256, *b"[system]Be brief.[user]Hi[assistant]"]
    assert "[assistant]" in TEMPLATE
    options = dict(model="mamba2", messages=messages, temperature=0, max_completion_tokens=10, extra_body=IGNORE_EOS)
    reply = client.chat.completions.create(**options)
    assert reply.choices[0].message.content == text_of(expected(directory, prompt, 10))
    assert reply.choices[0].message.role == "assistant" and reply.usage.prompt_tokens == len(prompt)
    with client.chat.completions.create(**options, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant" and {delta.role for delta in deltas[1:]} <= {None}
    assert "".join(delta.content or "" for delta in deltas) == reply.choices[0].message.content


def test_stop_strings(client):
    """The text ends before the first one, and no later token is made than the one that completes it."""
    arguments = dict(temperature=1.5, max_tokens=60, seed=5)
    text = complete(client, **arguments).choices[0].text
    start = next(i for i in range(4, 50) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[start : start + 2]
    for stops in (stop, ["never there", stop]):
        reply = complete(client, stop=stops, **arguments)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (text[:start], "stop")
        assert reply.usage.completion_tokens < 60
        chunks = list(complete(client, stop=stops, stream=True, **arguments))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:start]


def test_the_end_of_text_token_ends_a_reply(client, directory):
    found = None
    for seed in range(200):
        tokens = expected(directory, PROMPT, 30, temperature=2.0, seed=seed)
        if 256 in tokens[2:]:
            found = seed, tokens.index(256)
            break
    seed, place = found
    reply = complete(client, temperature=2.0, seed=seed, max_tokens=30, extra_body={})
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("stop", place + 1)
    named = complete(client, temperature=2.0, seed=seed, max_tokens=30, stop="<|endoftext|>")  # with ignore_eos
    assert named.choices == reply.choices and named.usage.completion_tokens == place + 1


def test_log_probabilities(client, directory):
    """Oracle: the log-softmax of the model's logits."""
    new = expected(directory, PROMPT, 4)
    reference = log_probabilities(directory, [*PROMPT.encode(), *new])
    found = complete(client, temperature=0, max_tokens=4, logprobs=3, echo=True).choices[0].logprobs
    assert found.tokens[:20] == list(PROMPT) and found.text_offset[:20] == list(range(20))
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    for place, token in enumerate([*PROMPT.encode(), *new][1:]):
        row = reference[place]
        assert found.token_logprobs[place + 1] == pytest.approx(row[token].item(), abs=1e-4)
        likeliest, likeliest_of = row.topk(3), found.top_logprobs[place + 1]
        assert list(likeliest_of.values())[:3] == pytest.approx(likeliest.values.tolist(), abs=1e-4)
        assert len(likeliest_of) == 3 + (token not in likeliest.indices)
        assert likeliest_of[found.tokens[place + 1]] == found.token_logprobs[place + 1]
    only = complete(client, temperature=0, max_tokens=4, logprobs=0, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in only]
    values = [value for part in parts for value in part.token_logprobs]
    assert values == pytest.approx(found.token_logprobs[20:], abs=1e-4)
    assert all(part.top_logprobs is None for part in parts)


def test_log_probabilities_of_a_chat(client, directory):
    messages = [{"role": "user", "content": "Hi"}]
    new = expected(directory, [256, *b"[user]Hi[assistant]"], 5)
    reply = client.chat.completions.create(
        model="mamba2", messages=messages, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2,
        extra_body=IGNORE_EOS,
    )  # fmt: skip
    content = reply.choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in content] == [bytes([token]) for token in new]
    for entry in content:
        assert entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 2


def test_logit_bias(client):
    reply = complete(client, max_tokens=5, logit_bias={"120": 100, "121": 100}, temperature=0)
    assert len(reply.choices[0].text) == 5 and set(reply.choices[0].text) <= set("xy")
    reply = complete(client, max_tokens=5, logit_bias={"65": 100}, temperature=1)
    assert reply.choices[0].text == "AAAAA"


SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "color": {"enum": ["red", "green"]}},
    "required": ["size", "color"],
    "additionalProperties": False,
}


def test_replies_that_match_a_grammar(client):
    """A model of random weights would hardly write any of these."""
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    options = dict(model="mamba2", messages=[{"role": "user", "content": "Hi"}], seed=3, temperature=1.5)
    reply = client.chat.completions.create(**options, max_tokens=200, response_format=form)
    thing = json.loads(reply.choices[0].message.content)
    assert reply.choices[0].finish_reason == "stop"
    assert set(thing) == {"size", "color"} and 0 <= thing["size"] <= 99 and thing["color"] in ("red", "green")

    only = {"125": 60, "123": 10}  # the braces
    reply = client.chat.completions.create(**options, response_format={"type": "json_object"}, logit_bias=only)
    assert json.loads(reply.choices[0].message.content) == {}

    reply = complete(client, max_tokens=40, seed=1, extra_body={"guided_regex": "[0-9]{3}-(yes|no)"})
    assert re.fullmatch("[0-9]{3}-(yes|no)", reply.choices[0].text)
    reply = complete(client, max_tokens=40, seed=1, extra_body={"structured_outputs": {"choice": ["left", "right"]}})
    assert reply.choices[0].text in ("left", "right")
    reply = complete(client, max_tokens=40, seed=1, extra_body={"guided_grammar": 'start: "a" b "c"\nb: "1" | "2"'})
    assert reply.choices[0].text in ("a1c", "a2c")


def test_responses(client, directory):
    """Whole and as a stream, with instructions."""
    prompt = [256, *b"[system]Be brief.[user]Hi[assistant]"]
    options = dict(model="mamba2", instructions="Be brief.", input="Hi", temperature=0, max_output_tokens=10,
                   extra_body=IGNORE_EOS)  # fmt: skip
    reply = client.responses.create(**options)
    assert reply.output_text == text_of(expected(directory, prompt, 10))
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), 10)
    found = list(client.responses.create(**options, stream=True))
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == reply.output_text
    assert found[0].type == "response.created" and found[-1].type == "response.incomplete"
    usage = found[-1].response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(prompt), 10)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**options, previous_response_id="resp_1")
    assert refused.value.body["param"] == "previous_response_id"


class Thing(BaseModel):
    """Matches SCHEMA."""

    model_config = ConfigDict(extra="forbid")
    size: Annotated[int, Field(ge=0, le=99)]
    color: Literal["red", "green"]


def test_a_response_of_a_schema(client):
    options = dict(model="mamba2", input=[{"role": "user", "content": "Hi"}], text_format=Thing, temperature=1.5,
                   max_output_tokens=200, extra_body={"seed": 3})  # fmt: skip
    thing = client.responses.parse(**options).output_parsed
    assert isinstance(thing, Thing)
    with client.responses.stream(**options) as stream:
        assert stream.get_final_response().output_parsed == thing


def test_an_agent_of_two_turns_of_responses(client):
    """The call is forced; the second turn gets the output of the first, and the result of its call."""
    tool = {"type": "function", "name": "draw", "parameters": SCHEMA, "strict": True}
    options = dict(model="mamba2", tools=[tool], temperature=1.2, max_output_tokens=200, extra_body={"seed": 3})
    asked = {"role": "user", "content": "Draw."}
    forced = {"type": "function", "name": "draw"}
    reply = client.responses.create(**options, input=[asked], tool_choice=forced)
    (call,) = reply.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"size", "color"}
    with client.responses.stream(**options, input=[asked], tool_choice=forced) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == call.arguments and "response.function_call_arguments.delta" in kinds
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    last = client.responses.create(**options, input=[asked, *reply.output, result])
    assert [item.type for item in last.output] == ["message"]


def test_an_agent_of_two_turns_of_a_custom_tool(client):
    """In a namespace, beside a hosted tool, which is ignored."""
    space = {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "custom", "name": "patch"}]}
    options = dict(model="mamba2", tools=[space, {"type": "web_search"}], temperature=1.2, max_output_tokens=120,
                   tool_choice={"type": "custom", "name": "patch"}, extra_body={"seed": 3})  # fmt: skip
    asked = {"role": "user", "content": "Change it."}
    reply = client.responses.create(**options, input=[asked])
    (call,) = reply.output
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "files", "patch")
    events = list(client.responses.create(**options, input=[asked], stream=True))
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert events[-1].response.output[0].input == call.input == done.input != ""
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    last = client.responses.create(**options | {"tool_choice": "none"}, input=[asked, *reply.output, result])
    assert [item.type for item in last.output] == ["message"]


def test_echo(client):
    reply = complete(client, temperature=0, max_tokens=5, echo=True)
    alone = complete(client, temperature=0, max_tokens=5)
    assert reply.choices[0].text == PROMPT + alone.choices[0].text
    nothing = complete(client, max_tokens=0, echo=True)
    assert (nothing.choices[0].text, nothing.usage.completion_tokens) == (PROMPT, 0)
    ended = complete(client, max_tokens=0, echo=True, logit_bias={"256": 100}, extra_body={})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == (PROMPT, "length")
    longest = "y" * 4096
    assert complete(client, prompt=longest, max_tokens=0, echo=True).choices[0].text == longest


def test_prefixes_are_shared_by_the_requests_of_one_key(client):
    prompt = "x" * 300
    cached = [complete(each, prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens
              for each in (client, client, client.with_options(api_key=OTHER_KEY), client)]  # fmt: skip
    assert cached == [0, 300, 0, 300]


@pytest.mark.parametrize(
    "arguments, kind, param, message",
    [
        (dict(best_of=3), openai.BadRequestError, "best_of", "best_of is not implemented"),
        (dict(temperature=9), openai.BadRequestError, "temperature", "temperature=9: Input should be less than"),
        (dict(model="gpt"), openai.NotFoundError, "model", "there is no model 'gpt' here"),
        (
            dict(max_tokens=5000),
            openai.BadRequestError,
            "max_tokens",
            "20 tokens, and 5000 new ones do not fit: .* 4096",
        ),
        (dict(max_tokens=0), openai.BadRequestError, "max_tokens", "max_tokens=0 is for echo only"),
        (dict(prompt=[300]), openai.BadRequestError, "prompt", "token id 300 is outside the vocabulary of 257"),
        (dict(prompt=""), openai.BadRequestError, "prompt", "a prompt has no tokens"),
        (dict(prompt="x" * 4096), openai.BadRequestError, "prompt", "4096 tokens, which are too many: .* 4096"),
        (dict(prompt="x" * 4097, max_tokens=0, echo=True), openai.BadRequestError, "prompt", "4097 tokens, which are"),
        (dict(extra_body={"guided_regex": "()"}), openai.BadRequestError, "guided_regex", "no token of the vocabulary"),
        (dict(prompt=["x"] * 100, n=20), openai.BadRequestError, "n", "100 prompts with n=20: the limit is 256"),
        (dict(logit_bias={"x": 1}), openai.BadRequestError, "logit_bias", "'x' is not a token id"),
        (dict(extra_body={"guided_regex": "(a"}), openai.BadRequestError, "guided_regex", "guided_regex: regex: "),
        (dict(extra_body={"guided_grammar": "a"}), openai.BadRequestError, "guided_grammar", "guided_grammar: lark: "),
        (
            dict(extra_body={"guided_regex": "a", "response_format": {"type": "json_object"}}),
            openai.BadRequestError,
            "guided_regex",
            "response_format and guided_regex exclude each other",
        ),
        (
            dict(prompt=[65] * 4000, echo=True, logprobs=20, n=64, max_tokens=1),
            openai.BadRequestError,
            "logprobs",
            "256064 tokens x 21 log-probabilities exceed the limit of 400000; lower max_tokens",
        ),
        (dict(stream_options={"include_usage": True}), openai.BadRequestError, "stream_options", "for streams only"),
        (
            dict(extra_body={"response_format": {"type": "json_schema", "json_schema": {"schema": CHAIN}}}),
            openai.BadRequestError,
            "response_format",
            "json_schema: it is too complex",
        ),
        (
            dict(extra_body={"guided_grammar": RULES}),
            openai.BadRequestError,
            "guided_grammar",
            "lark: it is too complex",
        ),
    ],
)
def test_errors_name_what_is_wrong(client, running, arguments, kind, param, message):
    with pytest.raises(kind, match=message) as refused:
        complete(client, **arguments)
    assert refused.value.body["param"] == param and refused.value.type == "invalid_request_error"
    with running.client() as plain:
        assert plain.get("/health").status_code == 200


def test_a_key_is_required(running):
    for key in ("wrong", KEY[:-1], KEY + "0"):
        with openai.OpenAI(base_url=running.url + "/v1", api_key=key, max_retries=0) as client:
            for call in (lambda client=client: complete(client), client.models.list):
                with pytest.raises(openai.AuthenticationError, match="a valid API key is required"):
                    call()


def test_curl(running):
    """Streams, and what needs no key."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl")

    def run(path, *flags):
        command = [curl, "-sS", "-N", "--max-time", str(LIMIT_S), running.url + path, *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert json.loads(run("/health")) == {"status": "ok"} and json.loads(run("/ready")) == {"status": "ready"}
    body = json.dumps({"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True, **IGNORE_EOS})
    flags = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}", "-d", body]
    chunks = events(run("/v1/completions", *flags).splitlines())
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert 'requests_total{path="/v1/completions",status="200"}' in run("/metrics")
    assert json.loads(run("/v1/nothing"))["error"]["message"] == "GET /v1/nothing: Not Found"
