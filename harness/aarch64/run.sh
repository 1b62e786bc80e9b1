#!/usr/bin/env bash
# Hearth for 64-bit Arm, without such a machine: the workspace is cross-compiled, and the tests of the CPU path run under
# QEMU's user emulation.
#   harness/aarch64/run.sh             builds, and runs what takes minutes
#   harness/aarch64/run.sh conformance also runs the properties of every device, which takes most of an hour
# Needs Debian or Ubuntu with rustup. Missing packages are installed, by sudo unless root runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=aarch64-unknown-linux-gnu
packages=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}
if ! dpkg --status "${packages[@]}" >/dev/null 2>&1; then
  as_root apt-get update
  as_root apt-get install --yes --no-install-recommends "${packages[@]}"
fi
rustup target add "$target"

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
# Under emulation, tests run on a processor of QEMU's list. `max` has dot products (sdot) and matrix products (smmla).
on() {
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $1 -L /usr/aarch64-linux-gnu"
}
step() {
  local start=$SECONDS
  echo "== $*"
  "$@"
  echo "== took $((SECONDS - start)) s"
}
tests() {
  step cargo test --locked --quiet --target "$target" "$@"
}

step cargo build --workspace --locked --target "$target"
# Kernels against the scalar ones, bit for bit: on a processor with all products of bytes, with dot products only, and with
# neither.
for processor in max neoverse-n1 cortex-a72; do
  on "$processor"
  tests -p cpu --lib
done
on max
tests -p contract -p decode -p model
# Not `truncation`, whose tests start themselves again, which the emulator does not do.
tests -p gguf --lib --test hostile --test round_trip --test split
tests -p cpu --test golden --test protocol --test properties --test windows
if [ "${1:-}" = conformance ]; then
  tests -p cpu --test conformance
fi
# The executable with the bundled model.
step qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu "target/$target/debug/hearth" \
  run --device cpu --max-ctx 512 --no-speculation --temperature 0 --thinking off -n 12 "Hello"
