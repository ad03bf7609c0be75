"""Limits, signals and lost ranks of real servers. Oracles: HTTP's status codes, exit codes, `generate`."""

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from megatron_ssm.server.connections import bind
from servers import IGNORE_EOS, LIMIT_S, events, expected, server, with_template

LONG = {"prompt": "a", "max_tokens": 4000, "temperature": 0, **IGNORE_EOS}
ENDLESS = {**LONG, "max_tokens": 10**6}
ENDLESS_LENGTH = ["--max-length", 10**6 + 5000]  # the server's flag for it
SHORT = {"prompt": "a", "max_tokens": 3, "temperature": 0, **IGNORE_EOS}
ERROR_S = {signal.SIGKILL: 10, signal.SIGSTOP: 30}  # the longest that clients may wait for an error
END_S = 30  # and until the server has ended


@pytest.fixture(scope="module")
def directory():
    return with_template("mamba2")


def begin(client, **changes):
    """A stream of LONG whose first event has arrived: (the response, its lines)."""
    request = client.build_request("POST", "/v1/completions", json={**LONG, "stream": True, **changes})
    response = client.send(request, stream=True)
    assert response.status_code == 200, response.read()
    lines = response.iter_lines()
    next(lines)
    return response, lines


def last_event(lines):
    """The JSON of the last of a stream's events."""
    return json.loads([line for line in lines if line][-1].removeprefix("data: "))


