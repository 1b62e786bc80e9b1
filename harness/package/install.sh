#!/bin/sh
# Installs Hearth from the folder of the unpacked tarball: ./install.sh [--service] [PREFIX]
# PREFIX is /usr/local for root and ~/.local for others. --service also sets up the systemd service, for root.
# PREFIX/share/hearth/uninstall.sh removes everything again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
service=no
[ "${1:-}" = --service ] && { service=yes; shift; }
if [ "$(id -u)" = 0 ]; then default=/usr/local; else default=$HOME/.local; fi
prefix=${1:-$default}
if [ $service = yes ] && [ "$(id -u)" != 0 ]; then
  echo "install.sh: --service needs root; use sudo ./install.sh --service" >&2
  exit 1
fi
# Makes a folder, and lists those that were missing: only they are removed again.
made=$(mktemp)
make() {
  [ ! -d "$1" ] || return 0
  make "$(dirname "$1")"
  mkdir "$1"
  echo "$1" >> "$made"
}
while IFS= read -r file; do
  make "$(dirname "$prefix/${file#./}")"
  cp "$here/$file" "$prefix/${file#./}"
done < "$here/files"
cp "$here/files" "$prefix/share/hearth/files"
# An update finds its folders there and keeps the list.
cat "$made" >> "$prefix/share/hearth/folders"
rm -f "$made"
if [ $service = yes ]; then
  mkdir -p /etc/systemd/system /etc/hearth
  for unit in hearth.service hearth.socket; do
    sed "s|@BIN@|$prefix/bin|" "$prefix/share/hearth/systemd/$unit" > "/etc/systemd/system/$unit"
  done
  [ -e /etc/hearth/hearth.toml ] || cp "$prefix/share/hearth/hearth.toml" /etc/hearth/hearth.toml
  if [ ! -e /etc/hearth/keys ]; then
    (umask 077 && od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > /etc/hearth/keys && echo >> /etc/hearth/keys)
  fi
  [ ! -d /run/systemd/system ] || systemctl daemon-reload
  echo "the service is set up: systemctl enable --now hearth; its API key is in /etc/hearth/keys"
fi
echo "installed: $prefix/bin/hearth"
case ":$PATH:" in
  *":$prefix/bin:"*) ;;
  *) echo "$prefix/bin is not in PATH; add it, for example: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
