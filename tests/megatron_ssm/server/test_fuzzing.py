"""Random requests, made from the OpenAPI schema that the server publishes. Oracle: OpenAI's form of replies and errors."""

import json
import string

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from servers import LIMIT_S, events, server, with_template

ENDPOINTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SMALL = {
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "n": 3,
    "best_of": 1,
    "top_k": 300,
}  # so that requests are short


# Grammars: what llguidance reads, most of it nearly valid

NUMBERS = st.integers(-2, 20)
PIECES = st.sampled_from(r"a . [b-d] ( | ) * + {2} {1,300} \d \/ \w (?i) ^ $ é".split())
EXPRESSIONS = st.lists(PIECES, min_size=1).map("".join)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object", "nothing"])
VALUES = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "é\n"])
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/none"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries(
        {"type": TYPES},
        optional={"pattern": EXPRESSIONS, "enum": st.lists(VALUES, max_size=3), "minimum": NUMBERS, "maxLength": NUMBERS},
    )
    | st.fixed_dictionaries({"const": VALUES})
    | st.fixed_dictionaries({"$ref": REFERENCES}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "$defs": st.fixed_dictionaries({"a": inner}), "properties": st.dictionaries(st.sampled_from("abc"), inner),
            "required": st.lists(st.sampled_from("abc")), "additionalProperties": inner, "items": inner,
            "allOf": st.lists(inner, max_size=3), "anyOf": st.lists(inner, max_size=3), "oneOf": st.lists(inner, max_size=3),
        },
    ),
    max_leaves=8,
)  # fmt: skip
NAMES = st.sampled_from(["start", "b", "c", "A", "b[lazy]", 'c[stop="#"]', "%ignore", "//"])
PARTS = st.sampled_from(
    ['"a"', '"b":', "/[a:c]+/", "</s>", "<|endoftext|>", "<", "b", "c", "A", "B", "~3", "*", "?", "\n |", "(", ")", "# (",
     "/", "{2,300}", "&", '%json {"type": "null"}', '%regex {"substring_chars": "ab"}', "%lark { start: /a/ }", "@b", "é"]
)  # fmt: skip


def rules(names_and_parts):
    """A grammar of these rules."""
    return "\n".join(["start: b", *(f"{name}: {' '.join(parts)}" for name, parts in names_and_parts)])


def chain(length, part, is_json):
    """A grammar in which each rule names the next one; the first one has a part beside it."""
    text = "\n".join([f"start: a0 {part}", *(f"a{i}: a{i + 1}" for i in range(length)), f'a{length}: "a"'])
    return json.dumps({"grammars": [{"lark_grammar": text}]}) if is_json else text


GRAMMARS = {
    "guided_regex": EXPRESSIONS,
    "guided_grammar": st.lists(st.tuples(NAMES, st.lists(PARTS, max_size=6)), max_size=6).map(rules)
    | st.builds(chain, st.sampled_from([5, 400, 6000]), st.sampled_from(["", "/a/", "</s>"]), st.booleans())
    | st.integers(1, 200).map(lambda depth: f'start: {"(" * depth}"a"{")" * depth}'),
    "response_format": SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
    "tools": SCHEMAS.map(lambda schema: [{"type": "function", "function": {"name": "f", "parameters": schema}}]),
}
CHATTING = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}


def with_few_nulls(strategy):
    """The values of a strategy, and one null in four."""
    return st.integers(0, 3).flatmap(lambda number: strategy if number else st.none())


