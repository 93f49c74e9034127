"""The choices of keys that take one of a few words."""

from enum import StrEnum


class Dtype(StrEnum):
    """Number format of the parameters in compute."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


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
    wsd = "wsd"


class OptimizerKind(StrEnum):
    """Update rule."""

    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"
    adafactor = "adafactor"
    adamw8bit = "adamw8bit"


class Decay(StrEnum):
    """Parameters that weight decay applies to."""

    matrices = "matrices"
    all = "all"


class AdapterRefit(StrEnum):
    """How engines get adapters."""

    merged = "merged"
    adapters = "adapters"


class DataParallel(StrEnum):
    """What data-parallel ranks hold of the model."""

    fsdp = "fsdp"
    ddp = "ddp"


class Compression(StrEnum):
    """How DDP's gradients travel."""

    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"
    powersgd = "powersgd"


class PipelineSchedule(StrEnum):
    """Order of forward and backward passes over pipeline stages."""

    gpipe = "gpipe"
    one_f_one_b = "one_f_one_b"
    interleaved = "interleaved"


class Checkpointing(StrEnum):
    """Activations that the backward pass computes again."""

    none = "none"
    full = "full"
    selective = "selective"


class Offload(StrEnum):
    """What of the policy lives in host memory."""

    none = "none"
    optimizer = "optimizer"
    all = "all"


class Baseline(StrEnum):
    """What is subtracted from a reward."""

    leave_one_out = "leave_one_out"
    mean = "mean"
    none = "none"


class AdvantageScale(StrEnum):
    """What a centred reward is divided by."""

    std = "std"
    batch = "batch"
    none = "none"


class Objective(StrEnum):
    """What a policy-gradient loss makes of ratio and advantage."""

    clip = "clip"
    cispo = "cispo"
    reinforce = "reinforce"


class RatioLevel(StrEnum):
    """What one ratio of new to old policy belongs to."""

    token = "token"
    sequence = "sequence"


class Normalization(StrEnum):
    """What the sum over tokens of a loss is divided by."""

    token = "token"
    sequence = "sequence"
    constant = "constant"


class KLEstimator(StrEnum):
    """Estimator of KL(policy || reference), http://joschu.net/blog/kl-approx.html."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLPlace(StrEnum):
    """Where KL(policy || reference) is subtracted."""

    loss = "loss"
    reward = "reward"


class ImportanceCorrection(StrEnum):
    """What is done about the gap between the engine that sampled and the policy."""

    none = "none"
    truncate = "truncate"
    mask = "mask"


class ImportanceLevel(StrEnum):
    """What one importance weight belongs to."""

    token = "token"
    sequence = "sequence"


class MismatchAction(StrEnum):
    """What happens where engine and policy disagree too much."""

    warn = "warn"
    mask = "mask"
    stop = "stop"


class Transport(StrEnum):
    """How weights travel from the policy to generation."""

    ipc = "ipc"
    broadcast = "broadcast"


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


class PreferenceKind(StrEnum):
    """Loss of a pair as a function of its margin."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"


class Divergence(StrEnum):
    """Distance of the student's distribution from the teacher's."""

    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    mixed = "mixed"


class TeacherTail(StrEnum):
    """What becomes of tokens outside the teacher's most likely ones."""

    ignore = "ignore"
    renormalize = "renormalize"
    bucket = "bucket"


class Output(StrEnum):
    """What a model gives for each token.

    ``logprobs`` of tokens that train; ``values``: a scalar head's number where the token has been
    read; ``values_before``: its number where the token was to be sampled, of tokens that train.
    """

    logprobs = "logprobs"
    values = "values"
    values_before = "values_before"


class ContainerRuntime(StrEnum):
    """What starts a container image on a node of a Slurm cluster."""

    pyxis = "pyxis"
    apptainer = "apptainer"
