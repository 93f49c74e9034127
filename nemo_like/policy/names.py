"""Names of parameters: what wrappers put into them, and what they are called in files."""

# The last is peft's, in the names of an adapted layer's own parameters.
_WRAPPERS = ("causal_lm.", "_checkpoint_wrapped_module.", "_orig_mod.", ".base_layer")


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter of a wrapped model.

    >>> hf_name("causal_lm.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
