"""Servers with OpenAI's interface as processes of their own, and clients that measure them."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0  # for a server to load its model
REPLY_S = 600.0


@dataclass(frozen=True)
class Work:
    """A request: the text of its prompt, of one token for each character, and the number of tokens of its reply.

    more: further fields of the request.
    """

    prompt: str
    tokens: int
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """How long a request of `tokens` new tokens took: seconds to the first one, and then for each of the others."""

    tokens: int
    first: float
    each: float


@dataclass(frozen=True)
class Run:
    """What a server did with a number of requests in `seconds`."""

    timings: list[Timing]
    seconds: float

    @property
    def throughput(self) -> float:
        """New tokens a second."""
        return sum(timing.tokens for timing in self.timings) / self.seconds

    def within(self, first: float, each: float) -> int:
        """How many requests had their first token within `first` seconds, and the others within `each` on average."""
        return sum(timing.first <= first and timing.each <= each for timing in self.timings)

    def percentiles(self, name: str) -> list[float]:
        """The 50th, 95th and 99th percentile of a field of the timings."""
        return np.percentile([getattr(timing, name) for timing in self.timings], [50, 95, 99]).tolist()


@contextmanager
def started(command: Sequence[object], ready: str, threads: int, log: Path) -> Iterator[str]:
    """The address of a server that `command` starts, once the path `ready` answers with 200.

    command: to it, --port and the number of a free port are added. threads: OMP_NUM_THREADS. log: a file for what it prints.
    RuntimeError, with the end of the log, if it ends or does not answer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    with open(log, "w") as output:
        words = [*map(str, command), "--port", str(port)]
        process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url + ready, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until the address answers with 200."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{process.args} does not answer: {log.read_text()[-2000:]}")


async def ask(client: httpx.AsyncClient, work: Work) -> tuple[str, Timing]:
    """The text of the reply to a request, and its timing. RuntimeError for an error, or a reply of another length."""
    body = {"prompt": work.prompt, "max_tokens": work.tokens, "temperature": 0, "stream": True, **work.more}
    start, first, last, text, finished = time.perf_counter(), 0.0, 0.0, "", None
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "choices" not in event:
                raise RuntimeError(f"{client.base_url}: {event}")
            last = time.perf_counter()
            first = first or last
            text += event["choices"][0]["text"]
            finished = event["choices"][0]["finish_reason"] or finished
    if finished != "length":
        raise RuntimeError(f"{client.base_url}: status {reply.status_code}, finish_reason {finished!r}")
    return text, Timing(work.tokens, first - start, (last - first) / max(1, work.tokens - 1))


def closed_loop(url: str, works: Sequence[Work], clients: int) -> Run:
    """Let `clients` clients make the requests, each the next one when it has its reply."""
    left = iter(works)

    async def visit(client: httpx.AsyncClient) -> list[Timing]:
        return [(await ask(client, work))[1] for work in left]

    async def run() -> Run:
        async with _client(url) as client:
            start = time.perf_counter()
            timings = await asyncio.gather(*(visit(client) for _ in range(clients)))
            return Run([timing for each in timings for timing in each], time.perf_counter() - start)

    return asyncio.run(run())


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """The times in seconds at which `count` requests come, `rate` a second on average (a Poisson process)."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))


def open_loop(url: str, works: Sequence[Work], times: Sequence[float]) -> Run:
    """Make each request at its time, in seconds from the beginning, however long replies take."""

    async def run() -> Run:
        async with _client(url) as client:
            start, tasks = time.perf_counter(), []
            for work, due in zip(works, times, strict=True):
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                tasks.append(asyncio.create_task(ask(client, work)))
            timings = [timing for _, timing in await asyncio.gather(*tasks)]
            return Run(timings, time.perf_counter() - start)

    return asyncio.run(run())


def texts(url: str, works: Sequence[Work]) -> list[str]:
    """The texts of the replies to requests, one after the other."""

    async def run() -> list[str]:
        async with _client(url) as client:
            return [(await ask(client, work))[0] for work in works]

    return asyncio.run(run())


def _client(url: str) -> httpx.AsyncClient:
    """A client that connects for each request: llama-server sometimes closes a connection that is to be used again."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=REPLY_S, limits=limits)


def our_server(directory: Path, ranks: int, slots: int, *flags: object) -> list[object]:
    """The command of our server."""
    command = [sys.executable, "-m", "megatron_ssm", "serve", "--model", directory, "--device", "cpu", "--slots", slots]
    return [*command, "--max-waiting", 10**4, "--prefix-gb", 0, *(["--tp", ranks] if ranks > 1 else []), *flags]