def values(schema, name=""):
    """Values that match a JSON schema."""
    if "anyOf" in schema:
        return st.one_of([values(each, name) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):  # [type, "null"]
        return with_few_nulls(values({**schema, "type": kind[0]}, name))
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(schema.get("minimum", 0), SMALL.get(name, schema.get("maximum", 300)))
    if kind == "number":
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        return st.floats(least, schema["maximum"], exclude_min="exclusiveMinimum" in schema)
    if kind == "string":
        if "pattern" in schema:
            return st.from_regex(schema["pattern"].rstrip("$"), fullmatch=True)
        return st.just("mamba2") if name == "model" else st.text(min_size=schema.get("minLength", 0), max_size=12)
    if kind == "array":
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
    required = schema.get("required", ())
    fields = {field: values(each, field) for field, each in schema.get("properties", {}).items()}
    if "properties" not in schema:
        rule = schema.get("additionalProperties")
        elements = with_few_nulls(values(rule)) if rule else JSON
        return st.dictionaries(st.from_regex("[0-9]{1,3}", fullmatch=True), elements, max_size=3)
    optional = {field: each for field, each in fields.items() if field not in required}
    return st.fixed_dictionaries({field: fields[field] for field in required}, optional=optional)


VALID = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


def bodies(schema):
    """Mostly valid bodies, some with one field that is anything; and anything."""
    names = st.sampled_from([*schema["properties"], "unknown"])
    spoiled = st.builds(lambda body, name, value: body | {name: value}, values(schema), names, JSON)
    data = st.one_of(values(schema), values(schema), spoiled, JSON).map(json.dumps)
    noise = st.text(string.printable, max_size=30) | st.sampled_from(
        ['{"prompt": NaN}', "[" * 5000, '{"prompt": "\\ud800"}', "1" * 5000, '{"prompt": "a", "seed": 1e999}']
    )
    return (data | noise).map(str.encode) | st.binary(max_size=30)


def check_stream(path, text):
    """Each event has the form of its endpoint."""
    if path == "/v1/responses":
        found = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert found[-1]["type"] in ("response.completed", "response.incomplete", "error")
    else:
        kinds = {chunk["object"] for chunk in events(text.split("\n"))}
        assert kinds <= {"text_completion", "chat.completion.chunk"}


@pytest.fixture(scope="module", params=(1, pytest.param(2, marks=pytest.mark.full)))
def running(request, tmp_path_factory):
    """A server with as many ranks as the parameter says."""
    log = tmp_path_factory.mktemp("server") / "log"
    with server(with_template("mamba2"), log, "--slots", 3, "--max-length", 400, tp=request.param) as running:
        yield running
        running.wait_until_idle()
        code, text = running.end()
        assert code == 0 and "Traceback" not in text, text


@pytest.mark.parametrize("examples", (25, pytest.param(1000, marks=pytest.mark.full)))
@pytest.mark.parametrize("path", ENDPOINTS)
def test_random_bodies(running, path, examples):
    """Each gets a reply of the right form, and none an internal error."""
    described = httpx.get(running.url + "/openapi.json").json()["paths"][path]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    statuses = set()
    with running.client() as client:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(bodies(schema))
        @example(json.dumps(VALID[path]).encode())
        @example(b"[")
        def check(body):
            reply = client.post(path, content=body, timeout=LIMIT_S)
            statuses.add(reply.status_code)
            assert reply.status_code == 200 or str(reply.status_code) in described["responses"], reply.text
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"} and reply.status_code < 500
            elif reply.headers["content-type"].startswith("text/event-stream"):
                check_stream(path, reply.text)
            elif path.startswith("/v1/"):
                whole = reply.json()
                assert whole["usage"]["total_tokens"] > 0 and (whole.keys() & {"choices", "output", "data"})

        check()
    assert statuses >= {200, 400}, statuses
    running.wait_until_idle()


@pytest.mark.parametrize("examples", (25, pytest.param(1000, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", GRAMMARS)
def test_random_grammars(running, name, examples):
    """Each is followed, or the error names it."""
    statuses = set()
    with running.client() as client:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(GRAMMARS[name])
        def check(value):
            path, body = ("/v1/chat/completions", CHATTING) if name == "tools" else ("/v1/completions", {"prompt": "a"})
            reply = client.post(path, json={**body, "max_tokens": 5, name: value})
            statuses.add(reply.status_code)
            assert reply.status_code in (200, 400), reply.text
            assert reply.status_code == 200 or reply.json()["error"]["param"] == name

        check()
    assert statuses == {200, 400}
    running.wait_until_idle()


@pytest.mark.parametrize("path", ("/page.html", "/v1", "/v1/completions/", "/v1/models/x/y", "/metrics/../x", "/%00"))
@pytest.mark.parametrize("method", ("GET", "POST", "DELETE"))
def test_other_paths_and_methods(running, path, method):
    reply = httpx.request(method, running.url + path, timeout=LIMIT_S, follow_redirects=False)
    assert reply.status_code in (307, 401, 404, 405)
