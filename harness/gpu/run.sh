#!/usr/bin/env bash
# Checks correctness and speed on a machine with an NVIDIA GPU, and prints a short table.
#
#   harness/gpu/run.sh [PART...]     parts: tests sanitizer bench class file http; all of them without any
#
# Needs a driver, libnvrtc (`pip install nvidia-cuda-nvrtc`), Python 3; the sanitizer part needs compute-sanitizer,
# without which it is skipped. Environment:
#   MODEL=qwen3.5-27b:q4_k_m   the measured model; qwen3.5-9b:q4_k_m and smaller fit any GPU
#   DRAFT=q8_0                 weight type of the random-weight draft; empty for none
#   DEPTHS=512,4096,32768      committed tokens before the measured steps
#   BIN=DIR                    `hearth` and the test binaries (suite.py --names) are there; without it cargo builds them
#   CLASS=sm_86               part class runs tests and benches with the kernels of this class of home GPUs
#   LANES=8                    tests at once
#   OUT=DIR                    logs and JSON lines go there (default: a temporary folder, named at the end)
#   SANITIZER=FILE             compute-sanitizer, as of 2026.3 if it can be (`pip install nvidia-cuda-sanitizer-api==13.4.92`)
#   FILES=DIR                  where a GGUF file of MODEL is written for the file part (as large as the model)
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
model=${MODEL:-qwen3.5-27b:q4_k_m} draft=${DRAFT-q8_0} depths=${DEPTHS:-512,4096,32768}
out=${OUT:-$(mktemp -d)} files=${FILES:-${TMPDIR:-/tmp}}
parts=" ${*:-tests sanitizer bench class file http} "
mkdir -p "$out"
out=$(realpath "$out")
failures=0

row() { # what, result, seconds, detail
  printf '%-28s %-7s %6s s  %s\n' "$1" "$2" "$3" "$4" | tee -a "$out/table"
  [ "$2" = FAILED ] && failures=$((failures + 1))
  return 0
}
timed() { # what, log, command...: a row for a command; its log is kept
  local what=$1 log=$out/$2.log begun=$SECONDS
  shift 2
  if "$@" >"$log" 2>&1; then row "$what" ok $((SECONDS - begun)) ""; else row "$what" FAILED $((SECONDS - begun)) "$log"; fi
}
wants() { [[ $parts == *" $1 "* ]]; }

if [ -n "${BIN:-}" ]; then
  hearth=$BIN/hearth
  binary() { echo "$BIN/$1"; }
else
  cargo build --release -p server --bin hearth || exit 1
  hearth=$root/target/release/hearth
  binary() { # the path of a test binary, by the name that suite.py has for it
    local crate=cuda name=$1
    [ "$1" = server_ember ] && crate=server name=ember
    cargo test --release -p $crate --test $name --no-run 2>&1 | sed -n 's/.*(\(.*\)).*/\1/p' | tail -1
  }
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/table"

suite() { # name: every test binary; a row in the table
  local begun=$SECONDS name=$1
  mkdir -p "$out/bin" "$out/$name"
  for test in $(python3 harness/gpu/suite.py --names); do ln -sf "$(realpath "$(binary "$test")")" "$out/bin/$test"; done
  python3 harness/gpu/suite.py "$out/bin" "$out/$name" --lanes "${LANES:-8}" | tee -a "$out/table"
  if [ "${PIPESTATUS[0]}" -eq 0 ]; then row "$name" ok $((SECONDS - begun)) ""; else row "$name" FAILED $((SECONDS - begun)) "$out/$name"; fi
}
if wants tests; then suite tests; fi

