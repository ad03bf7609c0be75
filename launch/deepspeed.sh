#!/usr/bin/env bash
# The same under the deepspeed launcher: launch/deepspeed.sh RANKS [options of examples/pretrain.py]
# Add --engine deepspeed --deepspeed-config examples/deepspeed-zero2.json to train in DeepSpeed's engine too.
#
# On one node, the command `deepspeed` passes no signal on, and its ranks would outlive it. So the launcher has a process
# group of its own here, which gets SIGTERM and SIGINT; this script ends when the whole group has ended.
set -euo pipefail
ranks=${1:?usage: launch/deepspeed.sh RANKS [options of examples/pretrain.py]}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v nvidia-smi >/dev/null; then
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
fi
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

set -m # gives a background job a process group of its own
deepspeed --num_accelerators "$ranks" "$here/examples/pretrain.py" "$@" </dev/null &
launcher=$!
set +m
for signal in TERM INT; do trap "kill -$signal -- -$launcher 2>/dev/null || true" "$signal"; done
code=0
{ wait "$launcher" || code=$?; } 2>/dev/null # a signal ends the wait, too
while kill -0 -- "-$launcher"; do sleep 0.2; done 2>/dev/null
exit "$code"
