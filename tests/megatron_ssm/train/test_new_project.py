"""`megatron-ssm new`. Oracles: bash's parser; the options of the script; a run that its own script starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ssm.cli.main import main
from megatron_ssm.train.new_project import write_project
from megatron_ssm.train.options import parse_options

SCRIPTS = ("prepare.sh", "launch/torchrun.sh", "launch/deepspeed.sh", "launch/slurm.sh", "launch/mpi.sh")


def test_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "project"]) == 0
    assert "README.md says how to start" in capsys.readouterr().out
    for script in SCRIPTS:
        assert os.access(Path("project", script), os.X_OK)
        subprocess.run(["bash", "-n", Path("project", script)], check=True)
    monkeypatch.chdir("project")
    assert parse_options(["--config", "run.yaml"]).resume == "auto"
    assert main(["new", "."]) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err


def test_ports_of_slurm_jobs_differ(tmp_path):
    write_project(tmp_path / "project")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@" $SRUN_CPUS_PER_TASK\n')
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node\n")
    for tool in ("srun", "scontrol"):
        (tmp_path / tool).chmod(0o755)
    said = []
    for job in ("17", "18"):
        slurm = dict(SLURM_JOB_ID=job, SLURM_JOB_NODELIST="node", SLURM_NNODES="1", SLURM_CPUS_PER_TASK="8")
        slurm |= dict(SLURM_SUBMIT_DIR=str(tmp_path / "project"), PATH=f"{tmp_path}:{os.environ['PATH']}")
        command = [tmp_path / "project" / "launch" / "slurm.sh", "--lr", "1e-3"]
        said.append(subprocess.run(command, env=slurm, capture_output=True, text=True, check=True).stdout)
    assert "--rdzv-endpoint node:20017" in said[0] and "--rdzv-endpoint node:20018" in said[1]
    assert said[0].endswith("--config run.yaml --lr 1e-3 8\n")


@pytest.mark.full
def test_project_trains(tmp_path):
    write_project(tmp_path / "project")
    (tmp_path / "text").write_text("the state of a space " * 2000)
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    more = dict(os.environ, PATH=":".join(places), PYTHONPATH=str(Path(__file__).resolve().parents[3]))
    run = dict(cwd=tmp_path / "project", env=more, check=True, timeout=300)
    subprocess.run(["./prepare.sh", tmp_path / "text"], **run)
    subprocess.run(["launch/torchrun.sh", "2", "--train-iters", "2", "--num-layers", "1"], **run)
    assert (tmp_path / "project" / "out" / "model.safetensors").exists()
