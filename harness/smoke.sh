#!/usr/bin/env bash
# The executable as a user meets it. Usage: smoke.sh path/to/hearth
# Every step must succeed and leave what it promises; the server must answer, stream and stop cleanly.
set -euo pipefail
hearth=$(realpath "$1")
dir=$(mktemp -d)
server=
cleanup() {
  [ -n "$server" ] && kill "$server" 2>/dev/null || true
  rm -rf "$dir"
}
trap cleanup EXIT
cd "$dir"

fail() {
  echo "smoke: $*" >&2
  exit 1
}
expect() { # what, needle, haystack
  grep -qF -- "$2" <<<"$3" || fail "$1: no '$2' in: $3"
}

"$hearth" synth tiny-hybrid:bf16 bf16.gguf
"$hearth" quantize bf16.gguf q4.gguf q4_k_m
expect inspect Q4_K "$("$hearth" inspect q4.gguf)"
ids=$(printf 'Hello world <|im_end|>' | "$hearth" tokenize q4.gguf)
[[ $ids =~ ^\[[0-9]+(,[0-9]+)*\]$ ]] || fail "tokenize printed: $ids"
echo "$ids" >ids.json
"$hearth" eval q4.gguf --ids ids.json --logits logits.npy --greedy 4 --out-ids out.json
[ "$(head -c 6 logits.npy | tail -c 5)" = NUMPY ] || fail "eval wrote no NumPy file"
[[ $(cat out.json) =~ ^\[[0-9]+(,[0-9]+){3}\]$ ]] || fail "eval --greedy wrote: $(cat out.json)"
"$hearth" eval bf16.gguf --cpu-reference --ids ids.json --logits reference.npy
"$hearth" run q4.gguf "Hello" -n 8 --seed 1 >answer.txt
head -c 100 bf16.gguf >cut.gguf
if message=$("$hearth" inspect cut.gguf 2>&1); then fail "a truncated file was accepted"; fi
expect "truncated file" cut.gguf "$message"

port=$(python3 -c 'import socket; free = socket.socket(); free.bind(("127.0.0.1", 0)); print(free.getsockname()[1])')
"$hearth" serve q4.gguf --port "$port" 2>server.log &
server=$!
for try in $(seq 1200); do
  curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 "$server" 2>/dev/null || fail "the server ended: $(cat server.log)"
  [ "$try" -lt 1200 ] || fail "the server was not ready within 120 s: $(cat server.log)"
  sleep 0.1
done
body='{"messages":[{"role":"user","content":"Hello"}],"max_tokens":8,"seed":1'
whole=$(curl -sf "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' -d "$body}")
expect "chat" '"object":"chat.completion"' "$whole"
expect "chat" '"usage"' "$whole"
stream=$(curl -sfN "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' -d "$body,\"stream\":true}")
expect "stream" '"object":"chat.completion.chunk"' "$stream"
expect "stream" 'data: [DONE]' "$stream"
expect "models" '"object":"list"' "$(curl -sf "http://127.0.0.1:$port/v1/models")"
expect "metrics" '# TYPE' "$(curl -sf "http://127.0.0.1:$port/metrics")"
kill -TERM "$server"
wait "$server" || fail "the server did not stop cleanly: $(cat server.log)"
server=
echo "smoke: all steps passed"
