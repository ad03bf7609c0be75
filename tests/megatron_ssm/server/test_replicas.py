"""Several replicas behind one port. Oracles: `generate`, the prefix cache's counts, exit codes."""

import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from test_server_faults import begin, last_event

from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.replicas import Replicas, replica_environments
from megatron_ssm.server.router import add_metrics, prefix_of
from servers import IGNORE_EOS, LIMIT_S, expected, server, with_template

LONG = {"max_tokens": 3000, "temperature": 0, "return_token_ids": True, **IGNORE_EOS}


@pytest.fixture(scope="module")
def directory():
    return with_template("mamba2")


def start(directory, folder, *flags, **options):
    """Two replicas, which are new processes: a fork of a process with an event loop would be no test."""
    return server(directory, folder / "log", "--replicas", 2, "--slots", 4, *flags, start=subprocess.Popen, **options)


# The choice of a replica


@pytest.fixture
def three(tmp_path):
    """Three replicas that are ready; no process is started."""
    replicas = Replicas([], [{}] * 3, tmp_path, slack=1)
    for replica in replicas.all:
        replica.is_ready = True
    return replicas


def test_a_known_prefix_goes_to_its_replica_unless_that_has_too_many_requests(three):
    first = three.choose(b"prefix")
    first.taken, first.open = 1, 1
    assert three.choose(b"prefix") is first and three.choose(b"other") is not first
    first.open = 2
    second = three.choose(b"prefix")
    assert second is not first
    first.open = 0
    assert three.choose(b"prefix") is second  # which has the prefix, too


def test_requests_without_a_prefix_go_to_the_replica_with_the_fewest(three):
    for index, counts in enumerate([(0, 1, 1), (2, 0, 1), (1, 1, 0)]):
        for replica, count in zip(three.all, counts, strict=True):
            replica.open = count
        assert three.choose(b"") is three.all[index]


def test_lost_replicas_get_no_requests(three):
    first = three.choose(b"prefix")
    assert three.choose(b"prefix", [first]) is not first
    for replica in three.all:
        replica.is_ready = False
    with pytest.raises(ApiError, match="no replica of the model is running") as refused:
        three.choose(b"prefix")
    assert refused.value.status == 503
    three.all[0].is_ready = True
    three.drain()
    with pytest.raises(ApiError, match="the server is shutting down"):
        three.choose(b"prefix")


