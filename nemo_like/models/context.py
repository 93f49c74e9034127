"""How long a text a model takes."""

import functools

from nemo_like.errors import UserError


@functools.cache
def context_length(model_path: str) -> int:
    """Most positions that the model of a folder was made for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, local_files_only=True).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise UserError(
            f"policy.model={model_path}: its config.json has no max_position_embeddings, the most "
            "tokens of a row; add it."
        )
    return positions
