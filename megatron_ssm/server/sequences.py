"""The sequences that a client asks for: their arguments for the engine, and the updates that the engine returns.

The arguments are values that JSON can carry, so that every rank makes the same request from them.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.grammar import Grammar, GrammarMatcher
from megatron_ssm.engine.request import Request
from megatron_ssm.engine.sampling import Sampling
from megatron_ssm.engine.thinking import Thinking

from .errors import ApiError


@dataclass(frozen=True)
class Arguments:
    """The arguments of `Engine.add`. seed is never None, because each rank would draw a different one.

    grammar: the kind and the text of a `Grammar`, or None. thinking: the values of a `Thinking`, or None.
    pooling, adapter: as in `Request`.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_new_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: tuple[str, str] | None = None
    prefix_key: str = ""
    thinking: tuple[tuple[int, ...], bool, int | None] | None = None
    pooling: str | None = None
    adapter: str = ""

    def request(self, engine: Engine, matcher: GrammarMatcher | None = None) -> Request:
        """Make the request without queueing it. matcher: a matcher of its grammar, if it is compiled already.

        ValueError or FileNotFoundError if the engine cannot serve it.
        """
        sampling = Sampling(
            self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.frequency_penalty, self.presence_penalty,
            self.min_p,
        )  # fmt: skip
        return engine.make_request(
            self.prompt,
            self.max_new_tokens,
            sampling,
            self.stop_tokens,
            self.stop_strings,
            self.seed,
            self.min_new_tokens,
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=None if self.grammar is None else Grammar.unchecked(*self.grammar),
            prefix_key=self.prefix_key,
            matcher=matcher,
            thinking=None if self.thinking is None else Thinking(*self.thinking),
            pooling=self.pooling,
            adapter=self.adapter,
        )

    def to_json(self) -> dict[str, Any]:
        """Values for `json.dumps`."""
        return vars(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Arguments":
        """The arguments from the values of `to_json`, after `json.dumps` and `json.loads`."""
        bias, grammar, thinking = (values.pop(name) for name in ("logit_bias", "grammar", "thinking"))
        return cls(
            **values,
            logit_bias=None if bias is None else {int(token): each for token, each in bias.items()},
            grammar=None if grammar is None else (grammar[0], grammar[1]),
            thinking=None if thinking is None else (tuple(thinking[0]), thinking[1], thinking[2]),
        )


@dataclass(eq=False)
class Sequence:
    """A sequence that a client has asked for. index: its number among the client's replies.

    grammar_parameter: the parameter that gives its grammar; "" without a grammar. request: the request in the engine;
    reported: the number of its tokens that were handed over. Only the driver's thread changes them.
    """

    arguments: Arguments
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
