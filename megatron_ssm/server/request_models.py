"""The JSON that clients send, as pydantic models: requests are checked by them, and /openapi.json is generated from them."""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, from_json

from commfabric.foundation.command_line import did_you_mean

from .errors import ApiError, bad_request
from .tool_calls import NO_ARGUMENTS

MAX_PROMPTS, MAX_CHOICES, MAX_BIASES, MAX_TOOLS, MAX_EMBEDDINGS = 128, 128, 1024, 128, 2048
MAX_FIELDS = 100  # of an object: pydantic collects an error for each field before one of them is reported
_NULL = {"type": "null"}
SHOWN = 60  # characters of a wrong value in the error
# Parameters of OpenAI's and vLLM's, and Codex's client_metadata, that have no effect here, whatever their value.
IGNORED = frozenset(
    """
    access_programs background_options cache_salt client_metadata context_management disable_any_whitespace
    disable_fallback ec_transfer_params guided_decoding_backend guided_whitespace_pattern image include
    include_reasoning kv_transfer_params length_penalty max_tool_calls media_io_kwargs metadata mm_processor_kwargs
    prediction priority prompt_cache_key prompt_cache_options prompt_cache_retention request_id return_mm_kwargs
    return_token_offsets routed_experts_prompt_start safety_identifier service_tier session_id store stream_interval
    stream_options truncation truncation_side user verbosity vllm_xargs web_search_options whitespace_pattern
    """.split()
)
# {parameters of OpenAI's and vLLM's that are not implemented: the values, besides null, with which they change nothing}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio chat_template logprob_token_ids moderation previous_input_messages previous_response prompt "
    "prompt_embeds prompt_logprobs repetition_detection structural_tag thinking_token_budget "
    "truncate_prompt_tokens": (),
    "add_special_tokens background disable_additional_properties echo enable_response_messages "
    "include_stop_str_in_output return_prompt_text return_tokens_as_token_ids use_beam_search "
    "watermarking": (False,),
    "allowed_token_ids bad_words functions logits_processors": ([],), "function_call": ("none", "auto"), "suffix": ("",),
    "normalize skip_special_tokens spaces_between_special_tokens use_activation": (True,), "modalities": (["text"],),
    "embed_dtype": ("float32",), "endianness": ("native", "little"), "padding": ("do_not_pad",), "top_logprobs": (0,),
}  # fmt: skip
NOT_IMPLEMENTED = {name: values for names, values in _NEUTRAL.items() for name in names.split()}


class RequestModel(BaseModel):
    """A JSON object that clients send. A field that is null counts as left out. "1" and 1.0 are not integers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, fields: Any) -> Any:
        """Return the fields that are not null."""
        if not isinstance(fields, dict):
            return fields
        _check_length(fields, MAX_FIELDS)
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the model's JSON schema, in which fields that may be left out may be null."""
        schema = handler(core_schema)
        made = handler.resolve_ref_schema(schema)
        for name, field in made["properties"].items():
            if name not in made.get("required", ()) and _NULL not in field.get("anyOf", ()):
                made["properties"][name] = {"anyOf": [field, _NULL]}
        return schema


class Parameters(RequestModel):
    """A body, or an object in it, that may have the parameters of IGNORED and NOT_IMPLEMENTED besides its own fields."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    @model_validator(mode="before")
    @classmethod
    def drop_without_effect(cls, fields: Any) -> Any:
        """Return the fields that have an effect."""
        if not isinstance(fields, dict):
            return fields
        own = cls.model_fields
        others = {name for name, value in fields.items() if name in IGNORED or value in NOT_IMPLEMENTED.get(name, ())}
        return {name: value for name, value in fields.items() if name in own or name not in others}


def _check_length(fields: dict[str, Any], most: int) -> None:
    if len(fields) > most:
        raise PydanticCustomError("too_many_fields", "Object should have at most {most} fields", {"most": most})


def _check_biases(biases: Any) -> Any:
    if isinstance(biases, dict):
        _check_length(biases, MAX_BIASES)
    return biases


def _from_json(schema: Any) -> Any:
    """Return a JSON schema, or parse its text."""
    try:
        return from_json(schema, allow_inf_nan=False) if isinstance(schema, str) else schema
    except ValueError:
        raise PydanticCustomError("json", "Input should be a JSON schema, or its text") from None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _kind_of_prompt(prompt: Any) -> str | None:
    """Return the tag of a prompt by its first element, so that errors name the element that differs from the first."""
    if isinstance(prompt, str):
        return "a text"
    if not isinstance(prompt, list) or not prompt:
        return None
    return {str: "texts", int: "token ids", list: "lists of token ids"}.get(type(prompt[0]))


def _as_prompts(prompt: Any) -> Any:
    """Return a list of prompts, each a text or token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def kind_of_content(content: Any) -> str | None:
    """Return the tag of a text or of a list."""
    return "a text" if isinstance(content, str) else "parts" if isinstance(content, list) else None


