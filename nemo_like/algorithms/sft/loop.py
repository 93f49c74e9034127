"""Supervised fine-tuning: the next-token loss on given conversations.

Rows come from ``data/conversations.py``, which says what of them trains; the loss is the mean of
-log p(token) over all trained tokens of a step, whatever their rows, ranks and micro-batches
(``losses/cross_entropy.py``). Left out here: a mean over rows instead of tokens, and sampling from
the model for validation (``nemo-like eval`` does that).
"""

from nemo_like.algorithms.session import Session
from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.algorithms.texts import restore, start_texts
from nemo_like.data import conversations
from nemo_like.losses.cross_entropy import CrossEntropyLoss


def run(config: SFTConfig, session: Session) -> None:
    """From a run's processes to a trained model in ``run.dir``."""
    live = start_texts(config, session, conversations.load)
    restore(config, live)
    live.steps(CrossEntropyLoss())
    session.finish({"final": live.policy})
