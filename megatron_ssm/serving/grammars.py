"""Compiles grammars in a thread of its own, so that the engine goes on meanwhile; on every rank."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_ssm.inference.engine import Engine
from megatron_ssm.inference.grammar import Grammar

REMEMBERED = 64  # compilations: a grammar that is used again is compiled once


class GrammarCompiler:
    """Compiles the grammars of requests for an engine. All ranks start the same compilations in the same order."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, "grammars")
        self._started: OrderedDict[tuple[str, str], Future] = OrderedDict()

    def start(self, grammar: tuple[str, str]) -> Future:
        """Begin to compile a grammar, its kind and its text, unless that was begun before. The future has no result."""
        if grammar not in self._started:
            self._started[grammar] = self._pool.submit(self._compile, grammar)
            if len(self._started) > REMEMBERED:
                self._started.popitem(last=False)
        return self._started[grammar]

    def wait(self, grammar: tuple[str, str]) -> None:
        """Return when a grammar is compiled. ValueError if the engine cannot use it."""
        self.start(grammar).result()

    def stop(self) -> None:
        """End the thread when the current compilation is done, and forget the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: tuple[str, str]) -> None:
        self._engine.tokenizer.matcher(Grammar.unchecked(*grammar))
