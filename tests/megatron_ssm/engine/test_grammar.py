"""Grammars. Oracles: json, re, and what each grammar excludes; the same tokens on all ranks."""

import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
import torch.distributed as dist

from megatron_ssm import Engine, load
from megatron_ssm.engine.request_tokenizer import RequestTokenizer
from megatron_ssm.engine.text import BYTE_END_OF_TEXT_ID as END
from serving import attempt, checkpoint, ids, on_ranks

pytest.importorskip("llguidance")
from megatron_ssm.engine import grammar  # noqa: E402

worlds = pytest.mark.parametrize("world", (1, 2))
PROMPT = ids(5).tolist()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["mamba", "zamba"]}, "layers": {"type": "integer", "minimum": 1, "maximum": 64}},
    "required": ["name", "layers"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_object": (grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
    "json_schema": (grammar.json_schema(SCHEMA), lambda text: 1 <= json.loads(text)["layers"] <= 64),
    "regex": (grammar.regex("[a-c]{3}(-[0-9]+)*"), lambda text: re.fullmatch("[a-c]{3}(-[0-9]+)*", text)),
    "choice": (grammar.choice(['"a\\n', "b|%json"]), lambda text: text in ('"a\\n', "b|%json")),
    "lark": (grammar.lark('start: ("yes" | "no") "!"+'), lambda text: re.fullmatch("(yes|no)!+", text)),
}


def texts(model, made, count=6, **options):
    """[(text, finished)] of requests with a grammar, greedy and sampled, beside one without, whose tokens come last."""
    engine = Engine(model, slots=count + 1)
    requests = [engine.add(PROMPT, 60, temperature=i, seed=i, grammar=made, **options) for i in range(count)]
    other = engine.add(PROMPT, 8)
    while engine.is_busy:
        engine.step()
    return [(bytes(i for i in r.tokens if i < END).decode(errors="replace"), r.finished) for r in requests] + [
        other.tokens
    ]


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_texts_match_their_grammar(ranks, world):
    """Those that ended: a random model may go on with digits or spaces until its tokens are used up.

    With a bias for what ends texts and what is in them, they end as soon as they may.
    """
    ends = {END: 90.0, ord('"'): 60.0, ord("}"): 60.0}
    results = on_ranks(
        ranks, world, checkpoint("mamba2"),
        lambda model: {
            name: (texts(model, made, stop_tokens=END), texts(model, made, logit_bias=ends, stop_tokens=END))
            for name, (made, _) in GRAMMARS.items()
        },
    )  # fmt: skip
    plain = Engine(load(checkpoint("mamba2"), dtype=torch.float64))
    alone = list(plain.stream(plain.add(PROMPT, 8)))
    for name, (_, matches) in GRAMMARS.items():
        (*free, other), (*short, _) = results[name]
        assert other == alone
        assert all(finished == "stop" for _, finished in short), (name, short)
        for text, finished in free + short:
            assert finished in ("stop", "length") and (finished == "length" or matches(text)), (name, text)


def test_a_grammar_ends_a_request_where_nothing_may_follow():
    """Without stop tokens: there is no other end."""
    model = load(checkpoint("mamba"), dtype=torch.float64)
    *found, _ = texts(model, grammar.regex("a(bc|de)"))
    assert {text for text, _ in found} <= {"abc", "ade"} and {finished for _, finished in found} == {"stop"}


def test_stop_tokens_are_allowed_only_where_the_text_may_end():
    """However likely they are."""
    *found, _ = texts(load(checkpoint("mamba2")), grammar.regex("[ab]{7}"), stop_tokens=END, logit_bias={END: 1e4})
    assert all(re.fullmatch("[ab]{7}", text) and finished == "stop" for text, finished in found)


@pytest.mark.parametrize(
    "make, argument, message",
    [
        (grammar.regex, "a(b", "regex: "),
        (grammar.lark, "start: missing", "lark: "),
        (grammar.json_schema, {"type": "nonsense"}, "json_schema: "),
        (grammar.json_schema, "{", "json_schema: "),
        (grammar.json_schema, {"a": {1, 2}}, "json_schema: "),
    ],
)
def test_wrong_grammars(make, argument, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        make(argument)
    assert "\n" not in str(caught.value)


def chain(length, levels=0):
    """A schema in which each of `length` references leads to the next one, through as many levels of arrays."""

    def link(number):
        inner = {"$ref": f"#/$defs/a{number}"} if number < length else {"type": "null"}
        for _ in range(levels):
            inner = {"type": "array", "items": inner}
        return inner

    return {**link(0), "$defs": {f"a{number}": link(number + 1) for number in range(length)}}


def rules(count):
    """A grammar of so many rules, each of which names the next one."""
    return "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(count - 2)), f'a{count - 2}: "x"'])


OPTIONAL = {"type": "object", "properties": {f"property {i}": {"type": "string"} for i in range(5000)}}
MULTIPLES = " & ".join(f"/(a{{{prime}}})*/" for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41))
COMPLEX = "it is too complex: it takes more than "


@pytest.mark.parametrize(
    "kind, text, message",
    [
        ("regex", "(a{1000}){990}", COMPLEX),
        ("regex", "(((((a{10}){10}){10}){10}){10}){10}", COMPLEX),
        ("json_schema", json.dumps(OPTIONAL), COMPLEX),
        ("json_schema", json.dumps({"type": "integer", "multipleOf": 99999989}), COMPLEX),
        ("json_schema", json.dumps(chain(10000)), COMPLEX),
        ("json_schema", "[" * 100_000, "its parts are nested too deeply"),
        ("lark", f"start: A\nA: {MULTIPLES}", COMPLEX),
        ("lark", rules(6000), COMPLEX),
        ("lark", 'start: s\ns: s s s s | s s s | s s | "a"', COMPLEX),
    ],
)
def test_grammars_that_are_too_complex(kind, text, message):
    """They would take minutes, gigabytes, or more stack than a thread has, which ends a process."""
    with pytest.raises(ValueError, match=f"^{kind}: {message}"):
        grammar.Grammar(kind, text)


