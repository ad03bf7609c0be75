"""Compiles grammars on every rank, in a separate thread, so that the engine does not wait."""

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.grammar import Grammar, GrammarMatcher

Compiling = Future[GrammarMatcher]


class GrammarCompiler:
    """Makes the matchers of requests for an engine, one for each request, in the order of the calls of `start`.

    The grammars were checked before. Making a matcher usually takes less than a millisecond, and at most half a second.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, "grammars")

    def start(self, grammar: Grammar) -> Compiling:
        """Begin to make a matcher. The future raises ValueError if the engine cannot use the grammar."""
        return self._pool.submit(self._engine.tokenizer.matcher, grammar)

    def stop(self) -> None:
        """End the thread when the current compilation is done, and cancel those that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Compilations:
    """The compilations of a rank other than rank 0, for requests that rank 0 has not added yet."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._started: defaultdict[Grammar, deque[Compiling]] = defaultdict(deque)

    def start(self, grammar: Grammar) -> None:
        """Begin to make a matcher, for one request."""
        self._started[grammar].append(self._compiler.start(grammar))

    def pop_matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Wait for a matcher of a grammar, for a request that is being added. All matchers of one grammar are equal."""
        matcher = self._started[grammar].popleft().result()
        self._forget_if_none(grammar)
        return matcher

    def drop(self, grammar: Grammar) -> None:
        """Cancel the compilation for a request that will not be added: the last one of this grammar, because it would be
        used last.
        """
        self._started[grammar].pop().cancel()
        self._forget_if_none(grammar)

    def _forget_if_none(self, grammar: Grammar) -> None:
        if not self._started[grammar]:
            del self._started[grammar]
