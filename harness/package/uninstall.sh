#!/bin/sh
# Removes what install.sh installed, with the service and its settings: share/hearth/uninstall.sh [--purge]
# --purge also removes the user's compiled kernels, kept messages and client settings. Downloaded models stay, as other
# programs share their cache: `hearth list` and `hearth rm` before, or remove ~/.cache/huggingface.
set -eu
purge=no
[ "${1:-}" = --purge ] && purge=yes
own=$(cd "$(dirname "$0")" && pwd)
prefix=${own%/share/hearth}
if [ -e /etc/systemd/system/hearth.service ] && grep -qF "ExecStart=$prefix/bin/hearth" /etc/systemd/system/hearth.service; then
  if [ -d /run/systemd/system ]; then systemctl disable --now hearth.service hearth.socket || true; fi
  rm -f /etc/systemd/system/hearth.service /etc/systemd/system/hearth.socket
  rm -rf /etc/hearth /var/cache/private/hearth /var/cache/hearth /var/lib/private/hearth /var/lib/hearth
  if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
fi
folders=$(LC_ALL=C sort -r "$own/folders")
while IFS= read -r file; do
  rm -f "$prefix/${file#./}"
done < "$own/files"
rm -f "$own/files" "$own/folders"
# Those that the installation made, the deepest first, unless others use them now.
echo "$folders" | while IFS= read -r folder; do
  rmdir "$folder" 2>/dev/null || true
done
if [ $purge = yes ]; then
  rm -rf "${XDG_CACHE_HOME:-$HOME/.cache}/hearth" "${XDG_STATE_HOME:-$HOME/.local/state}/hearth" \
    "${XDG_CONFIG_HOME:-$HOME/.config}/hearth"
fi
echo "removed from $prefix"
