#!/usr/bin/env bash
#SBATCH --job-name=megatron-ssm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Pretrain on several nodes: sbatch launch/slurm.sh [options of examples/pretrain.py], from the checkout, with its environment active;
# one torchrun per node, one rank per GPU. Options of sbatch before the script override those above, and add what your cluster needs:
# --partition, --account, --time.
# Two minutes before the time limit, Slurm sends SIGTERM: the ranks write a last checkpoint and end. If a node fails, --requeue starts the
# job again under the same id, and it continues from its newest checkpoint.
# Set --tensor-model-parallel-size to at most the GPUs of a node: a block's all-reduces should stay on NVLink.
set -euo pipefail
here=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "$0")/.." && pwd)}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${SLURM_GPUS_PER_NODE:-1}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # which srun does not take from sbatch since Slurm 22.05
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1         # so that torchrun --max-restarts works on several nodes
exec srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${ranks##*:}" \
    --shutdown-timeout 110 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 10000))" \
    -- "$here/examples/pretrain.py" "$@"