def test_the_largest_grammars():
    """They are compiled in a thread, as in a server; a stack overflow would end the process."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(450)}}
    largest = [grammar.json_schema(chain(500)), grammar.json_schema(many), grammar.lark(rules(500))]
    engine = Engine(load(checkpoint("mamba2")))
    with ThreadPoolExecutor(1) as pool:
        assert all(matcher.allowed.any() for matcher in pool.map(engine.tokenizer.matcher, largest))


@cache
def tokenizer():
    return RequestTokenizer(checkpoint("mamba2"), 257)


def test_a_request_does_not_wear_out_the_grammar_of_the_next():
    """llguidance's copies of a parser share its errors."""
    made = grammar.Grammar.unchecked("regex", "(a?){1000}a{1000}")
    for _ in range(2):
        matcher = tokenizer().matcher(made)
        assert matcher.allowed[ord("a")] and not matcher.is_lost
        matcher.advance(ord("a"))
        assert matcher.is_lost


# JSON


def is_matched(made, text):
    """Whether a text matches a grammar as a whole."""
    matcher = tokenizer().matcher(made)
    for byte in text.encode():
        if not matcher.allowed[byte]:
            return False
        matcher.advance(byte)
    return matcher.accepts


@pytest.mark.parametrize(
    "made",
    [
        grammar.json_object(),
        grammar.json_schema({"type": "object"}),
        grammar.lark('start: %json {"type": "object"}'),
        grammar.lark('start: "x" | /%json [{]/ | object // %json {\nobject: %json\n{"type": "object"}'),
    ],
    ids=["json_object", "json_schema", "lark", "lark with other %json"],
)
def test_white_space_is_bounded(made):
    """At most a space, or a line break and an indentation of 8: what json.dumps writes, and no endless reply."""
    value = {"a": 1, "b": [True, {"c": "d  e"}], "f": {}}
    for options in (dict(), dict(separators=(",", ":")), dict(indent=2), dict(indent=1)):
        assert is_matched(made, json.dumps(value, **options)), options
    for text in ('{  "a": 1}', '{"a":  1}', '{"a": 1  }', '{\n\n"a": 1}', '{"a": [\n         1]}', '{\t"a": 1}'):
        assert json.loads(text) and not is_matched(made, text), text


@pytest.mark.parametrize(
    "own, text, is_allowed",
    [
        ({"whitespace_pattern": "[ ]+"}, '{    "a"   : 1}', True),
        ({"whitespace_flexible": True}, '{\n\n\n "a"   :\t1}', True),
        ({"whitespace_flexible": False}, '{"a": 1}', False),
        ({"whitespace_flexible": False}, '{"a":1}', True),
        ({"lenient": True}, '{  "a": 1}', False),
    ],
)
def test_a_schema_may_set_its_own_white_space(own, text, is_allowed):
    schema = {"x-guidance": own, "type": "object"}
    assert is_matched(grammar.json_schema(schema), text) == is_allowed
    assert is_matched(grammar.lark(f"start: %json {json.dumps(schema)}"), text) == is_allowed


def test_formats_that_are_annotations():
    """Strings of any text, wherever the schema of the string is; pydantic writes most of these."""
    names = "path file-path password binary base64url json-string format".split()
    texts = {name: {"type": "string", "format": name} for name in names}
    schema = {
        "$defs": {"format": texts["format"]},
        "properties": {
            **texts,
            "const": {"anyOf": [texts["path"], {"$ref": "#/$defs/format"}]},
            "value": {"const": texts},
        },
        "required": [*names, "const", "value"],
    }
    made = grammar.json_schema(schema)
    assert is_matched(made, json.dumps({**dict.fromkeys(names, "a/b c"), "const": "d", "value": texts}))
    assert not is_matched(made, json.dumps({**dict.fromkeys(names, "a/b c"), "const": "d", "value": {}}))


def test_formats_that_are_enforced():
    made = grammar.json_schema({"type": "string", "format": "date"})
    assert is_matched(made, '"2026-02-28"') and not is_matched(made, '"soon"')


def test_grammars_can_be_sent_to_other_ranks():
    for made, _ in GRAMMARS.values():
        assert pickle.loads(pickle.dumps(made)) == made == grammar.Grammar(made.kind, made.text)


def test_grammars_that_an_engine_refuses(tmp_path):
    engine = Engine(load(checkpoint("mamba2")))
    empty = attempt(engine.add, PROMPT, grammar=grammar.regex(""))
    assert empty == ("ValueError", "regex: no token of the vocabulary can begin a text of this grammar")
    shortest = attempt(engine.add, PROMPT, grammar=grammar.json_object(), min_new_tokens=3)
    assert shortest is not None and "min_new_tokens=3 must be 0 with a grammar" in shortest[1]
    for path in checkpoint("mamba2").iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    missing = attempt(Engine(load(tmp_path)).add, PROMPT, grammar=grammar.json_object())
    assert missing is not None and missing[0] == "FileNotFoundError" and "tokenizer.json" in missing[1]


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_a_grammar_that_differs_between_ranks(ranks, world):
    directory = checkpoint("mamba2")

    def run(rank):
        engine = Engine(load(directory, dist.group.WORLD))
        return attempt(engine.add, PROMPT, grammar=grammar.regex("a+" if rank == 1 else "b+"))

    for kind, message in ranks(run, world):
        assert kind == "ValueError" and message.startswith("arguments differ across ranks: rank 1 ")
