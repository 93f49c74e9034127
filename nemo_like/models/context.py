"""How long a text a model takes."""

import functools

from nemo_like.errors import UserError


@functools.cache
def context_length(model_path: str) -> int:
    """Most positions that the model of a folder was made for."""
    from nemo_like.models.settings import model_settings

    config = model_settings(model_path).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise UserError(
            f"policy.model={model_path}: its config.json has no max_position_embeddings, the most "
            "tokens of a row; add it."
        )
    return positions


def context_for(model_path: str, key: str, max_new_tokens: int) -> int:
    """``context_length``; UserError, naming ``key``, if completions leave no room for a prompt."""
    context = context_length(model_path)
    if max_new_tokens >= context:
        raise UserError(
            f"{key}={max_new_tokens} does not fit the model's context of {context} tokens with a "
            "prompt; use less."
        )
    return context
