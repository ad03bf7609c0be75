"""launch/netlab.sh; oracles: what ranks print from their namespaces, the process table, and bytes / rate in seconds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

NETLAB = Path(__file__).resolve().parents[3] / "launch" / "netlab.sh"
PROBE = "ip link add name bridge type bridge && tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 1ms"
RATE, BURST = 20e6 / 8, 16 * 1024  # bytes per second and bytes of the limited labs: 20mbit 16kb

# Rank 0 sends to the others or receives from them, and prints the seconds it took and the bytes its link counted. Given a
# named pipe, it does so twice: at once, and again after something was written to the pipe.
TRANSFER = """
import json, os, socket, sys, time
from concurrent.futures import ThreadPoolExecutor
direction, size, *pipes = sys.argv[1:]
rank, world, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(size)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

def send(peer):
    peer.sendall(bytes(size))
    assert peer.recv(1) == b"a"

def receive(peer):
    assert len(peer.recv(size, socket.MSG_WAITALL)) == size
    peer.sendall(b"a")

def counted():
    paths = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx")]
    return [int(open(path).read()) for path in paths]

if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(world - 1)]
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
for stage in range(1 + len(pipes)):
    if rank == 0:
        for pipe in pipes[:stage]:
            open(pipe).read()
        before, start = counted(), time.monotonic()
        for peer in peers:
            peer.sendall(b"g")
        with ThreadPoolExecutor() as pool:
            list(pool.map(send if direction == "out" else receive, peers))
        seconds = time.monotonic() - start
        print(json.dumps([seconds, *(now - then for now, then in zip(counted(), before))]), flush=True)
    else:
        assert peer.recv(1) == b"g"
        receive(peer) if direction == "out" else send(peer)
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, sums = dist.get_rank(), []
for ranks in ([0, 1], [0, 1, 2]):
    group, total = dist.new_group(ranks), torch.full((1000,), 10.0**rank)
    if rank in ranks:
        dist.all_reduce(total, group=group)
    sums.append(total.unique().tolist())
