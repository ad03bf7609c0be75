#!/usr/bin/env bash
# Ranks in network namespaces behind rate-limited links: one Linux machine as several on a slow network. Needs root.
#   launch/netlab.sh up N RATE [BURST]    N namespaces on a bridge, links limited to RATE (200mbit, 1gbit, none) both ways
#   launch/netlab.sh rate RATE [BURST]    change every link, also while ranks run
#   launch/netlab.sh run N COMMAND...     COMMAND once per rank, with the environment variables that torchrun sets;
#                                         the first rank that fails ends the others and gives its exit code
#   launch/netlab.sh down                 end what still runs in the lab and remove it
#   launch/netlab.sh run --rate RATE [--burst BURST] N COMMAND...    all in one; nothing is left of its lab afterwards
# BURST is what an idle link lets through at once: 128kb, or less (16kb) to study small messages.
# Labs with different names, NETLAB=NAME, run side by side.
#
# A run is a process namespace: the kernel kills all that is in it when its process 1 ends, and that one when the
# launcher ends. With --rate it is a mount namespace too, so that the lab's names, and with them the lab, go at its end.
set -euo pipefail
export NETLAB=${NETLAB:-netlab}
fail() { echo "netlab.sh: $*" >&2; exit 2; }
spaces() { ls /var/run/netns 2>/dev/null | grep -xE "$NETLAB-($1)"; }

rate() { # RATE [BURST]
    local limit="tbf rate $1 burst ${2:-128kb} latency 200ms" space
    [[ $(spaces bridge) ]] || fail "$NETLAB is not up: launch/netlab.sh up N RATE"
    if [[ $1 == none ]]; then limit=noqueue; fi
    for space in $(spaces '[0-9]+'); do
        tc -n "$space" qdisc replace dev eth0 root $limit
        tc -n "$NETLAB-bridge" qdisc replace dev "port${space##*-}" root $limit
    done
}

up() { # N RATE [BURST]
    ip netns add "$NETLAB-bridge" 2>/dev/null || fail "$NETLAB is up: launch/netlab.sh down, or another name in NETLAB"
    trap down EXIT # should something fail
    ip -n "$NETLAB-bridge" link set lo up
    ip -n "$NETLAB-bridge" link add name bridge up type bridge
    for ((rank = 0; rank < $1; rank++)); do
        ip netns add "$NETLAB-$rank"
        ip -n "$NETLAB-$rank" link set lo up
        ip -n "$NETLAB-$rank" link add eth0 up type veth peer name "port$rank" netns "$NETLAB-bridge"
        ip -n "$NETLAB-$rank" addr add "10.77.0.$((rank + 1))/24" dev eth0
        ip -n "$NETLAB-bridge" link set "port$rank" up master bridge
        # TCP alike on all hosts: bbr's guesses at a rate waver, and a cluster learns none anew after a pause
        ip -n "$NETLAB-$rank" route change 10.77.0.0/24 dev eth0 congctl reno
        ip netns exec "$NETLAB-$rank" sh -c 'echo 0 >/proc/sys/net/ipv4/tcp_slow_start_after_idle' 2>/dev/null || true
    done
    rate "${@:2}"
    trap - EXIT
}

down() {
    local space pids
    for space in $(spaces '[0-9]+') $(spaces bridge); do
        while pids=$(ip netns pids "$space") && [[ $pids ]]; do kill -KILL $pids 2>/dev/null || sleep 0.01; done
        ip netns del "$space"
    done
}

run() { # [--rate RATE [--burst BURST]] N COMMAND...
    local limit=() cores=$(nproc)
    while [[ $1 == --* ]]; do limit+=("$2"); shift 2; done
    [[ ${limit[*]} ]] || (($(spaces '[0-9]+' | wc -l) >= $1)) || fail "$NETLAB has fewer than $1 ranks up"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))} GLOO_SOCKET_IFNAME=eth0
    export MASTER_ADDR=10.77.0.1 MASTER_PORT=$((10000 + $$ % 20000)) # a port for each run in a lab
    export WORLD_SIZE=$1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
    trap 'stop 130' INT
    trap 'stop 143' TERM
    setsid setpriv --pdeathsig KILL unshare --pid --fork --kill-child --mount-proc bash "$0" ranks "${limit[*]}" "$@" &
    wait $! || exit $?
}

stop() { # CODE
    local run=$(jobs -p)
    kill -TERM -- "-$run" || kill -KILL "$run" || true # KILL if it is not yet a session
    wait
    exit "$1"
} 2>/dev/null

ranks() { # "[RATE [BURST]]" N COMMAND...: process 1 of a run
    trap 'finish 143' TERM
    mount -t tmpfs netlab /mnt # names for the addresses: without them c10d warns on every rank
    { cat /etc/hosts && seq -f "::ffff:10.77.0.%g netlab" "$2"; } >/mnt/hosts
    mount --bind /mnt/hosts /etc/hosts && umount /mnt
    if [[ $1 ]]; then mkdir -p /var/run/netns && mount -t tmpfs netlab /var/run/netns && up "$2" $1; fi
    for ((rank = 0; rank < $2; rank++)); do rank "$rank" "${@:3}" & done
    for ((rank = 0; rank < $2; rank++)); do wait -n || finish $?; done
}

rank() { # RANK COMMAND...; exits with its code: wait -n would miss a rank that a signal ended before it
    local code=0
    trap 'exit 143' TERM # once the command has ended
    export RANK=$1
    { env --default-signal=INT,QUIT setsid ip netns exec "$NETLAB-$1" "${@:2}" 2>&3 3>&-; } 3>&2 2>/dev/null || code=$?
    ((code == 0)) || echo "netlab.sh: rank $1 of $WORLD_SIZE ended with exit code $code" >&2
    exit "$code"
}

finish() { # CODE
    local ranks=$(jobs -p)
    trap - TERM
    kill -TERM -1 || true # all but this process
    (sleep 2 && kill -KILL -1) &
    [[ ! $ranks ]] || wait $ranks || true
    exit "$1"
} 2>/dev/null

if [[ $$ != 1 || ${1:-} != ranks ]]; then
    n='[1-9][0-9]?' rate='([1-9][0-9]{2,5}kbit|[1-9][0-9]{0,4}mbit|[1-9][0-9]?gbit|none)' burst='([4-9]|[1-9][0-9]{1,4})kb'
    grammar="^(up $n $rate( $burst)?|rate $rate( $burst)?|run( --rate $rate( --burst $burst)?)? $n .+|down)\$"
    words=$(printf '%q ' "$@") # a space within an argument is no end of one
    [[ ${words% } =~ $grammar && $NETLAB =~ ^[[:alnum:]_-]+$ ]] ||
        fail "usage: up N RATE [BURST] | rate RATE [BURST] | run [--rate RATE [--burst BURST]] N COMMAND... | down" \
            "(N to 99, RATE as 100kbit, 200mbit, 10gbit, none, BURST from 4kb)"
    probe='ip link add name bridge type bridge && tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 1ms'
    unshare --net --mount --pid --fork sh -c "$probe" 2>/dev/null ||
        fail "needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), ip and tc (Debian package iproute2)"
fi
"$@"
