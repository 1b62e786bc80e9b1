#!/usr/bin/env bash
# The stopwatch: from nothing to a first answer in a clean Debian, without a network. First by the README's first command
# after the install, which has the bundled model; then with a model that is pulled by name from a hub on loopback.
#   harness/package/first_answer.sh [FOLDER]        with the .deb of build.sh in FOLDER (target/package)
# Each must take less than two minutes. Needs root, debootstrap, and python3 outside.
set -euo pipefail
cd "$(dirname "$0")/../.."
packages=$(realpath "${1:-target/package}")
base=${BASE:-target/package-base.tar}
most=120
# The command of the README that stands behind its installation.
command=$(sed -n '/^## Install/,/^## /s/^    \(hearth run .*\)$/\1/p' README.md | head -n 1)
[ -n "$command" ] || { echo "README.md names no first command" >&2; exit 1; }
[ -e "$base" ] || { echo "$base is missing; harness/package/check.sh makes it" >&2; exit 1; }
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
tar --directory "$root" --extract --file "$base"
mkdir "$root/stage"
cp "$packages"/*.deb "$root/stage/"
work=$root/stage/pull
mkdir -p "$work" "$root/user"
cp harness/package/hub.py "$work/"

# All in one new network, in which the hub runs outside of the clean Debian, which has no Python.
unshare --net --mount --pid --fork --mount-proc -- bash -s -- "$root" "$command" "$most" <<'INSIDE'
set -euo pipefail
root=$1 command=$2 most=$3 work=$1/stage/pull
ip link set lo up
mount --rbind /dev "$root/dev" && mount -t proc proc "$root/proc"
within() {
  chroot "$root" /usr/bin/env -i HOME=/user PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"
}
took() {
  echo "$1: $2 s"
  [ "$2" -lt "$most" ] || { echo "$1 took $2 s; at most $most s are allowed" >&2; exit 1; }
}

SECONDS=0
within sh -c 'dpkg --install /stage/*.deb >/dev/null'
answer=$(within sh -c "$command" </dev/null)
[ -n "$answer" ] || { echo "$command printed nothing" >&2; exit 1; }
echo "$command"
echo "$answer"
took "from nothing to the first answer" "$SECONDS"

# A tiny model with random weights: what it says is noise, the way to it is that of every model.
within hearth synth tiny-hybrid:q8_0 /stage/pull/tiny.gguf 2>/dev/null
python3 "$work/hub.py" "$work/tiny.gguf" "$work/port" &
for _ in $(seq 50); do [ -s "$work/port" ] && break; sleep 0.1; done
port=$(cat "$work/port")
SECONDS=0
within env HF_ENDPOINT="http://127.0.0.1:$port" hearth pull loopback/tiny-GGUF
within env HF_ENDPOINT="http://127.0.0.1:$port" hearth serve loopback/tiny-GGUF 2> "$work/log" &
for _ in $(seq 300); do
  status=$(within bash -c 'exec 3<>/dev/tcp/127.0.0.1/8000 && printf "GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n" >&3 &&
    head -n 1 <&3' 2>/dev/null || true)
  case $status in *" 200 "*) break ;; esac
  sleep 0.1
done
answer=$(within hearth run --url http://127.0.0.1:8000 -n 8 "Hello" 2> "$work/run.log") ||
  { cat "$work/log" "$work/run.log" >&2; exit 1; }
grep -q 'of the server at' "$work/run.log"
took "from a name on the hub to an answer of its server" "$SECONDS"
INSIDE
