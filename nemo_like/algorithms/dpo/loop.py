"""Direct preference optimization (arXiv:2305.18290) and its relatives, on given pairs.

Each pair's loss is a function of how much more the policy prefers the chosen completion to the
rejected one than the reference does (``losses/preference.py``: sigmoid, IPO, hinge, smoothed,
length-normalised, reference-free, with an SFT term). The reference is the model that training
begins with. Left out here: pairs sampled during training, references that follow the policy.
"""

from nemo_like.algorithms.dpo.config import DPOConfig
from nemo_like.algorithms.session import Session
from nemo_like.algorithms.texts import Texts, in_parts, restore, start_texts
from nemo_like.batch import keys
from nemo_like.data import preferences
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.preference import PreferenceLoss


def run(config: DPOConfig, session: Session) -> None:
    """From a run's processes to a trained model in ``run.dir``."""
    live = start_texts(config, session, preferences.load)
    if not config.loss.reference_free:
        with session.run.start_phase("reference"):
            score_by_reference(live)
    restore(config, live)
    live.steps(PreferenceLoss(config.loss))
    session.finish({"final": live.policy})


def score_by_reference(live: Texts) -> None:
    """Score the rows with the policy as it is: before its first step, and before a checkpoint is
    restored, it is the reference."""

    def scored(batch: RemoteBatch) -> RemoteBatch:
        return in_parts(batch, lambda part: live.policy.score(part, keys.REFERENCE_LOGPROBS))

    live.train = scored(live.train)
    if live.held_out is not None:
        live.held_out = scored(live.held_out)