@contextmanager
def half_a_request(running):
    """A socket on which the server waits for the second half of a body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", urlsplit(running.url).port), LIMIT_S) as client:
        client.sendall(head)
        assert client.recv(2**16).startswith(b"HTTP/1.1 100 ")  # sent once the server reads the body
        client.sendall(b'{"prompt": "a", "max')
        yield client


def refusal(client):
    """The message of the 503 that ends a connection."""
    head, _, body = b"".join(iter(lambda: client.recv(2**16), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 "), head
    error = json.loads(body)["error"]
    assert error["code"] == "unavailable"
    return error["message"]


def test_limits(directory, tmp_path):
    """Two slots, and one request may wait."""
    flags = ["--slots", 2, "--max-waiting", 1, "--max-body-mb", 0.01]
    with server(directory, tmp_path / "log", *flags, *ENDLESS_LENGTH) as running, running.client() as client:
        assert running.post("/v1/completions", {**SHORT, "prompt": "a" * 20_000}).status_code == 413
        chunked = client.post("/v1/completions", content=(b"x" * 1000 for _ in range(20)))
        assert chunked.status_code == 413 and chunked.json()["error"]["type"] == "invalid_request_error"
        assert running.post("/v1/completions", {**SHORT, "max_tokens": 2 * 10**6}).status_code == 400

        streams = [begin(client, **ENDLESS, n=n) for n in (5, 1, 1)]
        refused = running.post("/v1/completions", SHORT)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        for stream, _ in streams:
            stream.close()
        running.wait_until_idle()
        many = running.post("/v1/completions", {**SHORT, "prompt": ["a"] * 100})
        assert many.status_code == 200 and len(many.json()["choices"]) == 100
        assert running.post("/v1/completions", SHORT).status_code == 200
        assert running.metric("requests_total", 'status="429"') == 1


def test_replies_that_take_too_long(directory, tmp_path):
    """More at a time than there are slots; also as a stream, which may have begun before."""
    with server(directory, tmp_path / "log", "--slots", 2, "--request-timeout", 1, *ENDLESS_LENGTH) as running:
        for is_stream in (False, True):
            late = running.post("/v1/completions", {**ENDLESS, "n": 3, "stream": is_stream})
            assert late.status_code == 504 or (is_stream and late.status_code == 200)
            assert last_event(late.text.splitlines())["error"]["code"] == "timeout"
            running.wait_until_idle()


@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
@pytest.mark.parametrize("is_stream", (True, False))
def test_a_client_that_hangs_up_frees_its_slots(directory, tmp_path, tp, is_stream):
    """All slots are in use before. After the server has noticed, it finishes at most the step that runs."""
    slots, path = 4, 'path="/v1/completions"'
    body = {**ENDLESS, "n": slots, "stream": is_stream}
    with server(directory, tmp_path / "log", "--slots", slots, *ENDLESS_LENGTH, tp=tp) as running:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(running.url).port), LIMIT_S) as client:
            client.sendall(head.encode() + content)
            running.wait_until(lambda: running.metric("new_tokens_total"), "it gets no tokens")
        running.wait_until(lambda: running.metric("requests_total", path) == 1, "the request does not end")
        tokens = running.metric("new_tokens_total")
        running.wait_until_idle()
        assert running.metric("new_tokens_total") <= tokens + slots
        assert running.metric("requests_total", f'{path},status="499"') == 1
        assert running.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.parametrize("tp", (pytest.param(1, marks=pytest.mark.full), 2))
def test_sigterm_finishes_what_runs_and_refuses_what_comes(directory, tmp_path, tp):
    """One request runs, one waits for its slot, and the body of one has not arrived."""
    with (
        server(directory, tmp_path / "log", "--slots", 1, tp=tp) as running,
        running.client() as client,
        half_a_request(running) as half,
    ):
        body = {**LONG, "max_tokens": 3000, "return_token_ids": True}
        _, lines = begin(client, **body)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(running.post, "/v1/completions", SHORT)
            running.wait_until(lambda: running.metric("waiting"), "it does not wait")
            running.process.terminate()
            assert refusal(half) == "the server is shutting down"
            chunks = events(["data: {}", *lines])[1:]
            assert waiting.result().status_code == 200
        assert running.process.wait(LIMIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            running.post("/v1/completions", SHORT)
        assert "Traceback" not in running.log.read_text()
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == expected(directory, "a", 3000)[1:]


@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
def test_after_the_drain_timeout_open_requests_end_with_an_error(directory, tmp_path, tp):
    """One is a stream, one is not."""
    flags = ["--drain-timeout", 1, *ENDLESS_LENGTH]
    with server(directory, tmp_path / "log", *flags, tp=tp) as running, running.client() as client:
        _, lines = begin(client, **ENDLESS)
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(running.post, "/v1/completions", ENDLESS)
            running.wait_until(lambda: running.metric("running") == 2, "the requests do not run")
            running.process.terminate()
            for error in (last_event(lines)["error"], whole.result().json()["error"]):
                assert (error["message"], error["code"]) == ("the server is shutting down", "unavailable")
            assert whole.result().status_code == 503
        assert running.process.wait(LIMIT_S) == 0
        assert "Traceback" not in running.log.read_text()


@pytest.mark.full
@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
def test_sigint_ends_all_requests(directory, tmp_path, tp):
    with server(directory, tmp_path / "log", tp=tp) as running, running.client() as client:
        _, lines = begin(client)
        start = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert last_event(lines)["error"]["message"] == "the server was interrupted"
        assert running.process.wait(LIMIT_S) == 130
        assert time.monotonic() - start < 9  # three times the limit


def test_ctrl_c_in_a_terminal_counts_once(directory, tmp_path):
    """It sends SIGINT to the whole group, of which the ranks leave it to the process that was started."""
    start = subprocess.Popen
    with server(directory, tmp_path / "log", tp=2, start=start) as running, running.client() as client:
        for rank in running.ranks():
            os.kill(rank, signal.SIGINT)
        assert running.post("/v1/completions", SHORT).status_code == 200
        _, lines = begin(client)
        with half_a_request(running) as half:
            os.killpg(running.process.pid, signal.SIGINT)
            assert last_event(lines)["error"]["message"] == refusal(half) == "the server was interrupted"
        assert running.process.wait(LIMIT_S) == 130
        assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("number", (signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.full)))
@pytest.mark.parametrize("rank", (1, pytest.param(0, marks=pytest.mark.full)))
def test_a_lost_rank_ends_all_requests_and_the_server(directory, tmp_path, rank, number):
    """Clients get an error, and the server names the cause. If it is rank 0, there is nobody to send the error."""
    with server(directory, tmp_path / "log", "--slots", 4, "--lost-rank-timeout", 3, tp=2) as running:
        results, started = [], threading.Barrier(9)

        def client_of(number):
            with running.client() as client:
                response, lines = (None, ()) if number % 2 else begin(client)
                started.wait(LIMIT_S)
                try:
                    if number % 2:
                        results.append(client.post("/v1/completions", json=LONG).status_code)
                    else:
                        results.append(last_event(lines)["error"]["type"])
                except (httpx.HTTPError, IndexError, ValueError):
                    results.append("broken off")

        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(client_of, number) for number in range(8)]
            started.wait(LIMIT_S)
            while running.metric("running") + running.metric("waiting") < 8:
                time.sleep(0.01)
            start = time.monotonic()
            os.kill(running.ranks()[rank], number)
            for future in futures:
                future.result(LIMIT_S)
            assert time.monotonic() - start < ERROR_S[number]
        assert running.process.wait(LIMIT_S) == 1
        assert time.monotonic() - start < END_S
        log = running.log.read_text()
    assert f"rank {rank} of 2" in log, log
    if rank:
        assert sorted(map(str, results)) == ["503"] * 4 + ["server_error"] * 4
    else:
        assert results == ["broken off"] * 8


@pytest.mark.parametrize(
    "number", (signal.SIGKILL, signal.SIGHUP, pytest.param(signal.SIGQUIT, marks=pytest.mark.full))
)
def test_no_rank_outlives_the_process_that_was_started(directory, tmp_path, number):
    """SIGHUP and SIGQUIT do what SIGTERM does. After SIGKILL, too, another server can have the address."""
    with server(directory, tmp_path / "log", tp=2) as running:
        assert running.post("/v1/completions", SHORT).status_code == 200
        ranks = [os.pidfd_open(pid) for pid in running.ranks()]
        running.process.send_signal(number)
        assert running.process.wait(LIMIT_S) == (-number if number == signal.SIGKILL else 0)
        for rank in ranks:  # readable once the rank has ended
            assert select.select([rank], [], [], LIMIT_S)[0]
            os.close(rank)
        address = urlsplit(running.url)
        bind(address.hostname, address.port).close()


@pytest.mark.full
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
def test_a_rank_that_is_lost_while_nothing_runs(directory, tmp_path, number):
    """The server is started as a new process, because here one that is a fork of the tests does not end a stopped rank."""
    with server(directory, tmp_path / "log", tp=2, start=subprocess.Popen) as running:
        assert running.post("/v1/completions", SHORT).status_code == 200
        with half_a_request(running) as half:
            os.kill(running.ranks()[1], number)
            assert refusal(half) in ("a rank of the server was lost", "the engine has failed")
        assert running.process.wait(LIMIT_S) == 1
        log = running.log.read_text()
        assert "rank 1 of 2" in log and "Traceback" not in log


@pytest.mark.full
def test_idle_ranks_do_not_spin(directory, tmp_path):
    """Of 3 s, each uses less than a tenth."""
    with server(directory, tmp_path / "log", tp=2) as running:
        assert running.post("/v1/completions", SHORT).status_code == 200

        def seconds(pid):
            return sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15])) / os.sysconf("SC_CLK_TCK")

        ranks = running.ranks()
        before = list(map(seconds, ranks))
        time.sleep(3)
        assert all(after - first < 0.3 for after, first in zip(map(seconds, ranks), before, strict=True))
        assert running.post("/v1/completions", SHORT).status_code == 200
