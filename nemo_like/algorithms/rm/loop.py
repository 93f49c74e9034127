"""Training a reward model on given pairs: a scalar head that scores the chosen completion higher.

The model is the language model with one number in place of its vocabulary, read at the last token
of prompt and completion; the loss is Bradley-Terry's (``losses/preference.py``). What is exported
is transformers' own model for sequence classification with one label. Left out here: tensor,
context and pipeline parallelism, which the scalar head does not know.
"""

from nemo_like.algorithms.rm.config import RewardModelConfig
from nemo_like.algorithms.session import Session
from nemo_like.algorithms.texts import restore, start_texts
from nemo_like.data import preferences
from nemo_like.losses.preference import RewardModelLoss


def run(config: RewardModelConfig, session: Session) -> None:
    """From a run's processes to a trained model in ``run.dir``."""
    live = start_texts(config, session, preferences.load, output="values")
    restore(config, live)
    live.steps(RewardModelLoss(config.loss))
    session.finish({"final": live.policy})
