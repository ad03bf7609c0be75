"""Where the tokens of a reply begin in its text: the `text_offset` of OpenAI's completions."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_ssm.inference.text import TextStream, token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def prompt_offsets(tokenizer: "Tokenizer", text: str, ids: Iterable[int]) -> list[int]:
    """Where each token of a prompt begins in its text, in characters.

    The text has the special tokens that the client has written, and lacks those that the tokenizer has added.
    """
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id: token.content for token_id, token in added.items() if token.special}
    offsets, places = TextOffsets(tokenizer), []
    for token in ids:
        places.append(offsets.push(token))
        if token in special and text.startswith(special[token], offsets.place):
            offsets.place += len(special[token])
    return places


class TextOffsets:
    """Where tokens begin in the text that `TextStream` makes of them, in characters.

    A token that is a part of a character begins where the character does. place: where the next token begins. prompt: the
    ids before it.
    """

    def __init__(
        self, tokenizer: "Tokenizer", special_ids: Iterable[int] = (), place: int = 0, prompt: Sequence[int] = ()
    ):
        self.place = place
        self._stream, self._bytes_of = TextStream(tokenizer, (), special_ids, prompt), token_bytes(tokenizer)

    def push(self, token: int) -> int:
        """Where this token begins, which follows those pushed before."""
        start, added = self.place, self._stream.push(token)
        self.place += len(added)
        own = self._bytes_of(token).decode(errors="ignore")
        return self.place - len(own) if own and added.endswith(own) else start  # bytes before it may not be valid UTF-8