Count = Annotated[int, Field(ge=0, le=2**31)]
PositiveCount = Annotated[int, Field(ge=1, le=2**31)]
Budget = Annotated[int, Field(ge=-1, le=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
JsonSchema = Annotated[dict[str, Any], BeforeValidator(_from_json, json_schema_input_type=dict[str, Any] | str)]
ShortText = Annotated[str, Field(min_length=1, max_length=1000)]
Choices = Annotated[list[ShortText], Field(min_length=1, max_length=1000, fail_fast=True)]
FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_.:/-]{1,128}$")]
Regex = Annotated[str, Field(min_length=1, max_length=10_000)]
LarkGrammar = Annotated[str, Field(min_length=1, max_length=100_000)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192}  # tokens of the reasoning; more effort has no limit
StopStrings = Annotated[list[ShortText], Field(max_length=16)]
_PROMPT = Discriminator(
    _kind_of_prompt,
    custom_error_type="prompt",
    custom_error_message="Input should be a text, a list of texts, a list of token ids, or a list of such lists",
)
Prompt = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[list[str], Tag("texts"), Field(fail_fast=True, max_length=MAX_PROMPTS)]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[list[TokenIds], Tag("lists of token ids"), Field(fail_fast=True, max_length=MAX_PROMPTS)],
    _PROMPT,
]
Texts = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[list[str], Tag("texts"), Field(fail_fast=True, max_length=MAX_EMBEDDINGS)]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[list[TokenIds], Tag("lists of token ids"), Field(fail_fast=True, max_length=MAX_EMBEDDINGS)],
    _PROMPT,
]
OTHER_ITEM = "another item"
# {type of an item of /v1/responses: tag}
ITEMS = {
    "message": "a message",
    "function_call": "a call",
    "function_call_output": "an output",
    "custom_tool_call": "a call",
    "custom_tool_call_output": "an output",
    "reasoning": "some reasoning",
    "additional_tools": "further tools",
}
TAGS = {
    "a text",
    "texts",
    "token ids",
    "lists of token ids",
    "parts",
    "a mode",
    "a function",
    *ITEMS.values(),
}  # which pydantic adds to the places of errors


class TextPart(RequestModel):
    """A part of a message's content. Other fields, such as cache_control, are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "refusal", "thinking"]
    text: Annotated[str, Field(validation_alias=AliasChoices("text", "refusal", "thinking"))]


Content = Annotated[
    Annotated[str, Tag("a text")] | Annotated[list[TextPart], Tag("parts"), Field(fail_fast=True, min_length=1)],
    Discriminator(
        kind_of_content, custom_error_type="content", custom_error_message="Input should be a text, or a list of texts"
    ),
]


class CalledFunction(RequestModel):
    """The function of a tool call in a message. arguments: the text of a JSON object."""

    name: str
    arguments: str = ""

    def for_template(self) -> dict[str, Any]:
        """Return the fields for the template, which expects an object of arguments. Text that is none, such as that of a
        call cut by max_tokens, is its only argument.
        """
        try:
            value = from_json(self.arguments or "null")
        except ValueError:
            value = self.arguments
        arguments = value if isinstance(value, dict) else {} if value is None else {"arguments": self.arguments}
        return {"name": self.name, "arguments": arguments}


class CalledTool(RequestModel):
    """A tool call in an assistant's message. Other fields, such as its index in a stream, are ignored."""

    model_config = ConfigDict(extra="ignore")

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class Message(RequestModel):
    """A message of a conversation. Templates may use fields that are not listed here."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    type: Literal["text"] = "text"
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = []
    function_call: None = None
    audio: None = None

    @model_validator(mode="before")
    @classmethod
    def make_content_optional(cls, fields: Any) -> Any:
        """Return the fields; the assistant's messages and results of tools without content get their refusal, or ""."""
        if not isinstance(fields, dict) or fields.get("role") not in ("assistant", "tool"):
            return fields
        return {**fields, "content": fields.get("refusal") or ""} if fields.get("content") in (None, []) else fields

    def for_template(self) -> dict[str, Any]:
        """Return the fields for the template; the content is one text."""
        parts = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        text = "".join(part.text for part in parts if part.type != "thinking")
        thinking = "".join(part.text for part in parts if part.type == "thinking")
        fields = {"role": self.role, "content": text, **(self.model_extra or {})}
        if thinking:
            fields.setdefault("reasoning", thinking)
        if "reasoning" in fields:
            fields.setdefault("reasoning_content", fields["reasoning"])  # the name that templates know
        if self.tool_calls:
            calls = [(call, call.function.for_template()) for call in self.tool_calls]
            fields["tool_calls"] = [{"id": call.id, "type": call.type, "function": made} for call, made in calls]
        return fields


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=10_000)]


