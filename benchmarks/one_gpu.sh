#!/usr/bin/env bash
# What README.md has on one H200, in one go of half an hour: peers, sampling ahead, 8 bits, kernels.
#
#   bash benchmarks/one_gpu.sh FOLDER             # records go to FOLDER/*.jsonl
#   CASES="trl-qwen7b decoding" bash … FOLDER    # these alone
#
# Each case has its own limit in seconds, and none begins after END_S (default 1600).
set -uo pipefail
out=$(realpath -m "$1")
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}

run() { # name, limit, command
  local name=$1 limit=$2
  shift 2
  [[ -n ${CASES:-} && " $CASES " != *" $name "* ]] && return
  ((SECONDS < ${END_S:-1600})) || { echo "$SECONDS $name is left out"; return; }
  echo "$SECONDS $name begins"
  timeout --signal TERM --kill-after 30 "$((limit + 30))" "$@" >"$out/$name.log" 2>&1
  echo "$SECONDS $name ends with exit code $?"
}

grpo() { # name, limit, words of grpo.py
  local name=$1 limit=$2
  shift 2
  run "$name" "$limit" python3 benchmarks/grpo.py --out "$out/$name.jsonl" --work "$out/work" \
    --limit-s "$limit" "$@"
}

lag() { # name, limit of each variant, workload, steps, seeds, variants
  WORKLOADS=$3 STEPS=$4 SEEDS=$5 VARIANTS=$6 LIMIT_S=$2 run "$1" "$((3 * $2))" \
    bash benchmarks/lag_gpu.sh "$out" --unsaved
}

run kernels 60 python3 -m pytest -q tests/graph_kernels.py
lag smollm2 110 smollm2 14 0 "lag0 overlap lag1-mps"
grpo trl-smollm2 120 --workload smollm2 --only trl --steps 8
grpo qwen1.5b 110 --workload qwen1.5b --only ours --steps 10 --unsaved
grpo trl-qwen1.5b 120 --workload qwen1.5b --only trl --steps 8
grpo qwen7b 240 --workload qwen7b --only ours --steps 7 --unsaved
grpo trl-qwen7b 260 --workload qwen7b --only trl --steps 6
grpo fp8-qwen7b 200 --workload qwen7b --only ours --steps 6 --unsaved generation.quantization=fp8
lag tail 110 tail 13 0 "lag0 overlap lag1-mps"
grpo learning 100 --workload learning --only ours --steps 60
grpo trl-learning 150 --workload learning --only trl --steps 60
run decoding 150 python3 benchmarks/decoding.py smollm2 qwen1.5b qwen7b --kernels --out "$out/decoding.jsonl"
run decoding-fp8 100 python3 benchmarks/decoding.py qwen7b --fp8 --out "$out/decoding.jsonl"
