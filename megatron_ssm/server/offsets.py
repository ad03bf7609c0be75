"""The places of a reply's tokens in its text: the `text_offset` of OpenAI's completions."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from megatron_ssm.engine.text import TextStream, token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def prompt_offsets(tokenizer: "Tokenizer", text: str, ids: Sequence[int]) -> list[int]:
    """Return where each token of a prompt begins in its text, in characters.

    The text has the special tokens that the client has written, and lacks those that the tokenizer has added. It may also
    lack the space that the tokenizer puts before a text, and ids that the tokenizer does not have. After a character for
    which the tokenizer has only an unknown token, or after text that its decoder changes (WordPiece's, around punctuation),
    places may be a few characters off, but never beyond the text.
    """
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id: token.content for token_id, token in added.items() if token.special}

    def is_shown(token: int) -> bool:
        return token not in special and tokenizer.id_to_token(token) is not None

    places: list[int] = []
    place = 0
    for are_shown, run in groupby(ids, is_shown):
        if are_shown:
            found, place = _run_offsets(tokenizer, text, place, list(run))
            places += found
            continue
        for token in run:
            places.append(place)
            content = special.get(token, "")
            place += len(content) if text.startswith(content, place) else 0
    return [min(place, len(text)) for place in places]


def _run_offsets(tokenizer: "Tokenizer", text: str, place: int, ids: list[int]) -> tuple[list[int], int]:
    """Return the places of tokens in a text that contains them from `place` on, and the place of the next token."""
    # The first token is pushed after another token, so that it keeps its leading space: at the beginning of a text the
    # decoder may strip that space.
    offsets = TextOffsets(tokenizer, place=place, prompt=ids[:1])
    places, shown = [], ""
    for token in ids:
        places.append(offsets.push(token))
        shown += offsets.added
    offsets.finish()
    lacking = max(0, _spaces(shown, 0) - _spaces(text, place))
    return [max(place, each - lacking) for each in places], offsets.place - lacking


def _spaces(text: str, place: int) -> int:
    """The number of spaces at a place of a text."""
    rest = text[place:]
    return len(rest) - len(rest.lstrip(" "))


class TextOffsets:
    """Finds the places of tokens, in characters, in the text that `TextStream` makes of them.

    A token that is a part of a character begins where the character does. place: the place of the next token. added: the
    text that the last token has added. prompt: the ids before the text.
    """

    def __init__(
        self, tokenizer: "Tokenizer", special_ids: Iterable[int] = (), place: int = 0, prompt: Sequence[int] = ()
    ):
        self.place, self.added = place, ""
        self._stream, self._bytes_of = TextStream(tokenizer, (), special_ids, prompt), token_bytes(tokenizer)

    def push(self, token: int) -> int:
        """Return the place of this token, which follows the tokens pushed before."""
        start, self.added = self.place, self._stream.push(token)
        self.place += len(self.added)
        own = self._bytes_of(token).decode(errors="ignore")
        # Bytes before the token's own text may not be valid UTF-8.
        return self.place - len(own) if own and self.added.endswith(own) else start

    def finish(self) -> None:
        """After the last token: move `place` past an incomplete character."""
        self.place += len(self._stream.finish())
