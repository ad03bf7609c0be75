"""Runs the engine: rank 0 in a thread of its own, the other ranks in lockstep with it.

The thread takes additions and cancellations from a queue, and hands the new tokens of each step to asyncio's thread. So HTTP
never waits for the model, and a request that is cancelled leaves its slot before the next step.
"""

import logging
import queue
import threading
from collections.abc import Callable
from itertools import starmap

from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.grammar import Grammar
from megatron_ssm.engine.options import GenerationOptions
from megatron_ssm.engine.request import Request
from megatron_ssm.engine.sampling import nan_error

from .channel import Channel, Commands
from .errors import ApiError, bad_request
from .grammars import Compilations, Compiling, GrammarCompiler
from .metrics import Load
from .sequences import Sequence, Update

log = logging.getLogger(__name__)

# Seconds without work after which rank 0 sends an empty turn, as a sign of life; sending fails if another rank is gone.
IDLE_S = 1.0


class TurnRunner:
    """Applies turns to one rank's engine. A turn is a set of additions and cancellations, and one step of the engine; all
    ranks apply the same turns.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._requests: dict[int, Request] = {}  # those that are waiting or running

    def apply(self, additions: list[Request], cancellations: tuple[int, ...]) -> list[Request]:
        """Apply one turn, and return the requests that got tokens. All ranks call it with equal arguments."""
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


def run_follower(engine: Engine, channel: Channel) -> None:
    """The loop of all ranks but 0: receive and apply each turn of rank 0, up to the last one."""
    runner, compiler = TurnRunner(engine), GrammarCompiler(engine)
    compilations = Compilations(compiler)

    def make_request(prompt: list[int], options: GenerationOptions) -> Request:
        """Make the request. Waits for this rank's compilation of the grammar, which rank 0 has already finished."""
        matcher = None if options.grammar is None else compilations.pop_matcher(options.grammar)
        return engine.make_request(prompt, options, matcher)

    try:
        while not (commands := Commands.decode(channel.receive(engine.is_busy))).is_last:
            for grammar in commands.grammars:
                compilations.start(grammar)
            for grammar in commands.dropped:
                compilations.drop(grammar)
            runner.apply(list(starmap(make_request, commands.additions)), commands.cancellations)
    finally:
        compiler.stop()


class Driver(threading.Thread):
    """The thread of rank 0 that steps the engine.

    deliver: is called with the updates of each turn. fail: is called with the error that has ended the thread. load: the
    load of the engine after the last turn. error: the exception that ended the thread, or None.
    """

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        deliver: Callable[[list[Update]], None],
        fail: Callable[[BaseException], None],
    ):
        super().__init__(name="engine", daemon=True)
        self.load = Load(len(engine.cache.lengths), prefix_cache_max_bytes=engine.prefix_cache.max_bytes)
        self.error: BaseException | None = None
        self._engine, self._channel, self._runner = engine, channel, TurnRunner(engine)
        self._deliver, self._fail, self._compiler = deliver, fail, GrammarCompiler(engine)
        self._inbox: queue.SimpleQueue[tuple[str, Sequence | None]] = queue.SimpleQueue()
        self._compiling: dict[Sequence, Compiling] = {}  # sequences whose grammars are being compiled, in their order
        self._running: dict[Request, Sequence] = {}

    # From any thread

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its first update may be an error."""
        self._inbox.put(("add", sequence))

    def cancel(self, sequence: Sequence) -> None:
        """Cancel a sequence; does nothing if it has ended. Only updates that are already queued may still arrive."""
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
        unused_compilations: list[Sequence] = []  # those whose compiled grammars are not used
        is_last = False
        for command, sequence in self._commands():
            if sequence is None:
                is_last = is_last or command == "stop"
            elif command == "add":
                added.append(sequence)
            elif sequence in added:
                added.remove(sequence)
            elif compiling := self._compiling.pop(sequence, None):
                compiling.cancel()
                unused_compilations.append(sequence)
            else:
                cancelled.append(sequence)
        for_grammar = [sequence for sequence in added if sequence.options.grammar is not None]
        self._compile(for_grammar)
        compiled = [sequence for sequence, compiling in self._compiling.items() if compiling.done()]
        added = [sequence for sequence in added if sequence.options.grammar is None] + compiled
        updates = [update for sequence in added if (update := self._prepare(sequence))]
        requests = {sequence.request: sequence for sequence in added if sequence.request is not None}
        unused_compilations += [sequence for sequence in compiled if sequence.request is None]
        running = [sequence.request for sequence in cancelled if sequence.request is not None]
        # Requests that have finished are no longer in _running.
        ended = [request for request in running if self._running.pop(request, None)]
        commands = Commands(
            tuple((sequence.prompt, sequence.options) for sequence in requests.values()),
            tuple(request.id for request in ended),
            _grammars(for_grammar),
            _grammars(unused_compilations),
            is_last,
        )
        self._channel.send(commands.encode(), self._engine.is_busy)
        if is_last:
            return False
        self._running |= requests
        advanced = self._runner.apply(list(requests), commands.cancellations)
        updates += [self._update(request) for request in advanced]
        self._report(updates)
        return True

    def _commands(self) -> list[tuple[str, Sequence | None]]:
        """The commands since the last turn; waits for one while there is nothing to do."""
        commands = []
        try:
            commands.append(self._inbox.get(block=not self._engine.is_busy, timeout=IDLE_S))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _compile(self, sequences: list[Sequence]) -> None:
        """Begin to compile the grammars of new sequences."""
        for sequence, grammar in zip(sequences, _grammars(sequences), strict=True):
            self._compiling[sequence] = self._compiler.start(grammar)
            self._compiling[sequence].add_done_callback(lambda _: self._inbox.put(("compiled", None)))

    def _prepare(self, sequence: Sequence) -> Update | None:
        """Make the request of a sequence and return None, or return an update with the error. If rank 0 succeeds, the other
        ranks will.
        """
        try:
            compiling = self._compiling.pop(sequence, None)
            matcher = None if compiling is None else compiling.result()
            sequence.request = self._engine.make_request(sequence.prompt, sequence.options, matcher)
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
        prefixes = self._engine.prefix_cache
        load, (running, waiting), (proposed, accepted) = self.load, self._engine.load, self._engine.speculated
        self.load = Load(
            load.slots,
            running=running,
            waiting=waiting + len(self._compiling),
            prompt_tokens=load.prompt_tokens + sum(len(u.sequence.prompt) for u in firsts),
            reused_tokens=load.reused_tokens + sum(u.reused for u in firsts),
            prefix_hits=load.prefix_hits + sum(u.reused > 0 for u in firsts),
            new_tokens=load.new_tokens + sum(len(u.tokens) for u in updates),
            proposed_tokens=proposed,
            accepted_tokens=accepted,
            bytes_sent=self._engine.bytes_sent + self._channel.sent,
            prefix_cache_entries=len(prefixes),
            prefix_cache_bytes=prefixes.nbytes,
            prefix_cache_max_bytes=prefixes.max_bytes,
        )
        if updates:
            self._deliver(updates)


def _wrong_request(sequence: Sequence, message: str) -> ApiError:
    """The error for a request that cannot be made: because of its grammar, as everything else was checked before."""
    name = sequence.grammar_parameter
    return bad_request(f"{name}: {message}", name) if name else bad_request(message)


def _grammars(sequences: list[Sequence]) -> tuple[Grammar, ...]:
    """The grammars of sequences that have one."""
    return tuple(sequence.options.grammar for sequence in sequences if sequence.options.grammar is not None)
