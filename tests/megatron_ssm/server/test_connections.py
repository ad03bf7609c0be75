"""Clients that send their requests slowly, or open many connections. Oracle: the documentation of the limits."""

import asyncio
import json
import os
import resource
import signal
import socket
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from chosen import by_default
from programs import Fork

from megatron_ssm.server.access_log import AccessLog
from megatron_ssm.server.connections import OTHER_FILES, Connections, allow_files, bind
from megatron_ssm.server.server import Server
from servers import IGNORE_EOS, LIMIT_S, server, with_template

BODY = json.dumps({"prompt": "a", "max_tokens": 2, **IGNORE_EOS}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY)
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def connection(running):
    """A socket that is connected to the server."""
    parts = urlsplit(running.url)
    with socket.create_connection((parts.hostname, parts.port), LIMIT_S) as client:
        yield client


def rest(client):
    """What the server sends until it closes the connection."""
    return b"".join(iter(lambda: client.recv(2**16), b""))


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    with server(
        with_template("mamba2"), tmp_path_factory.mktemp("impatient") / "log", "--arrival-timeout", 1, "--slots", 1,
        "--max-waiting", 0,
    ) as running:  # fmt: skip
        yield running


def late(running):
    """How many connections were closed because no request arrived on them."""
    return running.metric("connections_closed_total", 'reason="late"')


@pytest.mark.parametrize("sent", by_default((b"", HEAD[:-2]), (b"", GET, GET + b"X-Some: thing", HEAD[:-2])))
def test_a_request_whose_headers_do_not_arrive(impatient, sent):
    before = late(impatient)
    with connection(impatient) as client:
        client.sendall(sent)
        assert rest(client) == b""
        impatient.wait_until(lambda: late(impatient) > before, "the connection is not counted")


@pytest.mark.parametrize("sent", by_default((BODY[:-1],), (b"", BODY[:-1])))
def test_a_request_whose_body_does_not_arrive(impatient, sent):
    """It takes no slot: the only one serves another request in the meantime."""
    before = impatient.metric("requests_total", 'status="408"')
    with connection(impatient) as client:
        client.sendall(HEAD + sent)
        assert impatient.post("/v1/completions", json.loads(BODY)).status_code == 200
        reply = rest(client)
    assert reply.startswith(b"HTTP/1.1 408 ") and b"the body has not arrived within 1 s" in reply
    assert impatient.metric("requests_total", 'status="408"') == before + 1


def test_a_body_that_does_not_arrive_after_the_reply(impatient):
    """The path takes none, so the reply does not wait for it; the connection does not stay open."""
    before = late(impatient)
    with connection(impatient) as client:
        client.sendall(GET + b"Content-Length: 9\r\n\r\n1234")
        assert rest(client).startswith(b"HTTP/1.1 200 ")
    impatient.wait_until(lambda: late(impatient) > before, "the connection is not counted")


@pytest.mark.parametrize("seconds", (6, 60, 600.5))
def test_connections_are_kept_between_requests_as_long_as_documented(seconds):
    """uvicorn's own limit, after which it closes one that waits for the next request, is longer."""

    async def app(scope, receive, send):
        raise AssertionError("no request is sent")

    async def keep_alive():
        connections = Connections(9, seconds)
        server = Server(AccessLog(app), None, connections, 1, lambda: None)
        server.config.load()
        options = dict(config=server.config, server_state=server.server_state, app_state={})
        return connections.protocol(**options).timeout_keep_alive

    assert asyncio.run(keep_alive()) > seconds


def unread(running):
    """How many connections were closed because their clients did not read."""
    return running.metric("connections_closed_total", 'reason="unread"')


def small_socket():
    """One whose buffers hold few bytes; a listener hands them on to its connections."""
    small = socket.socket()
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        small.setsockopt(socket.SOL_SOCKET, option, 4096)
    small.settimeout(LIMIT_S)
    return small


def test_many_requests_whose_replies_are_not_read(impatient):
    """More replies than any buffer holds: the server waits with the next one."""
    before, size = unread(impatient), len(httpx.get(impatient.url + "/openapi.json").content)
    with small_socket() as client:
        client.connect(("127.0.0.1", urlsplit(impatient.url).port))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * (2**24 // size))
        impatient.wait_until(lambda: unread(impatient) > before, "the connection is held")
    assert impatient.post("/v1/completions", json.loads(BODY)).status_code == 200


@pytest.mark.parametrize("head", (b"", b"Connection: close\r\n"))
@pytest.mark.parametrize("size", (40_000, 4_000_000))
def test_a_reply_that_is_not_read(size, head):
    """The small one is in the server's buffer as a whole, so that the server only waits with the end."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"x" * (size // 10), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def visit():
        connections, loop = Connections(9, 0.3), asyncio.get_running_loop()
        config = uvicorn.Config(app, http=connections.protocol, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        with small_socket() as listener, small_socket() as client:
            listener.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0)
            client.setblocking(False)
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, GET + head + b"\r\n")
            while not connections.unread or connections.open:
                await asyncio.sleep(0.01)
            server.should_exit = True
            await serving
        return connections.late

    assert asyncio.run(asyncio.wait_for(visit(), LIMIT_S)) == 0


def test_the_port_of_a_server_that_has_ended_can_be_taken():
    """While a connection of a client lingers there, which the server has closed first."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def visit(listener, client):
        server = Server(AccessLog(app), None, Connections(9, LIMIT_S), LIMIT_S, lambda: None)
        serving, loop = asyncio.create_task(server.serve([listener])), asyncio.get_running_loop()
        while not server.started:
            await asyncio.sleep(0)
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, GET + b"\r\n")
        assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200 ")
        server.should_exit = True
        await serving

    with socket.socket() as client:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            asyncio.run(asyncio.wait_for(visit(listener, client), LIMIT_S))
        with bind("127.0.0.1", port) as again:
            again.listen()


