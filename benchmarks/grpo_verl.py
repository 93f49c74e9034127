"""verl's GRPO on a workload: FSDP2 trainer and vLLM on one GPU, one optimizer step a batch.

    python benchmarks/grpo_verl.py --workload smollm2 --out verl.jsonl

For verl 0.9.1, which must be installed with its flash-attn. Settings are for speed on one GPU that
has the memory: float32 master weights and bfloat16 compute, packed rows, dynamic micro-batches, and
an engine that stays awake. Large workloads put the engine to sleep, checkpoint activations and keep
the optimizer's states on the host. The engine's logprobs are those of the old policy, as in this
project, so no pass is made for them.

verl looks for a finished rollout every two seconds, which no setting reaches. ``--poll`` sets
VERL_POLL_INTERVAL, for an installation whose ``replay_buffer.py`` was changed to read it.

A record a step, from the end of one to the end of the next.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, Inputs, Workload, add_arguments, prepare, read_rows

HERE = Path(__file__).resolve().parent
MOST_PROMPT_TOKENS = 256
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:(\d+) - (.*)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--poll", type=float, help="seconds between looks at a rollout")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    args, more = parser.parse_known_args()
    workload = WORKLOADS[args.workload]
    args.steps = args.steps or workload.steps
    inputs = prepare(workload, args.work, args.steps, args.seed)
    settings = [*verl_settings(workload, inputs, args), *more]
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), *_paths()]), COLUMNS="200")
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1"}
    if args.poll is not None:
        variables["VERL_POLL_INTERVAL"] = str(args.poll)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    sys.exit(run(command, variables, args.out, workload.num_completions))


def verl_settings(workload: Workload, inputs: Inputs, args: argparse.Namespace) -> list[str]:
    """Overrides of verl's configuration; writes its data beside ``args.out``."""
    import pandas

    rows = [
        {
            "data_source": workload.reward,
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"prompt": row["prompt"]},
        }
        for row in read_rows(inputs.prompts)
    ]
    data = args.out.resolve().with_suffix(".parquet")
    pandas.DataFrame(rows).to_parquet(data)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    model = "actor_rollout_ref.model"
    large = str(workload.is_large).lower()
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "algorithm.rollout_correction.bypass_mode=true",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={workload.num_prompts}",
        f"data.max_prompt_length={MOST_PROMPT_TOKENS}",
        f"data.max_response_length={workload.max_new_tokens}",
        "data.shuffle=false",
        "data.dataloader_num_workers=0",
        f"{model}.path={inputs.model}",
        f"{model}.use_remove_padding=true",
        f"{model}.enable_gradient_checkpointing={large}",
        f"+{model}.override_config.attn_implementation=flash_attention_2",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.strategy=fsdp2",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"{actor}.fsdp_config.dtype=bfloat16",
        f"{actor}.fsdp_config.reshard_after_forward={large}",
        f"{actor}.fsdp_config.optimizer_offload={large}",
        f"{actor}.ppo_mini_batch_size={workload.num_prompts}",
        f"{actor}.ppo_epochs=1",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={workload.verl_tokens}",
        f"{actor}.use_kl_loss=false",
        f"{actor}.entropy_coeff=0",
        f"{actor}.use_torch_compile=true",
        f"{actor}.optim.lr={workload.lr}",
        f"{actor}.optim.weight_decay=0.0",
        f"{rollout}.name=vllm",
        f"{rollout}.n={workload.num_generations}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.temperature=1.0",
        f"{rollout}.gpu_memory_utilization={args.gpu_memory_utilization}",
        f"{rollout}.free_cache_engine={large}",
        f"{rollout}.max_model_len={MOST_PROMPT_TOKENS + workload.max_new_tokens}",
        f"{rollout}.enforce_eager=false",
        f"{rollout}.max_num_seqs=1024",
        f"{rollout}.max_num_batched_tokens=16384",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.agent.num_workers=4",
        f"{rollout}.log_prob_use_dynamic_bsz=true",
        f"{rollout}.log_prob_max_token_len_per_gpu={2 * workload.verl_tokens}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=4",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.logger=[console]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={args.steps}",
        "trainer.total_epochs=100",
        f"trainer.default_local_dir={args.out.resolve().parent}/checkpoints",
        f"hydra.run.dir={args.out.resolve().parent}",
        "hydra.output_subdir=null",
    ]


def run(command: list[str], variables: dict[str, str], out: Path, num_completions: int) -> int:
    """Pass its output on, and append what it says of each step to ``out``; its exit code."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    last = None
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        numbers = step_numbers(line)
        if numbers is None:
            continue
        now = time.perf_counter()
        if last is not None:
            numbers["wall_s"] = now - last
        last = now
        numbers["tokens"] = numbers.pop("mean_tokens") * num_completions
        with out.open("a") as file:
            file.write(json.dumps(numbers) + "\n")
    return process.wait()


def step_numbers(line: str) -> dict[str, Any] | None:
    """The record of a step of which verl's console logger tells; None of another line."""
    found = _STEP.search(_COLOURS.sub("", line))
    if found is None:
        return None
    values: dict[str, float] = {}
    for part in found[2].split(" - "):
        name, _, value = part.strip().rpartition(":")
        try:
            values[name] = float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", value))
        except ValueError:
            continue
    return {
        "step": int(found[1]),
        "wall_s": values.get("timing_s/step", 0.0),
        "generation_s": values.get("timing_s/gen", 0.0),
        "refit_s": values.get("timing_s/update_weights", 0.0),
        "mean_tokens": values.get("response_length/mean", 0.0),
        "reward": values.get("critic/rewards/mean", 0.0),
        "numbers": values,
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """A reward function of ``workloads.py`` as verl calls it."""
    import workloads

    reward = getattr(workloads, data_source)
    return reward(extra_info["prompt"], solution_str, answer=ground_truth)


def _paths() -> list[str]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(one).resolve()) for one in given if one]


if __name__ == "__main__":
    main()