# racecheck_repro.cu shows what each version of racecheck follows. 2026.3 follows all handovers except one, a lane that
# arrives for its warp, and does not check reads before a bulk copy. 2025.3 does not follow bar.arrive either, so its
# reports on kernels that use it are counted separately. 2026.4 also requires a proxy fence between reads by threads and
# a bulk copy to the same memory; this script does not check that.
cases="cpu_reference short_run_covers_every_pass
cpu_reference short_run_covers_other_weight_kinds
batch_invariance eager_steps_equal_graph_replays --launch-count 40
fused_layer fused_layer_is_deterministic --launch-count 2
fused_layer fused_layer_of_data_parallel_tiles_is_deterministic --launch-count 2
gated_delta_row delta_tree_nodes_of_several_sequences_equal_single_row_steps --launch-count 60
gated_delta_row delta_tree_without_clusters_has_the_same_bits --launch-count 60
gated_delta_row fused_delta_row_equals_separate_launches --launch-count 30
gated_delta delta_trees_of_several_sequences_share_a_launch --launch-count 24
gated_delta delta_tree_nan_node_reaches_only_its_descendants --launch-count 24
gated_delta delta_layer_matches_composed_references --launch-count 40
gated_delta_chunk delta_chunk_boundaries_at_multiples_of_64_change_no_bit --launch-count 24
attention_batch_invariance tree_node_attention_equals_single_token_attention --launch-count 16
attention_batch_invariance windowed_tree_node_attention_equals_single_token_attention --launch-count 16
attention tree_attention_over_q8_0_matches_reference --launch-count 24
prefill_attention prefill_attention_row_bits_do_not_depend_on_the_chunk --launch-count 24
prefill_gemm prefill_gemm_row_bits_do_not_depend_on_the_chunk --launch-count 24
mtp_kernels hidden_rows_are_kept_at_their_places --launch-count 24
mtp_kernels joined_inputs_match_the_reference --launch-count 24
mtp_kernels rows_drafted_depth_by_depth_attend_to_their_ancestors --launch-count 24
moe experts_of_a_step_match_the_reference --launch-count 24
moe experts_of_a_chunk_match_the_reference --launch-count 24
gemm_small_batch row_bits_do_not_depend_on_the_other_rows --launch-count 24
rows logits_reduction_matches_reference --launch-count 24
mass edited_rows_have_the_masses_of_their_edits --launch-count 24
norm rms_norm_matches_reference --launch-count 24"
if wants sanitizer; then
  sanitizer=${SANITIZER:-$(command -v compute-sanitizer)}
  if [ -n "$sanitizer" ]; then
    unknown=none
    "$sanitizer" --version | grep 'Version 202[0-5]' >/dev/null && unknown='\(attn_prefill\|attn_decode_tree\)+'
    racecheck="--num-cuda-barriers 128"
    "$sanitizer" --tool racecheck --help | grep -e --racecheck-fence-proxy-async >/dev/null && racecheck="$racecheck --racecheck-fence-proxy-async no"
    for tool in memcheck racecheck; do
      while read -r name test options; do
        log=$out/$tool.$name.$test.log begun=$SECONDS
        [ $tool = racecheck ] && options="$options $racecheck"
        # shellcheck disable=SC2086
        "$sanitizer" --tool $tool --print-limit 1000 $options "$(binary "$name")" --exact "$test" --nocapture >"$log" 2>&1 </dev/null
        named=$(grep -ac '========= [A-Z].* \(at\|between\|by\|with\|reported\) ' "$log")
        unknown_races=$(grep -a 'Race reported' "$log" | grep -ac "$unknown")
        result=ok
        grep -aqE '1 passed; 0 failed' "$log" || result=FAILED
        [ $((named - unknown_races)) -eq 0 ] || result=FAILED
        row "$tool $name" $result $((SECONDS - begun)) "$test: $((named - unknown_races)) errors, $unknown_races more by bar.arrive"
      done <<<"$cases"
    done
    if command -v nvcc >/dev/null; then
      for handover in 0 1 2 3 4 5 6 7; do
        for plant in 0 1; do
          nvcc -arch=native -DHANDOVER=$handover -DPLANT=$plant harness/gpu/racecheck_repro.cu -o "$out/repro" &&
            row "repro $handover $plant" shown 0 "$("$sanitizer" --tool racecheck "$out/repro" | grep -a -e wrong -e SUMMARY | tr '\n' ' ')"
        done
      done
    fi
  else
    row sanitizer skipped 0 "no compute-sanitizer"
  fi
