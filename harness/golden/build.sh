#!/bin/sh
# Downloads and builds the reference implementations in a folder: a Python environment, the llama.cpp source
# and its native runtime, a strict ggml without multiply-add contraction, and the C programs of this folder.
#
#   build.sh FOLDER
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
work=$(cd "$1" && pwd)
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q -r "$here/requirements.txt"
export PATH="$work/venv/bin:$PATH"

pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 -d "$work/sdist"
tar -C "$work" -xzf "$work"/sdist/llama_cpp_python-0.3.36.tar.gz
ln -sfn "$work/llama_cpp_python-0.3.36/vendor/llama.cpp" "$work/llama.cpp"

off="-DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF
     -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_CURL=OFF -DCMAKE_BUILD_TYPE=Release"
# shellcheck disable=SC2086
cmake -G Ninja -S "$work/llama.cpp" -B "$work/build-native" $off -DGGML_NATIVE=ON
ninja -C "$work/build-native" llama
# shellcheck disable=SC2086
cmake -G Ninja -S "$work/llama.cpp" -B "$work/build-strict" $off -DGGML_NATIVE=OFF \
    -DCMAKE_C_FLAGS=-ffp-contract=off -DCMAKE_CXX_FLAGS=-ffp-contract=off
ninja -C "$work/build-strict" ggml-base

mkdir -p "$work/bin"
for program in bench_llama llama_quantize llama_logits; do
    cc -O2 -Wall -Wextra "$here/$program.c" -o "$work/bin/$program" \
        -I"$work/llama.cpp/include" -I"$work/llama.cpp/ggml/include" \
        -L"$work/build-native/bin" -lllama -lggml -lggml-base -Wl,-rpath,"$work/build-native/bin"
done
