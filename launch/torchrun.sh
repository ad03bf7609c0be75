#!/usr/bin/env bash
# Pretrain on the GPUs (or cores) of one machine: launch/torchrun.sh RANKS [options of examples/pretrain.py]
set -euo pipefail
ranks=${1:?usage: launch/torchrun.sh RANKS [options of examples/pretrain.py]}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
# The -- keeps torchrun's own parser away from --log.
exec torchrun --standalone --nproc-per-node "$ranks" -- "$here/examples/pretrain.py" "$@"
