"""The layouts of the invariance matrix, and the shape of a model that all of them can split."""

from nemo_like.config.policy import ParallelConfig

FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
}


def layout(**sizes):
    short = {
        "tp": "tensor_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_parallel_size",
        "replicate": "replicate_size",
        "schedule": "pipeline_schedule",
    }
    return ParallelConfig(**{short.get(name, name): value for name, value in sizes.items()})


DDP = {"data_parallel": "ddp"}
# name -> (ranks, parallel)
LAYOUTS = {
    "one": (1, layout()),
    "dp2": (2, layout()),
    "dp4": (4, layout()),
    "dp2_zero2": (2, layout(reshard_after_forward=False)),
    "ddp2": (2, layout(**DDP)),
    "hybrid2x2": (4, layout(replicate=2)),
    "tp2": (2, layout(tp=2)),
    "tp2_sequence": (2, layout(tp=2, sequence_parallel=True)),
    "cp2": (2, layout(cp=2)),
    "pp2_gpipe": (2, layout(pp=2, schedule="gpipe")),
    "pp2_1f1b": (2, layout(pp=2)),
    "pp2_interleaved": (2, layout(pp=2, schedule="interleaved")),
    "dp2_tp2": (4, layout(tp=2)),
    "dp2_pp2": (4, layout(pp=2)),
    "dp2_cp2": (4, layout(cp=2)),
    "cp2_tp2_sequence": (4, layout(cp=2, tp=2, sequence_parallel=True)),
    "dp2_tp2_pp2": (8, layout(tp=2, pp=2)),
    "hybrid2x2_tp2": (8, layout(replicate=2, tp=2)),
}
"""FSDP2 unless it says ddp; ranks that no size claims are sharded data parallel."""