fi

bench() { # name, arguments...
  local name=$1
  shift
  timed "bench $name" "bench_$name" "$hearth" bench --device cuda --json "$out/lines.jsonl" "$@"
  grep -hE '^(case|pp|tg|verify|step|draft|mtp)' "$out/bench_$name.log" | tee -a "$out/table"
}
if wants bench; then
  bench first --synthetic "$model" ${draft:+--draft "$draft"} --depth "${depths%%,*}"
  # Without the first depth, deep contexts; kernels come from the cache now.
  [ "$depths" != "${depths#*,}" ] && bench deep --synthetic "$model" --pp 2048 --verify 1,24 --depth "${depths#*,}"
  bench small --synthetic qwen3.5-0.8b:bf16 --pp 512 --verify 1
fi

# What a home GPU runs, on a GPU of another class: tests of kernels that the class lacks are listed as skipped.
if wants class && [ "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)" = 9.0 ]; then
  export HEARTH_GPU_LIKE=${CLASS:-sm_86}
  suite "tests_$HEARTH_GPU_LIKE"
  bench "$HEARTH_GPU_LIKE" --synthetic "$model" ${draft:+--draft "$draft"} --depth "${depths%%,*}"
  bench "${HEARTH_GPU_LIKE}_82" --gpu-sms 82 --synthetic "$model" --pp 2048 --verify 1,16,24 --depth "${depths%%,*}"
  unset HEARTH_GPU_LIKE
fi

serve() { # arguments...: a server on $port, or an error
  port=$((20000 + RANDOM % 20000))
  "$hearth" serve "$@" --device cuda --port $port >"$out/serve.log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    curl -sf "http://127.0.0.1:$port/health" >/dev/null && return
    kill -0 $server 2>/dev/null || break
    sleep 0.1
  done
  row serve FAILED 0 "$(tail -1 "$out/serve.log")"
  return 1
}
stop() {
  kill -TERM $server
  wait $server
  cat "$out/serve.log" >>"$out/servers.log"
}

if wants file; then
  file=$files/card-$$.gguf
  # The mix of types that `bench --synthetic` measures.
  timed "write $model" synth "$hearth" synth "$model-published" "$file"
  cat "$file" >/dev/null # from the page cache, as the goal for loading is stated
  bench file "$file" --pp 2048 --verify 1,24 --depth "${depths%%,*}"
  grep -h "model opened" "$out/bench_file.log" | tee -a "$out/table"
  if serve "$file" --max-ctx 4096 --no-speculation; then
    python3 harness/gpu/client.py $port rate 160 170 | tee -a "$out/table"
    stop
  fi
  size=$(stat -c %s "$file")
  for limit in $((size / 2)) $((size + (size / 4))); do
    if "$hearth" bench "$file" --device cuda --vram-limit $limit --pp 0 --tg 8 --verify '' >"$out/limit.log" 2>&1; then
      row "limit $limit" fits 0 "$(grep -h '^tg' "$out/limit.log" | head -1)"
    else
      row "limit $limit" refused 0 "$(grep -h 'error' "$out/limit.log" | head -1)"
    fi
  done
  rm -f "$file"
fi

if wants http; then
  timed "run" run bash -c '"$0" run --device cuda --temperature 0 "What is 23 + 45?" | grep 68' "$hearth"
  if serve; then
    python3 harness/gpu/client.py $port chat | tee -a "$out/table"
    python3 harness/gpu/client.py $port rate 160 200 | tee -a "$out/table"
    stop
  fi
fi

grep -q 'FAILED' "$out/table" && failures=$((failures + 1))
echo "logs and JSON lines: $out"
[ $failures -eq 0 ]
