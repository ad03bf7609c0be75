"""Many clients at once. Oracle: `generate` for each request alone, on one rank."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from servers import IGNORE_EOS, events, expected, server, with_template

CLIENTS, ROUNDS = 16, 2
STOPS = ["\ufffd" * 3, *"aeiourst"]  # the first: random bytes that are not valid UTF-8
full = pytest.mark.full
CASES = [
    pytest.param("mamba", 1, marks=full), pytest.param("mamba", 2, marks=full), pytest.param("falcon_mamba", 1, marks=full),
    pytest.param("falcon_mamba", 2, marks=full), pytest.param("mamba2", 1, marks=full),
    pytest.param("mamba2", 2, marks=full), pytest.param("zamba", 1, marks=full), pytest.param("zamba", 2, marks=full),
    pytest.param("zamba2", 1, marks=full), ("zamba2", 2),
]  # fmt: skip


@dataclass
class Asked:
    """A request, the ids of its prompt, and the options with which `generate` makes its replies."""

    path: str
    body: dict
    prompt: list[int]
    options: dict

    def alone(self, directory, index):
        """The tokens of the reply `index`."""
        return expected(directory, self.prompt, self.body["max_tokens"], index=index, **self.options)


def wanted(rng):
    """A random request: a completion or a chat, for one reply or two."""
    shared = dict(
        temperature=rng.choice((0, 0.8)), seed=rng.randrange(2**32), repetition_penalty=rng.choice((1.0, 1.2))
    )
    chosen = dict(top_p=rng.choice((None, 0.7)), top_k=rng.choice((None, 20)), stop=rng.choice((None, STOPS)))
    options = {**shared, "top_p": chosen["top_p"], "top_k": chosen["top_k"], "stop_strings": chosen["stop"] or ()}
    body = {"max_tokens": rng.randrange(1, 40), "n": rng.choice((1, 2)), **shared, **chosen}
    body |= {"return_token_ids": True, **IGNORE_EOS}
    if rng.random() < 0.3:
        text = "word " * rng.choice((1, 40))
        prompt = [256, *f"[user]{text}[assistant]".encode()]  # as the template of the tests writes it
        return Asked("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}, prompt, options)
    prompt = [rng.randrange(257) for _ in range(rng.choice((1, 5, 300)))]
    return Asked("/v1/completions", {**body, "prompt": prompt}, prompt, options)


def visit(running, seed):
    """A client that makes a few requests, and hangs up in the middle of some: [(request, {reply: tokens}, whether all)]."""
    rng, replies = random.Random(seed), []
    with running.client() as client:
        for _ in range(ROUNDS):
            asked = wanted(rng)
            if rng.random() < 0.4:
                choices = client.post(asked.path, json=asked.body).raise_for_status().json()["choices"]
                replies.append((asked, {choice["index"]: choice["token_ids"] for choice in choices}, True))
                continue
            leaves_after = rng.choice((1, 7, 1000))
            with client.stream("POST", asked.path, json={**asked.body, "stream": True}) as stream:
                lines = []
                for line in stream.iter_lines():
                    lines += [line] if line else []
                    if len(lines) == leaves_after:
                        break
            is_whole = lines[-1] == "data: [DONE]"
            tokens = {}
            for chunk in events(lines if is_whole else [*lines, "data: [DONE]"]):
                (choice,) = chunk["choices"]
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            replies.append((asked, tokens, is_whole))
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
    replies = [reply for each in visits for reply in each]
    assert sum(not is_whole for _, _, is_whole in replies) > 3
    for asked, found, is_whole in replies:
        assert found and (not is_whole or len(found) == asked.body["n"])
        for index, tokens in found.items():
            alone = asked.alone(directory, index)
            assert tokens == (alone if is_whole else alone[: len(tokens)]) and tokens
    wholes = [(asked, tokens) for asked, found, is_whole in replies if is_whole for tokens in found.values()]
    assert any(len(tokens) < asked.body["max_tokens"] for asked, tokens in wholes), "a stop string ends one"
    assert {asked.path for asked, _, _ in replies} == {"/v1/completions", "/v1/chat/completions"}
