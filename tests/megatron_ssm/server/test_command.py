"""The command line of the server. Oracle: its documentation."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time

import pytest
from programs import completed

from docs.generated import filled
from megatron_ssm.cli import main as cli
from megatron_ssm.server import command
from megatron_ssm.server.command import bind, serve
from megatron_ssm.server.server import DRAIN_ERRORS_S
from servers import ROOT, open_sockets, server
from serving import checkpoint

HELP = """
import sys
from megatron_ssm.cli.main import main
try:
    main(["serve", "--help"])
finally:
    assert not {"torch", "uvicorn", "starlette"} & set(sys.modules)
"""


def test_help_loads_neither_torch_nor_the_server():
    result = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    page = filled((ROOT / "docs" / "reference" / "commands.md").read_text())
    flags = re.findall(r"^  (--[\w-]+)", result.stdout, re.MULTILINE)
    assert len(flags) > 15
    assert not [flag for flag in flags if flag not in page], "the reference names every flag"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tp", "0"], "--tp 0 must be at least 1"),
        (["--host", ""], "--host is empty: it must be a host name or an address (0.0.0.0: every network)"),
        (["--slots", "0"], "--slots 0 must be at least 1"),
        (["--slots", "600"], "--token-budget 512 must be above --slots 600"),
        (["--port", "-1"], "--port -1 must be at least 0"),
        (["--port", "70000"], "--port 70000 must be at least 0 and below 65536"),
        (["--max-body-mb", "nan"], "--max-body-mb nan must be at least 0.001"),
        (["--max-body-mb", "inf"], "--max-body-mb inf must be at least 0.001 and below 2^31"),
        (["--max-body-mb", "0"], "--max-body-mb 0.0 must be at least 0.001"),
        (["--max-body-mb", "-1"], "--max-body-mb -1.0 must be at least 0.001"),
        (["--prefix-gb", "nan"], "--prefix-gb nan must be at least 0"),
        (["--max-connections", "0"], "--max-connections 0 must be at least 1"),
        (["--arrival-timeout", "0"], "--arrival-timeout 0.0 must be at least 1"),
        (["--request-timeout", "0"], "--request-timeout 0.0 must be at least 1"),
    ],
)
def test_flags_out_of_range(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "--model", "DIR", *flags])
    assert capsys.readouterr().err == f"megatron-ssm: {message}\n"


def test_the_unit_of_systemd_and_the_image_start_a_server(tmp_path):
    """With options that exist; systemd waits longer for the end than the server for its requests."""
    unit = (ROOT / "launch" / "megatron-ssm.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    program, *words = shlex.split(settings["ExecStart"])
    assert int(settings["TimeoutStopSec"]) > cli.parser().parse_args(words).drain_timeout + DRAIN_ERRORS_S
    entry = json.loads(re.findall("^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0])
    assert cli.parser().parse_args(entry[1:]).model == "/model"
    if shutil.which("systemd-analyze"):
        (tmp_path / "megatron-ssm.service").write_text(unit.replace(program, sys.executable))
        result = subprocess.run(["systemd-analyze", "verify", tmp_path / "megatron-ssm.service"], capture_output=True)
        assert (result.returncode, result.stderr) == (0, b"")


def refusal(model, *flags):
    """The error of a server that does not start."""
    arguments = cli.parser().parse_args(["serve", "--model", str(model), "--device", "cpu", *map(str, flags)])
    sockets = open_sockets("self")
    with pytest.raises((ValueError, OSError)) as refused:
        serve(arguments)
    assert open_sockets("self") == sockets
    return str(refused.value)


def test_what_does_not_start(tmp_path):
    directory = checkpoint("mamba2")
    (tmp_path / "keys").write_text("\n")
    assert "keys has no API keys" in refusal(directory, "--api-key-file", tmp_path / "keys")
    assert "nowhere" in refusal(directory, "--api-key-file", tmp_path / "nowhere")
    assert "there are 1 ranks, and a server uses all of them" in refusal(directory, "--tp", 2)
    assert "missing does not exist" in refusal(tmp_path / "missing")
    error = refusal(directory, "--port", 0, "--allowed-host", "name:80")
    assert error == "--allowed-host name:80 must be a host name or an address, without a port"
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"--host 127.0.0.1 --port {port}: Address already in use" in refusal(directory, "--port", port)
    assert "--host 256.1.1.1 --port 8000: " in refusal(directory, "--host", "256.1.1.1")
    for host in ("a..b", "a" * 64):
        assert refusal(directory, "--host", host) == f"--host {host} is neither a host name nor an address"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(directory / name, tmp_path)
    assert "tokenizer.json does not exist" in refusal(tmp_path)


def test_names_and_a_chat_template(tmp_path):
    """Every name is answered, and shown in the reply to it. The template decides about the format of tool calls, too."""
    (tmp_path / "template").write_text("{{ messages[-1].content }}<tool_call>")
    flags = [
        "--served-model-name",
        "gpt-4o",
        "--served-model-name",
        "org/model",
        "--chat-template",
        tmp_path / "template",
    ]
    before = time.time()
    with server(checkpoint("mamba2"), tmp_path / "log", *flags) as running:
        with running.client() as client:
            cards = client.get("/v1/models").json()["data"]
            assert [(card["id"], card["root"], card["has_chat_template"]) for card in cards] == [
                ("gpt-4o", "mamba2", True), ("org/model", "mamba2", True),
            ]  # fmt: skip
            assert before - 1 <= cards[0]["created"] <= time.time()
            assert client.get("/v1/models/org/model").json() == cards[1]
        for asked, shown in ((None, "gpt-4o"), ("gpt-4o", "gpt-4o"), ("org/model", "org/model")):
            reply = running.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": asked})
            assert reply.json()["model"] == shown
        assert running.post("/v1/completions", {"prompt": "a", "model": "mamba2"}).status_code == 404
        told = running.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
        assert told["tokens"] == list(b"hi<tool_call>")
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 1}
        assert running.post("/v1/chat/completions", body).status_code == 200
    assert "--lora gpt-4o=" in refusal(checkpoint("mamba2"), *flags, "--lora", f"gpt-4o={tmp_path}")
    assert "nowhere" in refusal(checkpoint("mamba2"), "--chat-template", tmp_path / "nowhere")


def test_the_address_is_taken_before_the_model_is_loaded(monkeypatch):
    opened = []

    def load(*_, **__):
        port = opened[0].getsockname()[1]
        second = completed(["serve", "--model", checkpoint("mamba2"), "--device", "cpu", "--port", port])
        line = f"megatron-ssm serve: --host 127.0.0.1 --port {port}: Address already in use"
        assert (second.returncode, second.stdout, second.stderr.decode().splitlines()) == (2, b"", [line])
        raise ValueError("the first one has loaded enough")

    monkeypatch.setattr(command, "bind", lambda *address: opened.append(bind(*address)) or opened[0])
    monkeypatch.setattr(command, "load", load)
    assert refusal(checkpoint("mamba2"), "--port", 0) == "the first one has loaded enough"


def test_another_server_listens_between_bind_and_listen(monkeypatch):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port, bind = other.getsockname()[1], socket.socket.bind
        monkeypatch.setattr(socket.socket, "bind", lambda *arguments: (bind(*arguments), other.listen()))
        message = f"--host 127.0.0.1 --port {port}: Address already in use"
        assert refusal(checkpoint("mamba2"), "--port", port) == message


@pytest.mark.parametrize("family, slots, length", [("zamba2", 16, 2 * 10**9), ("mamba2", 10**8, 4096)])
def test_caches_that_do_not_fit(family, slots, length):
    """Of keys and values, and of states."""
    flags = ["--slots", slots, "--max-length", length, "--token-budget", slots + 1]
    error = refusal(checkpoint(family), "--port", 0, *flags)
    assert error.startswith(
        f"--slots {slots} --max-length {length}: not enough memory for the caches of this many slots of this"
    )
    assert re.search(r"\(tried to allocate \d+ bytes\)$", error)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_under_stdout_does_not_end_the_server(monkeypatch, caplog):
    """The address is logged instead."""
    monkeypatch.setattr(command, "run_server", lambda *arguments: arguments[-2]())  # it announces, and ends
    flags = ["serve", "--model", str(checkpoint("mamba2")), "--device", "cpu", "--port", "0"]
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        serve(cli.parser().parse_args(flags))
    (line,) = [record.getMessage() for record in caplog.records if "stdout" in record.getMessage()]
    assert re.search(
        r"serving \S+ at http://127.0.0.1:\d+ .*; stdout cannot be written: No space left on device$", line
    )


def test_ipv6():
    try:
        listener = bind("::1", 0)
    except ValueError:
        pytest.skip("no IPv6 here")
    assert listener.family == socket.AF_INET6
    listener.close()


def test_a_missing_package_is_named(monkeypatch, capsys):
    for name in ("command", "lifecycle", "server"):
        monkeypatch.delitem(sys.modules, f"megatron_ssm.server.{name}")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr(cli, "leave_on_interrupt", lambda: None)  # it would stay for the tests that follow
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    assert cli.main(["serve", "--model", "DIR"]) == 2
    assert (
        "there is no package uvicorn: pip install '.[serve]' in a checkout of megatron-ssm" in capsys.readouterr().err
    )
