"""The body of a request to /v1/responses, and the chat that answers it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from .errors import bad_request
from .request_models import (
    ITEMS,
    MAX_TOOLS,
    ChatRequest,
    Count,
    Function,
    FunctionChoice,
    GenerationParameters,
    JsonSchema,
    PositiveCount,
    ReasoningEffort,
    RequestModel,
    kind_of_choice,
    kind_of_content,
)


class _Lenient(RequestModel):
    """An object of a conversation, of which fields that are not listed, such as id and status, are ignored."""

    model_config = ConfigDict(extra="ignore")


class InputText(_Lenient):
    """A part of a message's content."""

    type: Literal["input_text", "output_text"]
    text: str


class ReasoningText(_Lenient):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


Text = Annotated[
    Annotated[str, Tag("a text")] | Annotated[list[InputText], Tag("parts"), Field(fail_fast=True, min_length=1)],
    Discriminator(
        kind_of_content, custom_error_type="content", custom_error_message="Input should be a text, or a list of texts"
    ),
]


def _joined(text: str | list[InputText]) -> str:
    return text if isinstance(text, str) else "".join(part.text for part in text)


class InputMessage(_Lenient):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    type: Literal["message"] = "message"

    def for_chat(self) -> dict[str, Any]:
        """Return the message of a chat."""
        return {"role": self.role, "content": _joined(self.content)}


class InputCall(_Lenient):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def for_chat(self) -> dict[str, Any]:
        """Return the message of a chat, with this call."""
        call = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class CallOutput(_Lenient):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text

    def for_chat(self) -> dict[str, Any]:
        """Return the message of a chat."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class InputReasoning(_Lenient):
    """The reasoning before the next message or call."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] = []


def _kind_of_item(item: Any) -> str | None:
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    return ITEMS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag(ITEMS["message"])]
    | Annotated[InputCall, Tag(ITEMS["function_call"])]
    | Annotated[CallOutput, Tag(ITEMS["function_call_output"])]
    | Annotated[InputReasoning, Tag(ITEMS["reasoning"])],
    Discriminator(
        _kind_of_item,
        custom_error_type="item",
        custom_error_message=f"Input should be an item of type {', '.join(ITEMS)}",
    ),
]
Input = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[list[Item], Tag("parts"), Field(fail_fast=True, min_length=1, max_length=10_000)],
    Discriminator(
        kind_of_content, custom_error_type="content", custom_error_message="Input should be a text, or a list of items"
    ),
]


class _OfFunctionType(RequestModel):
    """An object whose type is "function". As the last base class, its field is checked first."""

    type: Literal["function"]


class FunctionTool(Function, _OfFunctionType):
    """A function that the model may call, in the form of /v1/responses."""


class FunctionToolChoice(FunctionChoice, _OfFunctionType):
    """The function that the model must call, in the form of /v1/responses."""


class TextFormat(RequestModel):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    name: str = ""
    description: str = ""
    strict: bool = False


class TextOptions(RequestModel):
    """Options of the text."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] = "medium"


class ReasoningOptions(RequestModel):
    """Options of the reasoning."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] = "auto"


def _refuse_id(value: Any) -> Any:
    raise PydanticCustomError("not_stored", "responses are not stored, so input must have the whole conversation")


class ResponseRequest(GenerationParameters):
    """The body of a request to /v1/responses."""

    input: Input
    """The conversation: a text, or a list of messages, calls, their outputs, and reasoning."""
    instructions: str = ""
    """A system message before the conversation."""
    max_output_tokens: PositiveCount | None = None
    """The maximum number of new tokens; by default as many as a request may have."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    """The functions that the model may call."""
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("a mode")]
        | Annotated[FunctionToolChoice, Tag("a function")],
        Discriminator(kind_of_choice),
    ] = "auto"
    """auto: the model calls tools, or not; none: it does not; required: it calls one or more; or the function to call."""
    parallel_tool_calls: bool = True
    """False: a reply has at most one tool call."""
    text: TextOptions = TextOptions()
    """The form of the text."""
    reasoning: ReasoningOptions = ReasoningOptions()
    thinking_token_budget: Count | None = None
    """The maximum number of tokens of the reasoning."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""
    previous_response_id: Annotated[None, BeforeValidator(_refuse_id)] = None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    include: list[Literal["reasoning.encrypted_content"]] = []
    stream_options: dict[str, Literal[False]] = {}
    top_logprobs: Literal[0] = 0

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat. Calls join the assistant's message before them; reasoning joins the one after."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        reasoning = ""
        for item in items:
            if isinstance(item, InputReasoning):
                reasoning += "".join(part.text for part in item.content)
                continue
            message = item.for_chat()
            last: dict[str, Any] = messages[-1] if messages else {}
            if isinstance(item, InputCall) and last.get("role") == "assistant" and not reasoning:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
            if reasoning and message["role"] == "assistant":
                message["reasoning"] = reasoning
            reasoning = ""
            messages.append(message)
        return messages


class ResponseChat(ChatRequest):
    """A request to /v1/responses as a chat; errors name its own parameters. request: the body as it was sent."""

    prompt_field, format_field = "input", "text.format"

    request: ResponseRequest

    @classmethod
    def of(cls, body: ResponseRequest) -> "ResponseChat":
        """Return the chat of a request. ApiError 400 for a format without its schema, or no messages."""
        form, choice = body.text.format, body.tool_choice
        if form.type == "json_schema" and form.schema_ is None:
            raise bad_request("text.format needs the field schema", cls.format_field)
        messages = body.messages()
        if not messages:
            raise bad_request("input has no message", cls.prompt_field)
        schema = {} if form.schema_ is None else {"json_schema": {"schema": form.schema_}}
        functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in body.tools]
        return cls.model_validate(
            {
                **{name: getattr(body, name) for name in GenerationParameters.model_fields},
                "request": body,
                "messages": messages,
                "max_completion_tokens": body.max_output_tokens,
                "tools": [{"type": "function", "function": function} for function in functions],
                "tool_choice": choice
                if isinstance(choice, str)
                else {"type": "function", "function": {"name": choice.name}},
                "parallel_tool_calls": body.parallel_tool_calls,
                "response_format": {"type": form.type, **schema},
                "thinking_token_budget": body.thinking_token_budget,
                "reasoning_effort": body.reasoning.effort,
                "chat_template_kwargs": body.chat_template_kwargs,
            }
        )

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """The parameter that limits the new tokens, and its value."""
        return "max_output_tokens", self.max_completion_tokens
