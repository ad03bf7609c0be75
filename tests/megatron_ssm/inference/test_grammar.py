"""Grammars. Oracles: json, re, and what each grammar excludes; the same tokens on all ranks."""

import json
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ssm import Engine, load
from megatron_ssm.inference.text import BYTE_END_OF_TEXT_ID as END
from megatron_ssm.inference.text import load_tokenizer
from serving import attempt, checkpoint, ids, on_ranks

pytest.importorskip("llguidance")
from megatron_ssm.inference import grammar  # noqa: E402

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
    "lark": (grammar.lark('start: ("yes" | "no") "!"+'), lambda text: re.fullmatch("(yes|no)!+", text)),
}


def texts(model, made, count=6, **options):
    """[(text, finished)] of requests with a grammar, greedy and sampled, beside one without, whose tokens come last."""
    engine = Engine(model, slots=count + 1)
    requests = [engine.add(PROMPT, 60, temperature=i, seed=i, grammar=made, **options) for i in range(count)]
    other = engine.add(PROMPT, 8)
    while engine.is_busy:
        engine.step()
    return [(bytes(i for i in r.tokens if i < END).decode(), r.finished) for r in requests] + [other.tokens]


@worlds
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
        (grammar.regex, 3, "the text of a grammar must be a string, not int"),
    ],
)
def test_wrong_grammars(make, argument, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        make(argument)
    assert "\n" not in str(caught.value)


# Sizes that llguidance's recursion survives, in a thread


def chain(length, levels=0):
    """A schema in which each of `length` references leads to the next one, through as many levels of arrays."""

    def link(number):
        inner = {"$ref": f"#/$defs/a{number}"} if number < length else {"type": "null"}
        for _ in range(levels):
            inner = {"type": "array", "items": inner}
        return inner

    return {**link(0), "$defs": {f"a{number}": link(number + 1) for number in range(length)}}


def rules(count, opening="", closing=""):
    """A grammar of so many rules, each of which names the next one."""
    lines = [f"a{number}: {opening} a{number + 1} {closing}" for number in range(count - 2)]
    return "\n".join(["start: a0", *lines, f'a{count - 2}: "x"'])


@pytest.mark.parametrize(
    "kind, text, what",
    [
        ("json_schema", json.dumps(chain(501)), "501 references"),
        ("json_schema", json.dumps(chain(501)).replace("$", "\\u0024"), "501 references"),
        ("json_schema", json.dumps(chain(200, 5)), "brackets around references"),
        ("lark", rules(501), "501 rules"),
        ("lark", rules(501).replace(":", '[stop="#"] :'), "501 rules"),
        ("lark", rules(501).replace("a0", "a0 </>", 1), "501 rules"),
        ("lark", rules(501).replace("a0", "a0 <\x1c/>", 1), "501 rules"),  # not a space for llguidance
        ("lark", rules(100, "(" * 16, ")" * 16), "times the brackets"),
        ("lark", f'start: {"(" * 101}"x"{")" * 101}', "101 brackets inside each other"),
        ("lark", f'start: {"( /[)]/ " * 101}"x"{")" * 101}', "101 brackets inside each other"),
        ("lark", f"start: %json {json.dumps(chain(501))}", "501 references"),
    ],
)
def test_grammars_that_are_too_large(kind, text, what):
    with pytest.raises(ValueError, match=f"^{kind}: .*{re.escape(what)}"):
        grammar.Grammar(kind, text)


CHECK = """
import sys
from megatron_ssm.inference import grammar
try:
    grammar.Grammar(sys.argv[1], sys.stdin.read())
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "kind, text",
    [
        ("lark", json.dumps({"grammars": [{"lark_grammar": rules(6000)}]})),
        ("lark", rules(6000).replace("a0", "a0 </>", 1)),
    ],
    ids=("JSON", "a special token"),
)
def test_grammars_that_would_overflow_the_stack(kind, text):
    """In a process of its own, which an overflow would end."""
    command, root = [sys.executable, "-c", CHECK, kind], Path(__file__).resolve().parents[3]
    result = subprocess.run(command, input=text, capture_output=True, text=True, cwd=root, timeout=60)
    assert result.returncode == 0 and result.stdout.startswith(f"{kind}: "), result


def test_the_largest_grammars():
    """They are compiled in a thread, as in a server; a stack overflow would end the process."""
    largest = [
        ("json_schema", json.dumps(chain(500))), ("json_schema", json.dumps(chain(100, 12))), ("lark", rules(500)),
        ("lark", rules(60, "(" * 25, ")" * 25)), ("lark", "\n".join(['start: "x"', *['  | ":([{" /[:(]/ // :('] * 600])),
    ]  # fmt: skip
    engine = Engine(load(checkpoint("mamba2")))
    with ThreadPoolExecutor(1) as pool:
        for kind, text in largest:
            made = pool.submit(grammar.Grammar, kind, text).result()
            assert pool.submit(engine.tokenizer.matcher, made).result().allowed.any()


def test_how_many_parsers_are_kept(monkeypatch):
    """Those of the grammars used last, as far as their texts are short enough in sum."""
    tokens, compiled = grammar.GrammarTokens(load_tokenizer(checkpoint("mamba2")), 257), []
    new_parser = tokens._new_parser
    monkeypatch.setattr(tokens, "_new_parser", lambda made: (compiled.append(made), new_parser(made))[1])
    monkeypatch.setattr(grammar, "REMEMBERED", 100)
    monkeypatch.setattr(grammar, "LEAST_REMEMBERED", 30)
    short, other, longer, longest = (grammar.regex("a" * count) for count in (1, 2, 60, 200))
    for made in (short, other, short, longer, short, other, longest, longest, short):
        assert tokens.parser(made).compute_bitmask()
    assert compiled == [short, other, longer, other, longest, short]


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="grammar kind 'ebnf' is none of json_object, "):
        grammar.Grammar("ebnf", "")


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


@pytest.mark.parametrize("world", (2, 4))
def test_a_grammar_that_differs_between_ranks(ranks, world):
    directory = checkpoint("mamba2")

    def run(rank):
        engine = Engine(load(directory, dist.group.WORLD))
        return attempt(engine.add, PROMPT, grammar=grammar.regex("a+" if rank == 1 else "b+"))

    for kind, message in ranks(run, world):
        assert kind == "ValueError" and "[1] were asked something else" in message
