#!/bin/sh
# What tests use beside Python packages, from Debian: Mooncake's libraries and the packages that are named after the folder, installed;
# promtool, unpacked into the folder $1 (its package would start a Prometheus). Where this is not Debian, or not root, the tests that want what is missing skip, and say so.
set -eu
bin=$(realpath "$1")
shift
command -v apt-get >/dev/null || exit 0
missing=
for package in libcurl4 libibverbs1 libnuma1 "$@"; do
    dpkg-query --show --showformat='${Status}' $package 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
if [ -n "$missing" ] && [ "$(id -u)" = 0 ]; then
    apt-get update -qq || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null ||
        echo "not installed:$missing" >&2
fi
if ! command -v promtool >/dev/null && [ ! -x "$bin/promtool" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    cd "$folder"
    if apt-get download -qq prometheus >/dev/null 2>&1 && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool; then
        mv usr/bin/promtool "$bin/promtool"
    else
        echo "no promtool: apt-get cannot download Debian's package prometheus" >&2
    fi
fi
