"""More requests than a server can answer, and the queue of requests. Oracles: `generate`, the metrics, the memory that the
kernel reports, the guide.
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from megatron_ssm.engine.options import GenerationOptions
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.sequences import Sequence, Update
from megatron_ssm.server.service import Limits, Service
from servers import IGNORE_EOS, LIMIT_S, expected, server, with_template

NEW, PROMPTS = 24, 20
ERROR_S, END_S = 10, 30  # the longest until clients have an error after a rank has died, and until the server has ended


async def sent(client, number):
    """Send a request; returns its prompt, the status, and the tokens."""
    prompt = [number % PROMPTS] * 30
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0.9, "seed": number % PROMPTS, "return_token_ids": True}
    reply = await client.post("/v1/completions", json={**body, **IGNORE_EOS})
    return number % PROMPTS, reply.status_code, reply.json().get("choices", [{}])[0].get("token_ids")


async def at_rate(running, count, rate):
    """Send `count` requests with Poisson arrivals, `rate` a second, whatever becomes of them; returns what each gets."""
    limits = httpx.Limits(max_connections=None)
    rng, start, due = random.Random(0), time.monotonic(), 0.0
    async with httpx.AsyncClient(base_url=running.url, timeout=4 * LIMIT_S, limits=limits) as client:
        tasks = []
        for number in range(count):
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            tasks.append(asyncio.create_task(sent(client, number)))
        return await asyncio.gather(*tasks)


async def sustained(running, count, clients):
    """How many requests a second `clients` get answered that each send the next one after a reply."""
    numbers = iter(range(count))
    async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client:

        async def visit():
            for number in numbers:
                await sent(client, number)

        start = time.monotonic()
        await asyncio.gather(*(visit() for _ in range(clients)))
        return count / (time.monotonic() - start)


def service(slots, waiting, seconds=LIMIT_S):
    """A service that takes requests, without an engine."""
    made = Service(Limits(slots, waiting, 2**20, seconds, 9, LIMIT_S))
    made.start(SimpleNamespace(add=lambda sequence: None, cancel=lambda sequence: None))
    return made


def refusal(error):
    return error.status, error.code


def test_requests_that_are_prepared_have_places_in_the_queue():
    """One that its client has left keeps its place while a thread works on it, and then makes room."""
    may_end, done = threading.Event(), []

    async def prepared(service, number):
        work = lambda: (may_end.wait(LIMIT_S), done.append(number))  # noqa: E731
        return await service.prepare(work, time.monotonic())

    async def visit():
        room = 6
        limited = service(room - 1, 1)
        tasks = [asyncio.create_task(prepared(limited, number)) for number in range(room)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await prepared(limited, room)
        assert refusal(refused.value) == (429, "queue_full")
        tasks[0].cancel()  # a thread works on it
        await asyncio.wait(tasks[:1])
        with pytest.raises(ApiError):
            await prepared(limited, room)
        may_end.set()
        await asyncio.wait(tasks)
        await asyncio.to_thread(limited._pool.shutdown)
        with limited.added([Sequence([1], GenerationOptions(1, seed=0)) for _ in range(room)], time.monotonic()):
            limited.check_room()  # they are one request
        assert sorted(done) == [*range(room)]

    asyncio.run(visit())


def test_retry_after_is_learned_from_all_requests(monkeypatch):
    """One whose client hangs up, and one whose time is over; each is open for 100 s, and counts for a tenth of the mean."""
    now = [0.0]
    monkeypatch.setattr("megatron_ssm.server.service.time", SimpleNamespace(monotonic=lambda: now[0]))

    def sequences():
        return [Sequence([1], GenerationOptions(1, seed=0))]

    async def visit():
        limited = service(1, 0, seconds=0)
        with limited.added(sequences(), now[0]):
            now[0] += 100
        with limited.added(sequences(), now[0]) as updates:
            now[0] += 100
            assert refusal((await updates.get()).error) == (504, "timeout")
        with limited.added(sequences(), now[0]), pytest.raises(ApiError) as refused:
            limited.check_room()
        assert refused.value.headers == {"Retry-After": "20"}
        limited.stop()

    asyncio.run(asyncio.wait_for(visit(), LIMIT_S))


def test_the_time_of_a_request_includes_its_preparation():
    may_end = threading.Event()

    async def visit():
        limited, now = service(1, 1, seconds=0.2), time.monotonic()
        with pytest.raises(ApiError, match="the request has taken more than 0.2 s") as refused:
            await limited.prepare(lambda: may_end.wait(LIMIT_S), now)
        assert refusal(refused.value) == (504, "timeout")
        may_end.set()
        sequence = Sequence([1], GenerationOptions(1, seed=0))
        with limited.added([sequence], now - LIMIT_S) as updates:
            assert refusal((await asyncio.wait_for(updates.get(), LIMIT_S)).error) == (504, "timeout")
        limited.stop()

    asyncio.run(visit())


def test_requests_that_are_prepared_when_the_server_drains_are_finished():
    """But for those that are still prepared when the drain time-out ends, which are refused at once."""
    sequences = [Sequence([1], GenerationOptions(1, seed=0)) for _ in range(2)]
    may_end = [threading.Event() for _ in sequences]

    async def visit():
        draining, now = service(2, 0), time.monotonic()
        first, second = [asyncio.create_task(draining.prepare(partial(each.wait, LIMIT_S), now)) for each in may_end]
        await asyncio.sleep(0)  # they begin
        draining.drain()
        with pytest.raises(ApiError, match="the server is shutting down") as refused:
            draining.check_room()
        assert refusal(refused.value) == (503, "unavailable") and not draining.is_ready
        may_end[0].set()
        await first
        with draining.added(sequences[:1], now) as updates:
            draining.deliver([Update(sequences[0], [7], "length")])
            assert (await updates.get()).tokens == [7]
        draining.close("the server is shutting down")
        with pytest.raises(ApiError, match="the server is shutting down") as refused:
            await second
        assert refusal(refused.value) == (503, "unavailable")
        may_end[1].set()
        with pytest.raises(ApiError, match="the server is shutting down") as refused:
            draining.added(sequences[1:], now).__enter__()
        assert refusal(refused.value) == (503, "unavailable")
        draining.stop()

    asyncio.run(asyncio.wait_for(visit(), LIMIT_S))


def test_two_hundred_clients_at_once(tmp_path):
    """With the default options, none is refused."""

    async def visit(running):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S, limits=limits) as client:
            return await asyncio.gather(*(sent(client, number) for number in range(200)))

    with server(with_template("mamba2"), tmp_path / "log") as running:
        assert Counter(status for _, status, _ in asyncio.run(visit(running))) == {200: 200}


@pytest.mark.full
@pytest.mark.parametrize("tp", (1, 2))
def test_a_thousand_requests_at_twice_the_sustainable_rate(tp, tmp_path):
    """Each is answered with its own tokens, or with 429; the memory does not grow by more than 2 %."""
    directory = with_template("mamba2")
    alone = [expected(directory, [p] * 30, NEW, temperature=0.9, seed=p) for p in range(PROMPTS)]
    flags = ["--slots", 8, "--max-waiting", 16, "--prefix-gb", 0.001]
    with server(directory, tmp_path / "log", *flags, tp=tp) as running:
        rate = asyncio.run(sustained(running, 100, 16))
        asyncio.run(at_rate(running, 300, 2 * rate))  # the allocator has its memory afterwards
        before = running.resident()
        refused = running.metric("requests_total", 'status="429"')
        replies = asyncio.run(at_rate(running, 1000, 2 * rate))
        statuses = Counter(status for _, status, _ in replies)
        assert sum(statuses.values()) == statuses[200] + statuses[429] == 1000 and min(statuses.values()) > 100
        assert all(tokens == alone[prompt] for prompt, status, tokens in replies if status == 200)
        assert running.metric("requests_total", 'status="429"') == refused + statuses[429]
        assert running.resident() == pytest.approx(before, rel=0.02)
        running.wait_until_idle()
        code, log = running.end()
        assert code == 0 and "Traceback" not in log, log


@pytest.mark.full
@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_killed_under_load(rank, tmp_path):
    """Every client has a reply, or gets an error in time. If it is rank 0, the error is a connection that ends."""

    async def status(client, number):
        try:
            return (await sent(client, number))[1]
        except httpx.TransportError:
            return None

    async def visit(running):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S, limits=limits) as client:
            tasks = [asyncio.create_task(status(client, number)) for number in range(60)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            os.kill(running.ranks()[rank], signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*tasks), ERROR_S)

    with server(with_template("mamba2"), tmp_path / "log", "--slots", 8, tp=2) as running:
        statuses = Counter(asyncio.run(visit(running)))
        assert running.process.wait(END_S) == 1
    assert set(statuses) == {200, 503 if rank else None} and statuses[200] < 40, statuses
