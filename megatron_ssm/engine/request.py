"""A request to an engine, and the tokens generated for it so far."""

import hashlib
from dataclasses import dataclass, field

from .grammar import GrammarMatcher
from .options import GenerationOptions
from .sampling import LogProbability


@dataclass(eq=False)
class Request:
    """A sequence that an engine continues.

    Log-probabilities are those of the model's own distribution, in nats, and equal on all tensor-parallel ranks.

    Attributes:
        prompt: The ids of the prompt, at least one.
        options: How its tokens are chosen, and where they end.
        matcher: The matcher that follows the grammar, or None.
        seed: The seed of its generator: that of the options, or one that was drawn.
        id: The number of the request in the order of the engine.
        tokens: The new ids so far.
        finished: None while the request is waiting or running. Then "stop" (the last token is a stop token, or completes a
            stop string or the grammar), "length" (there are max_new_tokens, or the grammar has become too complex),
            "cancelled", or "error" (logits or an embedding are NaN).
        reused: The number of prompt tokens that were restored from the prefix cache.
        logprobs: Unless the option is None, for each new token (its log-probability, [(id, log-probability), ...]) with
            that number of most likely ids, the most likely first.
        prompt_logprobs: The same for each token of the prompt, with None for the first, if the option is True.
        embedding: The embedding of the prompt; [] before it is read, and without pooling.
        admitted_at: The time, by `time.monotonic`, at which it got a slot.
    """

    prompt: tuple[int, ...]
    options: GenerationOptions = GenerationOptions()
    matcher: GrammarMatcher | None = field(default=None, repr=False)
    seed: int | None = None
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

    @property
    def compared(self) -> dict[str, object]:
        """What ranks compare. The prefix key, which may be secret, is hashed."""
        key = hashlib.sha256(self.options.prefix_key.encode()).hexdigest()[:16]
        return {"prompt": self.prompt, **vars(self.options), "prefix_key": key}

    @property
    def cache_key(self) -> str:
        """The key of its prefixes in the prefix cache: only requests with the same adapter and prefix_key share them."""
        return repr((self.options.adapter, self.options.prefix_key))

    @property
    def max_cached_tokens(self) -> int:
        """The largest number of its tokens in the cache; the last new token is not read."""
        return len(self.prompt) + self.options.max_new_tokens - 1

    @property
    def left(self) -> int:
        """The number of tokens that it may still get."""
        return self.options.max_new_tokens - len(self.tokens)
