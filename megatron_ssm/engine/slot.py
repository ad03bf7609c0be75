"""A running request of an `Engine`, with its row of the cache and the state for choosing its next token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_ssm.layers.cache import Cache, Snapshot
from megatron_ssm.model.model import Model

from .grammar import GrammarMatcher
from .options import GenerationOptions
from .request import Request
from .request_tokenizer import RequestTokenizer
from .sampling import Sampling, apply_repetition_penalty
from .text import TextStream
from .thinking import ThinkingFollower


class Penalties:
    """The penalties of one sequence, on this rank's slice of the vocabulary.

    Args:
        options: The options with the penalties.
        prompt: (n,) The places in the slice of the prompt's ids. Only the repetition penalty applies to them.
    """

    def __init__(self, options: GenerationOptions, prompt: torch.Tensor, width: int, device: torch.device):
        self._options = options
        self._seen = torch.zeros(width, dtype=torch.bool, device=device)
        self._counts = torch.zeros(width, dtype=torch.int64, device=device)  # of new tokens
        self._seen[prompt] = True

    def add_token(self, place: torch.Tensor) -> None:
        """Count a new token; place: (1,) in the slice, or (0,) if another rank has its id."""
        self._seen[place] = True
        self._counts[place] += 1

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return (width,) logits with the penalties."""
        options = self._options
        if options.repetition_penalty != 1:
            logits = apply_repetition_penalty(logits, self._seen, options.repetition_penalty)
        counts = self._counts.to(logits.dtype)
        return logits - options.frequency_penalty * counts - options.presence_penalty * counts.clamp(max=1)


