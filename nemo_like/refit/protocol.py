"""What a transport does: bring generation to the policy's weight version, or raise."""

from dataclasses import dataclass
from typing import Any, Protocol

from nemo_like.generation.generation import Generation
from nemo_like.policy.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RefitStats:
    """What one refit moved and where its time went."""

    num_bytes: int
    send_s: float
    load_s: float


class RefitTransport(Protocol):
    """Transports differ in how bytes travel; what is sent and what is checked is the same."""

    def sync(self, policy: Policy, generation: Generation[Any]) -> RefitStats:
        """Load the policy's current weights into every replica; all of them, or RunError."""
        ...

    def close(self) -> None:
        """Leave no file and no memory behind."""
        ...
