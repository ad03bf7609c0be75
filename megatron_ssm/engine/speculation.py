"""Speculative decoding: the model reads several proposed tokens in one call, for which it reads its weights only once.

A proposed token is accepted if the request would choose it at that position, by greedy search or with its next random
number, from the logits of the call. So speculation never changes the tokens of a request. The first rejected token and all
tokens after it are removed from the cache (`Cache.accept`). Proposals come from the request's own tokens (prompt lookup),
from a small draft model, or from the draft head of the model's own checkpoint.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch

from megatron_ssm.kernels.products import instructions
from megatron_ssm.layers.cache import Cache
from megatron_ssm.model.flops import expert_elements, matrix_elements
from megatron_ssm.model.model import Model
from megatron_ssm.spec.stack import Stack

from .draft_by_head import DraftByHead
from .prompt_reader import fair_shares
from .request import Request
from .sampling import Sampling, choose_tokens
from .slot import Slot, run_model

PROPOSAL_COUNTS = 1, 3, 7, 15  # possible numbers of proposals for a request
CALL_LENGTHS = 1, *(1 + count for count in PROPOSAL_COUNTS)  # numbers of tokens that a call reads for a request
SHORTEST_MATCH, LONG_MATCH, LONGEST_MATCH = 2, 6, 16  # tokens of a match in prompt lookup
LOOKUP_WINDOW = 2**15  # prompt lookup searches this many last tokens of a request
# Time of a call that reads 2, 4, 8 or 16 tokens, relative to a call that reads one, by weight format: measured for the
# slower of the two 130m models on one thread of a CPU with AVX-512, and rounded up. No call reads more tokens, because
# computing would take longer than reading the weights, and because larger calls use kernels that round differently.
RELATIVE_CALL_TIMES: dict[torch.dtype | str, tuple[float, ...]] = {
    torch.float32: (1.2, 1.5, 2.0, 2.8),
    torch.bfloat16: (1.3, 1.6),
    "int8": (1.4, 2.1, 3.1, 5.5),
    "int4": (2.0, 2.8, 4.5, 8.2),
}
RELATIVE_CALL_TIMES_WITH_AMX: dict[torch.dtype | str, tuple[float, ...]] = {  # the same on processors with AMX
    torch.float32: (1.2, 1.3, 1.6, 2.6),
    torch.bfloat16: (1.3, 1.6, 1.8, 2.1),
    "int8": (1.4, 1.6, 1.8, 2.8),
    "int4": (1.5, 2.0, 2.4, 3.6),
}
BITS = {"int8": 8.5, "int4": 4.5}  # bits of one element of a quantized matrix, including its share of the scale
FIRST_RATES = 0.45, 0.8  # initial acceptance rates after short and after long matches
LEARNING_RATE = 0.3  # learning rate of an acceptance rate, applied for each proposal
FORGETTING_RATE = 0.005  # the same towards its initial value, applied for each step without proposals


class History:
    """The tokens of a request, and the estimated acceptance rate of proposals for it.

    Proposals after long matches are accepted more often, so there are two rates. Proposals of a draft model use the rate of
    short matches, and those of a draft head (uses_high_rate=True) that of long ones.
    """

    def __init__(self, request: Request, uses_high_rate: bool = False):
        self._request, self._uses_high_rate, self._rates = request, uses_high_rate, list(FIRST_RATES)
        self._tokens = np.array(request.prompt, dtype=np.int64)
        self._length = len(self._tokens)  # tokens in use; the array may be longer

    def lookup(self, max_tokens: int) -> list[int]:
        """Find the longest earlier match of the last tokens (the latest one, if there are several), and return the
        `max_tokens` tokens that followed it.

        If fewer tokens follow the match, they are repeated. [] if no match has SHORTEST_MATCH tokens.
        """
        self._update()
        tokens = self._tokens[max(0, self._length - LOOKUP_WINDOW) : self._length]
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where earlier matches end
        for matched in range(1, LONGEST_MATCH):
            longer = ends[ends >= matched]
            longer = longer[tokens[longer - matched] == tokens[-1 - matched]] if len(longer) else longer
            if not len(longer):
                break
            ends = longer
        else:
            matched = LONGEST_MATCH
        self._uses_high_rate = matched >= LONG_MATCH
        if matched < SHORTEST_MATCH:
            return []
        following = tokens[ends[-1] + 1 :][:max_tokens].tolist()
        return [following[i % len(following)] for i in range(max_tokens)]

    def _update(self) -> None:
        new = self._request.tokens[self._length - len(self._request.prompt) :]
        length = self._length + len(new)
        if length > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(length, dtype=np.int64)])
        self._tokens[self._length : length] = new
        self._length = length

    def learn(self, proposed: int, accepted: int) -> None:
        """Adapt the acceptance rate to the last proposals, of which the first `accepted` were accepted."""
        rate = self._rates[self._uses_high_rate]
        for _ in range(accepted):
            rate += LEARNING_RATE * (1 - rate)
        self._rates[self._uses_high_rate] = rate - LEARNING_RATE * rate * (accepted < proposed)

    def forget(self) -> None:
        """Raise low rates a little after a step without proposals, so that proposals are tried again."""
        for index, first in enumerate(FIRST_RATES):
            self._rates[index] += FORGETTING_RATE * max(0.0, first - self._rates[index])

    def expected(self, count: int) -> float:
        return sum(self._rates[self._uses_high_rate] ** i for i in range(1, count + 1))


@dataclass(frozen=True)
class _Call:
    """A speculative call, with the numbers of new tokens of each request before it, and of its proposals."""

    rows: Cache
    slots: list[Slot]
    before: list[int]
    proposed: list[int]


def _call_times(model: Model) -> tuple[float, ...]:
    """The row of RELATIVE_CALL_TIMES for this model, or of RELATIVE_CALL_TIMES_WITH_AMX if every rank has AMX. One
    all-reduce of a number.
    """
    format = model.weights or model.dtype
    lacks_amx = torch.tensor(not (instructions() == "AMX" and model.device.type == "cpu"), dtype=torch.float32)
    if not model.ranks.all_reduce_max(lacks_amx.to(model.device)) and format in RELATIVE_CALL_TIMES_WITH_AMX:
        return RELATIVE_CALL_TIMES_WITH_AMX[format]
    return RELATIVE_CALL_TIMES.get(format, RELATIVE_CALL_TIMES.get(model.dtype, RELATIVE_CALL_TIMES[torch.float32]))


class SpeculativeDecoder:
    """Decodes the next tokens of requests, with proposals where this is expected to be faster.

    All decisions depend only on tokens and on times that are the same on all ranks, so all ranks decide alike.

    Args:
        model, cache: The model without adapters, whose draft head proposes tokens for all requests, and the engine's cache.
        longest: The largest number of proposals for a request in one call; 0 disables speculation.
        draft: A model with the same vocabulary and ranks that proposes tokens. None: the model's draft head if it has one,
            else prompt lookup.
        chunk: The most tokens of a prompt that the draft reads in one call.
    """

    def __init__(self, model: Model, cache: Cache, longest: int, draft: Model | None, chunk: int | None):
        self._model, self._cache, self._longest = model, cache, longest
        self._draft: Draft | DraftByHead | None = None if draft is None else Draft(draft, len(cache.lengths), chunk)
        self._draft_cost = 0.0 if draft is None else relative_size(draft, model)
        if draft is None and model.draft_head is not None and longest:
            self._draft, self._draft_cost = DraftByHead(model, cache, chunk), relative_size_of_head(model)
        self._histories: WeakKeyDictionary[Slot, History] = WeakKeyDictionary()
        self._call: _Call | None = None
        self.proposed, self.accepted = 0, 0  # numbers of tokens so far

    @property
    def bytes_of_draft(self) -> int:
        return self._draft.model.ranks.counter.sent if isinstance(self._draft, Draft) else 0

    @property
    def is_pending(self) -> bool:
        return self._call is not None

    @cached_property
    def _times(self) -> tuple[float, ...]:
        """The relative times of calls that read CALL_LENGTHS tokens. All ranks use it for the first time in the same
        step.
        """
        return 1.0, *_call_times(self._model)

    @cached_property
    def _expert_fractions(self) -> tuple[float, float]:
        """(fraction of a token's matrix elements that belong to experts, fraction of the experts that it chooses)."""
        config = self._model.config
        used = next((field.used for field in config.fields() if field.by_expert), 1.0)
        return expert_elements(config) / matrix_elements(config), used

    def decode(self, slots: list[Slot], max_tokens: int) -> int:
        """Call the model once for slots of one adapter, sorted by their rows. Returns the number of tokens that it read.

        The slots then have logits.

        `accept` must follow once the requests have chosen their tokens, and before another `decode` if there `is_pending`.
        max_tokens: the most tokens to read; it reads at least one per slot. Sends the messages of the call and of the draft
        model.
        """
        proposals = self._propose(slots, max_tokens)
        if not any(proposals):
            run_model(self._cache, slots)
            return len(slots)
        most = max(map(len, proposals))
        ids = [
            [slot.request.tokens[-1], *tokens, *[0] * (most - len(tokens))]
            for slot, tokens in zip(slots, proposals, strict=True)
        ]
        rows = self._cache.select(slot.row for slot in slots)
        local = slots[0].model.speculative_logits(torch.tensor(ids, device=self._model.device), rows)
        self._call = _Call(rows, slots, [len(slot.request.tokens) for slot in slots], list(map(len, proposals)))
        for slot, tokens, logits in zip(slots, proposals, local, strict=True):
            slot.logits, slot.proposed = logits[0], list(zip(tokens, logits[1 : len(tokens) + 1], strict=True))
        return len(ids) * len(ids[0])

    def accept(self) -> None:
        """Keep the accepted tokens of the last call in the cache, and remove the others."""
        if self._call is None:
            return
        call, self._call = self._call, None
        # A request that ended without a token, because its logits are NaN, no longer needs its row.
        new = [max(1, len(slot.request.tokens) - before) for slot, before in zip(call.slots, call.before, strict=True)]
        call.rows.accept(new)
        self.proposed += sum(call.proposed)
        self.accepted += sum(new) - len(new)
        for slot, count, proposed in zip(call.slots, new, call.proposed, strict=True):
            is_finished = slot.request.finished is not None  # it stopped by itself, so no proposal was rejected
            self._history(slot).learn(count - 1 if is_finished else proposed, count - 1)

    def _propose(self, slots: Sequence[Slot], max_tokens: int) -> list[list[int]]:
        """The proposals for each slot; all are [] if proposing is not expected to be faster."""
        most_tokens = CALL_LENGTHS[len(self._times) - 1]
        most = min(most_tokens, max_tokens) // len(slots) - 1
        histories = [self._history(slot) for slot in slots]
        limits = [max(0, min(self._longest, most, slot.request.left - 1)) for slot in slots]
        if self._draft is not None:
            count, found = self._propose_by_draft(self._draft, slots, limits, max_tokens)
        else:
            found = [history.lookup(limit) if limit else [] for history, limit in zip(histories, limits, strict=True)]
            count = self._best_count(histories, list(map(len, found)))
        proposals = [tokens[: min(count, limit)] for tokens, limit in zip(found, limits, strict=True)]
        if not any(proposals):
            for history in histories:
                history.forget()
        return proposals

    def _propose_by_draft(
        self, draft: "Draft | DraftByHead", slots: Sequence[Slot], limits: Sequence[int], max_tokens: int
    ) -> tuple[int, list[list[int]]]:
        """(number of proposals, the draft's proposals for each slot; [] for requests that the draft has not read yet).

        limits: The maximum number of proposals for each slot. The draft reads prompts only while proposing is expected to be
        faster, and at most `max_tokens` of their tokens in each step.
        """
        histories = [self._history(slot) for slot in slots]
        if not self._best_count(histories, limits):
            return 0, [[] for _ in slots]
        ready = draft.read(slots, max_tokens)
        count = self._best_count(histories, [n if s in ready else 0 for s, n in zip(slots, limits, strict=True)])
        found = dict(zip(ready, draft.propose(ready, count), strict=True)) if count else {}
        return count, [found.get(slot, []) for slot in slots]

    def _history(self, slot: Slot) -> History:
        if slot not in self._histories:
            self._histories[slot] = History(slot.request, isinstance(self._draft, DraftByHead))
        return self._histories[slot]

    def _best_count(self, histories: Sequence[History], available: Sequence[int]) -> int:
        """The number of proposals for each slot with which decoding is expected to be fastest; 0: none.

        available: the number of proposals that each slot could get.
        """
        batch = len(histories)

        def speed(count: int) -> float:  # tokens of each slot in the time of a plain decoding step
            accepted = sum(h.expected(min(count, n)) for h, n in zip(histories, available, strict=True))
            longer = self._time(batch * (1 + count)) / self._time(batch)
            return (1 + accepted / batch) / (longer + count * self._draft_cost)

        count = max((n for n in PROPOSAL_COUNTS if n <= max(available)), key=speed, default=0)
        return count if count and speed(count) > 1 else 0

    def _time(self, tokens: int) -> float:
        """The relative time of a call that reads this many tokens of all slots.

        Each token chooses experts of its own. If one token reads a fraction u of the experts, n tokens read 1 - (1 - u)^n.
        """
        share, used = self._expert_fractions
        more = share * ((1 - (1 - used) ** tokens) / used - 1)
        return float(np.interp(tokens, CALL_LENGTHS[: len(self._times)], self._times)) * (1 + more)


class Draft:
    """A small model that proposes tokens by greedy search.

    Its cache has two rows for each slot of the engine: the first for the tokens of the request, and a copy of it that also
    reads the proposed tokens. chunk: the most tokens of a request that it reads in one call (None: any number).
    """

    def __init__(self, model: Model, slots: int, chunk: int | None):
        self.model, self._slots, self._chunk = model, slots, chunk
        self._cache = model.new_cache(2 * slots)
        self._tokens_read: WeakKeyDictionary[Slot, int] = WeakKeyDictionary()

    def read(self, slots: Sequence[Slot], budget: int | None) -> list[Slot]:
        """Read on in requests with many unread tokens, such as prompts; returns the slots that are ready to propose.

        budget: The maximum number of tokens over all slots, at least one per slot; None: no limit. Calls the draft once for
        each slot with too many unread tokens.
        """
        for slot in slots:
            if slot not in self._tokens_read:
                self._cache.reset(slot.row)
                self._tokens_read[slot] = 0
        wanted = {slot: min(left, self._chunk or left) for slot in slots if (left := self._behind(slot)) > 0}
        for slot, count in fair_shares(wanted, budget).items():
            start = self._tokens_read[slot]
            ids = torch.tensor([slot.tokens_from(start, count)], device=self.model.device)
            self.model.next_logits(ids, None, self._cache.select([slot.row]), prompt=True)
            self._tokens_read[slot] = start + count
        return [slot for slot in slots if self._behind(slot) <= 0]

    def _behind(self, slot: Slot) -> int:
        """The number of tokens that must be read before `propose` can run; `propose` reads the last CALL_LENGTHS[-1] or
        fewer itself. 0 or less: ready.
        """
        request, read = slot.request, self._tokens_read[slot]
        behind = slot.tokens - read
        return max(len(request.prompt) - read, behind - CALL_LENGTHS[-1])

    def propose(self, slots: Sequence[Slot], count: int) -> list[list[int]]:
        """`count` tokens for each slot that `read` has returned, the same on all ranks. Sends the messages of the calls."""
        model, cache, columns = self.model, self._cache, []
        local = self._catch_up(slots)
        for slot in slots if count > 1 else ():
            cache.fork(slot.row, self._slots + slot.row)
        for left in reversed(range(count)):
            columns.append(choose_tokens(local, Sampling(), [], model.ranks).clamp(min=0))
            if left:
                rows = cache.select(self._slots + slot.row for slot in slots)
                local = model.next_logits(columns[-1].unsqueeze(1).to(model.device), None, rows)
        return torch.stack(columns, dim=1).tolist()

    def _catch_up(self, slots: Sequence[Slot]) -> torch.Tensor:
        """Read each request's unread tokens; returns this rank's logits (batch, width) after the last of them."""
        unread = [slot.tokens_from(self._tokens_read[slot]) for slot in slots]
        counts = list(map(len, unread))
        most = next(tokens for tokens in CALL_LENGTHS if tokens >= max(counts))
        ids = torch.tensor([tokens + [0] * (most - len(tokens)) for tokens in unread], device=self.model.device)
        rows = self._cache.select(slot.row for slot in slots)
        local = self.model.speculative_logits(ids, rows)
        rows.accept(counts)
        for slot, new in zip(slots, counts, strict=True):
            self._tokens_read[slot] += new
        return local[torch.arange(len(slots)), torch.tensor(counts) - 1]


def relative_size(draft: Model, model: Model) -> float:
    return draft.config.elements / model.config.elements


def relative_size_of_head(model: Model) -> float:
    """The time of a guess by the draft head relative to a decoding step: the ratio of the bytes that they read.

    A guess reads the vocabulary in 4 bits (`DraftHead.copy_vocabulary`). Neither reads the matrix of an untied embedding.
    """
    config, bits = model.config, BITS.get(model.weights or "", 8 * model.dtype.itemsize)
    head, vocabulary = config.draft_head, config.vocab_size * config.hidden_size
    assert head is not None, "the model has no draft head"
    own = sum(math.prod(field.shape) for field in head.fields(config.hidden_size))
    read = config.elements - own - (0 if config.tie_embeddings else vocabulary)
    return (own * bits + vocabulary * min(bits, BITS["int4"])) / (read * bits)


def check_draft(model: Model, speculate: int, draft: Model | None) -> None:
    """ValueError if there cannot be speculative decoding with these models."""
    if (speculate or draft is not None) and model.context_ranks is not None:
        raise ValueError("speculative decoding is not supported on context ranks")
    if draft is None:
        return
    check_vocabularies(draft.config, model.config)
    if draft.num_ranks != model.num_ranks or draft.device != model.device:
        places = f"{draft.num_ranks} ranks on {draft.device}, the model over {model.num_ranks} on {model.device}"
        raise ValueError(f"the draft model is split over {places}: they must be equal")


def check_vocabularies(draft: Stack, model: Stack) -> None:
    """ValueError if the vocabularies of both models have different sizes."""
    if draft.vocab_size != model.vocab_size:
        vocabularies = f"a vocabulary of {draft.vocab_size}, the model one of {model.vocab_size}"
        raise ValueError(f"the draft model has {vocabularies}: they must be equal")
