"""Sockets, and limits on the connections of clients: their number, and the time that a request may take to arrive."""

import asyncio
import errno
import resource
import socket
from contextlib import ExitStack
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ACCEPTED_AT_ONCE = 32  # per round of the event loop; connections beyond the limit are open for up to 4 rounds
OTHER_FILES = 256  # for connections beyond the limit, the model, the listener, other ranks and GPUs
MOST_AHEAD = 2**16  # bytes of later requests that are read before the current reply is complete
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connections:
    """Counts connections, and allows at most `most` at a time: further ones get the status 503 and are closed.

    A connection is closed if the headers of a request do not arrive within `seconds` of its beginning or of the end of the
    last reply. `Service.arrived` limits the time of the body. A connection is also closed if its client is slow to read: if
    the buffer stays full for `seconds`, or if the rest of a reply is not read within `seconds` of its end.

    open: the number of connections. refused, late, unread: the number of connections that were closed because there were too
    many, because no request had arrived, and because the client had not read its reply.
    """

    def __init__(self, most: int, seconds: float):
        self.most, self.seconds = most, seconds
        self.open = self.refused = self.late = self.unread = 0

    def protocol(self, **options: Any) -> asyncio.Protocol:
        """uvicorn's protocol of one connection."""
        return _Connection(self, **options)


def allow_files(connections: int, each: int = 1) -> None:
    """Raise the limit of open files of this process, if necessary, to what this many connections need.

    each: files for a connection. ValueError if the system does not permit it.
    """
    needed = each * connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):
        raise ValueError(
            f"--max-connections {connections} needs {needed} open files, and the hard limit of ulimit -n is {hard}"
        ) from None


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address (port 0: any that is free), and accepts no connections yet.

    No other server can be bound to the address while this one loads its model, unless connections of an earlier server
    linger: then only SO_REUSEADDR lets one be bound, and it lets several. ValueError if the address is wrong or taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as closed_on_error:
            listener = closed_on_error.enter_context(socket.socket(family, kind))
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
            closed_on_error.pop_all()
    except UnicodeError:
        raise ValueError(f"--host {host} is neither a host name nor an address") from None
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return listener


def bind_to_path(path: str) -> socket.socket:
    """Return a Unix socket that is bound to a path, which does not exist yet."""
    with ExitStack() as closed_on_error:
        listener = closed_on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(path)
        closed_on_error.pop_all()
    return listener


class _Connection(H11Protocol):
    """A connection of uvicorn that also limits the time for a request to arrive, and for the client to read a reply."""

    def __init__(self, all: Connections, **options: Any):
        super().__init__(**options)
        self._all = all
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.open += 1
        if self._all.open > self._all.most:
            self._all.refused += 1
            transport.write(TOO_MANY)
            transport.close()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.open -= 1
        self._stop()
        self._stop_unread()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        # uvicorn reads no further if bytes follow a request, and then does not notice that the client hangs up.
        is_complete = self.conn.their_state is h11.DONE
        if is_complete and self.flow.read_paused and len(self.conn.trailing_data[0]) < MOST_AHEAD:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._all.seconds, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _watch(self) -> None:
        """Stop the timer while a request waits for its reply; otherwise start it, unless it runs.

        The timer also runs while the transport is closing: closing waits until the client has read everything.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._all.seconds, self._close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _close(self) -> None:
        """Close the connection. The part of the last reply that the client has not read is lost."""
        if self.transport.get_write_buffer_size():
            self._abort()
        else:
            self._all.late += 1
            self.transport.close()

    def _abort(self) -> None:
        """Close the connection although the client has not read everything."""
        self._all.unread += 1
        self.transport.abort()
