"""The JSON that clients of /v1/responses receive, as pydantic models."""

from typing import Any, Literal

from .reply_models import CachedTokens, ReasoningTokens, ReplyModel

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ReplyModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[str]


class OutputReasoningText(ReplyModel):
    """The text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ReplyModel):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(ReplyModel):
    """The reasoning before the answer."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[str]
    content: list[OutputReasoningText]


class OutputCall(ReplyModel):
    """A tool call. namespace: only of a tool that is in one. arguments: of a function, the text of a JSON object. input: of
    a custom tool.
    """

    id: str
    type: Literal["function_call", "custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str = ""
    arguments: str = ""
    input: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokens(CachedTokens):
    """The tokens of prompts that the prefix cache had. cache_write_tokens: always 0, as nothing is paid for writing."""

    cache_write_tokens: Literal[0]


class ResponseUsage(ReplyModel):
    """The number of tokens that were read and made."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(ReplyModel):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(ReplyModel):
    """The error that has ended a response."""

    code: str
    message: str


class ModelResponse(ReplyModel):
    """The reply of /v1/responses. The fields after `usage` repeat the request, or have the only value that they may have."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    system_fingerprint: str
    status: ResponseStatus
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, str]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    background: Literal[False]
    previous_response_id: None
    store: Literal[False]
    truncation: Literal["disabled"]


class ResponseEvent(ReplyModel):
    """Each event of a stream of /v1/responses. The type determines which of the fields after sequence_number it has."""

    type: str
    sequence_number: int
    response: ModelResponse | None = None
    item: OutputItem | None = None
    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    part: OutputText | OutputReasoningText | None = None
    delta: str = ""
    text: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""
    logprobs: list[str] = []
    code: str | None = None
    message: str = ""
    param: str | None = None

    @property
    def event_name(self) -> str:
        """The name of the server-sent event."""
        return self.type