@pytest.mark.parametrize("target, host", ((b"[x", b"localhost"), (b"/x", b"["), (b"[x", b"[")))
def test_a_target_and_a_host_that_make_no_url(impatient, target, host):
    """The host is checked first."""
    with connection(impatient) as client:
        client.sendall(b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (target, host))
        reply = rest(client)
    assert reply.startswith(b"HTTP/1.1 403 " if host == b"[" else b"HTTP/1.1 404 ") and b'"error"' in reply


@pytest.mark.parametrize("more", (b"\r\n", HEAD, b"x" * 1000))
def test_a_client_that_hangs_up_after_sending_more(impatient, more):
    """Its request leaves the only slot, which another one then gets."""
    body = json.dumps({"prompt": "a", "max_tokens": 4000, **IGNORE_EOS}).encode()
    before = impatient.metric("requests_total", 'status="499"')
    with connection(impatient) as client:
        client.sendall(HEAD.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
        impatient.wait_until(lambda: impatient.metric("running") == 1, "it has no slot")
        client.sendall(more)
    impatient.wait_until(lambda: impatient.metric("requests_total", 'status="499"') > before, "it goes on")


def test_a_request_in_pieces(impatient):
    """Several on one connection, each in two parts: none is late."""
    with connection(impatient) as client:
        for _ in range(3):
            for piece in (HEAD[:30], HEAD[30:] + BODY[:5], BODY[5:]):
                client.sendall(piece)
            reply = client.recv(2**16)
            assert reply.startswith(b"HTTP/1.1 200 ")
            while not reply.endswith(b"}"):
                reply += client.recv(2**16)


def test_more_connections_than_there_may_be(tmp_path):
    """Those that are open hold half a body. One that is closed makes room."""
    most = 5
    with server(with_template("mamba2"), tmp_path / "log", "--max-connections", most) as running:
        held = [socket.create_connection(("127.0.0.1", urlsplit(running.url).port), LIMIT_S) for _ in range(most)]
        for client in held:
            client.sendall(HEAD + BODY[:9])
        with connection(running) as client:
            assert rest(client).startswith(b"HTTP/1.1 503 ")
        held[0].sendall(BODY[9:])
        assert held[0].recv(2**16).startswith(b"HTTP/1.1 200 ")
        held.pop().close()

        def is_served():
            with connection(running) as client:
                client.sendall(GET + b"Connection: close\r\n\r\n")
                return rest(client).startswith(b"HTTP/1.1 200 ")

        running.wait_until(is_served, "a closed connection counts")
        held.pop().close()
        assert running.metric("connections_closed_total", 'reason="limit"') >= 1
        running.wait_until(lambda: running.metric("connections") <= most, "closed connections count")
        for client in held:
            client.close()
        code, log = running.end()
    assert code == 0 and "Traceback" not in log, log


# The limit of open files


def in_fork(run):
    """What `run()` returns in a process of its own, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(run()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as text:
        os.waitpid(child, 0)
        return text.read()


def limits_for(connections, soft, hard):
    """The limits of open files after those of a process were raised for so many connections, or the error."""

    def run():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            allow_files(connections)
        except ValueError as error:
            return error
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    return in_fork(run)


def test_the_limit_of_open_files_is_raised_as_far_as_needed():
    hard = OTHER_FILES + 40
    assert limits_for(9, 64, hard) == f"({OTHER_FILES + 9}, {hard})"
    assert limits_for(40, 64, hard) == limits_for(40, hard, hard) == limits_for(9, hard, hard) == f"({hard}, {hard})"


@pytest.mark.parametrize("soft", (64, OTHER_FILES + 40))
def test_more_connections_than_files_may_be_open(soft):
    hard = OTHER_FILES + 40
    message = f"--max-connections 41 needs {hard + 1} open files, and the hard limit of ulimit -n is {hard}"
    assert limits_for(41, soft, hard) == message


def start_with_few_files(command, **options):
    """A process whose soft limit of open files is lower than the server needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OTHER_FILES, hard))
    try:
        return Fork(command, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_connections_at_once(tmp_path):
    """More than files may be open, while the server is stopped. It keeps --max-connections, and refuses the others."""
    most, count = 100, 2 * OTHER_FILES
    flags = ("--max-connections", most)
    with (
        server(with_template("mamba2"), tmp_path / "log", *flags, start=start_with_few_files) as running,
        ExitStack() as opened,
    ):
        running.process.send_signal(signal.SIGSTOP)
        clients = [opened.enter_context(connection(running)) for _ in range(count)]
        running.process.send_signal(signal.SIGCONT)
        assert all(rest(client).startswith(b"HTTP/1.1 503 ") for client in clients[most:])
        for client in clients[:most]:
            client.sendall(GET + b"Connection: close\r\n\r\n")
            assert rest(client).startswith(b"HTTP/1.1 200 ")
        assert "Traceback" not in running.log.read_text()
