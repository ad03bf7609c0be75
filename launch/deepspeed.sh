#!/usr/bin/env bash
# The same under the deepspeed launcher: launch/deepspeed.sh RANKS [options of examples/pretrain.py]
# Add --engine deepspeed --deepspeed-config examples/deepspeed-zero2.json to train in DeepSpeed's engine too.
set -euo pipefail
ranks=${1:?usage: launch/deepspeed.sh RANKS [options of examples/pretrain.py]}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v nvidia-smi >/dev/null; then
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
fi
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
exec deepspeed --num_accelerators "$ranks" "$here/examples/pretrain.py" "$@"