print(f"{rank}: {sums}\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""

# A rank that prints that it is up and waits for a child process, which has a session of its own.
WAIT = 'setsid sleep 1000 & echo "up$RANK"; wait'


def netlab(*arguments, **options):
    """The finished process of netlab.sh with these arguments."""
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([NETLAB, *map(str, arguments)], **options)


def start(*arguments, **options):
    """netlab.sh with these arguments, started as a terminal would: it can be interrupted."""
    command = ["env", "--default-signal=INT", NETLAB, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True, **options}
    return subprocess.Popen(command, **options)


def wait_until_up(process, ranks):
    """Wait until each rank has printed that it is up; returns the process."""
    lines = sorted(process.stdout.readline() for _ in range(ranks))
    assert lines == [f"up{rank}\n" for rank in range(ranks)]
    return process


def namespaces(name):
    """The names of a lab's network namespaces."""
    return sorted(path.name for path in Path("/var/run/netns").glob(f"{name}-*"))


def processes(name):
    """The ids of the running processes of a lab, in all namespaces: those with its name in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"NETLAB={name}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass  # it ended meanwhile, or is not ours
    return [pid for pid in found if pid != os.getpid()]


def sleep_processes(name, count):
    """Wait until the ranks of a lab have started `count` sleep processes, as WAIT does; returns their ids."""

    def found():
        return {pid for pid in processes(name) if command_of(pid).startswith(b"sleep\0")}

    wait_until(lambda: len(found()) == count)
    return found()


def command_of(pid):
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition):
    """Wait until a condition holds, at most 20 seconds."""
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def lab(request, monkeypatch):
    """The name of a lab that is not up; NETLAB is set to it. The test must leave nothing of the lab behind."""
    if shutil.which("unshare") is None:
        pytest.skip("needs Linux")
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", PROBE]
    if subprocess.run(probe, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("needs root that may create network namespaces, ip and tc")
    name = f"test{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"
    monkeypatch.setenv("NETLAB", name)
    yield name
    left = namespaces(name), processes(name)
    for pid in left[1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for space in left[0]:
        netlab("down", env={**os.environ, "NETLAB": space.rpartition("-")[0]})
    assert left == ([], [])


@pytest.fixture
def up(lab):
    """up(ranks, rate, burst): bring the lab up; it is taken down after the test."""

    def bring_up(*arguments):
        result = netlab("up", *arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    yield bring_up
    assert netlab("down").returncode == 0


# What a rank sees


@pytest.mark.parametrize("world_size", (1, 3))
def test_the_environment_of_a_rank(lab, monkeypatch, world_size):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = "import json, os; print(json.dumps([dict(os.environ), os.listdir('/sys/class/net')]) + '\\n', end='')"
    result = netlab("run", "--rate", "none", world_size, sys.executable, "-c", program)
    assert (result.returncode, result.stderr) == (0, "")
    seen = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda rank: rank[0]["RANK"])
    assert [environment["RANK"] for environment, _ in seen] == [str(rank) for rank in range(world_size)]
    for environment, interfaces in seen:
        expected = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world_size)),
            "NETLAB": lab,
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert environment["MASTER_PORT"] == seen[0][0]["MASTER_PORT"]
        assert sorted(interfaces) == ["eth0", "lo"]


def test_a_given_number_of_threads_is_kept(lab, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert netlab("run", "--rate", "none", 2, "sh", "-c", "echo $OMP_NUM_THREADS").stdout == "7\n7\n"


def test_arguments_and_output_go_through_unchanged(lab):
    program = (
        r"import os, sys; os.write(1, sys.argv[1].encode()); os.write(2, b'\xff\r\n\0'); print(end=sys.stdin.read())"
    )
    arguments = "run", "--rate", "none", 1, sys.executable, "-c", program, " a  b\n* $HOME '\""
    result = netlab(*arguments, text=False, input=b"not for ranks")
    assert (result.returncode, result.stdout, result.stderr) == (0, b" a  b\n* $HOME '\"", b"\xff\r\n\0")


@pytest.mark.full
def test_all_reduce_over_two_and_three_ranks(lab):
    result = netlab("run", "--rate", "1gbit", 3, sys.executable, "-c", ALL_REDUCE)
    assert (result.returncode, result.stderr) == (0, "")
    sums = ["[[11.0], [111.0]]", "[[11.0], [111.0]]", "[[100.0], [111.0]]"]
    assert sorted(result.stdout.splitlines()) == [f"{rank}: {line}" for rank, line in enumerate(sums)]


# Rates


@pytest.mark.parametrize("direction", ("out", "in"))
@pytest.mark.parametrize("world_size", (2, 3))
def test_no_link_is_faster_than_its_rate(lab, direction, world_size):
    """With three ranks, the limit is that of rank 0's link, at its own end or at the end of the bridge."""
    size = 400_000 // (world_size - 1)
    limit = "--rate", "20mbit", "--burst", "16kb"
    result = netlab("run", *limit, world_size, sys.executable, "-c", TRANSFER, direction, size)
    assert (result.returncode, result.stderr) == (0, "")
    seconds, *counted = json.loads(result.stdout)
    assert counted[direction == "in"] >= 400_000 > counted[direction == "out"]
    assert seconds >= (400_000 - 2 * BURST) / RATE


def test_the_rate_changes_while_ranks_run(up, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    up(2, "none")
    process = start("run", 2, sys.executable, "-c", TRANSFER, "out", 400_000, tmp_path / "pipe")
    json.loads(process.stdout.readline())
    assert netlab("rate", "20mbit", "16kb").returncode == 0
    (tmp_path / "pipe").write_text("")
    output, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert json.loads(output)[0] >= (400_000 - 2 * BURST) / RATE


def test_both_ends_of_each_link_are_limited(up, lab):
    def limits():
        shown = [["-n", f"{lab}-bridge", "qdisc", "show", "dev", f"port{rank}"] for rank in range(2)]
        shown += [["-n", f"{lab}-{rank}", "qdisc", "show", "dev", "eth0"] for rank in range(2)]
        found = [subprocess.run(["tc", "-j", *line], capture_output=True, check=True).stdout for line in shown]
        return [json.loads(line)[0] for line in found]

    up(2, "200mbit")
    assert [(link["kind"], link["options"]["rate"]) for link in limits()] == [("tbf", 25_000_000)] * 4
    assert [round(link["options"]["burst"] / 1024) for link in limits()] == [128] * 4
    netlab("rate", "1gbit", "16kb", check=True)
    assert [link["options"]["rate"] for link in limits()] == [125_000_000] * 4
    assert [round(link["options"]["burst"] / 1024) for link in limits()] == [16] * 4
    netlab("rate", "none", check=True)
    assert [link["kind"] for link in limits()] == ["noqueue"] * 4


# Side by side


def test_two_labs_do_not_see_each_other(up, lab, monkeypatch):
    listen = (
        "import socket; s = socket.create_server(('10.77.0.1', 5000)); print('up0', flush=True); s.accept(); s.accept()"
    )
    connect = "import socket; socket.create_connection(('10.77.0.1', 5000))"
    other = f"{lab}-1"  # also the name of a namespace of the first
    up(2, "none")
    first = wait_until_up(start("run", 2, "bash", "-c", WAIT), 2)
    monkeypatch.setenv("NETLAB", other)
    netlab("up", 2, "none", check=True)
    second = wait_until_up(start("run", 1, sys.executable, "-c", listen), 1)
    monkeypatch.setenv("NETLAB", lab)
    assert "ConnectionRefusedError" in netlab("run", 2, sys.executable, "-c", connect).stderr
    assert netlab("down").returncode == 0
    first.communicate(timeout=20)
    assert (first.returncode, processes(lab)) == (137, [])
    assert namespaces(lab) == [f"{other}-{rank}" for rank in (0, 1, "bridge")]
    monkeypatch.setenv("NETLAB", other)
    assert netlab("run", 2, sys.executable, "-c", connect).returncode == 0
    second.communicate(timeout=20)
    assert second.returncode == 0  # it accepted both connections
    assert netlab("down").returncode == 0


def test_two_runs_in_one_lab(up, lab):
    """If one of them fails, the ranks of the other go on."""
    up(2, "none")
    first = wait_until_up(start("run", 2, "bash", "-c", WAIT), 2)
    before = sleep_processes(lab, 2)
    assert netlab("run", 2, "bash", "-c", "exit 5").returncode == 5
    assert sleep_processes(lab, 2) == before
    assert netlab("down").returncode == 0
    first.communicate(timeout=20)
    assert first.returncode == 137


def test_two_runs_with_labs_of_their_own(lab):
    """The ranks of one do not end with the other, even if both labs have the same name."""
    own = "run", "--rate", "none"
    first = wait_until_up(start(*own, 2, "bash", "-c", WAIT), 2)
    before = sleep_processes(lab, 2)
    assert netlab(*own, 2, "true").returncode == 0
    assert sleep_processes(lab, 2) == before
    first.terminate()
    first.communicate(timeout=20)
    assert first.returncode == 143


# How runs end

OWN = pytest.mark.parametrize("own", (True, False), ids=("own", "up"))


@pytest.fixture
def arguments(up):
    """arguments(own, ranks): arguments of netlab.sh for a run in a lab of its own (`own`), or in one that is up."""

    def make(own, ranks):
        if not own:
            up(ranks, "none")
        return ["run", *(["--rate", "none"] if own else []), ranks]

    return make


@pytest.mark.parametrize("own, world_size", ((True, 2), (False, 3)))
@pytest.mark.parametrize("death, code", (("exit 3", 3), ("kill -9 $$", 137), ("/no/such/program", 127)))
def test_a_dead_rank_ends_the_others(arguments, lab, own, world_size, death, code):
    last = f"if ((RANK == {world_size - 1})); then {death}; else {WAIT}; fi"
    result = netlab(*arguments(own, world_size), "bash", "-c", last)
    assert result.returncode == code
    assert (
        result.stderr.splitlines()[-1]
        == f"netlab.sh: rank {world_size - 1} of {world_size} ended with exit code {code}"
    )
    assert processes(lab) == []
    assert len(namespaces(lab)) == (0 if own else world_size + 1)


def test_other_ranks_get_sigterm_and_then_sigkill(lab, tmp_path):
    """When rank 0 fails, rank 1 handles SIGTERM, and rank 2 ignores it."""
    program = """
        case $RANK in
            0) until [[ -e $0/1 && -e $0/2 ]]; do sleep 0.01; done; exit 3 ;;
            1) trap 'echo bye; exit' TERM ;;
            2) trap '' TERM ;;
        esac
        touch $0/$RANK
        while :; do sleep 0.01; done
    """
    result = netlab("run", "--rate", "none", 3, "bash", "-c", program, tmp_path)
    assert (result.returncode, result.stdout) == (3, "bye\n")
    assert processes(lab) == []


@OWN
@pytest.mark.parametrize("whole_group", (True, False), ids=("group", "launcher"))
@pytest.mark.parametrize("number, code", ((signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_interrupted(arguments, lab, own, whole_group, number, code):
    process = wait_until_up(start(*arguments(own, 2), "bash", "-c", WAIT), 2)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == code
    assert processes(lab) == []
    assert len(namespaces(lab)) == (0 if own else 3)


@OWN
def test_ranks_end_when_the_launcher_is_killed(arguments, lab, own):
    process = wait_until_up(start(*arguments(own, 2), "bash", "-c", WAIT), 2)
    process.kill()
    process.communicate(timeout=20)  # returns when no process holds the pipes any more
    wait_until(lambda: processes(lab) == [])
    assert len(namespaces(lab)) == (0 if own else 3)


def test_background_processes_of_ranks_end_with_them(lab):
    result = netlab("run", "--rate", "none", 2, "bash", "-c", "setsid sleep 1000 & exit 0")
    assert (result.returncode, processes(lab)) == (0, [])


def test_down_ends_what_runs_in_the_lab(up, lab):
    up(1, "none")
    with subprocess.Popen(["ip", "netns", "exec", f"{lab}-0", "sleep", "1000"]) as process:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        assert netlab("down").returncode == 0
        assert process.wait(timeout=20) == -signal.SIGKILL
    assert namespaces(lab) == []


def test_an_up_that_fails_leaves_nothing(lab, monkeypatch, tmp_path):
    failing = '#!/bin/sh\ncase "$*" in *port1*) echo no tc today >&2; exit 1;; esac\nexec "{tc}" "$@"\n'
    (tmp_path / "tc").write_text(failing.format(tc=shutil.which("tc")))
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = netlab("up", 3, "200mbit")
    assert (result.returncode, result.stderr) == (1, "no tc today\n")
    assert namespaces(lab) == []


# Refusals: one line, exit 2


def refusal(result):
    """The one line of a refusal."""
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr


@pytest.mark.parametrize(
    "line",
    (
        "",
        "help",
        "up",
        "up 2",
        "up 0 none",
        "up 2 fast",
        "up 2 200mbits",
        "up 2 1.5gbit",
        "up 2 200mbit 16",
        "up two none",
    )
    + ("up 2 none 16kb 1", "rate", "rate 0mbit", "down now", "run", "run 2", "run 0 true", "run --rate 2 true")
    + (
        "up 2 99kbit",
        "up 2 100gbit",
        "up 2 200mbit 3kb",
        "up 2 99999999999mbit",
        "run --rate 200mbit --burst 1kb 2 true",
    )
    + ("run --burst 16kb 2 true", "run --rate 200mbit", "ranks none 2 true"),
)
def test_usage(line):
    assert refusal(netlab(*line.split())).startswith("netlab.sh: usage: up N RATE [BURST] | ")


@pytest.mark.parametrize("words", (("up 2 200mbit",), ("up", "2", "200mbit 16kb"), ("run --rate", "none", "2", "true")))
def test_spaces_do_not_separate_arguments(words):
    assert "usage" in refusal(netlab(*words))


@pytest.mark.parametrize("name", ("a/b", "a b", "a.*"))
def test_invalid_names(monkeypatch, name):
    monkeypatch.setenv("NETLAB", name)
    assert "usage" in refusal(netlab("down"))


def test_without_root():
    unprivileged = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    with open(NETLAB) as script:  # others than root may not read its folder
        command = [*unprivileged, "bash", "-s", "down"]
        result = subprocess.run(command, stdin=script, capture_output=True, text=True)
    assert "needs root" in refusal(result)


@pytest.mark.parametrize("missing", ("ip", "tc"))
def test_without_iproute2(lab, monkeypatch, tmp_path, missing):
    for tool in {"bash", "sh", "unshare", "ip", "tc"} - {missing}:
        (tmp_path / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = subprocess.run([tmp_path / "bash", NETLAB, "down"], capture_output=True, text=True)
    monkeypatch.undo()
    assert "iproute2" in refusal(result)


def test_a_lab_that_is_up_or_not(up, lab):
    assert f"{lab} is not up" in refusal(netlab("rate", "200mbit"))
    assert f"{lab} has fewer than 1 ranks" in refusal(netlab("run", 1, "true"))
    assert netlab("down").returncode == 0
    up(2, "none")
    before = namespaces(lab)
    assert all(word in refusal(netlab("up", 2, "none")) for word in (lab, "down", "NETLAB"))
    assert namespaces(lab) == before
    assert f"{lab} has fewer than 3 ranks" in refusal(netlab("run", 3, "true"))
