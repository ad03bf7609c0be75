"""What Prometheus reads at /metrics. Oracle: the requests that were made."""

import httpx
import pytest

from servers import IGNORE_EOS, server, with_template

NEW, PROMPT = 5, "x" * 300


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("one\nanother\n")
    return path


def cached(running, key):
    """Ask for NEW tokens with an API key; returns how many tokens of the prompt the prefix cache had."""
    body = {"prompt": PROMPT, "max_tokens": NEW, **IGNORE_EOS}
    reply = httpx.post(
        running.url + "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_times_tokens_and_prefixes(tmp_path, keys):
    """Without --share-prefixes, the second key reads the prompt anew."""
    with server(with_template("mamba2"), tmp_path / "log", "--api-key-file", keys) as running:
        assert [cached(running, key) for key in ("one", "one", "another")] == [0, 300, 0]
        expected = dict(
            prompt_tokens_total=3 * 300, reused_tokens_total=300, prefix_hits_total=1, new_tokens_total=3 * NEW, slots=16,
            running=0, waiting=0, bytes_sent_total=0, time_to_first_token_seconds_count=3,
            time_per_output_token_seconds_count=3, queue_time_seconds_count=3, request_seconds_count=3,
            prefix_cache_max_bytes=2**30,
        )  # fmt: skip
        assert {name: running.metric(name) for name in expected} == expected
        assert running.metric("prefix_cache_entries") >= 2 and 0 < running.metric("prefix_cache_bytes") < 2**30
        assert "\nprocess_resident_memory_bytes " in httpx.get(running.url + "/metrics", timeout=60).text
        sums = [running.metric(f"{name}_seconds_sum") for name in ("queue_time", "time_to_first_token", "request")]
        assert 0 < sums[0] <= sums[1] <= sums[2]
        for name in ("time_to_first_token_seconds", "time_per_output_token_seconds"):
            assert running.metric(f"{name}_bucket", 'le="+Inf"') == 3 and 0 < running.metric(f"{name}_sum") < 3 * 60


def test_prefixes_may_be_shared_by_all_keys(tmp_path, keys):
    with server(with_template("mamba2"), tmp_path / "log", "--api-key-file", keys, "--share-prefixes") as running:
        assert [cached(running, key) for key in ("one", "another", "another")] == [0, 300, 300]
        assert (running.metric("prefix_hits_total"), running.metric("reused_tokens_total")) == (2, 600)


def test_requests_and_their_tokens_are_counted(tmp_path):
    """Requests by path and status. A first token is counted when it comes, not when its reply is complete."""
    with server(with_template("mamba2"), tmp_path / "log", "--max-length", 10**6 + 100) as running:
        for path in ("/v1/models/mamba2", "/v1/models/another", "/v1/models", "/nowhere", "/elsewhere"):
            httpx.get(running.url + path, timeout=60)
        counts = {
            ("/v1/models/NAME", 200): 1, ("/v1/models/NAME", 404): 1, ("/v1/models", 200): 1, ("other", 404): 2
        }  # fmt: skip
        for (path, status), count in counts.items():
            assert running.metric("requests_total", f'path="{path}",status="{status}"') == count

        def times():
            return [running.metric(f"time_{name}_seconds_count") for name in ("to_first_token", "per_output_token")]

        assert len(running.tokens({"prompt": "a", "max_tokens": 1})[0]) == 1
        assert times() == [1, 0]
        body = {"prompt": "a", "max_tokens": 10**6, "stream": True, **IGNORE_EOS}
        with running.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # the connection is closed with it
            assert next(lines).startswith("data: {")
            assert times() == [2, 0] and running.metric("running") == 1
