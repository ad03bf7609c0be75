"""Where ranks meet, and what they print meanwhile. Oracle: which rank comes late."""

import os
import socket
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from commfabric.collectives import meeting
from commfabric.collectives.agreement import together
from commfabric.collectives.meeting import gather_in_store
from commfabric.foundation.launcher import LauncherError

TIMEOUT = timedelta(seconds=60)


@pytest.mark.parametrize("late", (0, 1))
def test_a_rank_that_waits_says_for_whom_and_where(ranks, late, tmp_path, monkeypatch):
    """The late rank begins to meet the others when it reads their lines: rank 1 waits for the store, rank 0 for rank 1."""
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.05)
    os.mkfifo(tmp_path / "stderr")

    def run(rank):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = [("127.0.0.1", server.getsockname()[1])]
        dist.broadcast_object_list(address)
        host, port = address[0]
        os.environ |= dict(MASTER_ADDR=host, MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank))
        line = ""
        if rank == late:
            with open(tmp_path / "stderr") as stderr:
                line = stderr.readline()
        else:
            sys.stderr = open(tmp_path / "stderr", "w", buffering=1)
        store, place = meeting.meet(TIMEOUT)
        return line, place, together(lambda: "the same", [gather_in_store(store, rank, 2, place)])

    found = ranks(run, 2)
    place = found[0][1]
    assert found[late][0] == f"rank {1 - late}: waiting for 1 of 2 ranks at {place}: rank {late}\n"
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize(
    "address, port, message",
    [
        ("nowhere.invalid", "29500", "rank 1 of 2: MASTER_ADDR=nowhere.invalid cannot be resolved: "),
        ("a" * 64, "29500", f"rank 1 of 2: MASTER_ADDR={'a' * 64} cannot be resolved: "),
        ("", "29500", "rank 1: MASTER_ADDR is not set"),
        ("127.0.0.1", "", "rank 1: MASTER_PORT is not set"),
        ("127.0.0.1", "http", "MASTER_PORT=http must be an integer from 1 to 65535"),
    ],
)
def test_an_address_that_is_none_is_an_error_at_once(monkeypatch, address, port, message):
    for name, value in dict(MASTER_ADDR=address, MASTER_PORT=port, WORLD_SIZE="2", RANK="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LauncherError) as refused:
        meeting.meet(TIMEOUT)
    assert str(refused.value).startswith(message)


def test_a_rank_that_does_not_come_is_named(monkeypatch, capsys):
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.2), wait_for_workers=False)
    store.set("gather-0/1/value", "{}")
    message = "rank 0: 1 of 3 ranks did not come to node:29500 in time: rank 2"
    with pytest.raises(LauncherError, match=f"^{message}$"):
        together(lambda: "the same", [gather_in_store(store, 0, 3, "node:29500")])
    assert capsys.readouterr().err == "rank 0: waiting for 1 of 3 ranks at node:29500: rank 2\n"


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK="0").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            LauncherError, match=rf"^rank 0 of 2 cannot meet the other ranks at 127.0.0.1:{port}: .*in use"
        ):
            meeting.meet(TIMEOUT)
