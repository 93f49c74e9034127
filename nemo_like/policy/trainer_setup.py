"""The setup of a rank of a model."""

from dataclasses import dataclass

from nemo_like.config.policy import Output, PolicyConfig
from nemo_like.planning.offload import MemoryNeeds


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    config: PolicyConfig
    model_path: str
    max_steps: int
    with_reference: bool = False
    output: Output = "logprobs"
    role: str = "policy"
    """``policy``, ``critic`` or ``teacher``: the section that names the model, and the process."""
    trains: bool = True
    """False: a model without gradients and optimizer."""
    log_dir: str = "."
    num_threads: int = 1
    timeout_s: float = 600.0
    """Time limit of collectives."""
    refit_timeout_s: float = 600.0
    """Time limit of each wait for an engine."""
    memory: MemoryNeeds | None = None
    """Predicted memory of a rank on a GPU, where the formulas cover the model."""
    ranks_per_node: int = 1
    """Most ranks of the model that share a node's memory."""
