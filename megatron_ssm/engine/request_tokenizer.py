"""The tokenizer of a checkpoint for the stop strings and the grammars of an engine's requests."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .grammar import Grammar, GrammarMatcher, GrammarTokens
from .text import TextStream, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class RequestTokenizer:
    """A tokenizer that is loaded when a request needs it.

    Args:
        directory: The directory of the checkpoint, or None.
        vocab_size: The vocabulary of the model.

    Attributes:
        checksum: The checksum of the loaded file, or "". The ranks compare it, because different tokenizers would find a
            stop string at different tokens.
    """

    def __init__(self, directory: Path | None, vocab_size: int):
        self.checksum = ""
        self._directory, self._vocab_size = directory, vocab_size
        self._tokenizer: Tokenizer | None = None
        self._grammar_tokens: GrammarTokens | None = None

    def text_stream(
        self, stop_strings: tuple[str, ...], stop_tokens: Iterable[int] = (), prompt: Sequence[int] = ()
    ) -> TextStream:
        """A stream that finds stop strings in the text after a prompt; stop tokens are not part of the text.

        ValueError if a stop string is empty, or without a tokenizer.
        """
        return TextStream(self._load("stop_strings"), stop_strings, stop_tokens, prompt)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher that follows the tokens of a request through its grammar.

        It takes up to half a second for a complex grammar, and may be called in any thread. ValueError if there is no
        tokenizer, or if the tokens cannot express the grammar.
        """
        if self._grammar_tokens is None:
            self._grammar_tokens = GrammarTokens(self._load("grammars"), self._vocab_size)
        matcher = GrammarMatcher(grammar, self._grammar_tokens)
        if not matcher.allowed.any():
            raise ValueError(f"{grammar.kind}: no token of the vocabulary can begin a text of this grammar")
        return matcher

    def _load(self, users: str) -> "Tokenizer":
        """Load the tokenizer once. ValueError or FileNotFoundError if there is none. users: the features that need it."""
        if self._tokenizer is None:
            if self._directory is None:
                raise ValueError(f"{users} need a tokenizer.json, and this model was not loaded from a directory")
            self._tokenizer = load_tokenizer(self._directory)
            self.checksum = hashlib.sha256((self._directory / "tokenizer.json").read_bytes()).hexdigest()[:16]
        return self._tokenizer
