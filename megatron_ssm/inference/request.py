"""What is asked of an engine, and what comes of it."""

from dataclasses import dataclass, field

from .sampling import Sampling


@dataclass(eq=False)
class Request:
    """A sequence being continued.

    id: counts the engine's requests. tokens: the new ids so far. finished: None while there are more to come, then "stop"
    (one of the stop tokens, or the completion of a stop string, is the last of `tokens`), "length" or "cancelled".
    reused: tokens of the prompt that a prefix cache spared.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    min_new_tokens: int = 0
    id: int = -1
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    reused: int = 0

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("a request needs a prompt of at least one token")
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0)):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}={getattr(self, name)!r} must be an integer")
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} must be an integer")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} must fit in 64 bits")

    @property
    def said(self) -> tuple:
        """What was asked for, in an order that does not depend on a set's."""
        return (self.prompt, self.max_new_tokens, self.sampling, sorted(self.stop_tokens), self.stop_strings, self.seed,
                self.min_new_tokens)  # fmt: skip

    @property
    def longest(self) -> int:
        """The most positions it will have in the cache: its last token is not read."""
        return len(self.prompt) + self.max_new_tokens - 1
