"""The choices of keys that take one of a few words."""

from enum import StrEnum


class Dtype(StrEnum):
    """Number format of the parameters in compute."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Backend(StrEnum):
    """Engine that samples completions."""

    vllm = "vllm"
    hf = "hf"


class Batching(StrEnum):
    """How the rows of a micro-batch share one forward pass."""

    packed = "packed"
    padded = "padded"


class Attention(StrEnum):
    """Attention implementation of transformers, for padded rows."""

    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


class Schedule(StrEnum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Baseline(StrEnum):
    """What is subtracted from a reward."""

    leave_one_out = "leave_one_out"
    mean = "mean"


class AdvantageScale(StrEnum):
    """What a centred reward is divided by."""

    std = "std"
    none = "none"


class Normalization(StrEnum):
    """What a loss is a mean over."""

    token = "token"
    sequence = "sequence"


class KLEstimator(StrEnum):
    """Estimator of KL(policy || reference), http://joschu.net/blog/kl-approx.html."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Transport(StrEnum):
    """How weights travel from the policy to generation."""

    shared_memory = "shared_memory"
    disk = "disk"


class OverlongPrompts(StrEnum):
    """What happens to a prompt that leaves no room for a completion."""

    refuse = "refuse"
    drop = "drop"


class WandbMode(StrEnum):
    """Where Weights & Biases records go."""

    off = "off"
    offline = "offline"
    online = "online"


class Console(StrEnum):
    """How progress is shown."""

    auto = "auto"
    live = "live"
    plain = "plain"
