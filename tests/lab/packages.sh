#!/bin/sh
# Installs the Debian packages named on the command line that are missing. Their services are neither started nor
# enabled: the lab runs its own sshd and its own containers, and the machine's stay as they were.
set -eu

missing=
for package in "$@"; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true) in
    installed) ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "This needs a Debian machine with apt-get; on another Linux install what answers to:$missing." >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "These Debian packages are missing:$missing. Run the same command as root, or: sudo apt-get install$missing" >&2
    exit 1
fi

echo "installing Debian packages:$missing"
log=$(mktemp)
policy=/usr/sbin/policy-rc.d # asked before any service is started; 101 means no
[ -e "$policy" ] && policy=
finish() {
    [ -z "$policy" ] || rm -f "$policy"
    rm -f "$log"
}
trap finish EXIT
if [ -n "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
install() {
    # shellcheck disable=SC2086 # a list of package names
    apt-get update && apt-get -o DPkg::Lock::Timeout=60 install --yes --no-install-recommends $missing
}
tries=60 # a machine that has just booted updates itself for a while, and holds apt's locks
until install >"$log" 2>&1 </dev/null; do
    if [ "$tries" = 0 ] || ! grep -q "Could not get lock" "$log"; then
        tail -n 15 "$log" >&2
        echo "apt-get could not install:$missing (its last lines stand above)." >&2
        exit 1
    fi
    tries=$((tries - 1))
    sleep 5
done
for package in $missing; do
    case $package in
    openssh-server) units="ssh.service" ;;
    lxc) units="lxc.service lxc-net.service lxc-monitord.service" ;;
    *) continue ;;
    esac
    for unit in $units; do
        if command -v systemctl >/dev/null; then systemctl --quiet disable "$unit" 2>/dev/null || true; fi
    done
done
