"""From tokens to the replies of /v1/responses, whole or as events."""

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from .errors import ApiError
from .prepared_request import PreparedRequest, ServedModel
from .replies import Piece, Replies
from .reply_models import ReplyModel
from .response_models import ModelResponse, ResponseEvent
from .response_request import ResponseChat, full_name
from .tool_calls import ToolCall

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}  # of ids of items
NAN = {"code": "server_error", "message": "the logits of the model are NaN"}


class ResponseReplies(Replies):
    """The reply to one request to /v1/responses: items that are added one after another, of which the last one grows."""

    end_mark = ""

    def __init__(self, request: PreparedRequest, served: ServedModel):
        super().__init__(request, served)
        assert isinstance(request.body, ResponseChat)
        self._body = request.body.request
        tools = self._body.callable_tools
        self._tools = {full_name(space, tool.name): (space, tool.name, tool.type) for space, tool in tools}
        self._id = f"resp_{secrets.token_hex(12)}"
        self._next_number = 0  # the sequence number of the next event
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # True while the last item may grow
        self._finished = ""  # the reason for which the reply has ended

    def whole(self, pieces: Iterable[Piece]) -> ReplyModel:
        """The reply to a request that is not a stream."""
        for piece in pieces:
            self.events(piece)
        return ModelResponse.model_validate(self._response())

    def first_events(self) -> list[ReplyModel]:
        """The events before the first token."""
        return [self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress")]

    def events(self, piece: Piece) -> list[ReplyModel]:
        """The events with a part of the reply."""
        return list(self._add(piece))

    def last_events(self) -> list[ReplyModel]:
        """The event with the whole response."""
        return [self._event(f"response.{self._status}", response=self._response())]

    def error_event(self, error: ApiError) -> ReplyModel:
        """The last event of a stream that fails."""
        detail = error.reply.error
        return self._event("error", code=detail.code or detail.type, message=detail.message, param=detail.param)

    # Items

    def _add(self, piece: Piece) -> Iterator[ReplyModel]:
        if piece.reasoning:
            yield from self._add_text("reasoning", piece.reasoning)
        if piece.text:
            yield from self._add_text("message", piece.text)
        for call in piece.calls:
            yield from self._add_call(call)
        if piece.finished is not None:
            if not self._items:  # a response has at least one item
                yield from self._begin_text("message")
            self._finished = piece.finished
            yield from self._close()

    def _add_text(self, kind: str, text: str) -> Iterator[ReplyModel]:
        """Add text to the last item, or to a new one if the last one is closed or of another kind."""
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            yield from self._begin_text(kind)
        part = self._items[-1]["content"][0]
        part["text"] += text
        yield self._event_of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **_logprobs(part))

    def _begin_text(self, kind: str) -> Iterator[ReplyModel]:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        fields: dict[str, Any] = {"summary": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            fields = {"role": "assistant"}
        yield self._begin(kind, content=[], **fields)
        self._items[-1]["content"].append(part)
        yield self._event_of_item("response.content_part.added", content_index=0, part=part)

    def _add_call(self, call: ToolCall) -> Iterator[ReplyModel]:
        """Begin a call, or add to the arguments of the last one. The input of a custom tool is known at its end."""
        if call.name:
            yield from self._close()
            space, name, kind = self._tools.get(call.name, ("", call.name, "function"))
            named = {"call_id": call.id, "name": name, **({"namespace": space} if space else {})}
            empty = {"arguments": ""} if kind == "function" else {"input": ""}
            yield self._begin("function_call" if kind == "function" else "custom_tool_call", **named, **empty)
        item = self._items[-1]
        if "input" in item:
            item["input"] += call.arguments
        elif call.arguments:
            item["arguments"] += call.arguments
            yield self._event_of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _begin(self, kind: str, **fields: Any) -> ReplyModel:
        item_id = f"{PREFIXES[kind]}_{secrets.token_hex(12)}"
        self._items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._is_open = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _close(self) -> Iterator[ReplyModel]:
        """Complete the last item, if it is open."""
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item["status"] = "completed" if self._finished in ("", "stop", "tool_calls") else "incomplete"
        if item["type"] == "function_call":
            fields = {name: item[name] for name in ("name", "arguments")}
            yield self._event_of_item("response.function_call_arguments.done", **fields)
        elif item["type"] == "custom_tool_call":
            text = item["input"] = _input_of(item["input"])
            yield self._event_of_item("response.custom_tool_call_input.delta", delta=text)
            yield self._event_of_item("response.custom_tool_call_input.done", input=text)
        else:
            part = item["content"][0]
            shared = {"content_index": 0}
            yield self._event_of_item(f"response.{part['type']}.done", **shared, text=part["text"], **_logprobs(part))
            yield self._event_of_item("response.content_part.done", **shared, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    # Events and the response

    def _event_of_item(self, kind: str, **fields: Any) -> ReplyModel:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> ReplyModel:
        number, self._next_number = self._next_number, self._next_number + 1
        return ResponseEvent.model_validate({"type": kind, "sequence_number": number, **fields})

    @property
    def _status(self) -> str:
        names = {"": "in_progress", "length": "incomplete", "error": "failed"}
        return names.get(self._finished, "completed")

    def _response(self) -> dict[str, Any]:
        """The response as it is now."""
        body, usage = self._body, self.usage
        choice = body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "system_fingerprint": self._head["system_fingerprint"],
            "status": self._status,
            "error": NAN if self._finished == "error" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._finished == "length" else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            }
            if self._finished
            else None,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning": body.reasoning.model_dump(exclude_unset=True),
            "temperature": body.temperature,
            "text": {"format": body.text.format.model_dump(exclude_unset=True, by_alias=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools if tool.name],
            "top_p": body.top_p,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }


def _input_of(arguments: str) -> str:
    """The input of a custom tool in the arguments of a call, which may be cut; those of another form are the input."""
    try:
        text = from_json(arguments, allow_partial="trailing-strings")["input"]
    except (ValueError, TypeError, KeyError):
        return arguments
    return text if isinstance(text, str) else arguments


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    """The field logprobs of events with the text of a message."""
    return {"logprobs": []} if part["type"] == "output_text" else {}


def replies_to(request: PreparedRequest, served: ServedModel) -> Replies:
    """Return the replies to a request, in the form of its endpoint."""
    is_response = isinstance(request.body, ResponseChat)
    return (ResponseReplies if is_response else Replies)(request, served)
