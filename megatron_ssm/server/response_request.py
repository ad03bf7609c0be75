"""The body of a request to /v1/responses, and the chat that answers it."""

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from .errors import bad_request
from .request_models import (
    ITEMS,
    MAX_TOOLS,
    OTHER_ITEM,
    Budget,
    ChatRequest,
    Function,
    FunctionName,
    GenerationParameters,
    JsonSchema,
    PositiveCount,
    ReasoningEffort,
    RequestModel,
    kind_of_choice,
    kind_of_content,
    parse_body,
)

# Items without which a conversation would lack a part. Others that are not in ITEMS are of hosted tools.
NOT_KNOWN = {"compaction", "compaction_trigger", "configuration_update", "item_reference"}
ONE_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class _Lenient(RequestModel):
    """An object of a conversation, of which fields that are not listed, such as id and status, are ignored."""

    model_config = ConfigDict(extra="ignore")


def full_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a tool of a namespace; "" is no namespace."""
    return f"{namespace}__{name}" if namespace else name


class CallableTool(Function):
    """A function, or a custom tool: the model sees it as a function of one text, which may have the form of a grammar."""

    type: Literal["function", "custom"]
    format: dict[str, Any] = {}
    """Of a custom tool: the grammar of its input, which is shown to the model."""

    def for_chat(self, namespace: str) -> dict[str, Any]:
        """Return the tool of a chat."""
        fields = self.model_dump(include={"description", "parameters", "strict"}, exclude_unset=True)
        if self.type == "custom":
            grammar = self.format.get("definition")
            form = f"\n\nThe input has the form of this grammar:\n{grammar}" if grammar else ""
            fields = {"description": self.description + form, "parameters": ONE_INPUT}
        return {"type": "function", "function": {"name": full_name(namespace, self.name), **fields}}


class ResponseTool(CallableTool):
    """A tool in the form of /v1/responses; a namespace has tools of its own. Other types are hosted tools, and ignored."""

    type: str  # type: ignore[assignment]
    name: FunctionName = ""
    tools: Annotated[list[CallableTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []


class InputText(_Lenient):
    """A part of a message's content, of a reasoning, or of its summary."""

    type: Literal["input_text", "output_text", "reasoning_text", "text", "summary_text", "refusal"]
    text: Annotated[str, Field(validation_alias=AliasChoices("text", "refusal"))]


