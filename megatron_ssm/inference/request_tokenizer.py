"""The tokenizer of a checkpoint, as the requests of an engine need it: for stop strings and grammars."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .grammar import Grammar, GrammarMatcher, GrammarTokens
from .text import TextStream, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class RequestTokenizer:
    """A tokenizer that is loaded when a request needs it, and a checksum of its file ("" before).

    The ranks compare the checksum: with different tokenizers they would find a stop string at different tokens.

    directory: that of the checkpoint, or None. vocab_size: that of the model.
    """

    def __init__(self, directory: Path | None, vocab_size: int):
        self.checksum = ""
        self._directory, self._vocab_size = directory, vocab_size
        self._tokenizer: Tokenizer | None = None
        self._grammar_tokens: GrammarTokens | None = None

    def text_stream(
        self, stop_strings: tuple[str, ...], stop_tokens: Iterable[int] = (), prompt: Sequence[int] = ()
    ) -> TextStream:
        """A finder of stop strings in a text without its stop tokens, which follows a prompt.

        ValueError if a stop string is empty, or without a tokenizer.
        """
        return TextStream(self._load("stop_strings"), stop_strings, stop_tokens, prompt)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher that follows the tokens of a request through its grammar.

        Compiling takes up to half a second for a complex grammar, and may be done before, in any thread. ValueError if
        there is no tokenizer, or if the tokens cannot express the grammar.
        """
        if self._grammar_tokens is None:
            self._grammar_tokens = GrammarTokens(self._load("grammars"), self._vocab_size)
        matcher = GrammarMatcher(grammar, self._grammar_tokens)
        if not matcher.allowed.any():
            raise ValueError(f"{grammar.kind}: no token of the vocabulary can begin a text of this grammar")
        return matcher

    def _load(self, what: str) -> "Tokenizer":
        """Load it, unless that is done. ValueError or FileNotFoundError, naming `what` needs it, if the model has none."""
        if self._tokenizer is None:
            if self._directory is None:
                raise ValueError(f"{what} need a tokenizer.json, and this model was not loaded from a directory")
            self._tokenizer = load_tokenizer(self._directory)
            self.checksum = hashlib.sha256((self._directory / "tokenizer.json").read_bytes()).hexdigest()[:16]
        return self._tokenizer