@dataclass(eq=False)
class Slot:
    """A request in a row of the cache.

    Attributes:
        model: The model with the request's adapter.
        vocabulary: The ids in this rank's slice of the vocabulary.
        sampling: How its tokens are chosen.
        generator: The generator of sampled tokens, or None with greedy search.
        text: The stream that finds stop strings, or None.
        bias: The bias (width,) of the logits, or None.
        tokens_read: The number of prompt tokens in the cache.
        logits: This rank's logits (width,) for the next token, or None.
        proposed: Pairs (proposed token, logits after it) of speculative tokens that were read.
        snapshot: The last snapshot of the prompt while it is read, or None.
        pooled: The last hidden state of the prompt (hidden,), or the sum of those read, if the request has a pooling.
    """

    row: int
    request: Request
    model: Model
    vocabulary: range
    sampling: Sampling
    generator: torch.Generator | None = None
    text: TextStream | None = None
    penalties: Penalties | None = None
    bias: torch.Tensor | None = None
    matcher: GrammarMatcher | None = None
    thinking: ThinkingFollower | None = None
    tokens_read: int = 0
    logits: torch.Tensor | None = None
    proposed: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    snapshot: Snapshot | None = None
    pooled: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of the request, including its prompt."""
        return len(self.request.prompt) + len(self.request.tokens)

    def tokens_from(self, start: int, count: int | None = None) -> list[int]:
        prompt, tokens = self.request.prompt, self.request.tokens
        return [*prompt[start:], *tokens[max(0, start - len(prompt)) :]][:count]

    @classmethod
    def of(cls, row: int, request: Request, model: Model, tokenizer: RequestTokenizer) -> "Slot":
        """A slot for a request whose prompt has not been read."""
        vocabulary = range(model.embeddings.start, model.embeddings.stop)
        slot = cls(row, request, model, vocabulary, request.options.sampling, matcher=request.matcher)
        if request.options.temperature:
            assert request.seed is not None, "a queued request has a seed"
            slot.generator = torch.Generator().manual_seed(request.seed)
        if request.options.stop_strings:
            slot.text = tokenizer.text_stream(request.options.stop_strings, request.options.stop_tokens, request.prompt)
        if request.options.thinking is not None:
            slot.thinking = ThinkingFollower(request.options.thinking, tokenizer)
        if request.options.logit_bias:
            slot.bias = torch.zeros(model.embeddings.width, device=model.device)
            local = {token: bias for token, bias in request.options.logit_bias if token in slot.vocabulary}
            slot.bias[slot._local(local)] = torch.tensor(
                list(local.values()), dtype=slot.bias.dtype, device=model.device
            )
        if request.options.has_penalties:
            prompt = slot._local(request.prompt)
            slot.penalties = Penalties(request.options, prompt, model.embeddings.width, model.device)
        return slot

    @property
    def is_reading(self) -> bool:
        return self.tokens_read < len(self.request.prompt)

    def next_of_prompt(self, count: int) -> Sequence[int]:
        return self.request.prompt[self.tokens_read : self.tokens_read + count]

    def allowed_logits(self) -> torch.Tensor:
        """The logits with the request's bias and penalties, and with -inf for ids that must not come next.

        These are stop tokens until the request has `min_new_tokens` tokens and, before a grammar, while it reasons; and ids
        that match neither the grammar nor the end of reasoning whose budget is used up.
        """
        assert self.logits is not None, "the prompt has not been read"
        logits = self.logits if self.bias is None else self.logits + self.bias
        if self.penalties is not None:
            logits = self.penalties.apply(logits)
        thinking = self.thinking if self.thinking is not None and self.thinking.is_open else None
        if thinking is not None and thinking.next_token is not None:
            banned = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            banned[self._local([thinking.next_token])] = False
        elif self.matcher is not None and thinking is None:
            allowed = self.matcher.allowed[self.vocabulary.start : self.vocabulary.stop].to(logits.device)
            banned = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            banned[: len(allowed)] = ~allowed
            if self.matcher.accepts:
                banned[self._local(self.request.options.stop_tokens)] = False
        elif self.matcher is not None or len(self.request.tokens) < self.request.options.min_new_tokens:
            banned = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            banned[self._local(self.request.options.stop_tokens)] = True
        else:
            return logits
        return logits.masked_fill(banned, float("-inf"))

    def pool(self, hidden: torch.Tensor) -> None:
        """Add the hidden states (seq, hidden) of the next tokens of the prompt to the embedding."""
        states = hidden.float()
        if self.request.options.pooling == "last":
            self.pooled = states[-1]
        else:
            self.pooled = states.sum(0) if self.pooled is None else self.pooled + states.sum(0)

    def finish_pooling(self) -> None:
        """End the request with the embedding, or with an error if that is NaN."""
        assert self.pooled is not None, "the prompt has been read"
        embedding = torch.nn.functional.normalize(self.pooled, dim=0)
        self.request.embedding = embedding.tolist()
        self.request.finished = "stop" if bool(embedding.isfinite().all()) else "error"

    def append(self, token: int) -> None:
        """Add the chosen token to the request; sets `request.finished` if it is the last one.

        The slot then has logits if the request goes on and the token was proposed. A token of -1 means that logits are NaN.
        """
        request, self.logits = self.request, None
        if token < 0:
            request.finished = "error"
            return
        request.tokens.append(token)
        if self.penalties is not None:
            self.penalties.add_token(self._local([token]))
        if self.text is not None:
            self.text.push(token)
        was_thinking = self.thinking is not None and self.thinking.is_open
        if self.thinking is not None:
            self.thinking.advance(token)
        if token in request.options.stop_tokens or (self.text is not None and self.text.stopped):
            request.finished = "stop"
        elif len(request.tokens) == request.options.max_new_tokens:
            request.finished = "length"
        elif self.matcher is not None and not was_thinking:
            request.finished = self._follow_grammar(self.matcher, token)
        if request.finished is None and self.proposed and self.proposed[0][0] == token:
            _, self.logits = self.proposed.pop(0)
        else:
            self.proposed = []

    def _follow_grammar(self, matcher: GrammarMatcher, token: int) -> str | None:
        """The reason why the grammar ends the request after this token, or None if another token may follow."""
        matcher.advance(token)
        if matcher.is_lost:
            return "length"
        may_stop = matcher.accepts and self.request.options.stop_tokens
        return None if may_stop or matcher.allowed.any() else "stop"

    def _local(self, ids: Iterable[int]) -> torch.Tensor:
        """The positions of `ids` in this rank's slice of the vocabulary, without ids of other ranks."""
        local = [i - self.vocabulary.start for i in ids if i in self.vocabulary]
        return torch.tensor(local, dtype=torch.int64)


def by_adapter(slots: Iterable[Slot]) -> list[list[Slot]]:
    """The slots of each adapter, in the order of their first ones. A call of a model reads for the slots of one adapter."""
    groups: dict[str, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(slot.request.options.adapter, []).append(slot)
    return list(groups.values())


def run_model(cache: Cache, slots: Sequence[Slot], prompts: Sequence[Sequence[int]] | None = None) -> None:
    """Read tokens of each slot by one call of their model, and store the logits after the last one in the slots.

    prompts: parts of the slots' prompts (slots, n); None: the last token of each request.
    """
    if slots:
        model, rows = slots[0].model, cache.select([slot.row for slot in slots])
        ids = [[slot.request.tokens[-1]] for slot in slots] if prompts is None else prompts
        local = model.next_logits(torch.tensor(ids, device=model.device), None, rows, prompts is not None)
        for slot, logits in zip(slots, local, strict=True):
            slot.logits = logits
