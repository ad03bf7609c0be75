"""Compiles a grammar in a separate process that limits time, memory and stack; llguidance's own limits do not.

The process runs this file by its path, with the standard library only until it has its parent's `sys.path`.
"""

import json
import random
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

SECONDS = 0.3  # limit of processor time, for compiling and the first tokens
MEGABYTES = 48  # limit of data; without a grammar the process needs about 18
STACK = 6 * 2**20  # bytes of stack, less than the usual 8 MiB of a thread
TOKENS = 256  # the number of tokens to try: the work per token grows with some grammars
LONGEST_ERROR = 500  # characters of an error
# llguidance's limits during generation that differ from its defaults. They count work, not time, so that all ranks get the
# same result. A state of the lexer takes up to 1 kB.
LIMITS: dict[str, Any] = dict(max_lexer_states=100_000, verbose_errors=False)

_PLACES = threading.BoundedSemaphore(2)  # limits the number of simultaneous processes


def problem(grammar: str) -> str:
    """The reason why a grammar in llguidance's notation cannot be used, or "". It takes 0.1 s for a small grammar."""
    with _PLACES:
        result = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            input=f"{json.dumps(sys.path)}\n{grammar}", capture_output=True, encoding="utf-8",
        )  # fmt: skip
    if result.returncode == -signal.SIGPROF:
        return f"it is too complex: it takes more than {SECONDS} s of processor time"
    if result.returncode < 0 or "MemoryError" in result.stderr:
        return f"it is too complex: it takes more than {MEGABYTES} MB, or its parts are nested too deeply"
    if result.returncode:
        raise RuntimeError(f"the process that checks grammars has failed: {result.stderr[-500:]}")
    return one_line(result.stdout)


def one_line(error: str) -> str:
    return " ".join(error[:LONGEST_ERROR].replace("<non-verbose/>", "").split())


def _main() -> None:
    """Print the reason why the grammar on stdin, after a line with `sys.path`, cannot be used. Runs in the process."""
    sys.path[:] = json.loads(sys.stdin.readline())
    text = sys.stdin.read()
    import llguidance

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), slices=[])

    errors: list[str] = []
    generator = random.Random(0)

    def check() -> None:
        matcher = llguidance.LLMatcher(tokens, text, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
        for _ in range(TOKENS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [byte for byte in range(256) if mask >> byte & 1]
            if matcher.is_error() or not allowed:
                break
            matcher.consume_token(generator.choice(allowed))
        errors.append(matcher.get_error())

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEGABYTES * 10**6, MEGABYTES * 10**6))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
    threading.stack_size(STACK)
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    print(errors[0])  # IndexError if the thread has failed


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes, and one that ends a text."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids = (256,)

    def __call__(self, data: Any) -> list[int]:
        return list(data)


if __name__ == "__main__":
    _main()
