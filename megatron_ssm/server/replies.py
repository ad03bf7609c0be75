"""Makes the replies of OpenAI's interface from tokens: completions and chat completions, whole or in chunks."""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron_ssm.engine.text import TextStream, token_bytes
from megatron_ssm.engine.thinking import BEGIN, END

from .errors import ApiError
from .offsets import TextOffsets
from .prepared_request import PreparedRequest, ServedModel, schemas_of
from .reasoning import ReasoningSplitter
from .reply_models import ChatCompletion, ChatCompletionChunk, Completion, ReplyModel
from .request_models import ChatRequest
from .sequences import Update
from .tool_calls import CallParser, ForcedCallParser, Part, ToolCall


@dataclass
class Piece:
    """A part of reply number `index`, or the whole reply. calls: tool calls. logprobs: `Request.logprobs` of `tokens`.

    prompt, prompt_logprobs: what the reply repeats of the prompt at its beginning (echo). offsets: for a completion with
    log-probabilities, where each token of `prompt` and of `tokens` begins in the text of the whole reply. reasoning_tokens:
    how many of `tokens` are part of the reasoning.
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
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    reasoning_tokens: int = 0

    @property
    def is_shown(self) -> bool:
        """Return True if the piece adds anything to the reply besides tokens."""
        return bool(self.text or self.reasoning or self.calls or self.is_first or self.finished)

    def add(self, part: Part) -> None:
        """Append content, or a part of a tool call."""
        if isinstance(part, str):
            self.text += part
        elif self.calls and self.calls[-1].index == part.index:
            self.calls[-1].arguments += part.arguments
        else:
            self.calls.append(part)

    def extend(self, other: "Piece") -> None:
        """Append the next part of the reply."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.reasoning_tokens += other.reasoning_tokens
        for call in other.calls:
            self.add(call)
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.offsets += other.offsets
        self.finished = other.finished


