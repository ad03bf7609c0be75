"""Grammars that constrain the text of a request, by masks of the logits that llguidance computes.

llguidance (https://github.com/guidance-ai/llguidance) parses the text so far to find the tokens that may follow. It is
deterministic, because its limits count work, not time. So all ranks that see the same tokens compute the same masks.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .grammar_check import LIMITS, one_line, problem
from .schemas import map_schema

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END = "<|end of the text of a grammar|>"
REMEMBERED = 64  # grammars whose check is remembered
# White space in JSON, unless a schema's x-guidance has a rule. It is bounded: a weak model may repeat white space forever.
WHITE_SPACE = r" |\n {0,8}"
# The formats of strings that llguidance knows. Others are annotations for the reader of a schema: pydantic writes password,
# path, binary and more.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
# Strings, comments, special tokens and expressions of a grammar, which may have %json in them; %json before a schema.
_LEXEME = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?:#|//)[^\n]*|<[^<>\s]+>|/(?:\\.|[^/\\])*/?|(?P<json>%json\s*)')


@dataclass(frozen=True)
class Grammar:
    """The grammar of the text of a request.

    It is checked in a separate process (see the module `grammar_check`), but not again when it is copied to another process.

    Attributes:
        kind: One of json_object, json_schema, regex, lark.
        text: The schema as JSON, the regular expression, or the grammar.

    Raises:
        ValueError: The grammar is invalid or too complex.
    """

    kind: str
    text: str = ""

    @classmethod
    def unchecked(cls, kind: str, text: str) -> "Grammar":
        """A grammar that was checked before; a check takes 0.1 s."""
        grammar = object.__new__(cls)
        object.__setattr__(grammar, "kind", kind)
        object.__setattr__(grammar, "text", text)
        return grammar

    def __post_init__(self):
        if error := _problem(self.kind, self.text):
            raise ValueError(f"{self.kind}: {error}")

    def compiled(self) -> str:
        """This grammar in llguidance's notation. ValueError for a schema that is not JSON."""
        if self.kind == "regex":
            return _llguidance().LLMatcher.grammar_from_regex(self.text)
        try:
            if self.kind == "lark":
                return json.dumps({"grammars": [{"lark_grammar": _with_bounded_schemas(self.text)}]})
            schema = {"type": "object"} if self.kind == "json_object" else json.loads(self.text)
            return json.dumps({"grammars": [{"json_schema": _bounded_schema(schema)}]})
        except RecursionError:
            raise ValueError("its parts are nested too deeply") from None


def json_object() -> Grammar:
    return Grammar("json_object")


def json_schema(schema: Mapping[str, Any] | str) -> Grammar:
    """JSON that a JSON schema (a dictionary, or its text) describes. ValueError for a schema that is not supported."""
    try:
        return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    except TypeError as error:
        raise ValueError(f"json_schema: {error}") from None


def regex(text: str) -> Grammar:
    """A grammar of whole matches of a regular expression (of Rust's regex package). ValueError for a wrong expression."""
    return Grammar("regex", text)


def lark(text: str) -> Grammar:
    """A grammar from llguidance's variant of the notation of Lark. ValueError for a wrong grammar.

    An ambiguous grammar slows down all replies that are generated at the same time.
    """
    return Grammar("lark", text)


def choice(texts: Iterable[str]) -> Grammar:
    """A grammar that matches one of `texts`. ValueError if there is no text, or an empty one."""
    texts = list(texts)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"choice={texts!r} must be a list of non-empty texts")
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


class GrammarTokens:
    """The tokens of a model for llguidance. The constructor takes up to a second, so it is called once per tokenizer.

    vocab_size: the vocabulary of the model. It may be larger than that of the tokenizer; further ids are never allowed.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int):
        from tokenizers import Tokenizer

        self._vocab_size = vocab_size
        # llguidance needs a token that ends a text. It gets a new one, because a request has its own stop tokens.
        extended = Tokenizer.from_str(tokenizer.to_str())
        extended.add_special_tokens([_END])
        self._end = extended.get_vocab()[_END]
        self._tokens = _llguidance().LLTokenizer(extended.to_str(), eos_token=self._end)

    def allowed(self, parser: Any) -> torch.Tensor:
        """(vocab_size,) bool: True for the ids that may follow, other than an end of the text."""
        bits = np.frombuffer(parser.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(bits, count=self._end, bitorder="little")
        return torch.from_numpy(np.pad(known, (0, self._vocab_size - self._end)).astype(bool))

    def parser(self, grammar: Grammar) -> Any:
        """llguidance's parser of a grammar, at the beginning of a text. ValueError if the tokens cannot express it.

        Each request needs its own parser: copies share their lexer's states, and the error if there are too many.
        """
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(**LIMITS)
        parser = llguidance.LLMatcher(self._tokens, grammar.compiled(), log_level=0, limits=limits)
        if parser.is_error():
            raise ValueError(f"{grammar.kind}: {one_line(parser.get_error())}")
        return parser


class GrammarMatcher:
    """Follows the tokens of one request through its grammar. ValueError if the tokens cannot express the grammar.

    Attributes:
        allowed: (vocab_size,) bool on the CPU: True for the ids that may follow, other than ids that end the text.
        accepts: True if the text so far matches the whole grammar.
        is_lost: True if the grammar has become too complex to go on.
    """

    def __init__(self, grammar: Grammar, tokens: GrammarTokens):
        self._tokens, self._parser = tokens, tokens.parser(grammar)
        self._look()

    def advance(self, token: int) -> None:
        self._parser.consume_token(token)
        self._look()

    def _look(self) -> None:
        self.allowed = self._tokens.allowed(self._parser)
        self.accepts, self.is_lost = self._parser.is_accepting(), self._parser.is_error()


@lru_cache(REMEMBERED)
def _problem(kind: str, text: str) -> str:
    """The reason why a grammar cannot be used, or ""."""
    try:
        _llguidance()
        return problem(Grammar.unchecked(kind, text).compiled())
    except ValueError as error:
        return str(error)


def _with_bounded_schemas(text: str) -> str:
    """A grammar with the defaults of `_bounded_schema` for each schema after %json."""
    parts, end = [], 0
    for lexeme in _LEXEME.finditer(text):
        if lexeme["json"] and lexeme.start() >= end:
            schema, after = json.JSONDecoder().raw_decode(text, lexeme.end())
            parts += [text[end : lexeme.end()], json.dumps(_bounded_schema(schema))]
            end = after
    return "".join(parts) + text[end:]


def _bounded_schema(schema: Any) -> Any:
    """A schema with bounded white space, unless its x-guidance has a rule, and without formats that are annotations."""
    schema = map_schema({} if schema is True else schema, _without_annotations)
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if isinstance(own, dict) and "whitespace_flexible" not in own:
        schema["x-guidance"] = {"whitespace_pattern": WHITE_SPACE, **own}
    return schema


def _without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without its format, unless that is among FORMATS."""
    known = not isinstance(schema.get("format"), str) or schema["format"] in FORMATS
    return schema if known else {name: value for name, value in schema.items() if name != "format"}


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError("grammars need the package llguidance: pip install llguidance") from None
    return llguidance
