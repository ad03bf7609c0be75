"""Many clients at once. Oracle: `generate` for each request alone, on one rank."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from servers import IGNORE_EOS, events, expected, server, with_template

CLIENTS, ROUNDS = 16, 2
full = pytest.mark.full
CASES = [
    ("mamba", 1), pytest.param("mamba", 2, marks=full), pytest.param("falcon_mamba", 1, marks=full),
    pytest.param("falcon_mamba", 2, marks=full), pytest.param("mamba2", 1, marks=full),
    pytest.param("mamba2", 2, marks=full), pytest.param("zamba", 1, marks=full), pytest.param("zamba", 2, marks=full),
    pytest.param("zamba2", 1, marks=full), ("zamba2", 2),
]  # fmt: skip


def wanted(rng):
    """The arguments of a random request, for `generate` and for the server."""
    prompt = [rng.randrange(257) for _ in range(rng.choice((1, 5, 300)))]
    options = dict(
        temperature=rng.choice((0, 0.8)), seed=rng.randrange(2**32), repetition_penalty=rng.choice((1.0, 1.2))
    )
    return prompt, rng.randrange(1, 40), options


def visit(running, seed):
    """A client that makes a few requests, and hangs up in the middle of some: [(arguments, tokens so far, whether all)]."""
    rng, replies = random.Random(seed), []
    with running.client() as client:
        for _ in range(ROUNDS):
            prompt, new, options = wanted(rng)
            body = {"prompt": prompt, "max_tokens": new, "return_token_ids": True, **options, **IGNORE_EOS}
            if rng.random() < 0.4:
                choice = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
                replies.append(((prompt, new, options), choice["token_ids"], True))
                continue
            leaves_after = rng.choice((1, 7, 1000))
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                lines = []
                for line in stream.iter_lines():
                    lines += [line] if line else []
                    if len(lines) == leaves_after:
                        break
            is_whole = lines[-1] == "data: [DONE]"
            chunks = events(lines if is_whole else [*lines, "data: [DONE]"])
            tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
            replies.append(((prompt, new, options), tokens, is_whole))
    return replies


@pytest.mark.parametrize("family, tp", CASES)
def test_each_reply_has_the_tokens_that_it_has_alone(family, tp, tmp_path):
    directory = with_template(family)
    flags = ["--token-budget", 100, "--speculate", 3] if tp == 2 else []
    with server(directory, tmp_path / "log", "--slots", 6, *flags, tp=tp) as running:
        with ThreadPoolExecutor(CLIENTS) as pool:
            visits = list(pool.map(lambda seed: visit(running, seed), range(CLIENTS)))
        running.wait_until_idle()
        assert running.metric("bytes_sent_total") > 0 or tp == 1
        code, log = running.end()
    assert code == 0 and "Traceback" not in log, log
    assert sum(not is_whole for replies in visits for _, _, is_whole in replies) > 3
    for (prompt, new, options), tokens, is_whole in (reply for replies in visits for reply in replies):
        alone = expected(directory, prompt, new, **options)
        assert tokens == (alone if is_whole else alone[: len(tokens)]) and tokens
