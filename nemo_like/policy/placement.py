"""Where a rank keeps its optimizer's state: as configured, or as its GPU has room."""

import logging
from dataclasses import replace

import psutil
import torch

from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.planning.model_shape import GIB
from nemo_like.planning.offload import MemoryNeeds, Placement, choose

logger = logging.getLogger(__name__)

_SPARED = 0.1
"""Share of a node's free memory that offloading leaves to all else."""


def place_state(
    config: PolicyConfig, of_rank: MemoryNeeds | None, ranks_per_node: int, device: torch.device
) -> Placement:
    """Decide, and check that the host has the memory; UserError if it does not.

    ``of_rank``: None for models that the formulas do not cover, or that do not train.
    """
    if device.type != "cuda":
        return Placement(offload="none" if config.offload == "auto" else config.offload)
    found = Placement(offload=config.offload)
    if config.offload == "auto":
        found = choose(config, of_rank, torch.cuda.get_device_properties(device).total_memory)
    if found.offload != "none" and of_rank is not None:
        check_host_memory(of_rank.on_host, ranks_per_node, f"policy.offload={config.offload}")
        found = replace(found, host_bytes=of_rank.on_host)
    return found


def log_placement(placement: Placement) -> None:
    """Say what ``auto`` chose, and what is predicted not to fit."""
    if placement.reason:
        logger.info("policy.offload=auto: %s, as %s.", placement.offload, placement.reason)
    if placement.host_bytes:
        size = placement.host_bytes / GIB
        logger.info("policy.offload: each rank keeps %.1f GiB in host memory.", size)
    if placement.too_small:
        logger.warning(
            "The GPU is predicted to be too small; lower policy.micro_batch_tokens, or set "
            "policy.activation_checkpointing=full, policy.optimizer.moments=bfloat16 or "
            "policy.offload=all."
        )


def check_host_memory(num_bytes: float, ranks_per_node: int, key: str) -> None:
    """Raise UserError unless ``ranks_per_node`` ranks of this node can each have ``num_bytes``."""
    free = psutil.virtual_memory().available * (1 - _SPARED)
    if num_bytes * ranks_per_node > free:
        raise UserError(
            f"{key} keeps {num_bytes * ranks_per_node / GIB:.1f} GiB of optimizer state in the "
            f"memory of each node ({ranks_per_node} rank(s)), and {free / GIB:.1f} GiB may be used "
            "there; set policy.optimizer.moments=bfloat16 or int8, or use more nodes."
        )
