#!/usr/bin/env bash
# Makes a .deb and a tarball of Hearth, the same bytes from the same executable and commit.
#   harness/package/build.sh                 builds the executable first
#   harness/package/build.sh EXECUTABLE      packs this one
# They lie in $OUT, target/package by default. Needs dpkg-deb, GNU tar and binutils.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-target/package}
executable=${1:-}
if [ -z "$executable" ]; then
  cargo build --release --locked
  executable=target/release/hearth
fi
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
version=$("$executable" --version | awk '{ print $2 }')
machine=$(uname -m)
rm -rf "$out"
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What both have, below a prefix: the executable, its man pages, the completions of shells, documents, units.
tree() {
  local prefix=$1 units=$2 bin=$3
  install -D -m 755 "$executable" "$prefix/bin/hearth"
  strip --strip-unneeded "$prefix/bin/hearth"
  mkdir -p "$prefix/share/man/man1"
  "$executable" man --dir "$prefix/share/man/man1"
  gzip -9n "$prefix"/share/man/man1/*.1
  local shell place
  for shell in bash:bash-completion/completions/hearth zsh:zsh/site-functions/_hearth \
    fish:fish/vendor_completions.d/hearth.fish; do
    place=$prefix/share/${shell#*:}
    mkdir -p "$(dirname "$place")"
    "$executable" completions "${shell%%:*}" > "$place"
  done
  install -D -m 644 README.md "$prefix/share/doc/hearth/README.md"
  install -D -m 644 crates/server/CHANGELOG.md "$prefix/share/doc/hearth/changelog.md"
  local unit
  for unit in hearth.service hearth.socket; do
    mkdir -p "$units"
    sed "s|/usr/local/bin/hearth|$bin/hearth|" "crates/server/service/$unit" > "$units/$unit"
  done
}

deb() {
  local root=$work/deb architecture size libc
  architecture=$(dpkg --print-architecture)
  tree "$root/usr" "$root/usr/lib/systemd/system" /usr/bin
  install -D -m 644 LICENSE "$root/usr/share/doc/hearth/copyright"
  gzip -9n "$root/usr/share/doc/hearth/changelog.md"
  install -D -m 644 crates/server/service/hearth.toml "$root/etc/hearth/hearth.toml"
  size=$(du -sk --apparent-size "$root" | cut -f1)
  libc=$(objdump -T "$root/usr/bin/hearth" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
  mkdir -p "$root/DEBIAN"
  cat > "$root/DEBIAN/control" <<CONTROL
Package: hearth
Version: $version
Architecture: $architecture
Maintainer: The authors of Hearth <hearth@localhost>
Installed-Size: $size
Depends: libc6 (>= ${libc#GLIBC_}), libgcc-s1
Recommends: python3-venv
Section: net
Priority: optional
Description: local LLM server for one GPU
 An OpenAI- and Anthropic-compatible API, a chat page and a chat on the terminal
 for language models in GGUF files, with speculative decoding. A GPU needs
 NVIDIA's driver and its kernel compiler; \`hearth doctor\` says how to get it.
CONTROL
  echo /etc/hearth/hearth.toml > "$root/DEBIAN/conffiles"
  install -m 755 harness/package/debian/{postinst,prerm,postrm} "$root/DEBIAN/"
  find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
  dpkg-deb --root-owner-group -Zxz --build "$root" "$out/hearth_${version}_$architecture.deb" >/dev/null
}

tarball() {
  local name=hearth-$version-$machine-linux
  local root=$work/$name
  tree "$root" "$root/share/hearth/systemd" @BIN@
  install -m 644 LICENSE "$root/share/doc/hearth/LICENSE"
  install -D -m 644 crates/server/service/hearth.toml "$root/share/hearth/hearth.toml"
  install -D -m 755 harness/package/uninstall.sh "$root/share/hearth/uninstall.sh"
  # Before the script that installs them: it is no part of what is installed.
  (cd "$root" && find . -type f | LC_ALL=C sort) > "$work/files"
  install -m 755 harness/package/install.sh "$root/install.sh"
  install -m 644 "$work/files" "$root/files"
  tar --directory "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    --format=gnu --create "$name" | gzip -9n > "$out/$name.tar.gz"
}

deb
tarball
(cd "$out" && sha256sum -- *.deb *.tar.gz | tee SHA256SUMS)
