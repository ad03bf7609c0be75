"""A thousand requests of all kinds, mixed. Oracle: the tokens of each request alone, on one rank."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import httpx
import pytest

from megatron_ssm.engine.engine import Engine
from megatron_ssm.engine.grammar import Grammar
from servers import IGNORE_EOS, LIMIT_S, events, expected, model_of, server, text_of, with_template

REQUESTS, WARM_UP, CLIENTS, VARIANTS = 1000, 300, 24, 120
KINDS = ("whole", "stream", "hung up", "stop", "grammar", "bad")
STOPS = list("aeiourst")
EXPRESSION = "[0-9]{3}(-[a-f]{2,5})*!"
BAD = [  # a body and its status
    ({"prompt": [300]}, 400), ({"prompt": "a", "max_tokens": 9999}, 400), ({"prompt": "a", "best_of": 3}, 400),
    ({"prompt": "a", "guided_regex": "(a"}, 400), ({"prompt": "a", "model": "another"}, 404),
]  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request, its status, and its tokens alone. leaves_after: events after which its client hangs up."""

    kind: str
    body: dict
    status: int = 200
    alone: tuple[int, ...] = ()
    leaves_after: int | None = None

    @property
    def text(self):
        """The text of its tokens, up to the first stop string."""
        text = text_of(self.alone)
        return text[: min([text.find(stop) for stop in self.body.get("stop", ()) if stop in text], default=None)]


def matching(directory, prompt, new, **options):
    """The tokens of a request alone whose text matches EXPRESSION."""
    engine = Engine(model_of(directory), slots=1)
    request = engine.add(prompt, new, grammar=Grammar("regex", EXPRESSION), **options)
    return list(engine.stream(request))


@cache
def variant(directory, number):
    """One of VARIANTS different requests."""
    rng, kind = random.Random(number), KINDS[number % len(KINDS)]
    if kind == "bad":
        return Asked(kind, *rng.choice(BAD))
    prompt, new = [rng.randrange(257) for _ in range(rng.choice((1, 9, 150)))], rng.randrange(1, 40)
    options = dict(temperature=rng.choice((0, 0.9)), seed=rng.randrange(2**32))
    body = {"prompt": prompt, "max_tokens": new, "return_token_ids": True, **options, **IGNORE_EOS}
    if kind == "hung up":
        alone = expected(directory, prompt, 60, **options)  # more than the client waits for
        return Asked(kind, {**body, "max_tokens": 3000, "stream": True}, 200, tuple(alone), rng.randrange(1, 12))
    if kind == "grammar":
        alone = matching(directory, prompt, new, **options)
        return Asked(kind, {**body, "guided_regex": EXPRESSION}, 200, tuple(alone))
    stops = {"stop": STOPS} if kind == "stop" else {}
    alone = expected(directory, prompt, new, stop_strings=stops.get("stop", ()), **options)
    return Asked(kind, {**body, **stops, "stream": kind == "stream"}, 200, tuple(alone))


async def check(client, asked):
    """Make a request, and compare what comes back."""
    if not asked.body.get("stream"):
        reply = await client.post("/v1/completions", json=asked.body)
        assert reply.status_code == asked.status, reply.text
        if asked.status == 200:
            (choice,) = reply.json()["choices"]
            assert (tuple(choice["token_ids"]), choice["text"]) == (asked.alone, asked.text), asked
        else:
            assert reply.json()["error"]["message"]
        return
    lines = []
    async with client.stream("POST", "/v1/completions", json=asked.body) as reply:
        async for line in reply.aiter_lines():
            lines += [line] if line else []
            if len(lines) == asked.leaves_after:
                break
    chunks = events(lines if asked.leaves_after is None else [*lines, "data: [DONE]"])
    tokens = tuple(token for chunk in chunks for token in chunk["choices"][0]["token_ids"])
    assert tokens == (asked.alone if asked.leaves_after is None else asked.alone[: len(tokens)]) and tokens, asked


async def visits(running, requests):
    """CLIENTS clients make the requests, each the next one when it has its reply."""
    left = iter(requests)
    async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client:

        async def visit():
            for asked in left:
                await check(client, asked)

        await asyncio.gather(*(visit() for _ in range(CLIENTS)))


@pytest.mark.full
@pytest.mark.parametrize("tp", (1, 2))
def test_a_thousand_mixed_requests(tp, tmp_path):
    """Each has its own tokens, or its error. Afterwards no slot and no connection is in use, and the memory is the same."""
    directory, rng = with_template("mamba2"), random.Random(0)
    requests = [variant(directory, rng.randrange(VARIANTS)) for _ in range(WARM_UP + REQUESTS)]
    assert min(Counter(asked.kind for asked in requests).values()) > 150
    assert any(len(asked.alone) < asked.body["max_tokens"] for asked in requests if asked.kind == "stop")
    flags = ["--slots", 6, "--token-budget", 100, "--speculate", 3, "--prefix-gb", 0.001]
    with server(directory, tmp_path / "log", *flags, tp=tp) as running:
        sockets = running.sockets()
        asyncio.run(visits(running, requests[:WARM_UP]))  # the allocator has its memory afterwards
        running.wait_until_idle()
        memory = running.resident()
        asyncio.run(visits(running, requests[WARM_UP:]))
        running.wait_until_idle()
        running.wait_until(lambda: running.sockets() == sockets, "connections have leaked")
        assert running.resident() == pytest.approx(memory, rel=0.02)
        code, log = running.end()
    assert code == 0 and "Traceback" not in log, log
