"""Environment variables of reward processes: a list of what they get, instead of everything.

A run's environment holds keys of trackers, hubs and clouds, and a reward function often runs code
that a model wrote.
"""

import os
import re
import sys
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from nemo_like.errors import UserError

_NAMES = (
    # Programs, folders and the user's language.
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP VIRTUAL_ENV CONDA_PREFIX",
    "LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME",
    # How Python runs.
    "PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONUNBUFFERED PYTHONWARNINGS",
    "PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONNOUSERSITE PYTHONUSERBASE",
    # Devices.
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME NVIDIA_VISIBLE_DEVICES",
    # Where models and data sets are, and whether they may be downloaded. No HF_TOKEN.
    "HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_ASSETS_CACHE HF_XET_CACHE HF_DATASETS_CACHE",
    "HF_MODULES_CACHE HF_ENDPOINT HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE",
    "HF_HUB_DISABLE_TELEMETRY HF_HUB_DISABLE_PROGRESS_BARS TRANSFORMERS_CACHE TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR NLTK_DATA TIKTOKEN_CACHE_DIR TOKENIZERS_PARALLELISM",
    # By which what a run has started is found at its end.
    "NEMO_LIKE_SWEPT_BY",
    # Certificates.
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
)
PASSED = frozenset(" ".join(_NAMES).split())
PASSED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "NUMEXPR_", "MALLOC_")
PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})
"""In either case; an address that holds a user's name or password is not passed."""

_KEY = "environment.pass_variables"
_NAME = re.compile(r"\b[A-Z][A-Z0-9_]{3,}\b")


def reward_variables(variables: Mapping[str, str], passed: Iterable[str]) -> dict[str, str]:
    """What reward processes get of them; UserError for a ``passed`` name without a value."""
    passed = list(passed)
    for name in passed:
        if name not in variables:
            raise UserError(
                f"{_KEY}: {name} is not set where the engines run; set it there (export it before "
                "the run, or before ray start on each node), or leave it out."
            )
    kept = {name: value for name, value in variables.items() if _is_passed(name, value)}
    # With -P: the process finds exactly what this one finds, in the same order.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return kept | {name: variables[name] for name in passed} | {"PYTHONPATH": path}


def with_hint(error: str, withheld: Container[str]) -> str:
    """``error``, after what to set if it names a variable that the process does not get."""
    named = {word for word in _NAME.findall(error) if word in withheld}
    if not named:
        return error
    names = ", ".join(sorted(named))
    return f"reward processes do not get {names} (set {_KEY}=[{names}]): {error}"


def _is_passed(name: str, value: str) -> bool:
    if name.lower() in PROXIES:
        return "@" not in value
    return name in PASSED or name.startswith(PASSED_PREFIXES)
