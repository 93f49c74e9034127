"""nemo-like: reinforcement learning and post-training of language models on Ray.

``nl.grpo(...)`` and its like run from Python; see ``nemo_like.api``. Importing the package imports
neither torch nor Ray: names below come when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_like.algorithms.distillation.config import DistillationConfig as DistillationConfig
    from nemo_like.algorithms.distillation.config import (
        OffPolicyDistillationConfig as OffPolicyDistillationConfig,
    )
    from nemo_like.algorithms.dpo.config import DPOConfig as DPOConfig
    from nemo_like.algorithms.eval.config import EvalConfig as EvalConfig
    from nemo_like.algorithms.grpo.config import GRPOConfig as GRPOConfig
    from nemo_like.algorithms.ppo.config import PPOConfig as PPOConfig
    from nemo_like.algorithms.rm.config import RewardModelConfig as RewardModelConfig
    from nemo_like.algorithms.sft.config import SFTConfig as SFTConfig
    from nemo_like.api import RunResult as RunResult
    from nemo_like.api import distill as distill
    from nemo_like.api import distill_texts as distill_texts
    from nemo_like.api import dpo as dpo
    from nemo_like.api import eval as eval
    from nemo_like.api import grpo as grpo
    from nemo_like.api import ppo as ppo
    from nemo_like.api import rm as rm
    from nemo_like.api import sft as sft
    from nemo_like.api import train as train
    from nemo_like.errors import RunError as RunError
    from nemo_like.errors import UserError as UserError

__version__ = "0.1.0"

_API = "RunResult distill distill_texts dpo eval grpo ppo rm sft train"
_MODULES = {
    **dict.fromkeys(_API.split(), "api"),
    **dict.fromkeys(("RunError", "UserError"), "errors"),
    "DistillationConfig": "algorithms.distillation.config",
    "OffPolicyDistillationConfig": "algorithms.distillation.config",
    "DPOConfig": "algorithms.dpo.config",
    "EvalConfig": "algorithms.eval.config",
    "GRPOConfig": "algorithms.grpo.config",
    "PPOConfig": "algorithms.ppo.config",
    "RewardModelConfig": "algorithms.rm.config",
    "SFTConfig": "algorithms.sft.config",
}
"""Where each name is; an editor reads the imports above."""

if not TYPE_CHECKING:  # which would take any name for known

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'nemo_like' has no attribute {name!r}")
        return getattr(importlib.import_module(f"nemo_like.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
