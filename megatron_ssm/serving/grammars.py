"""Compiles grammars in a thread of its own, so that the engine goes on meanwhile; on every rank."""

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_ssm.inference.engine import Engine
from megatron_ssm.inference.grammar import Grammar, GrammarMatcher

Compiling = Future[GrammarMatcher]


class GrammarCompiler:
    """Makes the matchers of requests for an engine, one for each request, in the order of the calls of `start`.

    The grammars were checked before: making a matcher takes half a second at most, and hardly a millisecond as a rule.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, "grammars")

    def start(self, grammar: tuple[str, str]) -> Compiling:
        """Begin to make a matcher of a grammar, its kind and its text. Its ValueError: the engine cannot use the grammar."""
        return self._pool.submit(self._matcher, grammar)

    def stop(self) -> None:
        """End the thread when the current compilation is done, and forget the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, grammar: tuple[str, str]) -> GrammarMatcher:
        return self._engine.tokenizer.matcher(Grammar.unchecked(*grammar))


class Compilations:
    """The compilations of a rank other than rank 0, for requests that rank 0 has not added yet."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._started: defaultdict[tuple[str, str], deque[Compiling]] = defaultdict(deque)

    def start(self, grammar: tuple[str, str]) -> None:
        """Begin to make a matcher, for one request."""
        self._started[grammar].append(self._compiler.start(grammar))

    def pop_matcher(self, grammar: tuple[str, str]) -> GrammarMatcher:
        """Return a matcher of a grammar, for a request that is added; waits for it. Those of one grammar are equal."""
        matcher = self._started[grammar].popleft().result()
        self._forget_if_none(grammar)
        return matcher

    def drop(self, grammar: tuple[str, str]) -> None:
        """Cancel a compilation, for a request that will not be added: the last one, which other requests need least."""
        self._started[grammar].pop().cancel()
        self._forget_if_none(grammar)

    def _forget_if_none(self, grammar: tuple[str, str]) -> None:
        if not self._started[grammar]:
            del self._started[grammar]
