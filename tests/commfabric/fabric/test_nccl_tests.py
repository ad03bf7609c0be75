"""Measuring with nccl-tests; oracle: output recorded on four H100s, which executables of the same names print here."""

import re
from pathlib import Path

import pytest

from commfabric.fabric import nccl_tests
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.readers import read_curves
from commfabric.foundation.command_line import Failure, run
from sparsefusion.cli.commands import parser

FILES = Path(__file__).resolve().parents[3] / "examples" / "h100x4"
GB = 1 << 30
FAILURE = "all_reduce.cu:44: Test NCCL failure 'invalid usage'"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """programs(name=script): executables on the PATH, which append arguments and NCCL's variables to the file `log`."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()

    def install(**scripts):
        for name, script in scripts.items():
            path = tmp_path / "bin" / name
            log = f'echo "{name} $@ $NCCL_ALGO $NCCL_PROTO" >> {tmp_path / "log"}'
            path.write_text(f"#!/bin/sh\n{log}\n{script}\n")
            path.chmod(0o755)

    return install


def printing(eager, graph=None):
    """A script that prints a recorded file, another one if it is asked for CUDA graphs."""
    return f"case \"$*\" in *'-G 0'*) cat {FILES / eager} ;; *) cat {FILES / (graph or eager)} ;; esac"


def measure(tmp_path, *flags):
    """The exit code of the command."""
    words = ["measure", "--nccl-tests", "--out", str(tmp_path / "f.json"), *flags]
    return run("sparsefusion measure", lambda: nccl_tests.measure_with_nccl_tests(parser().parse_args(words)))


def test_what_the_programs_print_becomes_a_fabric(programs, tmp_path, capsys):
    """Eager and as CUDA graphs; the recorded run with graphs ends at 16 MB, which a line says."""
    programs(all_reduce_perf=printing("quiet_all_reduce.txt", "all_reduce_graph.txt"))
    assert measure(tmp_path, "--ranks", "4", "--collectives", "all_reduce", "--sizes", "8:8G") == 0
    fabric, (out, err) = Fabric.load(tmp_path / "f.json"), capsys.readouterr()
    assert out == fabric.table() + "\n"
    assert err == "sparsefusion measure: all_reduce on 4 ranks (graph) was measured up to 16 MB\n"
    recorded = [
        curve
        for name in ("quiet_all_reduce.txt", "all_reduce_graph.txt")
        for curve in read_curves(FILES / name, "all_reduce")
    ]
    assert fabric.curves == tuple(recorded)
    assert (tmp_path / "log").read_text().splitlines() == [
        f"all_reduce_perf -b 8 -e {8 * GB} -f 2 -g 4 -G {graph}  " for graph in (0, 1)
    ]


def test_sizes_of_an_all_gather_are_contributions(programs):
    """nccl-tests counts the output, which is four times as large."""
    programs(all_gather_perf=printing("quiet_all_gather.txt"))
    (curve,) = nccl_tests.run_program("all_gather", 4, "eager", "", [8, 2 * GB], 60.0)
    assert (curve,) == tuple(read_curves(FILES / "quiet_all_gather.txt", "all_gather"))
    assert curve.nbytes[-1] == 2 * GB


def test_settings_of_nccl(programs, tmp_path, capsys):
    """They reach the program as variables and name the curve; one that the program refuses is left out."""
    refusing = f'case "$NCCL_ALGO" in Tree) echo "{FAILURE}"; exit 3 ;; esac\n'
    programs(all_reduce_perf=refusing + printing("quiet_all_reduce.txt", "all_reduce_graph.txt"))
    flags = ["--ranks", "4", "--collectives", "all_reduce", "--sizes", "8:16M", "--nccl", "Tree,Ring/LL,LL128"]
    assert measure(tmp_path, *flags) == 0
    curves = Fabric.load(tmp_path / "f.json").curves
    names = ["all_reduce", "all_reduce Ring LL", "all_reduce LL128"]
    assert [(curve.operation, curve.mode) for curve in curves] == [(n, m) for m in ("eager", "graph") for n in names]
    assert [line.split()[11:] for line in (tmp_path / "log").read_text().splitlines()] == [
        [], ["Tree"], ["Ring", "LL"], ["LL128"]
    ] * 2  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [
        f"sparsefusion measure: left out all_reduce Tree on 4 ranks ({mode}): all_reduce_perf: {FAILURE}"
        for mode in ("eager", "graph")
    ]


def test_a_program_that_takes_too_long_is_stopped(programs):
    """Its complete rows are kept: here 8 and 16 bytes. Without any row it is an error."""
    head = FILES / "quiet_all_reduce.txt"
    rows = f"head -n 15 {head}; printf '          32      8   float'; exec tail -f /dev/null"
    programs(all_reduce_perf=rows, sendrecv_perf=f"head -n 13 {head}; exec tail -f /dev/null")
    (curve,) = nccl_tests.run_program("all_reduce", 4, "eager", "", [8, 1024], 3.0)
    assert (curve.nbytes, curve.seconds) == ((8, 16), pytest.approx((23.30e-6, 23.44e-6)))
    with pytest.raises(Failure, match="sendrecv_perf printed no time within 1 s: pass more --seconds"):
        nccl_tests.run_program("p2p", 4, "eager", "", [8, 1024], 1.0)


@pytest.mark.parametrize("flags, world, code, message", [
    (["--ranks", "4"], "", 2, "--nccl-tests: not on the PATH: all_gather_perf, alltoall_perf, .*, sendrecv_perf .*"),
    ([], "", 2, "--nccl-tests needs --ranks N, the number of GPUs"),
    (["--ranks", "4"], "2", 2, "--nccl-tests measures from one process: start it without torchrun"),
    (["--ranks", "4", "--collectives", "all_reduce"], "", 1, f"all_reduce_perf: {FAILURE}"),
    (["--ranks", "4", "--collectives", "all_reduce", "--out", "none/f.json"], "", 2, "cannot write none/f.json: .*"),
])  # fmt: skip
def test_errors_are_one_line(programs, flags, world, code, message, tmp_path, monkeypatch, capsys):
    programs(all_reduce_perf=f'echo "{FAILURE}"; exit 3')
    monkeypatch.setenv("WORLD_SIZE", world)
    assert measure(tmp_path, *flags) == code
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(f"sparsefusion measure: {message}\n", err), err
    assert not (tmp_path / "f.json").exists()