class Reply:
    """The text of one sequence, as it is generated."""

    def __init__(self, request: PreparedRequest, served: ServedModel, index: int):
        self.index, self._request = index, request
        options = request.sequences[index].options
        hidden = options.stop_tokens  # as in the engine, which finds the stop strings
        text, ids = request.prompts[index // request.body.n]
        shown = _marks(request, served)
        self._text = TextStream(served.tokenizer, options.stop_strings, hidden, ids, shown)
        self._echo = (text, ids) if request.body.echo else None
        self._prompt_offsets = request.offsets[index // request.body.n] if request.offsets else []
        self._has_offsets = options.logprobs is not None and not isinstance(request.body, ChatRequest)
        self._is_first, self._has_calls = True, False
        self._parser = _parser(request, served)
        mark = self._parser.begin if isinstance(self._parser, CallParser) else ""
        self._reasoning = None if request.is_thinking is None else ReasoningSplitter(request.is_thinking, mark)
        self._offsets = TextOffsets(served.tokenizer, hidden, len(text) if self._echo else 0, ids)

    def add_update(self, update: Update) -> Piece:
        """Return the part of the reply that an update adds."""
        tokens = [] if self._request.drops_tokens else update.tokens
        finished = "length" if update.finished and self._request.drops_tokens else update.finished
        piece = Piece(self.index, "", tokens, update.logprobs[: len(tokens)], finished, is_first=self._is_first)
        if self._is_first and self._echo is not None:
            piece.text, piece.prompt = self._echo
            piece.prompt_logprobs = update.prompt_logprobs
            piece.offsets = list(self._prompt_offsets)
        piece.offsets += map(self._offsets.push, tokens) if self._has_offsets else []
        for token in tokens:
            self._split(self._text.push(token), False, piece)
            piece.reasoning_tokens += self._reasoning is not None and self._reasoning.is_inside
        if update.finished is not None:
            self._split(self._text.finish(), True, piece)
        self._has_calls = self._has_calls or bool(piece.calls)
        if piece.finished == "stop" and self._has_calls:
            piece.finished = "tool_calls"
        self._is_first = False
        return piece

    def _split(self, text: str, is_last: bool, piece: Piece) -> None:
        """Add the reasoning, the content and the tool calls of text to a piece. A reply may end with calls within its
        reasoning.
        """
        is_reasoning = False
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            piece.reasoning += reasoning
            if is_last:
                is_reasoning = self._reasoning.is_inside
                reasoning, answer = self._reasoning.finish()
                text += reasoning if is_reasoning else answer
        parts: list[Part] = [text]
        if self._parser is not None:
            parts = self._parser.push(text) + (self._parser.finish() if is_last else [])
        for part in parts:
            if is_reasoning and isinstance(part, str):
                piece.reasoning += part
            else:
                piece.add(part)


def _parser(request: PreparedRequest, served: ServedModel) -> CallParser | ForcedCallParser | None:
    """The parser of a reply's tool calls; None if the reply cannot have any."""
    body = request.body
    if not isinstance(body, ChatRequest) or not body.usable_tools:
        return None
    if body.forced_tools:
        return ForcedCallParser()
    assert served.tool_parser is not None, "the request was checked"
    return served.tool_parser(schemas_of(body.tools), body.max_calls)


def _marks(request: PreparedRequest, served: ServedModel) -> tuple[str, ...]:
    """The special tokens that are part of a reply's text, because its parsers look for them."""
    marks = () if request.is_thinking is None else (BEGIN, END)
    if served.tool_parser is not None and isinstance(request.body, ChatRequest) and request.body.usable_tools:
        return (*marks, served.tool_parser.begin, served.tool_parser.end)
    return marks


class Replies:
    """The replies to one request. usage: the tokens so far.

    Tokens of a prompt count as cached if none of the replies to it needed to read them.

    end_mark: the data of the event after the last one of a stream; "" if there is none.
    """

    end_mark = "[DONE]"

    def __init__(self, request: PreparedRequest, served: ServedModel):
        self._request, self._is_chat = request, isinstance(request.body, ChatRequest)
        self._replies = [Reply(request, served, sequence.index) for sequence in request.sequences]
        bytes_of = token_bytes(served.tokenizer)
        self._bytes_of, self._name = cache(lambda token: list(bytes_of(token))), cache(self._name_of)
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.body.model or served.name,
            "system_fingerprint": served.fingerprint,
        }
        self._new, self._reasoning_tokens, self._reused = 0, 0, {}

    def add_update(self, update: Update) -> Piece:
        """Return the part of a reply that an update adds."""
        index = update.sequence.index
        prompt = index // self._request.body.n
        self._reused[prompt] = min(update.reused, self._reused.get(prompt, update.reused))
        piece = self._replies[index].add_update(update)
        self._new += len(piece.tokens)
        self._reasoning_tokens += piece.reasoning_tokens
        return piece

    @property
    def usage(self) -> dict[str, Any]:
        """The numbers of tokens that were read and generated."""
        prompt = sum(len(ids) for _, ids in self._request.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._new,
            "total_tokens": prompt + self._new,
            "prompt_tokens_details": {"cached_tokens": sum(self._reused.values())},
            **({"completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens}} if self._is_chat else {}),
        }

    def whole(self, pieces: Iterable[Piece]) -> ReplyModel:
        """The whole reply to a request without streaming. pieces: one for each of its texts."""
        if self._is_chat:
            return self._made(ChatCompletion, "chat.completion", map(self._message, pieces), usage=self.usage)
        return self._made(Completion, "text_completion", map(self._completion, pieces), usage=self.usage)

    def first_events(self) -> list[ReplyModel]:
        """The events of a stream before the first token."""
        return []

    def events(self, piece: Piece) -> list[ReplyModel]:
        """The events of a stream with a part of a reply."""
        body = self._request.body
        usage = self.usage if body.has_usage_in_events else None  # null, as in OpenAI's events before the last one
        return [self._chunk([piece], **({"usage": usage} if body.includes_usage else {}))]

    def last_events(self) -> list[ReplyModel]:
        """The events of a stream after all replies: the usage, if it is asked for."""
        return [self._chunk([], usage=self.usage)] if self._request.body.includes_usage else []

    def error_event(self, error: ApiError) -> ReplyModel:
        """The last event of a stream that fails."""
        return error.reply

    def _chunk(self, pieces: list[Piece], **usage: Any) -> ReplyModel:
        if self._is_chat:
            return self._made(ChatCompletionChunk, "chat.completion.chunk", map(self._delta, pieces), **usage)
        return self._made(Completion, "text_completion", map(self._completion, pieces), **usage)

    def _made(self, model: type[ReplyModel], kind: str, choices: Iterable[dict[str, Any]], **usage: Any) -> ReplyModel:
        return model.model_validate({**self._head, "object": kind, "choices": list(choices), **usage})

    def _completion(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if self._request.body.num_logprobs is None else self._completion_logprobs(piece)
        return self._choice(piece, {"text": piece.text}, logprobs)

    def _message(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [_call(call) for call in piece.calls]
        message |= _reasoning(piece)
        return self._choice(piece, {"message": message}, self._chat_logprobs(piece))

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if piece.is_first else {}
        if piece.is_first or piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in piece.calls]
        delta |= _reasoning(piece)
        return self._choice(piece, {"delta": delta}, self._chat_logprobs(piece))

    def _choice(self, piece: Piece, content: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        choice = {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finished}
        if self._request.body.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    # Log-probabilities

    def _completion_logprobs(self, piece: Piece) -> dict[str, Any]:
        """The log-probabilities of the prompt, if it is repeated, and of the new tokens."""
        tokens, entries = [*piece.prompt, *piece.tokens], [*piece.prompt_logprobs, *piece.logprobs]
        tops = None
        if self._request.body.num_logprobs:
            tops = [entry and self._most_likely(token, *entry) for token, entry in zip(tokens, entries, strict=True)]
        return {
            "tokens": list(map(self._name, tokens)),
            "token_logprobs": [entry and entry[0] for entry in entries],
            "top_logprobs": tops,
            "text_offset": piece.offsets,
        }

    def _most_likely(self, token: int, value: float, tops: list[tuple[int, float]]) -> dict[str, float]:
        """{name: log-probability} of the most likely tokens and the token itself. If tokens have the same name, the most
        likely one counts.
        """
        named: dict[str, float] = {}
        for each, number in [*tops, (token, value)]:
            named.setdefault(self._name(each), number)
        return named

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """The log-probabilities of the new tokens, one object for each."""
        if self._request.body.num_logprobs is None:
            return None

        def named(token: int, value: float) -> dict[str, Any]:
            return {"token": self._name(token), "logprob": value, "bytes": self._bytes_of(token)}

        entries = zip(piece.tokens, piece.logprobs, strict=True)
        content = [
            {**named(token, value), "top_logprobs": [named(*top) for top in tops]} for token, (value, tops) in entries
        ]
        return {"content": content, "refusal": None}

    def _name_of(self, token: int) -> str:
        """A token as text. A token that alone is not valid UTF-8 is written as OpenAI does: bytes:\\xe2."""
        data = bytes(self._bytes_of(token))
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _reasoning(piece: Piece) -> dict[str, str]:
    """The fields with the reasoning, if there is any, by its two names."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


def _call(call: ToolCall) -> dict[str, Any]:
    """A tool call, or a further piece of its arguments, which has no name."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