class Function(RequestModel):
    """A function that the model may call. parameters: the JSON schema of its arguments. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] = NO_ARGUMENTS
    strict: bool = False


class Tool(RequestModel):
    """A tool that the model may call. Other fields, such as cache_control, are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function


class FunctionChoice(RequestModel):
    """The name of a function."""

    name: FunctionName


class ToolChoice(RequestModel):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionChoice


def kind_of_choice(choice: Any) -> str:
    """Return the tag of a tool_choice."""
    return "a mode" if isinstance(choice, str) else "a function"


ToolChoices = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a mode")] | Annotated[ToolChoice, Tag("a function")],
    Discriminator(kind_of_choice),
]


class StreamOptions(RequestModel):
    """Options of a stream. Those that are not listed here must be false."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Literal[False]] = Field(init=False)

    include_usage: bool = False
    """Send the usage as the last event."""
    continuous_usage_stats: bool = False
    """With include_usage: also send the usage so far with every event."""
    include_obfuscation: bool = False
    """Has no effect."""


class NamedSchema(RequestModel):
    """A JSON schema that a reply must match."""

    schema_: Annotated[JsonSchema, Field(alias="schema")]
    name: str = ""
    description: str = ""
    strict: bool = False


class ResponseFormat(RequestModel):
    """The form of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Parameters):
    """A grammar that a reply must match, in one of its fields."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    json_object: bool = False
    choice: Choices | None = None
    regex: Regex | None = None
    grammar: LarkGrammar | None = None


class GenerationParameters(Parameters):
    """The parameters of every endpoint that generates."""

    model: str = ""
    """The name of the served model, as /v1/models lists it; may be left out."""
    stream: bool = False
    """Send tokens as they come, as server-sent events."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0: the most likely token (greedy search)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = 0
    """Sample from this many tokens; 0 or -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens that are less likely than this times the most likely one."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides the positive logits of tokens that occurred before, and multiplies the negative ones."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token once for each time that the reply has it."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of a token that the reply has."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Makes sampling repeatable. Reply i to a request is sampled with seed + i."""
    stop: Annotated[StopStrings, BeforeValidator(_as_list, json_schema_input_type=ShortText | StopStrings)] = []
    """A text that ends the reply and is not part of it, or a list of such texts."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] = []
    """Token ids that end the reply."""
    min_tokens: Count = 0
    """The number of tokens before one that ends a text, or one of stop_token_ids, may come."""
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_check_biases)] = {}
    """{token id: what is added to its logit}."""
    ignore_eos: bool = False
    """Do not stop at the tokens that end a text."""
    structured_outputs: StructuredOutputs | None = None
    """The reply matches this grammar."""
    cache_salt: Annotated[str, Field(max_length=1024)] = ""
    """Only requests with the same salt share the prefix cache."""


class GenerationRequest(GenerationParameters):
    """The parameters of completions and chats. The class variables name parameters in errors."""

    prompt_field: ClassVar[str]
    logprobs_field: ClassVar[str]
    format_field: ClassVar[str] = "response_format"

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    """The number of replies to a prompt."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Must be equal to n."""
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    """json_object: the reply is a JSON object; json_schema: JSON that a schema describes."""
    guided_json: JsonSchema | None = None
    """The reply matches this JSON schema, or its text."""
    guided_choice: Choices | None = None
    """The reply is one of these texts."""
    guided_regex: Regex | None = None
    """The reply matches this expression."""
    guided_grammar: LarkGrammar | None = None
    """The reply matches this grammar, in llguidance's variant of Lark's notation."""
    return_token_ids: bool = False
    """Add token_ids to each reply."""

    @property
    def includes_usage(self) -> bool:
        """Return True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_usage_in_events(self) -> bool:
        """Return True if every event of a stream has the usage so far."""
        return self.stream_options is not None and self.includes_usage and self.stream_options.continuous_usage_stats


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions."""

    prompt_field, logprobs_field = "prompt", "logprobs"

    prompt: Prompt
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: Count = 16
    """The maximum number of new tokens. 0 is possible with echo."""
    echo: bool = False
    """Begin the reply with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return the log-probabilities of each token, and of this many of the most likely ones."""
    add_special_tokens: Literal[True] = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids."""
        return _as_prompts(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives of each token that are returned with log-probabilities; None: no log-probabilities."""
        return self.logprobs

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """The parameter that limits the new tokens, and its value."""
        return "max_tokens", self.max_tokens


