"""`megatron-ssm new DIR`: a training project with a configuration, a recipe for its data, and launch scripts.

Loads no torch. Each launch script takes further options of `pretrain.py`, and chooses a port of its own, so that several
jobs can run on a node.
"""

from pathlib import Path

RUN_YAML = """\
# Options of the run; `python -m megatron_ssm.cli.pretrain --help` lists all. The command line takes precedence.
data: [data/corpus]              # data/corpus.bin and .idx, which prepare.sh writes
tokenizer-model: byte            # or a folder with a tokenizer.json, also in prepare.sh
out: out                         # checkpoints, and at the end the model for transformers
log: out/metrics.jsonl
resume: auto                     # the same command begins the run and continues it

model-type: mamba2
num-layers: 4
hidden-size: 256
mamba-state-dim: 64
mamba-head-dim: 32

tensor-model-parallel-size: 1
context-parallel-size: 1
seq-length: 512
micro-batch-size: 4
global-batch-size: 16
train-iters: 1000
lr: 3e-3
lr-warmup-iters: 50
save-interval: 200
eval-interval: 200
log-interval: 10
"""

PREPARE = """\
#!/usr/bin/env bash
# Text to data/corpus.bin and data/corpus.idx: ./prepare.sh FILE_OR_FOLDER...
# Reads JSON lines with the field "text" (also .gz), Parquet and UTF-8 text. Run again, it continues.
set -euo pipefail
cd "$(dirname "$0")"
here=$PWD; cd - >/dev/null # the arguments are paths where the script was started
mkdir -p "$here/data"
python -m megatron_ssm prepare --input "${@:?usage: ./prepare.sh FILE_OR_FOLDER...}" \\
    --tokenizer-model byte --out "$here/data/corpus"
"""

START = """\
#!/usr/bin/env bash
{directives}# {about}
set -euo pipefail
cd "{home}"
"""

TORCHRUN = """\
ranks=${1:?usage: launch/torchrun.sh RANKS [OPTIONS]}; shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > ranks ? $(nproc) / ranks : 1))}
# --standalone: torchrun chooses a free port.
exec torchrun --standalone --nproc-per-node "$ranks" -m -- megatron_ssm.cli.pretrain --config run.yaml "$@"
"""

DEEPSPEED = """\
ranks=${1:?usage: launch/deepspeed.sh RANKS [OPTIONS]}; shift
command -v nvidia-smi >/dev/null || export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > ranks ? $(nproc) / ranks : 1))}
port=$(python -I -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
exec deepspeed --num_accelerators "$ranks" --master_port "$port" --module megatron_ssm.cli.pretrain --config run.yaml \\
    --engine deepspeed --deepspeed-config deepspeed.json "$@"
"""

SBATCH = """\
#SBATCH --job-name={name}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
##SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
"""

SLURM = """\
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun does not take from sbatch since Slurm 22.05
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # so that ranks can be restarted on several nodes
gpus=${SLURM_GPUS_PER_NODE:-1}
ranks=${RANKS_PER_NODE:-${gpus##*:}}
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > ranks ? SLURM_CPUS_PER_TASK / ranks : 1))
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # another one for each job of a node
exec srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --shutdown-timeout 110 \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$port" \\
    -m -- megatron_ssm.cli.pretrain --config run.yaml "$@"
"""

MPI = """\
ranks=${1:?usage: launch/mpi.sh RANKS [OPTIONS]}; shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > ranks ? $(nproc) / ranks : 1))}
# The port follows from the number that mpirun gives its job. On several hosts, add -x MASTER_ADDR=HOST_OF_RANK_0.
exec mpirun -n "$ranks" ${MPIRUN_OPTIONS:-} python -m megatron_ssm.cli.pretrain --config run.yaml "$@"
"""

DEEPSPEED_JSON = """\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "zero_optimization": {"stage": 2}
}
"""

README = """\
# {name}

```sh
./prepare.sh TEXT_FOLDER          # text to data/corpus.bin and .idx
# Check everything before a run on 4 ranks: its layout, memory and messages
python -m megatron_ssm.cli.pretrain --config run.yaml --dry-run 4
launch/torchrun.sh 2              # trains, or continues
sbatch launch/slurm.sh            # one torchrun on each node; or launch/deepspeed.sh 2, launch/mpi.sh 2
python -m megatron_ssm generate --model out --prompt "the"
```

The options of the run are in `run.yaml`. Each script takes further ones: `launch/torchrun.sh 2 --lr 1e-3`.
"""


def write_project(directory: str | Path) -> str:
    """Write a project into a new or empty directory, and return a line about it.

    Raises:
        ValueError: The directory is not empty, or is a file.
        OSError: It cannot be written.
    """
    folder = Path(directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory")
    (folder / "launch").mkdir(parents=True, exist_ok=True)
    name, home = folder.resolve().name, '$(dirname "$0")/..'
    begin = {
        "torchrun.sh": ("", "Ranks on this machine: launch/torchrun.sh RANKS [OPTIONS]", home, TORCHRUN),
        "deepspeed.sh": ("", "The same in DeepSpeed's engine: launch/deepspeed.sh RANKS [OPTIONS]", home, DEEPSPEED),
        "slurm.sh": (
            SBATCH.format(name=name), "One torchrun on each node: sbatch launch/slurm.sh [OPTIONS], from the folder above",
            "$SLURM_SUBMIT_DIR", SLURM,
        ),
        "mpi.sh": ("", "Ranks that mpirun starts: launch/mpi.sh RANKS [OPTIONS]", home, MPI),
    }  # fmt: skip
    files = {"run.yaml": RUN_YAML, "prepare.sh": PREPARE, "deepspeed.json": DEEPSPEED_JSON}
    files["README.md"] = README.format(name=name)
    for script, (directives, about, where, body) in begin.items():
        files[f"launch/{script}"] = START.format(directives=directives, about=about, home=where) + body
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
        if path.endswith(".sh"):
            (folder / path).chmod(0o755)
    return f"{directory}: {', '.join(files)}; {directory}/README.md says how to start"
