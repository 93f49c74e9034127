"""Whether code that a model's folder brings along (``auto_map``) may run.

The decision is one for a run and all of its models. It travels in the environment of the run's own
processes, which the driver sets, whatever was there: every call that loads a model states it, so
that transformers never asks on stdin.
"""

import os

_VARIABLE = "NEMO_LIKE_TRUST_REMOTE_CODE"
TRUSTED = "trust_remote_code"
"""The decision's name in what a reward process is given."""


def set_trust(trusted: bool) -> None:
    """For this process, and those that it starts: ``policy.trust_remote_code`` of the run."""
    os.environ[_VARIABLE] = str(int(trusted))


def trusts_code() -> bool:
    """What every loader of transformers and vLLM takes for ``trust_remote_code``."""
    return os.environ.get(_VARIABLE) == "1"


def trust_variables() -> dict[str, str]:
    """The environment that tells a worker of this run."""
    return {_VARIABLE: str(int(trusts_code()))}
