#!/usr/bin/env bash
# Boots systemd in a clean Debian with the .deb and checks the service there: harness/package/boot.sh [FOLDER], with the .deb
# of build.sh in FOLDER (target/package). The service starts and answers, restarts after a crash, stops, starts at the first
# request to its socket, and names a missing model; a purge leaves nothing. Needs root, debootstrap and systemd-nspawn
# (systemd-container). BASE=FILE keeps the clean Debian as a tar archive and uses it the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."
deb=$(realpath "${1:-target/package}"/*.deb)
base=${BASE:-target/package-systemd.tar}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

if [ ! -e "$base" ]; then
  mkdir -p "$(dirname "$base")"
  debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,curl bookworm "$root" >&2
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar --directory "$root" --create --file "$base" .
else
  tar --directory "$root" --extract --file "$base"
fi
mkdir "$root/stage"
cp "$deb" "$root/stage/hearth.deb"
chroot "$root" dpkg --install /stage/hearth.deb > /dev/null

cat > "$root/stage/check" <<'CHECK'
#!/bin/bash
exec > /stage/result 2>&1
fail() { echo "boot.sh: $*"; journalctl --unit hearth --output cat --no-pager | tail -n 15; systemctl poweroff; exit 1; }
key=$(grep --max-count 1 --invert-match '^#' /etc/hearth/keys)
answer() {
  curl --silent --max-time 120 http://127.0.0.1:8000/v1/chat/completions --header "Authorization: Bearer $key" \
    --json '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 30, "seed": 1}'
}
answers() { local reply; reply=$(answer) && [[ $reply == *'"finish_reason"'* ]] || fail "$1: $reply"; echo "$1: answered"; }
state() { [ "$(systemctl is-active "$1")" = "$2" ] || fail "$1 is $(systemctl is-active "$1") where $2 is right: $3"; }
property() { systemctl show hearth --property "$1" --value; }

systemctl start hearth || fail "the service does not start"
answers "service"
[[ $(property StatusText) == serving* ]] || fail "its status is $(property StatusText)"
hearth ps --api-key "$key" > /dev/null || fail "hearth ps"
! hearth ps > /dev/null 2>&1 || fail "hearth ps lists without a key"
kill -KILL "$(property MainPID)"
for _ in {1..120}; do [[ $(systemctl is-active hearth) = active && $(property NRestarts) = 1 ]] && break; sleep 0.5; done
answers "after a crash"
systemctl stop hearth
[ "$(property Result)" = success ] || fail "stopping ended with $(property Result)"
systemctl start hearth.socket
state hearth inactive "nothing was asked yet"
answers "first request to the socket"
state hearth active "the socket was asked"
systemctl stop hearth.socket hearth
sed -i '/^#* *model *=/d' /etc/hearth/hearth.toml
sed -i '1i model = "/nowhere.gguf"' /etc/hearth/hearth.toml
! systemctl start hearth || fail "a missing model starts"
journalctl --unit hearth --output cat --no-pager | grep --quiet 'error: /nowhere.gguf' || fail "the journal names no missing model"
systemctl stop hearth
dpkg --purge hearth > /dev/null
for left in /etc/hearth /var/lib/private/hearth /var/cache/private/hearth /usr/lib/systemd/system/hearth.service; do
  [ ! -e "$left" ] || fail "a purge leaves $left"
done
echo "all right"
systemctl poweroff
CHECK
chmod +x "$root/stage/check"
printf '[Unit]\nAfter=multi-user.target\n[Service]\nExecStart=/stage/check\n[Install]\nWantedBy=multi-user.target\n' \
  > "$root/etc/systemd/system/check.service"
chroot "$root" systemctl enable --quiet check.service
timeout 300 systemd-nspawn --quiet --register=no --keep-unit --private-network --directory "$root" --boot > "$root/boot.log" 2>&1 ||
  tail -n 5 "$root/boot.log" >&2
cat "$root/stage/result"
grep --quiet '^all right$' "$root/stage/result"
