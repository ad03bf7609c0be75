"""From tokens to the objects of OpenAI's interface: completions and chat completions, whole or in chunks."""

import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron_ssm.inference.text import TextStream, token_bytes

from .calls import Call, Served
from .offsets import TextOffsets
from .sequences import Update


@dataclass
class Piece:
    """A part of the reply `index`, or the whole. logprobs: of `tokens`; see `Request.logprobs`.

    prompt, prompt_logprobs: what the reply repeats of the prompt at its beginning (echo). offsets: for a completion with
    log-probabilities, where each token of `prompt` and of `tokens` begins in the text of the whole reply.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finished: str | None = None
    offsets: list[int] = field(default_factory=list)
    is_first: bool = False
    prompt: list[int] = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)

    def extend(self, other: "Piece") -> None:
        """Append the next part of the reply."""
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.offsets += other.offsets
        self.finished = other.finished


class Reply:
    """The text of one sequence, as it is generated."""

    def __init__(self, call: Call, served: Served, index: int):
        self.index, self._call = index, call
        hidden = call.sequences[index].arguments.stop_tokens  # as in the engine, which finds the stop strings
        text, ids = call.prompts[index // call.values["n"]]
        self._text = TextStream(served.tokenizer, call.stop_strings, hidden, ids)
        self._echo = (text, ids) if call.values.get("echo") else None
        self._prompt_offsets = call.offsets[index // call.values["n"]] if call.offsets else []
        self._is_first = True
        self._offsets = TextOffsets(served.tokenizer, hidden, len(text) if self._echo else 0, ids)

    def take(self, update: Update) -> Piece:
        """The next part: what an update adds."""
        tokens = [] if self._call.drops_tokens else update.tokens
        finished = "length" if update.finished and self._call.drops_tokens else update.finished
        piece = Piece(self.index, "", tokens, update.logprobs[: len(tokens)], finished, is_first=self._is_first)
        has_offsets = self._call.logprobs is not None and not self._call.is_chat
        if self._is_first and self._echo is not None:
            piece.text, piece.prompt = self._echo
            piece.prompt_logprobs = update.prompt_logprobs
            piece.offsets = list(self._prompt_offsets)
        piece.offsets += map(self._offsets.push, tokens) if has_offsets else []
        piece.text += "".join(map(self._text.push, tokens))
        if update.finished is not None:
            piece.text += self._text.finish()
        self._is_first = False
        return piece


class Replies:
    """The replies to one call. usage: the tokens so far, as OpenAI reports them.

    Tokens of a prompt count as cached if none of the replies to it needed to read them.
    """

    def __init__(self, call: Call, served: Served):
        self._call, self._model = call, served.name
        self._replies = [Reply(call, served, sequence.index) for sequence in call.sequences]
        self._bytes_of, self._name = cache(token_bytes(served.tokenizer)), cache(self._name_of)
        self._head = {
            "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
        }
        self._new, self._reused = 0, {}

    def take(self, update: Update) -> Piece:
        """The part of a reply that an update adds."""
        index = update.sequence.index
        prompt = index // self._call.values["n"]
        self._reused[prompt] = min(update.reused, self._reused.get(prompt, update.reused))
        piece = self._replies[index].take(update)
        self._new += len(piece.tokens)
        return piece

    @property
    def usage(self) -> dict[str, Any]:
        """How many tokens were read and made; each prompt counts once."""
        prompt = sum(len(ids) for _, ids in self._call.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._new,
            "total_tokens": prompt + self._new,
            "prompt_tokens_details": {"cached_tokens": sum(self._reused.values())},
        }

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The reply to a request that is not a stream; pieces: the whole text of each reply."""
        make = self._message if self._call.is_chat else self._completion
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        return {**self._object(kind), "choices": [make(piece) for piece in pieces], "usage": self.usage}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The event of a stream with a part of a reply."""
        make = self._delta if self._call.is_chat else self._completion
        usage = {"usage": None} if self._call.includes_usage else {}  # as in OpenAI's events before the last one
        return {**self._object(self._chunk_kind), "choices": [make(piece)], **usage}

    def last_chunk(self) -> dict[str, Any]:
        """The event of a stream with the usage."""
        return {**self._object(self._chunk_kind), "choices": [], "usage": self.usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._call.is_chat else "text_completion"

    def _object(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._model}

    def _completion(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._completion_logprobs(piece) if self._call.logprobs is not None else None
        return self._choice(piece, {"text": piece.text}, logprobs)

    def _message(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(piece, {"message": message}, self._chat_logprobs(piece))

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta = {"role": "assistant"} if piece.is_first else {}
        if piece.is_first or piece.text:
            delta["content"] = piece.text
        return self._choice(piece, {"delta": delta}, self._chat_logprobs(piece))

    def _choice(self, piece: Piece, content: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        choice = {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finished}
        if self._call.values["return_token_ids"]:
            choice["token_ids"] = piece.tokens
        return choice

    # Log-probabilities

    def _completion_logprobs(self, piece: Piece) -> dict[str, Any]:
        """Those of the prompt, if it is repeated, and of the new tokens, in parallel lists."""
        tokens, entries = [*piece.prompt, *piece.tokens], [*piece.prompt_logprobs, *piece.logprobs]
        names = [self._name(token) for token in tokens]
        tops = None
        if self._call.logprobs:
            tops = [entry and self._likeliest(token, *entry) for token, entry in zip(tokens, entries, strict=True)]
        return {
            "tokens": names,
            "token_logprobs": [entry and _number(entry[0]) for entry in entries],
            "top_logprobs": tops,
            "text_offset": piece.offsets,
        }

    def _likeliest(self, token: int, value: float, tops: list[tuple[int, float]]) -> dict[str, float | None]:
        """{name: log-probability} of the likeliest tokens and the token itself; of tokens with one name, the likeliest."""
        named: dict[str, float | None] = {}
        for each, number in [*tops, (token, value)]:
            named.setdefault(self._name(each), _number(number))
        return named

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Those of the new tokens, one object for each."""
        if self._call.logprobs is None:
            return None

        def named(token: int, value: float) -> dict[str, Any]:
            return {"token": self._name(token), "logprob": _number(value), "bytes": list(self._bytes_of(token))}

        entries = zip(piece.tokens, piece.logprobs, strict=True)
        content = [
            {**named(token, value), "top_logprobs": [named(*each) for each in tops]} for token, (value, tops) in entries
        ]
        return {"content": content, "refusal": None}

    def _name_of(self, token: int) -> str:
        """A token as text; one that is not valid UTF-8 alone, as OpenAI writes it: bytes:\\xe2."""
        data = self._bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(value: float) -> float | None:
    """A number, or null for one that JSON does not have."""
    return value if math.isfinite(value) else None
