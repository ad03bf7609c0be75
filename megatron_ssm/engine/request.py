"""A request to an engine, and the tokens generated for it so far."""

import hashlib
import math
import operator
from dataclasses import dataclass, field

from .grammar import Grammar, GrammarMatcher
from .sampling import LogProbability, Sampling
from .thinking import Thinking

POOLINGS = ("last", "mean")
LARGEST_LOGPROBS = 1000  # the largest number of alternatives of a token


@dataclass(eq=False)
class Request:
    """A sequence that an engine continues. ValueError if an argument is out of range or has a wrong type.

    Log-probabilities are those of the model's own distribution, in nats, and equal on all tensor-parallel ranks.

    Attributes:
        prompt: The ids of the prompt. The arguments from here to prefix_key are those of `generate` and `Engine.add`.
        matcher: The matcher that follows the grammar, or None.
        id: The number of the request in the order of the engine.
        tokens: The new ids so far.
        finished: None while the request is waiting or running. Then "stop" (the last token is a stop token, or completes a
            stop string or the grammar), "length" (there are max_new_tokens, or the grammar has become too complex),
            "cancelled", or "error" (logits or an embedding are NaN).
        reused: The number of prompt tokens that were restored from the prefix cache.
        logprobs: Unless num_logprobs is None, for each new token (its log-probability, [(id, log-probability), ...]) with
            the num_logprobs most likely ids, the most likely first.
        prompt_logprobs: The same for each token of the prompt, with None for the first, if with_prompt_logprobs is True.
        thinking: The reasoning before the answer, or None.
        pooling: "last" or "mean" if the request ends with its prompt, and `embedding` becomes the last hidden state, or the
            mean of all, as a unit vector. None: it gets tokens.
        adapter: The name of one of the engine's adapters; "": the model itself.
        embedding: The embedding of the prompt; [] before it is read, and without pooling.
        admitted_at: The time, by `time.monotonic`, at which it got a slot.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    with_prompt_logprobs: bool = False
    grammar: Grammar | None = None
    prefix_key: str = ""
    matcher: GrammarMatcher | None = field(default=None, repr=False)
    thinking: Thinking | None = None
    pooling: str | None = None
    adapter: str = ""
    id: int = -1
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    reused: int = 0
    logprobs: list[LogProbability] = field(default_factory=list)
    prompt_logprobs: list[LogProbability | None] = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)
    admitted_at: float | None = None

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("a request needs a prompt of at least one token")
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0)):
            if operator.index(getattr(self, name)) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.seed is not None and not -(2**63) <= operator.index(self.seed) < 2**64:
            raise ValueError(f"seed={self.seed} must fit in 64 bits")
        self._check_additions()

    def _check_additions(self) -> None:
        """ValueError for a wrong logit_bias, num_logprobs or pooling, or min_new_tokens with a grammar."""
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ValueError(f"unknown pooling {self.pooling!r}: expected last or mean")
        if self.pooling is not None and self.with_prompt_logprobs:
            raise ValueError("pooling and prompt_logprobs exclude each other")
        for token, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias: the bias {bias} of token {token} must be a finite number")
        count = self.num_logprobs
        if count is not None and not 0 <= operator.index(count) <= LARGEST_LOGPROBS:
            raise ValueError(f"logprobs={count} must be from 0 to {LARGEST_LOGPROBS}")
        if self.grammar is not None and self.min_new_tokens:
            rule = "must be 0 with a grammar, which determines where a text may end"
            raise ValueError(f"min_new_tokens={self.min_new_tokens} {rule}")

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of the request, which ranks compare. The prefix key, which may be secret, is hashed."""
        return dict(
            prompt=self.prompt,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_tokens=sorted(self.stop_tokens),
            stop_strings=self.stop_strings,
            seed=self.seed,
            min_new_tokens=self.min_new_tokens,
            logit_bias=self.logit_bias,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.with_prompt_logprobs,
            grammar=self.grammar,
            thinking=self.thinking,
            pooling=self.pooling,
            adapter=self.adapter,
            prefix_key=hashlib.sha256(self.prefix_key.encode()).hexdigest()[:16] if self.prefix_key else None,
        )

    @property
    def cache_key(self) -> str:
        """The key of its prefixes in the prefix cache: only requests with the same adapter and prefix_key share them."""
        return repr((self.adapter, self.prefix_key))

    @property
    def max_cached_tokens(self) -> int:
        """The largest number of its tokens in the cache; the last new token is not read."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def left(self) -> int:
        """The number of tokens that it may still get."""
        return self.max_new_tokens - len(self.tokens)
