#!/usr/bin/env bash
# Waiting for each step, overlap at lag 0 and sampling ahead, on H200s; lag.py is for the CPU.
#
#   bash benchmarks/lag_gpu.sh FOLDER           # one GPU, shared by engine and policy, both awake
#   GPUS=2 bash benchmarks/lag_gpu.sh FOLDER    # two, shared by both (colocated), then one for each
#
# WORKLOADS, SEEDS, VARIANTS and STEPS pick; "tail" is the 1.5B shape with log-normal lengths. What is
# typed after FOLDER goes to each run.
set -uo pipefail
out=$(realpath -m "$1")
shift
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit
shared=(generation.sleep=false)
if ((${GPUS:-1} == 2)); then
  variants="colocated lag0 lag1 lag2 lag4"
  shared+=(cluster.gpus_per_node=2 generation.num_engines_per_bundle=1)
else
  variants="lag0 overlap lag1 lag1-mps"
fi
for workload in ${WORKLOADS:-learning tail}; do
  name=$workload options=("${shared[@]}")
  if [[ $workload == tail ]]; then
    name=qwen1.5b
    options+=("generation.backend=$PWD/benchmarks/long_tail.py:KIND" generation.max_new_tokens=1024)
  fi
  for variant in ${VARIANTS:-$variants}; do
    of_variant=()
    case $variant in
    overlap) of_variant=(rollout.overlap=true cluster.mps=true) ;;
    lag*)
      lag=${variant#lag}
      of_variant=("rollout.max_lag=${lag%-mps}")
      [[ $variant == *-mps ]] && of_variant+=(cluster.mps=true)
      ((${GPUS:-1} == 2)) && of_variant+=(cluster.num_generation_workers=1)
      ;;
    esac
    for seed in ${SEEDS:-0 1}; do
      python3 benchmarks/grpo.py --workload "$name" --seed "$seed" --only ours \
        ${STEPS:+--steps "$STEPS"} --limit-s "${LIMIT_S:-300}" --work "$out/work" \
        --out "$out/$workload-$seed-${GPUS:-1}gpu-$variant.jsonl" "${options[@]}" "${of_variant[@]}" "$@"
    done
  done
done
