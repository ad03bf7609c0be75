"""The JSON that clients receive, as pydantic models, from which /openapi.json is generated, too."""

from typing import Literal

from pydantic import BaseModel, SkipValidation
from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "error"]


class ReplyModel(BaseModel):
    """A JSON object that clients receive, without the fields that were not set."""

    def to_json(self) -> str:
        """Return the object as ASCII; numbers that are not finite become null."""
        return self.model_dump_json(exclude_unset=True, ensure_ascii=True)

    @property
    def event_name(self) -> str:
        """The name of the server-sent event with this object; "" if it has none."""
        return ""


class ErrorDetail(ReplyModel):
    """An error. param: the parameter that is wrong; code: a name for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ReplyModel):
    """The body of a reply that is an error."""

    error: ErrorDetail


class CachedTokens(ReplyModel):
    """The tokens of prompts that the prefix cache had."""

    cached_tokens: int


class ReasoningTokens(ReplyModel):
    """The new tokens that are reasoning."""

    reasoning_tokens: int


class Usage(ReplyModel):
    """The number of tokens that were read and made; each prompt counts once. completion_tokens_details: of a chat."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class Reply(ReplyModel):
    """The fields of all replies and events. created: seconds since 1970. usage: in events, only if it was asked for."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None


class Choice(ReplyModel):
    """The fields of a reply to a prompt, or of a part of it. token_ids: only if the request asks for them."""

    index: int
    finish_reason: FinishReason | None
    token_ids: list[int] = []


class CompletionLogprobs(ReplyModel):
    """Log-probabilities in parallel lists, one element for each token; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class CompletionChoice(Choice):
    """A completion, or a part of it."""

    text: str
    logprobs: CompletionLogprobs | None


class Completion(Reply):
    """The reply of /v1/completions, and each event of its streams."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class NamedLogprob(TypedDict):
    """The log-probability of a token. bytes: of its text."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprobs(NamedLogprob):
    """The log-probability of a token of a chat's reply, and those of the most likely ones at its place."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(ReplyModel):
    """Log-probabilities of a chat's reply."""

    content: SkipValidation[list[TokenLogprobs]]  # up to 400,000 dictionaries: copies would take seconds
    refusal: None


class CalledFunction(ReplyModel):
    """The function of a tool call. arguments: the text of a JSON object, or a part of it."""

    name: str = ""
    arguments: str


class CalledTool(ReplyModel):
    """A tool call, or a part of its arguments. index: only in events."""

    index: int = 0
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(ReplyModel):
    """The assistant's message. content: null if there are only tool calls. reasoning: the same as reasoning_content."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CalledTool] = []
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChoice(Choice):
    """A reply of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Reply):
    """The reply of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Delta(ReplyModel):
    """The addition of an event to the assistant's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledTool] = []
    reasoning_content: str = ""
    reasoning: str = ""


class ChunkChoice(Choice):
    """A part of a chat's reply."""

    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Reply):
    """Each event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class ModelCard(ReplyModel):
    """The served model, or one of its adapters.

    root: the name of the directory. parent: the id of an adapter's model. max_model_len: the maximum number of tokens of a
    request. has_reasoning: True if the chat template knows `</think>`.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    has_chat_template: bool
    has_reasoning: bool


class ModelList(ReplyModel):
    """The served model and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class EmbeddingObject(ReplyModel):
    """The embedding of a text: numbers, or base64 of them as float32."""

    object: Literal["embedding"]
    index: int
    embedding: SkipValidation[list[float] | str]


class EmbeddingUsage(ReplyModel):
    """The number of tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(ReplyModel):
    """The reply of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class TokenizeReply(ReplyModel):
    """The reply of /tokenize. token_strs: the names of the tokens, if the request asks for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(ReplyModel):
    """The reply of /detokenize."""

    prompt: str


class Status(ReplyModel):
    """The reply of /health, /ping and /ready."""

    status: Literal["ok", "ready", "unavailable"]
