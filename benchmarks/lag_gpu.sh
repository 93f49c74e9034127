#!/usr/bin/env bash
# One H200: waiting for each step, overlap at lag 0, and lag 1; see lag.py for the CPU.
#
#   bash benchmarks/lag_gpu.sh FOLDER
#
# Each variant writes a table and a file of records; engine and policy share the GPU, both awake.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
mkdir -p "$out"
for workload in smollm2 qwen1.5b; do
  for seed in 0 1; do
    for variant in max_lag=0 overlap=true max_lag=1; do
      python benchmarks/grpo.py --workload "$workload" --seed "$seed" --only ours \
        --out "$out/$workload-$seed-$variant.jsonl" generation.sleep=false "rollout.$variant"
    done
  done
done
