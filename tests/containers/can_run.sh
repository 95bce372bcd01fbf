#!/bin/sh
# Whether this machine's kernel and rights can run containers at all: prints each thing that cannot be done, and exits 1 if any.
# It asks the kernel itself, not Docker, so that a fault of the tests or of a download is never taken for one of the machine.
name=swprobe$$
lacking=0
try() {
    what=$1
    shift
    if ! error=$("$@" 2>&1); then
        echo "$what: $error"
        lacking=1
    fi
}
bridge() { ip link add "$name" type bridge && ip link delete "$name"; }
pair() { ip link add "$name" type veth peer name "${name}p" && ip link delete "$name"; }
group() {
    folder=/sys/fs/cgroup
    if [ -d "$folder/memory" ]; then folder=$folder/memory; fi
    mkdir "$folder/$name" && rmdir "$folder/$name"
}
if [ "$(id -u)" != 0 ]; then
    echo "root: this is user $(id -u)"
    exit 1
fi
try "namespaces" unshare --mount --pid --net --uts --ipc --fork true
try "mounts" unshare --mount mount -t tmpfs none /mnt
try "control groups" group
# A tool that is not installed says nothing about the kernel.
if command -v ip >/dev/null; then
    try "network bridges" bridge
    try "virtual networks" pair
fi
if command -v iptables >/dev/null; then
    try "address translation" iptables -t nat -S
fi
exit $lacking
