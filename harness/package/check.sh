#!/usr/bin/env bash
# Installs the packages in a clean Debian, takes the time to a first answer, and removes them: harness/package/check.sh
# [FOLDER], with the .deb and the tarball of build.sh in FOLDER (target/package). Needs root and debootstrap; what runs has
# a network of its own with loopback only. BASE=FILE keeps the clean Debian as a tar archive and uses it the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."
packages=$(realpath "${1:-target/package}")
deb=$(echo "$packages"/*.deb)
tarball=$(echo "$packages"/*.tar.gz)
base=${BASE:-target/package-base.tar}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

fail() {
  echo "check.sh: $*" >&2
  exit 1
}

clean_debian() {
  if [ ! -e "$base" ]; then
    mkdir -p "$(dirname "$base")"
    debootstrap --variant=minbase bookworm "$root" >&2
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar --directory "$root" --create --file "$base" .
  else
    tar --directory "$root" --extract --file "$base"
  fi
}

# A command within, without the network; its home is /user.
within() {
  # The loopback device of a new network namespace is down.
  unshare --net --mount --pid --fork --mount-proc -- bash -c '
    ip link set lo up
    mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc"
    exec chroot "$0" /usr/bin/env -i HOME=/user PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      TERM=dumb LC_ALL=C.UTF-8 HF_HUB_OFFLINE="${OFFLINE:-1}" "$@"' "$root" "$@"
}

# All files but those that every installation writes.
files() {
  (cd "$root" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./dev -o -path ./tmp -o -path ./stage -o -path ./packages \
    -o -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache/ldconfig \) -prune -o -print | LC_ALL=C sort)
}

check_same() {
  files > "$root/stage/after"
  diff "$root/stage/before" "$root/stage/after" || fail "$1 left or removed files"
}

# What both packages must do.
check_use() {
  within hearth --version
  within hearth doctor --json > "$root/stage/doctor.json"
  grep -q '"can_serve": true' "$root/stage/doctor.json" || fail "hearth doctor: $(cat "$root/stage/doctor.json")"
  local start=$SECONDS answer
  answer=$(within hearth run --seed 1 "What is the capital of France?")
  [ -n "$answer" ] || fail "hearth run printed nothing"
  echo "hearth run answered: $answer ($((SECONDS - start)) s)"
}

clean_debian
mkdir -p "$root/packages" "$root/user" "$root/stage"
cp "$deb" "$tarball" "$root/packages/"
files > "$root/stage/before"

echo "== the .deb: $(basename "$deb")"
start=$SECONDS
within dpkg --install "/packages/$(basename "$deb")"
check_use
for file in /usr/lib/systemd/system/hearth.service /usr/lib/systemd/system/hearth.socket /etc/hearth/hearth.toml \
  /usr/share/bash-completion/completions/hearth; do
  [ -s "$root$file" ] || fail "$file is missing"
done
[ "$(stat -c %a "$root/etc/hearth/keys")" = 600 ] || fail "/etc/hearth/keys is readable by others"
# The clean Debian has no systemd, so that of this machine reads the units, with a program that it has.
mkdir "$root/stage/units"
for unit in hearth.service hearth.socket; do
  sed 's|/usr/bin/hearth|/bin/true|' "$root/usr/lib/systemd/system/$unit" > "$root/stage/units/$unit"
done
systemd-analyze verify --man=no "$root"/stage/units/hearth.* || fail "the units are wrong"
systemd-analyze security --offline=true --threshold=25 "$root/stage/units/hearth.service" > "$root/stage/security" ||
  fail "the service is exposed: $(tail -n 1 "$root/stage/security")"
tail -n 1 "$root/stage/security"
within dpkg --purge hearth
rm -rf "$root/user/.cache" "$root/user/.local"
check_same "the .deb"
echo "== the .deb took $((SECONDS - start)) s"

echo "== the tarball: $(basename "$tarball")"
start=$SECONDS
within bash -c "cd /stage && tar -xf /packages/*.tar.gz && /stage/hearth-*/install.sh --service && rm -rf /stage/hearth-*"
check_use
grep -q '^ExecStart=/usr/local/bin/hearth' "$root/etc/systemd/system/hearth.service" || fail "the unit starts something else"
within /usr/local/share/hearth/uninstall.sh --purge
check_same "the tarball"
echo "== the tarball took $((SECONDS - start)) s"
