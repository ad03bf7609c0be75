"""The variables of launchers. Oracle: what the manuals of torchrun, Slurm, Open MPI and MPICH say about theirs."""

import os

import pytest

from commfabric.foundation.command_line import run
from commfabric.foundation.launcher import (
    LauncherError,
    adopt_launcher,
    first_host,
    launched,
    launched_ranks,
    ranks_that_slurm_did_not_start,
)

SBATCH = dict(SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_NNODES="2", SLURM_PROCID="0", SLURM_LOCALID="0")
SALLOC = dict(SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_NNODES="2", SLURM_JOB_NODELIST="n[1-2]")
TASK = {
    **SBATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu-[08-09,12],login", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}  # fmt: skip
PTY = {**SALLOC, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
OPEN_MPI = dict(
    OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2"
)
MPICH = dict(PMI_SIZE="8", PMI_RANK="5", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="4")
TORCHRUN = dict(WORLD_SIZE="6", RANK="5", LOCAL_RANK="2", LOCAL_WORLD_SIZE="3", MASTER_ADDR="n1", MASTER_PORT="29500")


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, {}),
        (TORCHRUN, TORCHRUN),
        ({**TASK, **TORCHRUN}, TORCHRUN),
        (TASK, dict(WORLD_SIZE="4", RANK="3", LOCAL_RANK="1", MASTER_ADDR="gpu-08")),
        ({**TASK, "MASTER_ADDR": "ib0", "WORLD_SIZE": "4"}, dict(WORLD_SIZE="4", RANK="3", MASTER_ADDR="ib0")),
        ({**TASK, "WORLD_SIZE": "1"}, dict(WORLD_SIZE="1")),
        ({**TASK, "SLURM_STEP_NUM_NODES": "1"}, dict(LOCAL_WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")),
        (dict(SLURM_NTASKS="2", SLURM_PROCID="0"), dict(WORLD_SIZE="2", RANK="0")),
        (SBATCH, {}),
        (SALLOC, {}),
        (PTY, {}),
        (OPEN_MPI, dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")),
        ({**SBATCH, **OPEN_MPI}, dict(WORLD_SIZE="2", RANK="1")),
        ({**TASK, **MPICH}, dict(WORLD_SIZE="8", RANK="5", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")),
        (dict(OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0"), {}),
    ],
    ids=str,
)
def test_torchruns_variables(environment, expected):
    found = launched(environment)
    assert found.items() >= expected.items() and bool(found) == bool(expected)


def test_the_ranks_of_a_job_have_one_port():
    ports = [launched(environment)["MASTER_PORT"] for environment in (TASK, TASK | dict(SLURM_PROCID="0"))]
    assert ports[0] == ports[1] != launched(TASK | dict(SLURM_STEP_ID="2"))["MASTER_PORT"]
    assert 1024 < int(ports[0]) < 32768  # no port of the system's, nor one that it gives to clients


@pytest.mark.parametrize(
    "hosts, first",
    [("n1", "n1"), ("n[003-007,9],login", "n003"), ("a[2,5]b[1-3],c", "a2b1"), ("x.org,y.org", "x.org"), ("", "")],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_processes_that_srun_did_not_start():
    assert [ranks_that_slurm_did_not_start(each) for each in (SBATCH, SALLOC)] == [4, 4]
    assert not any(map(ranks_that_slurm_did_not_start, ({}, TASK, PTY, SBATCH | TORCHRUN, SALLOC | OPEN_MPI)))


@pytest.fixture
def environment(monkeypatch):
    """Sets exactly these of the launchers' variables, until the test ends."""

    def set_variables(variables):
        for name in {*TORCHRUN, *TASK, *OPEN_MPI, *MPICH}:
            monkeypatch.setenv(name, "")  # so that one that the test sets does not remain
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_what_torch_reads_is_set(environment):
    environment(OPEN_MPI)
    adopt_launcher()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], launched_ranks()) == ("1", "2", 2)
    environment({})
    adopt_launcher()
    assert "WORLD_SIZE" not in os.environ and launched_ranks() == 1


@pytest.mark.parametrize(
    "variables, message",
    [
        (dict(WORLD_SIZE="2"), "there are 2 ranks .*, and RANK is not set: set WORLD_SIZE, RANK, LOCAL_RANK, "),
        (dict(SLURM_NTASKS="2"), "there are 2 ranks .*, and RANK is not set: set WORLD_SIZE, RANK, LOCAL_RANK, "),
        (dict(OMPI_COMM_WORLD_SIZE="3"), "there are 3 ranks .*, and RANK is not set: set WORLD_SIZE, RANK, "),
        (dict(WORLD_SIZE="2", RANK="2"), "RANK=2 must be an integer from 0 to 1, as WORLD_SIZE is 2"),
        (dict(RANK="1"), "RANK=1 must be an integer from 0 to 0, as WORLD_SIZE is not set"),
        (dict(WORLD_SIZE="two", RANK="0"), "WORLD_SIZE=two must be an integer from 1 to "),
        (dict(WORLD_SIZE="2", RANK="one"), "RANK=one must be an integer from 0 to 1"),
    ],
    ids=str,
)
def test_variables_that_name_no_rank(environment, variables, message):
    environment(variables)
    with pytest.raises(LauncherError, match=f"^{message}"):
        adopt_launcher()


def test_each_rank_prints_what_is_wrong_with_its_variables(environment, capsys):
    """The other ranks do not know it."""
    environment(dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="x"))
    assert run("train.py", adopt_launcher) == 2
    assert capsys.readouterr().err == "train.py: LOCAL_RANK=x must be an integer from 0 to 1048576\n"
