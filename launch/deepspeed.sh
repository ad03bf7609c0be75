#!/usr/bin/env bash
# The same under the deepspeed launcher: launch/deepspeed.sh RANKS [options of examples/pretrain.py]
# Add --engine deepspeed --deepspeed-config examples/deepspeed-zero2.json to train in DeepSpeed's engine too.
#
# On one node, the command `deepspeed` passes no signal on, and its ranks would outlive it. So the launcher has a process
# group of its own here, which gets SIGTERM, SIGINT and SIGUSR1; this script ends when the whole group has ended.
set -euo pipefail
ranks=${1:?usage: launch/deepspeed.sh RANKS [options of examples/pretrain.py]}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v nvidia-smi >/dev/null; then
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
fi
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

free_port='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
port=${MASTER_PORT:-$(python3 -I -c "$free_port")} # deepspeed's own is fixed: two runs on one machine could not start

launcher=
pass() { # SIGNAL; to the group, or ends this script before there is one
    local group=${launcher:-$(jobs -p)} # the job has begun before its number is known
    [[ $group ]] || exit $((128 + $(kill -l "$1")))
    kill "-$1" -- "-$group" 2>/dev/null || true
}
for signal in TERM INT USR1; do trap "pass $signal" "$signal"; done
exec 3>&2 2>/dev/null # bash would report it when a signal ends its job
set -m                # gives a background job a process group of its own
deepspeed --num_accelerators "$ranks" --master_port "$port" "$here/examples/pretrain.py" "$@" </dev/null 2>&3 3>&- &
launcher=$!
set +m
code=0
wait "$launcher" || code=$? # a signal ends the wait, too
exec 2>&3 3>&-
# Processes that have ended may stay as zombies (state Z), if the first process of a container does not collect them.
while awk -v group="$launcher" '$3 == group && $1 != "Z" { runs = 1 } END { exit !runs }' \
    < <(cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //'); do # state, parent, process group, ...
    sleep 0.2
done
exit "$code"
