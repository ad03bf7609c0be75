"""The sequences that a client asks for: their prompts and options, and the updates that the engine returns."""

from dataclasses import dataclass, field

from megatron_ssm.engine.options import GenerationOptions
from megatron_ssm.engine.request import Request

from .errors import ApiError


@dataclass(eq=False)
class Sequence:
    """A sequence that a client has asked for. index: its number among the client's replies.

    options: with a seed, because each rank would draw a different one. grammar_parameter: the parameter that gives its
    grammar; "" without a grammar. request: the request in the engine; reported: the number of its tokens that were handed
    over. Only the driver's thread changes them.
    """

    prompt: list[int]
    options: GenerationOptions
    index: int = 0
    grammar_parameter: str = ""
    request: Request | None = None
    reported: int = 0


@dataclass(frozen=True)
class Update:
    """The progress of a sequence since its last update.

    Args:
        tokens: The new tokens.
        finished: The reason for which the sequence has finished, or None.
        error: The error that has ended the sequence, or None.
        reused: The number of tokens of the prompt that came from the prefix cache.
        logprobs: As in `Request`.
        prompt_logprobs: As in `Request`; they come with the first token.
        embedding: As in `Request`.
    """

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    error: ApiError | None = None
    reused: int = 0
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)
