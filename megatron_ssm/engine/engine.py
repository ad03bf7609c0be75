"""Continuous batching: requests join and leave a running batch between steps, without changing each other's tokens.

The cache of an `Engine` has a fixed number of rows, called slots, one for each sequence. A step generates a token for every
running request. A waiting request gets the first free slot, and its prompt is read, at once or in chunks, while other
requests go on decoding. With a prefix cache, reading starts after the longest known prefix of the prompt.

On several tensor-parallel ranks, every rank makes the same calls on its own `Engine`. The ranks compare each request when it
is added, so that a difference is an error on every rank.
"""

import operator
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from commfabric.collectives.agreement import together
from megatron_ssm.model.model import Model

from .grammar import GrammarMatcher
from .options import GenerationOptions
from .prefix_cache import PrefixCache
from .prompt_reader import PromptReader, snapshot_interval
from .request import Request
from .request_tokenizer import RequestTokenizer
from .sampling import Sampling, choose_tokens, draw_seed, log_probabilities
from .slot import Slot, by_adapter, run_model
from .speculation import SpeculativeDecoder, check_draft
from .thinking import ThinkingFollower

DRAFT_PROPOSALS = 7  # the largest number of proposals of a draft if `speculate` is 0


class Engine:
    """Serves any number of requests, of which at most `slots` run at a time.

    The rounding of a matrix product may depend on the size of the batch. So a request gets the tokens of its solo run,
    except where two logits differ by less than rounding errors.

    Args:
        model: The model.
        slots: The largest number of running requests.
        max_length: The largest number of tokens of a request, including its prompt. A model with attention allocates their
            keys and values at once. None: unlimited; the allocation grows with the longest request.
        chunk: The most tokens of a prompt that a step reads, so that long prompts do not delay other requests. None: all.
        prefix_bytes: The memory on this rank for snapshots of prompts. 0 disables the prefix cache.
        block: The number of tokens between two snapshots of a prompt; there is also one at its end. By default 256, or more
            if states are large (see `snapshot_interval`).
        token_budget: The most tokens that all requests read in a step, more than `slots` (None: unlimited). Each decoding
            request reads one, and the prompts share the rest equally, so that no prompt delays another one for long.
        speculate: The largest number of tokens that speculative decoding (see the module `speculation`) proposes for a
            request in a step. 0 disables it, unless there is a draft, which then proposes up to 7.
        draft: A small model, split over the same ranks, that proposes tokens. By default the model's draft head if it was
            loaded, else prompt lookup. It reads prompts under the same limits as the model.
        adapters: {name: model with LoRA adapters} from `with_lora(model, ...)`, for requests that name one. A step calls the
            model of each adapter separately, for all of its requests at once.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(
        self,
        model: Model,
        slots: int = 8,
        max_length: int | None = None,
        chunk: int | None = None,
        prefix_bytes: int = 0,
        block: int | None = None,
        token_budget: int | None = None,
        speculate: int = 0,
        draft: Model | None = None,
        adapters: Mapping[str, Model] | None = None,
    ):
        self._options: dict[str, Any] = dict(
            slots=slots, max_length=max_length, chunk=chunk, block=block, prefix_bytes=prefix_bytes,
            token_budget=token_budget, speculate=speculate,
        )  # fmt: skip
        _check_options(self._options)
        check_draft(model, speculate, draft)
        self._models = {"": model, **(adapters or {})}
        self._options["adapters"] = sorted(self._models)
        if draft is not None:
            self._options["draft"] = f"{draft.config.num_layers} layers of {draft.config.hidden_size}"
        if not speculate and (draft is not None or model.draft_head is not None):
            speculate = DRAFT_PROPOSALS
        self.model, self.max_length, self._token_budget, self._speculate = model, max_length, token_budget, speculate
        self.cache = model.new_cache(slots, None if max_length is None else max_length + speculate)
        self._decoder = SpeculativeDecoder(model, self.cache, speculate, draft, chunk)
        self.prefix_cache = PrefixCache(prefix_bytes)
        block = block or snapshot_interval(self.cache.state_bytes, prefix_bytes)
        self._prompts = PromptReader(self.cache, self.prefix_cache, chunk, block)
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
        """(number of proposed tokens, number of accepted ones) of speculative decoding so far."""
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
        """(number of running requests, number of waiting ones)."""
        return len(self._slots), len(self._waiting)

    # Requests

    def add(self, prompt: Iterable[int], max_new_tokens: int = 64, temperature: float = 0.0, **options: Any) -> Request:
        """Queue a request. prompt: token ids. options: see `GenerationOptions.of`.

        All ranks call it with the same arguments, on engines that have had the same calls. Without a seed, the first rank
        draws one for all ranks. ValueError on every rank if arguments or options of engines differ across ranks, or if the
        request cannot be served.
        """

        def make() -> Request:
            given = {"max_new_tokens": max_new_tokens, "temperature": temperature, **options}
            return self.make_request(prompt, GenerationOptions.of(**given))

        def same(request: Request) -> dict[str, Any]:
            return self._options | self.fingerprint([request])

        request = together(make, self.model.generating_groups, same, self.model.device)
        return self.enqueue(request, draw_seed(self.model) if request.seed is None else request.seed)

    def make_request(
        self, prompt: Iterable[int], options: GenerationOptions, matcher: GrammarMatcher | None = None
    ) -> Request:
        """Make a request without queueing it, and reserve space for it in the cache. Sends nothing.

        matcher: a new matcher of the grammar, which is then not compiled here. ValueError or FileNotFoundError if this
        engine cannot serve the request.
        """
        request = Request(tuple(map(operator.index, prompt)), options, matcher, options.seed)
        self._check(request)
        if self.max_length is None:
            self.cache.reserve(request.max_cached_tokens + self._speculate)  # a call pads rows to its longest proposal
        return request

    def _check(self, request: Request) -> None:
        """ValueError or FileNotFoundError if this engine cannot serve the request."""
        vocabulary, prompt, options = self.model.config.vocab_size, request.prompt, request.options
        if options.adapter not in self._models:
            raise ValueError(f"unknown adapter {options.adapter!r}: expected one of {sorted(self._models)}")
        thinking_end_ids = () if options.thinking is None else options.thinking.end_ids
        for name, ids in (
            ("token id", (*prompt, *thinking_end_ids)),
            ("logit_bias: token id", (i for i, _ in options.logit_bias)),
        ):
            wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
            if wrong is not None:
                raise ValueError(f"{name} {wrong} is outside the vocabulary of {vocabulary}")
        if self.max_length is not None and len(prompt) + options.max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {options.max_new_tokens} new ones do not fit into "
                f"max_length={self.max_length}"
            )
        if options.logprobs is not None and options.logprobs > vocabulary:
            raise ValueError(f"logprobs={options.logprobs} exceeds the vocabulary of {vocabulary}")
        if options.prompt_logprobs and self.model.context_ranks is not None:
            raise ValueError("prompt_logprobs=True is not supported on context ranks, which share the prompt")
        if options.pooling is not None and self.model.context_ranks is not None:
            raise ValueError(f"pooling={options.pooling!r} is not supported on context ranks, which share the prompt")
        if options.stop_strings:
            self.tokenizer.text_stream(options.stop_strings)  # ValueError if one is empty
        if options.thinking is not None:
            ThinkingFollower(options.thinking, self.tokenizer)  # ValueError without a tokenizer
        if options.grammar is not None and request.matcher is None:
            request.matcher = self.tokenizer.matcher(options.grammar)

    def fingerprint(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The values that must be equal on every rank before requests are queued: the arguments of the requests, and the
        checksum of the tokenizer if any request needs it.
        """
        all_options = [request.options for request in requests]
        is_used = any(options.stop_strings or options.grammar or options.thinking for options in all_options)
        arguments = {
            f"request {row}: {name}": value
            for row, request in enumerate(requests)
            for name, value in request.compared.items()
        }
        return arguments | {"tokenizer": self.tokenizer.checksum if is_used else None}

    def enqueue(self, request: Request, seed: int) -> Request:
        """Queue a request that all ranks have compared. seed: the seed of a request without its own."""
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
        """Yield the tokens of a request as they are generated; steps the engine, and so all requests, to get more."""
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
        return [*self._waiting, *(slot.request for slot in self._slots.values())]

    def _check_own(self, request: Request) -> None:
        if request.finished is None and request not in self._unfinished():
            raise ValueError("the request belongs to another engine")

    # Steps

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Read the next tokens of prompts, and decode one token of each running request; all ranks together.

        Returns the requests that got a token (`tokens[-1]`; see `finished`), several with speculative decoding, or their
        embedding, the oldest first; [] if no request is left. It calls the model, or that of each adapter, once for its
        decoding requests, and once for each length among the chunks of its prompts. Then it chooses tokens, once for each
        set of equal sampling options, and again while requests accept proposals. Sends the messages of these calls.
        """
        decoding = [slot for slot in self._slots.values() if not slot.is_reading]
        if self._waiting:
            self._admit()
        all_decode = len(decoding) == len(self._slots)
        reading = [] if all_decode else [slot for slot in self._slots.values() if slot.is_reading]
        advanced: list[Request] = []
        spare = (self._token_budget or sys.maxsize) - len(decoding) - len(reading)  # beyond one token of each request
        for slots in by_adapter(decoding):
            slots.sort(key=attrgetter("row"))
            if not self._speculate:
                run_model(self.cache, slots)
                continue
            if self._decoder.is_pending:  # the cache holds the proposed tokens of one call at a time
                advanced += self._choose()
            spare -= self._decoder.decode(slots, len(slots) + spare) - len(slots)
        if reading:
            advanced += self._read(reading, len(reading) + spare)
        return sorted(advanced + self._choose(), key=attrgetter("id"))

    def _read(self, slots: Sequence[Slot], budget: int) -> list[Request]:
        """Read the next tokens of prompts; returns the requests that have their embedding, and end."""
        self._prompts.read(slots, budget)
        pooled = [slot for slot in slots if slot.request.options.pooling is not None and not slot.is_reading]
        for slot in pooled:
            slot.finish_pooling()
            del self._slots[slot.row]
        return [slot.request for slot in pooled]

    def _choose(self) -> list[Request]:
        """Choose the tokens of all slots with logits, and accept or reject proposals; returns the requests of the slots."""
        slots = ready = [slot for slot in self._slots.values() if slot.logits is not None]
        slots.sort(key=attrgetter("request.id"))
        while ready:
            self._choose_tokens(ready)
            ready = [slot for slot in ready if slot.logits is not None]
        if self._speculate:
            self._decoder.accept()
        return [slot.request for slot in slots]

    def _admit(self) -> None:
        free = [row for row in range(len(self.cache.lengths)) if row not in self._slots]
        for row in free[: len(self._waiting)]:
            request = self._waiting.popleft()
            request.admitted_at = time.monotonic()
            self._slots[row] = slot = Slot.of(row, request, self._models[request.options.adapter], self.tokenizer)
            self._prompts.begin(slot)

    def _choose_tokens(self, slots: Sequence[Slot]) -> None:
        """Choose a token for each slot, together for equal sampling options; free the slots of finished requests."""
        groups: dict[Sampling, list[Slot]] = {}
        for slot in slots:
            groups.setdefault(slot.sampling, []).append(slot)
        for sampling, group in groups.items():
            local = torch.stack([slot.allowed_logits() for slot in group])
            tokens = choose_tokens(local, sampling, [slot.generator for slot in group], self.model.ranks)
            tokens = self.model.same_on_peers(tokens)
            if noted := [
                (i, s) for i, s in enumerate(group) if s.request.options.logprobs is not None and tokens[i] >= 0
            ]:
                self._note_log_probabilities(noted, tokens)
            for slot, token in zip(group, tokens.tolist(), strict=True):
                slot.append(token)
                if slot.request.finished is not None:
                    del self._slots[slot.row]

    def _note_log_probabilities(self, rows: Sequence[tuple[int, Slot]], tokens: torch.Tensor) -> None:
        """Add log-probabilities of the chosen tokens (batch,) to requests. rows: pairs (row of the batch, its slot)."""
        local = torch.stack([slot.logits for _, slot in rows if slot.logits is not None])  # (rows, width)
        count = max(slot.request.options.logprobs or 0 for _, slot in rows)
        results = log_probabilities(local, tokens[[index for index, _ in rows]], count, self.model.ranks)
        for (_, slot), (chosen, best) in zip(rows, results, strict=True):
            slot.request.logprobs.append((chosen, best[: slot.request.options.logprobs]))


def _check_options(options: dict) -> None:
    for name, value in options.items():
        may_be_none = name in ("max_length", "chunk", "token_budget", "block")
        least = int(name not in ("prefix_bytes", "speculate"))
        if not (may_be_none and value is None) and (type(value) is not int or value < least):
            raise ValueError(f"{name}={value!r} must be an integer, at least {least}")
    budget, slots = options["token_budget"], options["slots"]
    if budget is not None and budget <= slots:
        raise ValueError(f"token_budget={budget} must be more than slots={slots}: each slot reads at least one token")
