"""Continuous batching: requests join and leave a running batch between steps, and none changes the tokens of another.

An `Engine` has a cache with a fixed number of rows, called slots, of one sequence each. A step gives every running request
one token. A waiting request takes the first free slot, and its prompt is read, at once or in chunks, while the others go on
decoding. With a prefix cache, reading starts after the longest prefix of the prompt that was read before.

On several tensor-parallel ranks, every rank makes the same calls on its own `Engine`. The ranks compare each request when it
is added, so that a difference is an error on every rank.
"""

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sparsefusion.collectives.agreement import together

from .grammar import Grammar, GrammarMatcher
from .language_model import LanguageModel, draw_seed
from .prefix_cache import PrefixCache
from .prompt_reader import PromptReader, snapshot_interval
from .request import Request
from .request_tokenizer import RequestTokenizer
from .sampling import Sampling, choose_tokens, log_probabilities
from .slot import Slot
from .speculation import SpeculativeDecoder, check_draft
from .thinking import Thinking, ThinkingFollower

DRAFTED = 7  # tokens that a draft model proposes at most, unless the engine is told another number


class Engine:
    """Serves any number of requests with at most `slots` of them in the batch; every rank holds its part of each.

    max_length: the most tokens that a request may have, prompt and new ones together. A model with attention then allocates
    keys and values for them at once; None: any number, and the allocation grows with the longest request. chunk: how many
    tokens of a prompt are read per step, so that long prompts do not delay the other requests (None: all). prefix_bytes:
    the memory on this rank for snapshots of prompts (0: there is no prefix cache). block: a snapshot is taken after every
    `block` tokens of a prompt, and at its end; None: after 256, or more where states are large (see `snapshot_interval`).

    token_budget: how many tokens all requests together read per step, more than `slots` (None: any number). Each request
    that is decoding reads one, and the prompts share the rest in equal parts; what one does not need goes to the others.
    So a short prompt does not wait for a long one, and no prompt waits for ever.

    speculate: speculative decoding (see the module `speculation`) with up to so many proposed tokens, which are what
    followed earlier in the request's own tokens; 0: off, without a draft. draft: a small model, split over the same ranks,
    that proposes them instead (up to DRAFTED if speculate is 0); None: the model's draft head, if it was loaded, does that.
    A step then gives a request one or more tokens, the same as without. The draft reads prompts in chunks, too, each step
    at most as many tokens as `chunk` and `token_budget` allow the model.

    The rounding of a matrix product may depend on the size of the batch. So a request's tokens are those of its solo run
    except where two logits are within rounding of each other. ValueError for an option that is out of range.
    """

    def __init__(
        self,
        model: LanguageModel,
        slots: int = 8,
        max_length: int | None = None,
        chunk: int | None = None,
        prefix_bytes: int = 0,
        block: int | None = None,
        token_budget: int | None = None,
        speculate: int = 0,
        draft: LanguageModel | None = None,
    ):
        self._options: dict[str, Any] = dict(
            slots=slots, max_length=max_length, chunk=chunk, block=block, prefix_bytes=prefix_bytes,
            token_budget=token_budget, speculate=speculate,
        )  # fmt: skip
        _check_options(self._options)
        check_draft(model, speculate, draft)
        if draft is not None:
            self._options["draft"] = f"{draft.config.num_layers} layers of {draft.config.hidden_size}"
        if not speculate and (draft is not None or model.draft_head is not None):
            speculate = DRAFTED
        self.model, self.max_length, self._token_budget, self._speculate = model, max_length, token_budget, speculate
        self.cache = model.new_cache(slots, None if max_length is None else max_length + speculate)
        self._decoder = SpeculativeDecoder(model, self.cache, speculate, draft, chunk)
        self.prefix_cache = PrefixCache(prefix_bytes)
        block = block or snapshot_interval(self.cache.state_bytes, prefix_bytes)
        self._prompts = PromptReader(model, self.cache, self.prefix_cache, chunk, block)
        self._waiting: deque[Request] = deque()
        self._slots: dict[int, Slot] = {}
        self._requests_added = 0
        self.tokenizer = RequestTokenizer(model.directory, model.config.vocab_size)

    @property
    def prefilled_tokens(self) -> int:
        """The number of prompt tokens that the model has read."""
        return self._prompts.tokens_read

    @property
    def speculated(self) -> tuple[int, int]:
        """The tokens that speculative decoding proposed, and those that requests got from it beyond one a step."""
        return self._decoder.proposed, self._decoder.accepted

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent for the model and the draft model."""
        return self.model.ranks.counter.sent + self._decoder.bytes_of_draft

    @property
    def is_busy(self) -> bool:
        """True if any request is waiting or running."""
        return bool(self._waiting or self._slots)

    @property
    def load(self) -> tuple[int, int]:
        """The number of requests that have a slot, and of those that wait for one."""
        return len(self._slots), len(self._waiting)

    # Requests

    def add(
        self,
        prompt: Iterable[int],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_tokens: int | Iterable[int] = (),
        stop_strings: str | Iterable[str] = (),
        seed: int | None = None,
        min_new_tokens: int = 0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        min_p: float | None = None,
        **additions: Any,
    ) -> Request:
        """Queue a request. prompt: token ids. For the other arguments see `generate`, for additions `make_request`.

        All ranks call it with the same arguments, on engines that have had the same calls. ValueError on every rank if the
        arguments, or the options of their engines, differ, or if the request cannot be served. Without a seed, all ranks use
        the one that the first of them draws.
        """

        def make() -> Request:
            sampling = Sampling(
                temperature, top_k, top_p, repetition_penalty, frequency_penalty, presence_penalty, min_p
            )
            return self.make_request(
                prompt, max_new_tokens, sampling, stop_tokens, stop_strings, seed, min_new_tokens, **additions
            )

        def same(request: Request) -> dict[str, Any]:
            return self._options | self.fingerprint([request])

        request = together(make, self.model.generating_groups, same, self.model.device)
        return self.enqueue(request, draw_seed(self.model) if request.seed is None else request.seed)

    def make_request(
        self,
        prompt: Iterable[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: int | Iterable[int],
        stop_strings: str | Iterable[str],
        seed: int | None,
        min_new_tokens: int,
        *,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        grammar: Grammar | None = None,
        prefix_key: str = "",
        matcher: GrammarMatcher | None = None,
        thinking: Thinking | None = None,
    ) -> Request:
        """A request that is not queued yet; reserves space for it in the cache. For the other arguments see `add`.

        logit_bias: {id: what is added to its logit, before everything else}. logprobs: how many alternatives of each new
        token `Request.logprobs` has with their log-probabilities (0: that of the token alone; None: it stays empty).
        prompt_logprobs: fill `Request.prompt_logprobs`, too. grammar: what the text of the new tokens must match (see the
        module `grammar`). Stop tokens come only where it may end, and it ends the request if nothing else may follow.
        prefix_key: the prefix cache is shared only between requests with the same key. matcher: an unused one of the
        grammar, which is then not compiled here. thinking: the reasoning before the answer, and its budget.

        Sends nothing. ValueError or FileNotFoundError if this engine cannot serve it.
        """
        stop_tokens = (stop_tokens,) if isinstance(stop_tokens, int) else stop_tokens
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        ids, stops = tuple(map(operator.index, prompt)), frozenset(map(operator.index, stop_tokens))
        biases = tuple(sorted((operator.index(i), bias) for i, bias in (logit_bias or {}).items()))
        request = Request(
            ids, max_new_tokens, sampling, stops, strings, seed, min_new_tokens,
            biases, logprobs, prompt_logprobs, grammar, prefix_key, matcher, thinking,
        )  # fmt: skip
        self._check(request)
        if self.max_length is None:
            self.cache.reserve(request.max_cached_tokens + self._speculate)  # what a row reads beside longer proposals
        return request

    def _check(self, request: Request) -> None:
        """ValueError or FileNotFoundError if this engine cannot serve the request."""
        vocabulary, prompt, strings = self.model.config.vocab_size, request.prompt, request.stop_strings
        marks = () if request.thinking is None else request.thinking.end_ids
        for name, ids in (
            ("token id", (*prompt, *marks)),
            ("logit_bias: token id", (i for i, _ in request.logit_bias)),
        ):
            wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
            if wrong is not None:
                raise ValueError(f"{name} {wrong} is outside the vocabulary of {vocabulary}")
        if self.max_length is not None and len(prompt) + request.max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones do not fit into "
                f"max_length={self.max_length}"
            )
        if request.num_logprobs is not None and request.num_logprobs > vocabulary:
            raise ValueError(f"logprobs={request.num_logprobs} exceeds the vocabulary of {vocabulary}")
        if request.with_prompt_logprobs and self.model.context_ranks is not None:
            raise ValueError("prompt_logprobs=True is not supported on context ranks, which share the prompt")
        if not all(isinstance(text, str) for text in strings):
            raise ValueError(f"stop_strings={strings!r} must be strings")
        if strings:
            self.tokenizer.text_stream(strings)  # ValueError if one is empty
        if request.thinking is not None:
            ThinkingFollower(request.thinking, self.tokenizer)  # ValueError without a tokenizer
        if request.grammar is not None and request.matcher is None:
            request.matcher = self.tokenizer.matcher(request.grammar)

    def fingerprint(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The values that must be equal on every rank before requests are queued: arguments, and a tokenizer in use."""
        is_used = any(request.stop_strings or request.grammar or request.thinking for request in requests)
        arguments = {f"request {row}": request.arguments for row, request in enumerate(requests)}
        return arguments | {"tokenizer": self.tokenizer.checksum if is_used else None}

    def enqueue(self, request: Request, seed: int) -> Request:
        """Queue a request that all ranks agree on; `seed` is used if it has none of its own."""
        request.seed = seed if request.seed is None else request.seed
        request.id, self._requests_added = self._requests_added, self._requests_added + 1
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request, waiting or running; its slot is free in the next step. All ranks cancel the same requests."""
        self._check_own(request)
        if request.finished is not None:
            return
        request.finished = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in [s for s in self._slots.values() if s.request is request]:
            del self._slots[slot.row]

    def stream(self, request: Request) -> Iterator[int]:
        """The tokens of one request as they come; steps the engine, and so all requests, while there is none to yield."""
        self._check_own(request)
        return self._tokens_of(request)

    def _tokens_of(self, request: Request) -> Iterator[int]:
        yielded = 0
        while True:
            while yielded < len(request.tokens):
                yielded += 1
                yield request.tokens[yielded - 1]
            if request.finished is not None:
                return
            self.step()

    def _unfinished(self) -> list[Request]:
        """The requests that are waiting or running."""
        return [*self._waiting, *(slot.request for slot in self._slots.values())]

    def _check_own(self, request: Request) -> None:
        """ValueError unless the request is one of this engine's, or finished."""
        if request.finished is None and request not in self._unfinished():
            raise ValueError("the request is not one of this engine's")

    # Steps

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Read the next tokens of prompts, and decode one token of each running request; all ranks together.

        Returns the requests that got a token (`tokens[-1]`; see `finished`), or several with speculative decoding, the
        oldest first; [] if no request is left. Sends what the calls of the model send: one call for all requests that are
        decoding, and one for each length among the chunks of prompts. Then it sends what choosing tokens sends, once for
        each set of equal sampling options, and again while requests accept proposals.
        """
        decoding = [slot for slot in self._slots.values() if not slot.is_reading]
        self._admit()
        reading = [slot for slot in self._slots.values() if slot.is_reading]
        budget = self._token_budget
        tokens = self._decoder.decode(decoding, None if budget is None else budget - len(reading))
        self._prompts.read(reading, None if budget is None else budget - tokens)
        ready = sorted((s for s in self._slots.values() if s.logits is not None), key=lambda slot: slot.request.id)
        advanced = [slot.request for slot in ready]
        while ready:
            self._choose_tokens(ready)
            ready = [slot for slot in ready if slot.logits is not None]
        self._decoder.accept()
        return advanced

    def _admit(self) -> None:
        """Put waiting requests into free slots, in the order in which they came."""
        free = [row for row in range(len(self.cache.lengths)) if row not in self._slots]
        for row in free[: len(self._waiting)]:
            self._slots[row] = slot = Slot.of(row, self._waiting.popleft(), self.model, self.tokenizer)
            self._prompts.begin(slot)

    def _choose_tokens(self, slots: Sequence[Slot]) -> None:
        """Choose a token for each slot, all with the same sampling options together; free the slots that are finished."""
        groups: dict[Sampling, list[Slot]] = {}
        for slot in slots:
            groups.setdefault(slot.request.sampling, []).append(slot)
        for sampling, group in groups.items():
            local = torch.stack([slot.allowed_logits() for slot in group])
            tokens = choose_tokens(local, sampling, [slot.generator for slot in group], self.model.ranks)
            tokens = self.model.same_on_peers(tokens)
            self._note_log_probabilities(group, tokens)
            for slot, token in zip(group, tokens.tolist(), strict=True):
                slot.append(token)
                if slot.request.finished is not None:
                    del self._slots[slot.row]

    def _note_log_probabilities(self, slots: Sequence[Slot], tokens: torch.Tensor) -> None:
        """Add the log-probabilities of the chosen tokens (batch,) to the requests that want them."""
        wanted = [
            (index, slot)
            for index, slot in enumerate(slots)
            if slot.request.num_logprobs is not None and tokens[index] >= 0
        ]
        if not wanted:
            return
        local = torch.stack([slot.logits for _, slot in wanted if slot.logits is not None])
        most = max(slot.request.num_logprobs or 0 for _, slot in wanted)
        found = log_probabilities(local, tokens[[index for index, _ in wanted]], most, self.model.ranks)
        for (_, slot), (own, best) in zip(wanted, found, strict=True):
            slot.request.logprobs.append((own, best[: slot.request.num_logprobs]))


def _check_options(options: dict) -> None:
    """ValueError for an option of an engine that is out of range or of a wrong type."""
    for name, value in options.items():
        may_be_none = name in ("max_length", "chunk", "token_budget", "block")
        least = int(name not in ("prefix_bytes", "speculate"))
        if not (may_be_none and value is None) and (type(value) is not int or value < least):
            raise ValueError(f"{name}={value!r} must be an integer, at least {least}")
    budget, slots = options["token_budget"], options["slots"]
    if budget is not None and budget <= slots:
        raise ValueError(f"token_budget={budget} must be more than slots={slots}: each slot reads at least one token")
