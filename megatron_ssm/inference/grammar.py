"""Grammars: what a request's text must match, enforced by masks of the logits that llguidance computes.

llguidance (https://github.com/guidance-ai/llguidance) finds the tokens that may follow by parsing the text so far. It is
deterministic: its limits count work, not time. So all ranks that see the same tokens compute the same masks.
"""

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END = "<|end of the text of a grammar|>"
REMEMBERED = 2**20  # characters of the grammars whose parsers are kept: one that is used again is compiled once
LEAST_REMEMBERED = 2**14  # characters that a shorter grammar counts as
KINDS = ("json_object", "json_schema", "regex", "lark")
# llguidance follows rules and references by recursion, so that a long chain of them overflows the stack of its thread, which
# ends the process. These limits are far below the lengths at which that happens.
MOST_REFERENCES = 500  # "$ref" in a schema
MOST_RULES = 500  # in a grammar
MOST_NESTED = 100  # brackets inside each other
MOST_LEVELS = 1500  # the brackets around each reference in sum, or rules times the brackets that are inside each other
# Strings (with the colon after a name in JSON), comments, special tokens and expressions, which hide what is in them; colons
# and brackets.
_LEXEME = re.compile(
    r'"(?:\\.|[^"\\\n])*"?(?:\s*:)?|(?:#|//)[^\n]*|<[^<>]+>'
    r"|/(?:\\.|[^/\\])*/?|(?P<colon>:)|(?P<open>[(\[{])|(?P<close>[)\]}])"
)
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


@dataclass(frozen=True)
class Grammar:
    """What the text of a request must match. kind: one of KINDS; text: the schema as JSON, the expression or the grammar.

    The functions below make one and check it; an object that is copied to another process is not checked again.
    """

    kind: str
    text: str = ""

    @classmethod
    def unchecked(cls, kind: str, text: str) -> "Grammar":
        """One that was checked before; a check takes almost as long as compiling."""
        grammar = object.__new__(cls)
        object.__setattr__(grammar, "kind", kind)
        object.__setattr__(grammar, "text", text)
        return grammar

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"grammar kind {self.kind!r} is none of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise ValueError(f"the text of a grammar must be a string, not {type(self.text).__name__}")
        if self.kind in ("json_schema", "lark"):
            self._check_size()
        is_wrong, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(self.compiled())
        if is_wrong:
            raise ValueError(f"{self.kind}: {' '.join(messages[0].split())}")

    def _check_size(self) -> None:
        """ValueError if a schema or a grammar may be too large for llguidance's recursion. A grammar may contain schemas."""
        references = rules = depth = deepest = levels = 0
        for lexeme in _LEXEME.finditer(self.text):
            rules += lexeme.lastgroup == "colon"
            depth += (lexeme.lastgroup == "open") - (lexeme.lastgroup == "close")
            deepest = max(deepest, depth)
            if _ESCAPE.sub(lambda match: chr(int(match[1], 16)), lexeme[0]).startswith('"$ref"'):
                references, levels = references + 1, levels + depth
        for count, most, what in (
            (references, MOST_REFERENCES, "references ($ref)"),
            (rules, MOST_RULES, "rules"),
            (deepest, MOST_NESTED, "brackets inside each other"),
            (levels, MOST_LEVELS, "brackets around references, in sum,"),
            (rules * deepest, MOST_LEVELS, "rules, times the brackets inside each other,"),
        ):
            if count > most:
                raise ValueError(f"{self.kind}: {count} {what} are more than the {most} that there may be")

    def compiled(self) -> str:
        """llguidance's own notation of it. ValueError for a schema that is not JSON."""
        matcher = _llguidance().LLMatcher
        if self.kind == "regex":
            return matcher.grammar_from_regex(self.text)
        if self.kind == "lark":
            return json.dumps({"grammars": [{"lark_grammar": self.text}]})  # the text alone may be read as such JSON
        try:
            return matcher.grammar_from_json_schema(self.text if self.kind == "json_schema" else '{"type": "object"}')
        except ValueError as error:
            raise ValueError(f"json_schema: {error}") from None


def json_object() -> Grammar:
    """Any JSON object."""
    return Grammar("json_object")


def json_schema(schema: Mapping[str, Any] | str) -> Grammar:
    """JSON that a JSON schema (a dictionary, or its text) describes. ValueError for a schema that is not supported."""
    try:
        return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    except TypeError as error:
        raise ValueError(f"json_schema: {error}") from None


def regex(text: str) -> Grammar:
    """What a regular expression (of Rust's regex package) matches as a whole. ValueError for a wrong expression."""
    return Grammar("regex", text)


def lark(text: str) -> Grammar:
    """What a grammar in llguidance's variant of the notation of Lark describes. ValueError for a wrong grammar."""
    return Grammar("lark", text)


class GrammarTokens:
    """The tokens of a model as llguidance needs them; it is made once for a tokenizer, which takes up to a second.

    vocab_size: that of the model, which may exceed the tokenizer's; ids that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int):
        from tokenizers import Tokenizer

        self._vocab_size = vocab_size
        # llguidance needs a token that ends a text. The request's own stop tokens do that here, so it is given a new one.
        extended = Tokenizer.from_str(tokenizer.to_str())
        extended.add_special_tokens([_END])
        self._end = extended.get_vocab()[_END]
        self._tokens = _llguidance().LLTokenizer(extended.to_str(), eos_token=self._end)
        self._parsers: dict[Grammar, Any] = {}  # those used last are last
        self._lock = threading.Lock()

    def allowed(self, parser: Any) -> torch.Tensor:
        """(vocab_size,) bool: the ids that may follow, without an end of the text."""
        bits = np.frombuffer(parser.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(bits, count=self._end, bitorder="little")
        return torch.from_numpy(np.pad(known, (0, self._vocab_size - self._end)).astype(bool))

    def parser(self, grammar: Grammar) -> Any:
        """llguidance's parser of a grammar, at the beginning of a text. ValueError if the tokens cannot express it."""
        with self._lock:
            parser = self._parsers.pop(grammar, None) or self._new_parser(grammar)
            self._parsers[grammar] = parser
            sizes = [max(LEAST_REMEMBERED, len(each.text)) for each in self._parsers]
            while sum(sizes) > REMEMBERED and len(sizes) > 1:
                del sizes[0], self._parsers[next(iter(self._parsers))]
            return parser.deep_copy()

    def _new_parser(self, grammar: Grammar) -> Any:
        parser = _llguidance().LLMatcher(self._tokens, grammar.compiled(), log_level=0)
        if parser.is_error():
            raise ValueError(f"{grammar.kind}: {' '.join(parser.get_error().split())}")
        return parser


class GrammarMatcher:
    """Follows the tokens of one request through its grammar. ValueError if the tokens cannot express the grammar.

    allowed: (vocab_size,) bool on the CPU, the ids that may follow; ids that end the text are not among them. accepts:
    whether the text so far matches the whole grammar. is_lost: whether the grammar has become too complex to go on.
    """

    def __init__(self, grammar: Grammar, tokens: GrammarTokens):
        self._tokens, self._parser = tokens, tokens.parser(grammar)
        self._look()

    def advance(self, token: int) -> None:
        """Add a token that was allowed."""
        self._parser.consume_token(token)
        self._look()

    def _look(self) -> None:
        """Find out what may follow."""
        self.allowed = self._tokens.allowed(self._parser)
        self.accepts, self.is_lost = self._parser.is_accepting(), self._parser.is_error()


def _llguidance() -> Any:
    """The package; ValueError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ValueError("grammars need the package llguidance: pip install llguidance") from None
    return llguidance