class Conversation(Parameters):
    """The parameters that the chat template needs. prompt_field: the one that errors name."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[Messages, Field(min_length=1)]
    """The conversation."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    """The functions that the model may call."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""
    documents: list[dict[str, Any]] = []
    """A variable of the chat template."""
    add_generation_prompt: bool | None = None
    """Let the template begin the assistant's next message."""
    continue_final_message: bool = False
    """Continue the last message, instead of adding one."""

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the template shows."""
        return self.tools

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return self.chat_template_kwargs


class TokenizeRequest(Conversation):
    """The body of a request to /tokenize: a text or a conversation."""

    model: str = ""
    """The name of the served model."""
    prompt: str | None = None
    """A text."""
    messages: Messages = []
    """A conversation."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's own special tokens; by default to a text only."""
    return_token_strs: bool = False
    """Return the names of the tokens, too."""


class EmbeddingRequest(Parameters):
    """The body of a request to /v1/embeddings."""

    input: Texts
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    model: str = ""
    """The name of the served model."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of the numbers as float32, in little-endian order."""
    pooling: Literal["last", "mean"] = "last"
    """last: the hidden state of the last token; mean: that of all tokens."""
    dimensions: PositiveCount | None = None
    """Must be the model's hidden size."""
    add_special_tokens: Literal[True] = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The texts, each a text or token ids."""
        return _as_prompts(self.input)


class DetokenizeRequest(Parameters):
    """The body of a request to /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """Token ids."""
    model: str = ""
    """The name of the served model."""


class ChatRequest(Conversation, GenerationRequest):
    """The body of a request to /v1/chat/completions."""

    prompt_field, logprobs_field = "messages", "top_logprobs"
    echo: ClassVar[bool] = False

    max_tokens: PositiveCount | None = None
    """The maximum number of new tokens; by default as many as a request may have."""
    max_completion_tokens: PositiveCount | None = None
    """Another name of max_tokens."""
    logprobs: bool = False
    """Return the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """With logprobs: also those of this many of the most likely tokens."""
    tool_choice: ToolChoices = "auto"
    """auto: the model calls tools, or not; none: it does not; required: it calls one or more; or the function to call."""
    parallel_tool_calls: bool = True
    """False: a reply has at most one tool call."""
    thinking_token_budget: Budget | None = None
    """The maximum number of tokens of the reasoning; -1: no limit."""
    thinking_budget: Budget | None = None
    """Another name of thinking_token_budget."""
    reasoning_effort: ReasoningEffort | None = None
    """The maximum number of tokens of the reasoning, in words, and a variable of the chat template."""

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the reply may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which the reply must call one; [] if it need not call any."""
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name]
        return self.tools if self.tool_choice == "required" else []

    @property
    def budget(self) -> int | None:
        """The maximum number of tokens of the reasoning; None: no limit."""
        budgets = (self.thinking_token_budget, self.thinking_budget, EFFORTS.get(self.reasoning_effort or ""))
        given = next((budget for budget in budgets if budget is not None), -1)
        return None if given < 0 else given

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinking = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {"reasoning_effort": self.reasoning_effort, **thinking, **self.chat_template_kwargs}

    @property
    def max_calls(self) -> int | None:
        """The maximum number of tool calls of a reply; None: no limit."""
        return None if self.parallel_tool_calls and not isinstance(self.tool_choice, ToolChoice) else 1

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives of each token that are returned with log-probabilities; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """The parameter that limits the new tokens, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


Body = CompletionRequest | ChatRequest
M = TypeVar("M", bound=RequestModel)


def parse_body(model: type[M], body: bytes | str | dict[str, Any]) -> M:
    """Parse a JSON text, or check an object, as this model. ApiError 400, which names the field, its value and the rule,
    if it does not match.
    """
    try:
        return model.model_validate(body) if isinstance(body, dict) else model.model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error, model) from None


def _api_error(error: ValidationError, model: type[RequestModel]) -> ApiError:
    """The API's error for the first error that pydantic has found."""
    first = error.errors(include_url=False, include_context=False)[0]
    parts = [part for part in first["loc"] if part not in TAGS]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)[1:]
    if not name:
        return bad_request(f"the body of the request: {first['msg']}")
    if first["type"] == "missing":
        return bad_request(f"{name} is missing", name)
    value = first["input"] if isinstance(first["input"], str) else json.dumps(first["input"])
    shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
    if first["type"] == "extra_forbidden" and parts[-1] in NOT_IMPLEMENTED:
        return ApiError(400, f"{name}={shown} is not implemented", name, for_log=f"{name} is not implemented")
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(name[:SHOWN], model.model_fields) if len(parts) == 1 else ""
        return bad_request(f"there is no parameter {name[:SHOWN]}{hint}", name)
    return ApiError(400, f"{name}={shown}: {first['msg']}", name, for_log=f"{name}: {first['msg']}")
