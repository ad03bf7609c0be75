"""The log of the server. Oracles: the requests that were made, the replies' usage, the JSON parser."""

import asyncio
import json

import httpx
import pytest
from programs import completed
from test_server_faults import begin

from megatron_ssm.server.access_log import AccessLog
from megatron_ssm.server.log_lines import Lines
from servers import IGNORE_EOS, LIMIT_S, server, with_template

SECRET = "sesame"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"other-{SECRET}\nkey-{SECRET}\n")
    return path


def read(running, id):
    """The only line about a request, as soon as it is there."""
    found = []

    def is_logged():
        found[:] = [line for line in map(json.loads, running.log.read_text().splitlines()) if line.get("id") == id]
        return found

    running.wait_until(is_logged, f"{id} is not logged")
    (line,) = found
    return line


def test_a_line_for_each_request(tmp_path, keys):
    """JSON. It has what the reply's usage says, no text of requests and replies, and no key."""
    flags = ["--slots", 1, "--max-length", 10**6, "--api-key-file", keys, "--log-format", "json"]
    with server(with_template("mamba2"), tmp_path / "log", *flags, key=f"key-{SECRET}") as running:
        body = {"prompt": SECRET, "max_tokens": 7, **IGNORE_EOS}
        for id, cached in (("first.1", 0), ("second_2", 6)):
            usage = running.post("/v1/completions", body, headers={**running.headers, "X-Request-Id": id}).json()[
                "usage"
            ]
            line = read(running, id)
            expected = dict(level="info", message="request", client="127.0.0.1", key="2", method="POST", status=200)
            assert line.items() >= {**expected, "path": "/v1/completions"}.items() and "error" not in line
            assert line["prompt_tokens"] == usage["prompt_tokens"] == 6 and line["new_tokens"] == 7
            assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == cached
            assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"] and line["tokens_per_s"] > 0
        for number, (path, sent, headers, status) in enumerate((
            ("/v1/completions", {"prompt": {SECRET: 1}}, running.headers, 400),
            ("/v1/completions", {"prompt": SECRET, "model": "x"}, running.headers, 404),
            ("/v1/completions", body, {"Authorization": f"Bearer {SECRET}"}, 401),
            ("/v1/completions", body, {"Host": "evil.example"}, 403),
            ("/nowhere%0A?api-key=sesame", {}, {}, 404),
        )):  # fmt: skip
            with httpx.Client(base_url=running.url, timeout=LIMIT_S) as client:
                reply = client.post(path, json=sent, headers={**headers, "X-Request-Id": str(number)})
            line = read(running, str(number))
            assert reply.headers["x-request-id"] == line["id"] and reply.status_code == line["status"] == status
            assert line["level"] == "warning" and line["error"] and "prompt_tokens" not in line
        many = running.post("/v1/completions", {**body, "prompt": ["a", "b"], "n": 2})
        line = read(running, many.headers["x-request-id"])
        assert (line["replies"], line["new_tokens"]) == (4, 4 * 7)
        user = {"role": "user", "content": SECRET}
        for path, sent in (
            ("/v1/completions", {"prompt": SECRET, "max_tokens": SECRET}),
            ("/v1/completions", {"prompt": [SECRET, 1]}),
            ("/v1/chat/completions", {"messages": SECRET}),
            ("/v1/chat/completions", {"messages": [user, {"role": "user", "content": {"text": SECRET}}]}),
            ("/v1/chat/completions", {"messages": [user], "n": 0}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": SECRET}]}]}),
            ("/v1/embeddings", {"input": {"a": SECRET}}),
            ("/tokenize", {"prompt": {"a": SECRET}}),
        ):
            assert running.post(path, sent).status_code == 400

        with running.client() as client:
            runs, _ = begin(client, **body | {"max_tokens": 900_000})
            waits = client.send(
                client.build_request("POST", "/v1/completions", json={**body, "stream": True}), stream=True
            )
            running.wait_until(lambda: running.metric("waiting") == 1, "the request does not wait")
            waits.close()
            line = read(running, waits.headers["x-request-id"])
            assert (line["status"], line["new_tokens"], line["level"]) == (499, 0, "info")
            assert line["queue_s"] == line["total_s"] and "first_token_s" not in line
            running.process.terminate()
            running.wait_until(lambda: "drain" in running.log.read_text(), "the server does not drain")
            runs.close()
            assert read(running, runs.headers["x-request-id"])["status"] == 499
        assert running.process.wait(LIMIT_S) == 0
        text = running.log.read_text()
        lines = list(map(json.loads, text.splitlines()))
        assert SECRET not in text and "/metrics" not in text
        named = {line["message"]: line for line in lines if line["message"] in ("start", "drain", "end")}
        assert named["start"].items() >= dict(model="mamba2", address=running.url, slots=1, dtype="float32").items()
        assert named["drain"]["open"] == 1
        assert (named["end"]["requests"], named["end"]["reason"]) == (18, "SIGTERM") and lines[-1] is named["end"]


def test_text_with_probes(tmp_path):
    """The level debug has probes; a value that is not a word is quoted, so that a request has one line."""
    with server(with_template("mamba2"), tmp_path / "log", "--log-level", "debug") as running:
        with running.client() as client:
            ids = [
                client.get(path).headers["x-request-id"] for path in ("/", "/health", "/ping", "/a%0A2026 error x=1")
            ]
            assert client.post("/ping").status_code == 200 and list(client.get("/version").json()) == ["version"]
            client.get("/", headers={"X-Request-Id": "proxied", "X-Forwarded-For": "1.1.1.1, 2001:db8::1"})
            odd = client.get("/", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
            assert odd not in ids and len(odd) == 16
        lines = [line for line in running.log.read_text().splitlines() if " request id=" in line]
        assert [" client=2001:db8::1 " in line for line in lines] == [" id=proxied " in line for line in lines]
        assert [line.split()[1] for line in lines[:4]] == ["info", "debug", "debug", "warning"]
        assert [f" id={id} " in line for id, line in zip(ids, lines, strict=False)] == [True] * 4
        assert ' path="/a\\n2026 error x=1" ' in lines[3] and lines[3].endswith(' error="Not Found"')
    with server(with_template("mamba2"), tmp_path / "log", "--log-level", "error") as running:
        running.post("/v1/completions", {"prompt": 1})
        assert running.log.read_text() == ""


def test_an_error_of_the_program_is_logged_with_its_traceback(caplog):
    async def fail(scope, receive, send):
        raise RuntimeError("a bug")

    scope = {"type": "http", "client": None, "method": "GET", "path": "/health", "headers": []}
    asyncio.run(AccessLog(fail)(scope, None, None))
    (record,) = caplog.records
    assert (record.levelname, record.fields["status"]) == ("ERROR", 500)
    line = json.loads(Lines(True, {}).format(record))
    assert line["traceback"].startswith("Traceback") and line["traceback"].endswith("RuntimeError: a bug")
    text = Lines(False, {"replica": 1}).format(record).splitlines()
    assert " error request replica=1 id=" in text[0] and text[1].startswith("Traceback")


def test_the_error_that_ends_the_server_is_an_object_too(tmp_path):
    done = completed(["serve", "--model", tmp_path, "--log-format", "json", "--device", "cpu"])
    assert done.returncode == 2
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["level"] == "error" and line["message"].startswith("megatron-ssm serve: ")
