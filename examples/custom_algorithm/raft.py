"""RAFT (arXiv:2304.06767): sample, keep the best completions of each prompt, fine-tune on them.

python examples/custom_algorithm/raft.py [key=value ...]; see --help.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from nemo_like.cli import train
from nemo_like.config.run import Algorithm
from nemo_like.config.sampling import SamplingLoop, SamplingRunConfig
from nemo_like.config.section import Count


class RaftSection(SamplingLoop):
    """The loop of RAFT."""

    num_kept: Count = 2
    """Completions of each prompt that train: those with the highest rewards."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Something is left out."""
        yield from super().rules(here, run)
        if self.num_kept >= self.num_generations_per_prompt:
            yield (
                f"{here}.num_kept={self.num_kept} must be below {here}.num_generations_per_prompt="
                f"{self.num_generations_per_prompt}, or nothing is chosen; raise that."
            )


class RaftConfig(SamplingRunConfig):
    """Configuration of RAFT."""

    section: ClassVar[str] = "raft"

    raft: RaftSection = RaftSection()


def run(config: RaftConfig, session: Any) -> None:
    """From a run's processes to a trained model in ``run.dir``."""
    # Imported here, as torch comes with them: a command line that is only checked needs none.
    from nemo_like.algorithms.policy_gradient import training_metrics
    from nemo_like.algorithms.sampling import start_sampling
    from nemo_like.batch import keys
    from nemo_like.losses.cross_entropy import CrossEntropyLoss

    live, loss = start_sampling(config, session), CrossEntropyLoss()
    for _, batch, metrics in live.batches():
        rows = batch.rows
        rows[keys.SAMPLE_MASK] = rows[keys.SAMPLE_MASK] & best_of_each(
            rows[keys.REWARDS], rows[keys.GROUP_IDS], config.raft.num_kept
        )
        with session.run.span("train"):
            trained = live.policy.train(batch, loss, check=live.mismatch_check())
        live.log(metrics | training_metrics(batch) | trained)
    session.finish({"final": live.policy})


def best_of_each(rewards: Any, prompts: Any, count: int) -> Any:
    """Bool [B]: the ``count`` highest of ``rewards`` [B] among the rows of each prompt [B]."""
    best = rewards.new_zeros(len(rewards), dtype=bool)
    for prompt in prompts.unique():
        rows = (prompts == prompt).nonzero(as_tuple=True)[0]
        best[rows[rewards[rows].nan_to_num(-float("inf")).argsort(descending=True)[:count]]] = True
    return best


ALGORITHM = Algorithm(name="raft", config=RaftConfig, run=run)

if __name__ == "__main__":
    train(ALGORITHM)
