"""Where the effect of a key is looked for: each function takes a configuration, and gives what its
last reader makes of it.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.launch.slurm import BatchJob, render_script
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.layout import bins_for_pipeline, parallel_sizes, stages_of_rank
from nemo_like.planning.resources import plan_run
from tests.key_loops import looped
from tests.key_steps import policy_steps


def placed(config: Any) -> Any:
    """Bundles, who sits in which, and what each rank of the policy is for."""
    plan = plan_run(config)
    sizes = parallel_sizes(config.policy, len(plan.policy))
    parallel = config.policy.parallel
    stages = [stages_of_rank(parallel, rank) for rank in range(parallel.pipeline_parallel_size)]
    return plan, sizes, stages, bins_for_pipeline(parallel)


def queued(config: Any) -> str:
    """The batch script that ``nemo-like slurm`` hands to Slurm."""
    job = BatchJob(name="run", config=config, commands=[["python"]], folder=Path("/mine"))
    return render_script(job, Path("ray.sbatch"))


def loop(config: Any) -> Any:
    """Everything that the run asks of its workers, and what it leaves in its folder."""
    with TemporaryDirectory() as folder:
        return looped(config, Path(folder))


def again(config: Any) -> Any:
    """The loop in the folder of a run that has ended."""
    with TemporaryDirectory() as folder:
        looped(config.replace(run=config.run.replace(resume=False)), Path(folder))
        return looped(config, Path(folder))


def trained(config: Any) -> Any:
    """Two steps of the policy's engine; of a model with scores where that is what trains."""
    output = "values" if config.section == "reward_model" else "logprobs"
    model = str(resolve_model(config.policy.model))
    return policy_steps(model, config.policy, output, config.max_steps or 4)


def critic_trained(config: PPOConfig) -> Any:
    """Two steps of the critic's engine."""
    critic = config.critic_policy
    model = str(resolve_model(critic.model))
    return policy_steps(model, critic, "values_before", config.max_critic_updates)
