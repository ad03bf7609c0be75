"""Steps the engine: in a thread of its own on rank 0, and in step with it on the other ranks.

The thread takes additions and cancellations from a queue, and hands the new tokens of each step to asyncio's thread. So HTTP
never waits for the model, and a request that is cancelled leaves its slot before the next step.
"""

import logging
import queue
import threading
from collections.abc import Callable

from megatron_ssm.api.errors import ApiError, bad_request
from megatron_ssm.api.sequences import Arguments, Sequence, Update
from megatron_ssm.inference.engine import Engine
from megatron_ssm.inference.request import Request
from megatron_ssm.inference.sampling import nan_error

from .channel import Channel, Orders
from .grammars import Compilations, Compiling, GrammarCompiler
from .metrics import Load

log = logging.getLogger(__name__)

# After this many seconds without work, rank 0 tells the other ranks that it is still there, and notices if one is not.
IDLE_S = 1.0


class Replica:
    """The turns that all ranks make: each queues and cancels requests, and steps the engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._requests: dict[int, Request] = {}  # those that are waiting or running

    def turn(self, additions: list[Request], cancellations: tuple[int, ...]) -> list[Request]:
        """One turn; returns the requests that got tokens. All ranks make it with equal arguments."""
        for request in additions:
            assert request.seed is not None, "the seed is part of the arguments"
            self.engine.enqueue(request, request.seed)
            self._requests[request.id] = request
        for number in cancellations:
            self.engine.cancel(self._requests.pop(number))
        advanced = self.engine.step() if self.engine.is_busy else []
        for request in advanced:
            if request.finished is not None:
                del self._requests[request.id]
        return advanced


def follow(engine: Engine, channel: Channel) -> None:
    """Make every turn that rank 0 makes, until it says that there are no more. For the other ranks."""
    replica, compiler = Replica(engine), GrammarCompiler(engine)
    compilations = Compilations(compiler)

    def made(arguments: Arguments) -> Request:
        """The request; rank 0 has compiled its grammar, so this rank soon has, too."""
        matcher = None if arguments.grammar is None else compilations.pop_matcher(arguments.grammar)
        return arguments.request(engine, matcher)

    try:
        while not (orders := Orders.decode(channel.receive(engine.is_busy))).is_last:
            for grammar in orders.grammars:
                compilations.start(grammar)
            for grammar in orders.dropped:
                compilations.drop(grammar)
            replica.turn(list(map(made, orders.additions)), orders.cancellations)
    finally:
        compiler.stop()


class Driver(threading.Thread):
    """The thread of rank 0 that steps the engine.

    deliver: is called with the updates of each turn. fail: is called with the error that has ended the thread. load: how
    busy the engine is, after each turn. error: what has ended the thread, or None.
    """

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        deliver: Callable[[list[Update]], None],
        fail: Callable[[BaseException], None],
    ):
        super().__init__(name="engine", daemon=True)
        self.load = Load(slots=len(engine.cache.lengths))
        self.error: BaseException | None = None
        self._engine, self._channel, self._replica = engine, channel, Replica(engine)
        self._deliver, self._fail, self._compiler = deliver, fail, GrammarCompiler(engine)
        self._inbox: queue.SimpleQueue[tuple[str, Sequence | None]] = queue.SimpleQueue()
        self._compiling: dict[Sequence, Compiling] = {}  # those whose grammars are being compiled, in their order
        self._running: dict[Request, Sequence] = {}

    # From any thread

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its first update may be an error."""
        self._inbox.put(("add", sequence))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence, of which no update follows that is not already on its way. It may have ended."""
        self._inbox.put(("cancel", sequence))

    def stop(self) -> None:
        """End the thread, and the loops of the other ranks, after the current step."""
        self._inbox.put(("stop", None))

    # In the thread

    def run(self) -> None:
        """Make turns until it is stopped, or the engine fails."""
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.error = error
            self._fail(error)
        finally:
            self._compiler.stop()

    def _turn(self) -> bool:
        """One turn; False if it was the last."""
        added: list[Sequence] = []
        cancelled: list[Sequence] = []
        dropped: list[Sequence] = []  # those whose compiled grammars are not used
        is_last = False
        for order, sequence in self._orders():
            if sequence is None:
                is_last = is_last or order == "stop"
            elif order == "add":
                added.append(sequence)
            elif sequence in added:
                added.remove(sequence)
            elif compiling := self._compiling.pop(sequence, None):
                compiling.cancel()
                dropped.append(sequence)
            else:
                cancelled.append(sequence)
        for_grammar = [sequence for sequence in added if sequence.arguments.grammar is not None]
        self._compile(for_grammar)
        compiled = [sequence for sequence, compiling in self._compiling.items() if compiling.done()]
        added = [sequence for sequence in added if sequence.arguments.grammar is None] + compiled
        updates = [update for sequence in added if (update := self._prepare(sequence))]
        requests = {each.request: each for each in added if each.request is not None}
        dropped += [sequence for sequence in compiled if sequence.request is None]
        running = [each.request for each in cancelled if each.request is not None]
        ended = [request for request in running if self._running.pop(request, None)]  # the others have finished
        orders = Orders(
            tuple(each.arguments for each in requests.values()),
            tuple(request.id for request in ended),
            _grammars(for_grammar),
            _grammars(dropped),
            is_last,
        )
        self._channel.send(orders.encode(), self._engine.is_busy)
        if is_last:
            return False
        self._running |= requests
        advanced = self._replica.turn(list(requests), orders.cancellations)
        updates += [self._update(request) for request in advanced]
        self._report(updates)
        return True

    def _orders(self) -> list[tuple[str, Sequence | None]]:
        """The orders since the last turn; waits for one while there is nothing to do."""
        orders = []
        try:
            orders.append(self._inbox.get(block=not self._engine.is_busy, timeout=IDLE_S))
            while True:
                orders.append(self._inbox.get_nowait())
        except queue.Empty:
            return orders

    def _compile(self, sequences: list[Sequence]) -> None:
        """Begin to compile the grammars of new sequences."""
        for sequence, grammar in zip(sequences, _grammars(sequences), strict=True):
            self._compiling[sequence] = self._compiler.start(grammar)
            self._compiling[sequence].add_done_callback(lambda _: self._inbox.put(("compiled", None)))

    def _prepare(self, sequence: Sequence) -> Update | None:
        """Make the request of a sequence, which all other ranks then can make; or an update with the error."""
        try:
            compiling = self._compiling.pop(sequence, None)
            matcher = None if compiling is None else compiling.result()
            sequence.request = sequence.arguments.request(self._engine, matcher)
            return None
        except ValueError as error:
            return Update(sequence, error=_wrong_request(sequence, str(error)))
        except Exception:  # of any kind: no other rank knows of the request, so the others go on
            log.exception("a request could not be made")
            return Update(sequence, error=ApiError(500, "the server has failed to handle the request"))

    def _update(self, request: Request) -> Update:
        """The update of a request that got tokens."""
        sequence = self._running[request] if request.finished is None else self._running.pop(request)
        start, sequence.reported = sequence.reported, len(request.tokens)
        if request.finished == "error":
            log.warning(
                f"megatron-ssm: a reply has ended: {nan_error(self._engine.model.directory, len(request.tokens))}"
            )
        return Update(
            sequence,
            request.tokens[start:],
            request.finished,
            reused=request.reused,
            logprobs=request.logprobs[start:],
            prompt_logprobs=[] if start else request.prompt_logprobs,
            embedding=request.embedding,
        )

    def _report(self, updates: list[Update]) -> None:
        """Hand over the updates, and update the load."""
        firsts = [u for u in updates if u.error is None and len(u.tokens) == u.sequence.reported]
        load, (running, waiting), (proposed, accepted) = self.load, self._engine.load, self._engine.speculated
        self.load = Load(
            load.slots,
            running=running,
            waiting=waiting + len(self._compiling),
            prompt_tokens=load.prompt_tokens + sum(len(u.sequence.arguments.prompt) for u in firsts),
            reused_tokens=load.reused_tokens + sum(u.reused for u in firsts),
            prefix_hits=load.prefix_hits + sum(u.reused > 0 for u in firsts),
            new_tokens=load.new_tokens + sum(len(u.tokens) for u in updates),
            proposed_tokens=proposed,
            accepted_tokens=accepted,
            bytes_sent=self._engine.bytes_sent + self._channel.sent,
        )
        if updates:
            self._deliver(updates)


def _wrong_request(sequence: Sequence, message: str) -> ApiError:
    """The error for a request that cannot be made: because of its grammar, as everything else was checked before."""
    name = sequence.grammar_parameter
    return bad_request(f"{name}: {message}", name) if name else bad_request(message)


def _grammars(sequences: list[Sequence]) -> tuple[tuple[str, str], ...]:
    """The grammars of sequences that have one."""
    return tuple(sequence.arguments.grammar for sequence in sequences if sequence.arguments.grammar is not None)
