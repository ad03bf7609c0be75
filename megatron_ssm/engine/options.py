"""How the tokens of a request are chosen, and where they end."""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .grammar import Grammar
from .sampling import Sampling
from .thinking import Thinking

POOLINGS = ("last", "mean")
LARGEST_LOGPROBS = 1000  # the largest number of alternatives of a token


@dataclass(frozen=True)
class GenerationOptions:
    """The options of `generate`, of `Engine.add` and of the server's requests; see `generate` for those up to min_p.

    Attributes:
        stop_tokens, stop_strings: Those that end the text, in a tuple.
        logit_bias: Pairs (id, what is added to its logit before penalties and temperature).
        logprobs: The number of most likely ids in `Request.logprobs` for each new token, in addition to that token. None
            leaves the list empty.
        prompt_logprobs: Fill `Request.prompt_logprobs` too.
        grammar: The grammar of the new text (see the module `grammar`). Stop tokens are allowed only where the text may end,
            and the request ends where nothing else may follow.
        prefix_key: Only requests with equal keys share the prefix cache.
        thinking: The reasoning before the answer, and its budget.
        pooling: "last" or "mean": the request ends with its prompt, and `Request.embedding` becomes the last hidden state,
            or the mean of all, as a unit vector. None: it gets tokens.
        adapter: The name of one of the engine's adapters; "": the model itself.

    Raises:
        ValueError: An option is out of range.
        TypeError: An option has a wrong type.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    prefix_key: str = ""
    thinking: Thinking | None = None
    pooling: str | None = None
    adapter: str = ""

    @classmethod
    def of(
        cls,
        stop_tokens: int | Iterable[int] = (),
        stop_strings: str | Iterable[str] = (),
        logit_bias: Mapping[int, float] | None = None,
        **options: Any,
    ) -> "GenerationOptions":
        """The options from the arguments of `generate` and `Engine.add`: one stop token or several, {id: bias}."""
        tokens = (stop_tokens,) if isinstance(stop_tokens, int) else stop_tokens
        strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
        biases = sorted((operator.index(token), bias) for token, bias in (logit_bias or {}).items())
        ids = sorted(set(map(operator.index, tokens)))
        return cls(stop_tokens=tuple(ids), stop_strings=tuple(strings), logit_bias=tuple(biases), **options)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "GenerationOptions":
        """The options from the values of `dataclasses.asdict`, after `json.dumps` and `json.loads`."""
        grammar, thinking = values.pop("grammar"), values.pop("thinking")
        return cls.of(
            values.pop("stop_tokens"), values.pop("stop_strings"), dict(values.pop("logit_bias")), **values,
            grammar=grammar and Grammar.unchecked(**grammar),
            thinking=thinking and Thinking(**{**thinking, "end_ids": tuple(thinking["end_ids"])}),
        )  # fmt: skip

    def __post_init__(self):
        self._check_sampling()
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0)):
            if operator.index(getattr(self, name)) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.seed is not None and not -(2**63) <= operator.index(self.seed) < 2**64:
            raise ValueError(f"seed={self.seed} must fit in 64 bits")
        if not all(isinstance(text, str) for text in self.stop_strings):
            raise ValueError(f"stop_strings={self.stop_strings!r} must be strings")
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ValueError(f"unknown pooling {self.pooling!r}: expected last or mean")
        if self.pooling is not None and self.prompt_logprobs:
            raise ValueError("pooling and prompt_logprobs exclude each other")
        for token, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias: the bias {bias} of token {token} must be a finite number")
        count = self.logprobs
        if count is not None and not 0 <= operator.index(count) <= LARGEST_LOGPROBS:
            raise ValueError(f"logprobs={count} must be from 0 to {LARGEST_LOGPROBS}")
        if self.grammar is not None and self.min_new_tokens:
            rule = "must be 0 with a grammar, which determines where a text may end"
            raise ValueError(f"min_new_tokens={self.min_new_tokens} {rule}")

    def _check_sampling(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0 and finite")
        if self.top_k is not None and operator.index(self.top_k) < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 and finite")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be finite")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1")

    @property
    def sampling(self) -> Sampling:
        """The options that choose a token of the logits."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