def test_replicas_share_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7,8")
    environments = replica_environments(2, 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["3,5", "6,7"]
    assert {each["OMP_NUM_THREADS"] for each in environments} == {str(max(1, os.cpu_count() // 4))}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in replica_environments(3, 2)] == ["3,5,6,7,8"] * 3


def test_prefixes_are_the_beginnings_of_prompts_by_key():
    def prefix(owner="a", **fields):
        return prefix_of(owner, json.dumps(fields).encode())

    long = "x" * 2000
    assert prefix(prompt=long, seed=1) == prefix(temperature=0, prompt=long + "y")
    assert len({prefix(prompt=long), prefix("b", prompt=long), prefix(prompt="y" + long)}) == 3
    assert prefix(prompt=long) == prefix(prompt=long, model=None) != prefix(prompt=long, model="adapter")
    assert prefix() == prefix_of("a", b"[" * 10**5) == prefix_of("a", b"\xff") == prefix_of("a", b"[1]") == b""
    assert prefix(model="adapter") == b""


def test_metrics_of_replicas_have_a_label():
    lines = {}
    for number in range(2):
        text = (
            "# HELP megatron_ssm_slots Slots.\n# TYPE megatron_ssm_slots gauge\nmegatron_ssm_slots 4.0\n"
            "# HELP megatron_ssm_requests_total Requests.\n# TYPE megatron_ssm_requests_total counter\n"
            'megatron_ssm_requests_total{path="/",status="200"} 2.0\n'
            "# HELP process_open_fds F\n# TYPE process_open_fds gauge\nprocess_open_fds 7.0\n"
            "# HELP megatron_ssm_connections C.\n# TYPE megatron_ssm_connections gauge\nmegatron_ssm_connections 1.0\n"
        )
        add_metrics(lines, text, number)
    own = "# HELP process_open_fds F\n# TYPE process_open_fds gauge\nprocess_open_fds 9.0\n"
    add_metrics(lines, own, None)
    assert [line for family in lines.values() for line in family] == [
        "# HELP megatron_ssm_slots Slots.\n", "# TYPE megatron_ssm_slots gauge\n",
        'megatron_ssm_slots{replica="0"} 4.0\n', 'megatron_ssm_slots{replica="1"} 4.0\n',
        "# HELP megatron_ssm_requests_total Requests.\n", "# TYPE megatron_ssm_requests_total counter\n",
        'megatron_ssm_requests_total{path="/",status="200",replica="0"} 2.0\n',
        'megatron_ssm_requests_total{path="/",status="200",replica="1"} 2.0\n',
        "# HELP process_open_fds F\n", "# TYPE process_open_fds gauge\n", 'process_open_fds{replica="0"} 7.0\n',
        'process_open_fds{replica="1"} 7.0\n', "process_open_fds 9.0\n",
    ]  # fmt: skip


# Servers


def cached(running, prompt):
    """The tokens of the prompt that the prefix cache had."""
    reply = running.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def requests_of(running, replica):
    return running.metric("new_tokens_total", f'replica="{replica}"')


def test_a_lost_replica(directory, tmp_path):
    """Its stream ends with an error, its other request is repeated; the others go on, and it is started again."""
    with start(directory, tmp_path, "--max-length", 10**4) as running:
        assert [cached(running, letter * 300) for letter in "abab"] == [0, 0, 300, 300]
        assert requests_of(running, 0) == requests_of(running, 1) == 2
        assert running.metric("slots") == 8 and running.metric("replicas") == 2
        with running.client() as client, ThreadPoolExecutor() as pool:
            streams = {letter: begin(client, **LONG, prompt=letter * 300)[1] for letter in "ab"}
            wholes = {
                letter: pool.submit(running.post, "/v1/completions", {**LONG, "prompt": letter * 300})
                for letter in "ab"
            }
            running.wait_until(lambda: running.metric("running") == 4, "the requests do not run")
            os.kill(running.ranks()[0], signal.SIGKILL)  # the one that has a
            error = last_event(streams["a"])["error"]
            assert (error["code"], error["type"]) == ("unavailable", "server_error")
            events = [json.loads(line[6:]) for line in streams["b"] if line.startswith("data: {")]
            tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
            assert tokens == expected(directory, "b" * 300, 3000)[-len(tokens) :] and len(tokens) > 2900
            for letter, whole in wholes.items():
                assert whole.result().status_code == 200, whole.result().text
                (choice,) = whole.result().json()["choices"]
                assert choice["token_ids"] == expected(directory, letter * 300, 3000)
        running.wait_until(lambda: running.metric("replicas") == 2, "it is not started again")
        assert [cached(running, letter * 300) for letter in "cd"] == [0, 0] and requests_of(running, 0) > 0
        check_signal(running, signal.SIGINT)
        assert "replica 0 has ended (killed by SIGKILL); it is started again" in running.log.read_text()


@pytest.mark.full
def test_clients_of_a_lost_replica(directory, tmp_path):
    """64 of them, half with streams: each gets all of its tokens or, of the lost replica, some and then an error."""
    new, prompts = 400, [letter * 200 for letter in "ab"]
    body = {**LONG, "max_tokens": new}
    whole = {prompt: expected(directory, prompt, new) for prompt in prompts}

    def stream(prompt):
        """(the tokens until the end, the code of the error that ended them or None)."""
        asked = {**body, "prompt": prompt, "stream": True}
        with running.client() as client, client.stream("POST", "/v1/completions", json=asked) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        tokens = [t for event in events if "choices" in event for t in event["choices"][0]["token_ids"]]
        return tokens, events[-1].get("error", {}).get("code")

    def reply(prompt):
        found = running.post("/v1/completions", {**body, "prompt": prompt})
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["token_ids"], None

    with start(directory, tmp_path) as running, ThreadPoolExecutor(64) as pool:
        assert [cached(running, prompt) for prompt in prompts] == [0, 0]
        asked = [(prompt, pool.submit(ask, prompt)) for prompt in prompts * 16 for ask in (stream, reply)]
        running.wait_until(lambda: running.metric("running") == 8, "the requests do not run")
        os.kill(running.ranks()[0], signal.SIGKILL)
        codes = []
        for prompt, future in asked:
            tokens, code = future.result(LIMIT_S)
            codes.append(code)
            assert tokens == whole[prompt][: len(tokens)] and (code or len(tokens) == new)
        assert set(codes) == {None, "unavailable"} and codes.count("unavailable") <= 16
        running.wait_until(lambda: running.metric("replicas") == 2, "it is not started again")
        assert running.metric("slots") == 8 and cached(running, "c" * 200) == 0


def test_keys_and_streams(directory, tmp_path):
    """Replicas check keys. A request is logged once: by its replica or, if it reached none, by the router."""
    (tmp_path / "keys").write_text("one\n")
    flags = ["--api-key-file", tmp_path / "keys", "--log-format", "json"]
    with start(directory, tmp_path, *flags, key="one") as running:
        assert httpx.get(running.url + "/ready", timeout=LIMIT_S).status_code == 200
        assert httpx.get(running.url + "/v1/models", timeout=LIMIT_S).status_code == 401
        assert httpx.get(running.url + "/v1/models", headers={"Host": "evil"}, timeout=LIMIT_S).status_code == 403
        assert httpx.post(running.url + "/ping", timeout=LIMIT_S).status_code == 200
        body, headers = (
            {"prompt": "a", "max_tokens": 3},
            {"X-Request-Id": "mine", "X-Forwarded-For": "spoofed, 10.1.2.3"},
        )
        reply = running.post("/v1/completions", body, headers={**running.headers, **headers})
        assert reply.headers.get_list("x-request-id") == ["mine"]
        large = running.post("/v1/completions", {"prompt": "a" * 2**21}, headers=headers)
        assert (large.status_code, large.headers["x-request-id"]) == (413, "mine")
        check_signal(running, signal.SIGTERM)
        lines = [json.loads(line) for line in running.log.read_text().splitlines()]
        mine = [line for line in lines if line.get("id") == "mine"]
        assert [(line["status"], line.get("replica") in (0, 1), line["client"]) for line in mine] == [
            (200, True, "10.1.2.3"), (413, False, "10.1.2.3"),
        ]  # fmt: skip
        ends = [line for line in lines if line["message"] == "end"]
        assert len(ends) == 3 and ends[-1].keys() == {"time", "level", "message", "requests", "reason", "replica"}


def check_signal(running, number):
    """SIGTERM finishes what runs, and SIGINT ends it with an error; no replica is left."""
    replicas = running.ranks()
    with running.client() as client:
        _, lines = begin(client, **LONG, prompt="a")
        running.process.send_signal(number)
        last = [line for line in lines if line][-1]
    assert ("[DONE]" in last) == (number == signal.SIGTERM)
    assert running.process.wait(LIMIT_S) == (0 if number == signal.SIGTERM else 130)
    assert not any(Path(f"/proc/{pid}").exists() for pid in replicas)
    assert "Traceback" not in running.log.read_text()


@pytest.mark.full
def test_replicas_of_several_ranks(directory, tmp_path):
    with start(directory, tmp_path, tp=2) as running:
        for letter in "ab":
            body = {"prompt": letter, "max_tokens": 9, "temperature": 0}
            assert running.tokens(body) == [expected(directory, letter, 9)]
        assert requests_of(running, 0) == requests_of(running, 1) == 9
        assert running.end()[0] == 0


def test_wrong_arguments_are_reported_once(directory, tmp_path):
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(AssertionError) as failed:
        with start(directory, tmp_path, "--api-key-file", tmp_path / "keys"):
            pass
    assert len(re.findall("keys has no API keys", str(failed.value))) == 1
