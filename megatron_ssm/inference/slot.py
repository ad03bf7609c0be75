"""A running request of an `Engine`: a row of the cache, and what choosing its next token needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_ssm.operators.cache import Cache, Snapshot

from .grammar import GrammarMatcher
from .language_model import LanguageModel
from .request import Request
from .request_tokenizer import RequestTokenizer
from .sampling import Penalties
from .text import TextStream
from .thinking import ThinkingFollower


@dataclass(eq=False)
class Slot:
    """A request in row `row` of the cache.

    vocabulary: the ids in this rank's slice of the vocabulary. generator: for sampled tokens, else None. text: finds stop
    strings; None if there are none. penalties: for the tokens that the request has; None: there are none. bias: (width,),
    what is added to the logits; None: nothing. matcher: follows the grammar, or None.
    thinking: follows the reasoning, or None. tokens_read: how many tokens of the
    prompt are in the cache. logits: this rank's (width,), from which the next token is to be chosen. proposed: [(proposed
    token, the logits after it)], the tokens that were read ahead. snapshot: while the prompt is read, the last one taken of
    it or restored for it.
    """

    row: int
    request: Request
    vocabulary: range
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

    @property
    def tokens(self) -> int:
        """The number of tokens of the request, including its prompt."""
        return len(self.request.prompt) + len(self.request.tokens)

    def tokens_from(self, start: int, count: int | None = None) -> list[int]:
        """The tokens of the request, of its prompt and new ones, from `start` on; count: the most of them."""
        prompt, tokens = self.request.prompt, self.request.tokens
        return [*prompt[start:], *tokens[max(0, start - len(prompt)) :]][:count]

    @classmethod
    def of(cls, row: int, request: Request, model: LanguageModel, tokenizer: RequestTokenizer) -> "Slot":
        """A slot for a request whose prompt is still to be read."""
        slot = cls(row, request, range(model.embeddings.start, model.embeddings.stop), matcher=request.matcher)
        if request.sampling.temperature:
            assert request.seed is not None, "a queued request has a seed"
            slot.generator = torch.Generator().manual_seed(request.seed)
        if request.stop_strings:
            slot.text = tokenizer.text_stream(request.stop_strings, request.stop_tokens, request.prompt)
        if request.thinking is not None:
            slot.thinking = ThinkingFollower(request.thinking, tokenizer)
        if request.logit_bias:
            slot.bias = torch.zeros(model.embeddings.width, device=model.device)
            local = {token: bias for token, bias in request.logit_bias if token in slot.vocabulary}
            slot.bias[slot._local(local)] = torch.tensor(
                list(local.values()), dtype=slot.bias.dtype, device=model.device
            )
        if request.sampling.has_penalties:
            prompt = slot._local(request.prompt)
            slot.penalties = Penalties(request.sampling, prompt, model.embeddings.width, model.device)
        return slot

    @property
    def is_reading(self) -> bool:
        """True if a part of the prompt is still to be read."""
        return self.tokens_read < len(self.request.prompt)

    def next_of_prompt(self, count: int) -> Sequence[int]:
        """The next `count` tokens of the prompt that are to be read."""
        return self.request.prompt[self.tokens_read : self.tokens_read + count]

    def allowed_logits(self) -> torch.Tensor:
        """The logits of a slot that has some, with the request's bias and penalties; -inf for ids that must not come next.

        These are the stop tokens until the request has `min_new_tokens` tokens and, before a grammar, while it reasons; and
        what does not fit the grammar, or the end of reasoning whose budget is used up.
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
                banned[self._local(self.request.stop_tokens)] = False
        elif self.matcher is not None or len(self.request.tokens) < self.request.min_new_tokens:
            banned = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            banned[self._local(self.request.stop_tokens)] = True
        else:
            return logits
        return logits.masked_fill(banned, float("-inf"))

    def append(self, token: int) -> None:
        """Add the chosen token to the request; sets `request.finished` if it is the last one.

        The slot then has logits if it goes on and that token was the one proposed. -1 is no token: the logits are NaN.
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
        if token in request.stop_tokens or (self.text is not None and self.text.stopped):
            request.finished = "stop"
        elif len(request.tokens) == request.max_new_tokens:
            request.finished = "length"
        elif self.matcher is not None and not was_thinking:
            request.finished = self._follow_grammar(self.matcher, token)
        if request.finished is None and self.proposed and self.proposed[0][0] == token:
            _, self.logits = self.proposed.pop(0)
        else:
            self.proposed = []

    def _follow_grammar(self, matcher: GrammarMatcher, token: int) -> str | None:
        """Why the grammar ends the request after this token, or None: some token may follow."""
        matcher.advance(token)
        if matcher.is_lost:
            return "length"
        may_stop = matcher.accepts and self.request.stop_tokens
        return None if may_stop or matcher.allowed.any() else "stop"

    def _local(self, ids: Iterable[int]) -> torch.Tensor:
        """The places of those `ids` that are in this rank's slice of the vocabulary."""
        local = [i - self.vocabulary.start for i in ids if i in self.vocabulary]
        return torch.tensor(local, dtype=torch.int64)


def run_model(
    model: LanguageModel, cache: Cache, slots: Sequence[Slot], ids: Sequence[Sequence[int]], prompt: bool
) -> None:
    """Continue the sequence of each slot by its row of `ids` (the same number for all); leaves the last logits in the slots.

    prompt: whether the tokens are part of prompts (see `LanguageModel.next_logits`). Sends what one call of the model sends.
    """
    if slots:
        rows = cache.select(slot.row for slot in slots)
        local = model.next_logits(torch.tensor(ids, device=model.device), None, rows, prompt)
        for slot, logits in zip(slots, local, strict=True):
            slot.logits = logits
