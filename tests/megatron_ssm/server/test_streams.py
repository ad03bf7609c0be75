"""The beginning of streams, and comments in them. Oracle: the form of server-sent events."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from megatron_ssm.server import endpoint
from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.replies import Piece
from servers import events, server, with_template

ENDLESS = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}


def test_a_stream_begins_while_its_request_waits(tmp_path):
    """All slots are taken; those that may not wait get their own status."""
    with server(with_template("mamba2"), tmp_path / "log", "--slots", 1, "--max-waiting", 1) as running:
        with running.client() as client, client.stream("POST", "/v1/completions", json=ENDLESS) as first:
            lines = first.iter_lines()
            assert next(lines).startswith("data: ")
            with client.stream("POST", "/v1/completions", json={**ENDLESS, "max_tokens": 3}) as second:
                assert second.status_code == 200 and second.headers["content-type"].startswith("text/event-stream")
                running.wait_until(lambda: running.metric("waiting") == 1, "the request does not wait")
                assert running.post("/v1/completions", ENDLESS).status_code == 429
                first.close()
                assert events(second.iter_lines())[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("error", (None, ApiError(504, "late")))
def test_comments_while_there_is_nothing_to_send(monkeypatch, error):
    monkeypatch.setattr(endpoint, "PING_S", 0)
    sent = []

    async def pieces():
        for piece in (None, Piece(0), Piece(0, "a")):
            yield piece
        if error is not None:
            raise error

    async def send(message):
        sent.append(message)

    def events(piece):
        return [SimpleNamespace(event_name="", to_json=lambda: json.dumps(piece.text))]

    replies = SimpleNamespace(
        first_events=list, events=events, last_events=list, end_mark="[DONE]", error_event=lambda error: error.reply
    )
    request = SimpleNamespace(shows_tokens=False)
    asyncio.run(endpoint._stream(request, replies, pieces(), send))
    assert sent[0]["status"] == 200
    last = "[DONE]" if error is None else error.reply.to_json()
    text = b"".join(message["body"] for message in sent[1:]).decode()
    assert text == f': ping\n\n: ping\n\ndata: "a"\n\ndata: {last}\n\n' and "more_body" not in sent[-1]