Text = Annotated[
    Annotated[str, Tag("a text")] | Annotated[list[InputText], Tag("parts"), Field(fail_fast=True)],
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
    """A call that the model has made: of a function, with arguments, or of a custom tool, with an input."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str = ""
    arguments: str = ""
    input: str = ""

    def for_chat(self) -> dict[str, Any]:
        """Return the message of a chat, with this call."""
        arguments = self.arguments if self.type == "function_call" else json.dumps({"input": self.input})
        function = {"name": full_name(self.namespace, self.name), "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": self.call_id, "function": function}]}


class CallOutput(_Lenient):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Text = ""

    def for_chat(self) -> dict[str, Any]:
        """Return the message of a chat."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class InputReasoning(_Lenient):
    """The reasoning before the next message or call."""

    type: Literal["reasoning"]
    content: Annotated[list[InputText], Field(fail_fast=True)] = []
    summary: Annotated[list[InputText], Field(fail_fast=True)] = []


class OtherItem(_Lenient):
    """An item of a hosted tool, which is ignored."""

    type: str


class AdditionalTools(OtherItem):
    """Further tools, as Codex sends all of them to some models."""

    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _kind_of_item(item: Any) -> str | None:
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    return ITEMS.get(kind, OTHER_ITEM) if isinstance(kind, str) and kind not in NOT_KNOWN else None


Item = Annotated[
    Annotated[InputMessage, Tag(ITEMS["message"])]
    | Annotated[InputCall, Tag(ITEMS["function_call"])]
    | Annotated[CallOutput, Tag(ITEMS["function_call_output"])]
    | Annotated[InputReasoning, Tag(ITEMS["reasoning"])]
    | Annotated[AdditionalTools, Tag(ITEMS["additional_tools"])]
    | Annotated[OtherItem, Tag(OTHER_ITEM)],
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


class ToolNameChoice(RequestModel):
    """The tool that the model must call, in the form of /v1/responses."""

    type: Literal["function", "custom"]
    name: FunctionName


class TextFormat(RequestModel):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    name: str = ""
    description: str = ""
    strict: bool = False


class TextOptions(_Lenient):
    """Options of the text. Others, such as verbosity, have no effect."""

    format: TextFormat = TextFormat(type="text")


class ReasoningOptions(_Lenient):
    """Options of the reasoning. Others, such as summary, have no effect."""

    effort: ReasoningEffort | None = None


def _refuse_id(value: Any) -> Any:
    raise PydanticCustomError("not_stored", "responses are not stored, so input must have the whole conversation")


NotStored = Annotated[None, BeforeValidator(_refuse_id)]


class ResponseRequest(GenerationParameters):
    """The body of a request to /v1/responses."""

    input: Input
    """The conversation: a text, or a list of messages, calls, their outputs, and reasoning."""
    instructions: str = ""
    """A system message before the conversation."""
    max_output_tokens: PositiveCount | None = None
    """The maximum number of new tokens; by default as many as a request may have."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    """The functions and custom tools that the model may call, and namespaces of them."""
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("a mode")] | Annotated[ToolNameChoice, Tag("a function")],
        Discriminator(kind_of_choice),
    ] = "auto"
    """auto: the model calls tools, or not; none: it does not; required: it calls one or more; or the function to call."""
    parallel_tool_calls: bool = True
    """False: a reply has at most one tool call."""
    text: TextOptions = TextOptions()
    """The form of the text."""
    reasoning: ReasoningOptions = ReasoningOptions()
    thinking_token_budget: Budget | None = None
    """The maximum number of tokens of the reasoning."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""
    metadata: dict[str, Any] = {}
    """Is part of the reply."""
    previous_response_id: NotStored = None
    conversation: NotStored = None

    @property
    def callable_tools(self) -> list[tuple[str, CallableTool]]:
        """The tools that the model may call, each with its namespace."""
        added = [tool for item in self.input if isinstance(item, AdditionalTools) for tool in item.tools]
        every = [*self.tools, *added]
        groups = [(tool.name, tool.tools) if tool.type == "namespace" else ("", [tool]) for tool in every]
        return [(name, tool) for name, tools in groups for tool in tools if tool.type in ("function", "custom")]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat. Calls join the assistant's message before them; reasoning joins the one after."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        reasoning = ""
        for item in items:
            if isinstance(item, OtherItem):
                continue
            if isinstance(item, InputReasoning):
                reasoning += "".join(part.text for part in item.content or item.summary)
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
        form = body.text.format
        choice: Any = body.tool_choice
        # A tool without a namespace comes last, so that its name is not taken for that of a tool in one.
        tools = sorted(body.callable_tools, key=lambda each: not each[0])
        full_names = {tool.name: full_name(namespace, tool.name) for namespace, tool in tools}
        if not isinstance(choice, str):
            choice = {"type": "function", "function": {"name": full_names.get(choice.name, choice.name)}}
        if form.type == "json_schema" and form.schema_ is None:
            raise bad_request("text.format needs the field schema", cls.format_field)
        messages = body.messages()
        if not messages:
            raise bad_request("input has no message", cls.prompt_field)
        schema = {} if form.schema_ is None else {"json_schema": {"schema": form.schema_}}
        return parse_body(
            cls,
            {
                **{name: getattr(body, name) for name in GenerationParameters.model_fields},
                "request": body,
                "messages": messages,
                "max_completion_tokens": body.max_output_tokens,
                "tools": [tool.for_chat(namespace) for namespace, tool in body.callable_tools],
                "tool_choice": choice,
                "parallel_tool_calls": body.parallel_tool_calls,
                "response_format": {"type": form.type, **schema},
                "thinking_token_budget": body.thinking_token_budget,
                "reasoning_effort": body.reasoning.effort,
                "chat_template_kwargs": body.chat_template_kwargs,
            },
        )

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """The parameter that limits the new tokens, and its value."""
        return "max_output_tokens", self.max_completion_tokens
