"""Continuous batching: requests join and leave a running batch between steps, and none notices the others.

An `Engine` has a cache of slots, one sequence each. A step gives every running request one token; a request that waits
takes the first free slot, and its prompt is read, whole or in chunks, beside the others' decoding. With a prefix cache,
reading starts from the longest prefix of the prompt that was read before.

At tensor-parallel degrees above 1 every rank makes the same calls. What each is given is compared when a request is
added; everything else follows from that.
"""

import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_ssm.layers.cache import Snapshot

from .language_model import LanguageModel
from .prefix_cache import PrefixCache
from .request import Request
from .sampling import Sampling, choose
from .text import TextStream, load_tokenizer


@dataclass(eq=False)
class _Slot:
    """A request in a row of the cache: what is not for its owner's eyes."""

    row: int
    request: Request
    generator: torch.Generator | None
    text: TextStream | None
    seen: torch.Tensor | None
    read: int = 0  # tokens of the prompt
    logits: torch.Tensor | None = None  # this rank's (width,), once the prompt is read and before it is decoding
    after: Snapshot | None = None  # the last one on this prompt's way

    @property
    def reading(self) -> bool:
        """Whether there is prompt left."""
        return self.read < len(self.request.prompt)


class Engine:
    """Serves any number of requests with at most `slots` of them in the batch; every rank holds its part of each.

    max_length: the most tokens a request may have, prompt and new ones, for which a model with attention then keeps room
    from the start (None: any number; room is made when a longer one comes, and kept). chunk: how many tokens of a prompt
    are read per step, so that long prompts do not hold up the others (None: all). prefix_bytes: what snapshots of
    prompts may occupy on this rank (0: no prefix cache); they are taken every `block` tokens and at a prompt's end.

    A row of a matrix product may be rounded otherwise in a batch of another size: a request's tokens are those of its
    solo run except where two logits are that near.
    """

    def __init__(self, model: LanguageModel, slots=8, max_length=None, chunk=None, prefix_bytes=0, block=256):
        self._options = dict(slots=slots, max_length=max_length, chunk=chunk, block=block, prefix_bytes=prefix_bytes)
        for name, value in self._options.items():
            may_be_none, least = name in ("max_length", "chunk"), int(name != "prefix_bytes")
            if not (may_be_none and value is None) and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r} must be an integer, at least {least}")
        self.model, self.chunk, self.block, self.max_length = model, chunk, block, max_length
        self.cache = model.new_cache(slots, max_length)
        self.prefixes = PrefixCache(prefix_bytes)
        self.prefilled_tokens = 0
        self._waiting: deque[Request] = deque()
        self._slots: dict[int, _Slot] = {}
        self._added = 0
        self._tokenizer = None

    def add(self, prompt, max_new_tokens=64, temperature=0.0, top_k=None, top_p=None, repetition_penalty=1.0,
            stop_tokens=(), stop_strings=(), seed=None, min_new_tokens=0) -> Request:  # fmt: skip
        """Queue a request; prompt: token ids. For the other arguments see `generate`.

        All ranks call it with the same arguments, on engines that have had the same requests: it gathers 16 bytes of
        each, and raises ValueError on all if they differ, or if what they ask cannot be done. Without a seed, rank 0's
        choice is everyone's.
        """
        made = []

        def asked():
            made.append(self.request(prompt, max_new_tokens, Sampling(temperature, top_k, top_p, repetition_penalty),
                                      stop_tokens, stop_strings, seed, min_new_tokens))  # fmt: skip
            return self._options, self._added, [r.id for r in self._requests()], made[0].said

        fresh = self.model.ranks.agree(self.model.device, asked)
        return self.queue(made[0], fresh)

    def request(self, prompt, max_new_tokens, sampling, stop_tokens, stop_strings, seed, min_new_tokens) -> Request:
        """A request as a value, and room for it; ValueError if this engine cannot serve it. Sends nothing."""
        stop_tokens = (stop_tokens,) if isinstance(stop_tokens, int) else stop_tokens
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
        prompt, stop_tokens = tuple(map(operator.index, prompt)), frozenset(map(operator.index, stop_tokens))
        request = Request(prompt, max_new_tokens, sampling, stop_tokens, tuple(stop_strings), seed, min_new_tokens)
        vocabulary = self.model.config.vocab_size
        wrong = next((i for i in prompt if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {vocabulary}")
        if self.max_length is not None and len(prompt) + max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit into "
                f"max_length={self.max_length}"
            )
        if not all(isinstance(text, str) for text in request.stop_strings):
            raise ValueError(f"stop_strings={request.stop_strings!r} must be texts")
        if request.stop_strings:
            if self.model.directory is None:
                raise ValueError("stop_strings need a tokenizer.json, and this model was not loaded from a directory")
            self._tokenizer = self._tokenizer or load_tokenizer(self.model.directory)
            TextStream(self._tokenizer, request.stop_strings)  # ValueError for an empty one
        if self.max_length is None:
            self.cache.reserve(request.longest)
        return request

    def queue(self, request: Request, fresh: int) -> Request:
        """Take in a request that all ranks agree on; `fresh`: its seed, if it has none."""
        request.seed = fresh if request.seed is None else request.seed
        request.id, self._added = self._added, self._added + 1
        self._waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._slots)

    def _requests(self) -> list[Request]:
        """Those waiting or running."""
        return [*self._waiting, *(slot.request for slot in self._slots.values())]

    def _check_own(self, request: Request) -> None:
        if request.finished is None and request not in self._requests():
            raise ValueError("the request is not one of this engine's")

    def cancel(self, request: Request) -> None:
        """Stop a request, waiting or running; its slot is free for the next step. All ranks alike."""
        self._check_own(request)
        if request.finished is not None:
            return
        request.finished = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in [s for s in self._slots.values() if s.request is request]:
            del self._slots[slot.row]

    def stream(self, request: Request) -> Iterator[int]:
        """The tokens of one request as they come; steps the engine, and so all requests, while it has none to give."""
        self._check_own(request)
        return self._tokens_of(request)

    def _tokens_of(self, request):
        given = 0
        while True:
            while given < len(request.tokens):
                given += 1
                yield request.tokens[given - 1]
            if request.finished is not None:
                return
            self.step()

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Read what is due of prompts and decode one token of each running request; all ranks together.

        Returns the requests that got a token, the oldest first (`tokens[-1]`; see `finished`); [] when idle. Sends what
        the model's calls send, one for all that are decoding and one per length of the pieces of prompt, and what the
        choice of tokens sends, for each set of equal sampling options.
        """
        decoding = [slot for slot in self._slots.values() if not slot.reading]
        self._admit()
        self._decode(decoding)
        self._read_prompts()
        ready = sorted((s for s in self._slots.values() if s.logits is not None), key=lambda slot: slot.request.id)
        self._choose(ready)
        return [slot.request for slot in ready]

    def _admit(self) -> None:
        """Waiting requests take free slots, in the order in which they came."""
        free = [row for row in range(len(self.cache.lengths)) if row not in self._slots]
        for row in free[: len(self._waiting)]:
            request = self._waiting.popleft()
            self.cache.reset(row)
            self._slots[row] = slot = self._new_slot(row, request)
            entry = self.prefixes.longest(request.prompt)
            if entry is not None:
                slot.after, logits = entry
                self.cache.restore(row, slot.after)
                slot.read = request.reused = slot.after.length
                slot.logits = None if slot.reading else logits

    def _new_slot(self, row, request) -> _Slot:
        generator = torch.Generator().manual_seed(request.seed) if request.sampling.temperature else None
        text = TextStream(self._tokenizer, request.stop_strings) if request.stop_strings else None
        seen = None
        if request.sampling.repetition_penalty != 1:
            seen = torch.zeros(self.model.embeddings.width, dtype=torch.bool, device=self.model.device)
            self._see(seen, request.prompt)
        return _Slot(row, request, generator, text, seen)

    def _see(self, seen, ids) -> None:
        """Mark those of `ids` that are in this rank's slice of the vocabulary."""
        start, stop = self.model.embeddings.start, self.model.embeddings.stop
        mine = [i - start for i in ids if start <= i < stop]
        seen[torch.tensor(mine, dtype=torch.int64, device=seen.device)] = True

    def _decode(self, slots) -> None:
        """One token of each."""
        slots = sorted(slots, key=lambda slot: slot.row)
        self._run(slots, [[slot.request.tokens[-1]] for slot in slots], prompt=False)

    def _read_prompts(self) -> None:
        """Up to `chunk` tokens of each prompt, in pieces that end where snapshots are taken."""
        budget = {slot.row: self.chunk or len(slot.request.prompt) for slot in self._slots.values() if slot.reading}
        while budget:
            groups: dict[int, list[_Slot]] = {}
            for row in sorted(budget):
                groups.setdefault(self._piece(self._slots[row], budget[row]), []).append(self._slots[row])
            for length, slots in groups.items():
                self._run(slots, [slot.request.prompt[slot.read : slot.read + length] for slot in slots], prompt=True)
                for slot in slots:
                    budget[slot.row] -= length
                    self._after_piece(slot, length)
            budget = {row: left for row, left in budget.items() if left and self._slots[row].reading}

    def _piece(self, slot, budget) -> int:
        """How many tokens of a prompt to read at once."""
        length = min(budget, len(slot.request.prompt) - slot.read)
        return min(length, self.block - slot.read % self.block) if self.prefixes.max_bytes else length

    def _after_piece(self, slot, length) -> None:
        slot.read += length
        self.prefilled_tokens += length
        if self.prefixes.max_bytes and (slot.read % self.block == 0 or not slot.reading):
            prefix = slot.request.prompt[: slot.read]
            snapshot = self.prefixes.get(prefix)
            if snapshot is None:
                snapshot = self.cache.snapshot(slot.row, slot.after)
                kept = self.prefixes.add(prefix, snapshot, slot.logits.clone())
                snapshot = snapshot if kept else None
            slot.after = snapshot
        if slot.reading:
            slot.logits = None

    def _run(self, slots, ids, prompt) -> None:
        """The model on equally many tokens of each slot's sequence; leaves their last logits."""
        if slots:
            ids = torch.tensor(ids, device=self.model.device)
            cache = self.cache.select(slot.row for slot in slots)
            local = self.model.local_logits(ids, None, cache, logits_to_keep=1, prompt=prompt)[:, -1]
            for slot, logits in zip(slots, local, strict=True):
                slot.logits = logits

    def _choose(self, slots) -> None:
        """A token for each, all with the same sampling options together."""
        groups: dict[Sampling, list[_Slot]] = {}
        for slot in slots:
            groups.setdefault(slot.request.sampling, []).append(slot)
        for sampling, group in groups.items():
            local = torch.stack([self._allowed(slot) for slot in group])
            seen = None if group[0].seen is None else torch.stack([slot.seen for slot in group])
            tokens = choose(local, sampling, [slot.generator for slot in group], seen, self.model.ranks)
            for slot, token in zip(group, tokens.tolist(), strict=True):
                self._give(slot, token)

    def _allowed(self, slot):
        """A slot's logits, without the stop tokens while it must go on."""
        if len(slot.request.tokens) >= slot.request.min_new_tokens:
            return slot.logits
        banned = torch.zeros(len(slot.logits), dtype=torch.bool, device=slot.logits.device)
        self._see(banned, slot.request.stop_tokens)
        return slot.logits.masked_fill(banned, float("-inf"))

    def _give(self, slot, token) -> None:
        """A new token; the slot is free if it was the last."""
        request, slot.logits = slot.request, None
        request.tokens.append(token)
        if slot.seen is not None:
            self._see(slot.seen, [token])
        if slot.text is not None:
            slot.text.push(token)
        if token in request.stop_tokens or (slot.text is not None and slot.text.stopped):
            request.finished = "stop"
        elif len(request.tokens) == request.max_new_tokens:
            request.finished = "length"
        if request.finished is not None:
            del self._slots[slot.row]
