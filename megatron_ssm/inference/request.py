"""A request to an engine, and the tokens generated for it so far."""

from dataclasses import dataclass, field

from .sampling import Sampling


@dataclass(eq=False)
class Request:
    """A sequence that an engine continues. For the arguments, up to min_new_tokens, see `generate`.

    id: how many requests the engine took before this one. tokens: the new ids so far. finished: None while more tokens are
    to come; then "stop" (the last of `tokens` is a stop token or completes a stop string), "length" or "cancelled". reused:
    how many tokens of the prompt a prefix cache has saved from being read.

    ValueError for arguments that are out of range or of a wrong type.
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
    def arguments(self) -> tuple:
        """What the request was made from; equal requests have equal `repr`s, on every rank."""
        return (self.prompt, self.max_new_tokens, self.sampling, sorted(self.stop_tokens), self.stop_strings, self.seed,
                self.min_new_tokens)  # fmt: skip

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens it will have in the cache; the last new token is not read."""
        return len(self.prompt) + self.max_new_tokens - 1
