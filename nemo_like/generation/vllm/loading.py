"""Load weights into a model that vLLM has prepared for its kernels (0.26 to 0.33).

On a GPU with plain layers they are copied in place. Elsewhere kernels compute with packed or
derived copies: of matrices and experts on the CPU, of what multi-head latent attention absorbs.
Those are rebuilt from all weights.
"""

import logging
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

Tensors = Iterator[tuple[str, Tensor]]

_AS_LOADED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""On a GPU these compute with the weights just as they were loaded."""
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOE_KERNEL = "moe_kernel"
"""Where vLLM's methods for experts keep the kernel, which they make and pack for only once."""
_PACKED_MATRIX = "cpu_linear"
"""The function of a layer on the CPU that holds a packed copy of its matrix."""


def load_model(
    model: nn.Module, config: VllmConfig, tensors: Tensors, reload: Callable[..., None]
) -> None:
    """Replace all weights of ``model``; RuntimeError naming one that ``tensors`` did not bring.

    ``reload`` is the worker's own ``reload_weights``.
    """
    # It warns of layers without weights of their own (rotary embeddings, tied heads) each time.
    logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
    # vLLM 0.26 leaves it to the caller to set the configuration that layers look up.
    with set_current_vllm_config(config), torch.no_grad():
        try:
            _load(model, config, tensors, reload)
        except (KeyError, AttributeError, ValueError) as error:
            raise RuntimeError(
                f"vLLM cannot load the weights of {type(model).__name__} by their names on disk "
                f"({type(error).__name__}: {error}); set generation.backend=hf."
            ) from error


def _load(
    model: nn.Module, config: VllmConfig, tensors: Tensors, reload: Callable[..., None]
) -> None:
    if current_platform.is_cpu():
        _load_as_at_start(model, config, tensors)
    elif _computes_with_loaded_weights(model):
        tensors = _begin_rounding(model, tensors)
        model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        refuse_incomplete(model)
    else:
        _forget(model)
        # Unpacks layer by layer what start-up packed for the kernels, and keeps every tensor's
        # address, which CUDA graphs rely on. It keeps tensors until their layer is complete,
        # hence the copies.
        reload(weights_iterator=_copies(tensors))
        # What pads a kernel's tensors is never written.
        _refuse_unwritten(model, torch.all)


def _computes_with_loaded_weights(model: nn.Module) -> bool:
    """Whether loading in place suffices, which is five times as fast as unpacking."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in _AS_LOADED and not _quantizes(method):
            return False
        # MLA absorbs matrices into others, for one; plain attention only looks after scales.
        if hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention):
            return False
    return True


def _quantizes(method: object) -> bool:
    """Whether a layer's method makes matrices of 8 bits from those that files hold."""
    return getattr(method, "uses_meta_device", False)


def _begin_rounding(model: nn.Module, tensors: Tensors) -> Tensors:
    """Prepare layers of 8 bits for new matrices, whose old copies vLLM then overwrites in place.

    Returns ``tensors``; as copies if there are such layers, since vLLM keeps them until it has all
    of a layer.
    """
    layers = [one for one in model.modules() if _quantizes(getattr(one, "quant_method", None))]
    for layer in layers:
        initialize_layerwise_reload(layer)
    return _copies(tensors) if layers else tensors


def _copies(tensors: Tensors) -> Tensors:
    """Of tensors that are overwritten as later ones come."""
    return ((name, tensor.clone()) for name, tensor in tensors)


def refuse_incomplete(model: nn.Module) -> None:
    """Raise RuntimeError if a layer of 8 bits still waits for tensors."""
    for name, layer in model.named_modules():
        if get_layerwise_info(layer).can_load():
            raise RuntimeError(
                f"vLLM did not load all of {name} of {type(model).__name__}, which would leave old "
                "weights in place; leave generation.quantization out."
            )


def _load_as_at_start(model: nn.Module, config: VllmConfig, tensors: Tensors) -> None:
    """Load whole tensors, then let vLLM pack them; only on the CPU may addresses change.

    ``reload_weights`` would leave old copies of some (0.26 to 0.32): of tied output heads, of
    experts, and of whatever a model copies in without vLLM's own loaders.
    """
    _unpack(model)
    tensors = _begin_rounding(model, tensors)
    _forget(model)
    model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
    refuse_incomplete(model)
    _refuse_unwritten(model, torch.any)
    # It would tie a head whose weights happen to be those of the embedding, for good.
    config.model_config.word_embeddings_untied_by_checkpoint = False
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def _unpack(model: nn.Module) -> None:
    """Give each parameter the shape in which files have it, and drop what was packed."""
    # Of the versions for the CPU; vLLM 0.26 need not have them.
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    for layer in model.modules():
        if hasattr(layer, _PACKED_MATRIX):
            setattr(layer, _PACKED_MATRIX, None)
        method = getattr(layer, "quant_method", None)
        if _quantizes(method):
            continue
        if hasattr(method, _MOE_KERNEL):
            setattr(method, _MOE_KERNEL, None)
        for name, as_loaded in get_layerwise_info(layer).restore_metadata[0].items():
            if not _is_as_loaded(layer._parameters.get(name), as_loaded):
                parameter = materialize_meta_tensor(restore_layer_refs(as_loaded, layer))
                layer.register_parameter(name, parameter)  # pyright: ignore[reportArgumentType]


def _is_as_loaded(parameter: Tensor | None, as_loaded: Tensor) -> bool:
    """Whether it can take weights: others may refer to it (to tied heads, attention's sinks)."""
    return (
        parameter is not None
        and parameter.shape == as_loaded.shape
        and parameter.dtype == as_loaded.dtype
        # Packed experts may keep their shape; what they lose is what a loader needs to know.
        and vars(parameter).keys() >= vars(as_loaded).keys()
    )


def _forget(model: nn.Module) -> None:
    """Mark all parameters, to find those that nothing writes."""
    for _, parameter in _loaded_parameters(model):
        parameter.data.fill_(math.nan)


def _refuse_unwritten(model: nn.Module, which: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError if a parameter was not written: vLLM only warns, or is silent."""
    names, unwritten = [], []
    for name, parameter in _loaded_parameters(model):
        names.append(name)
        unwritten.append(which(parameter.isnan()))
    for name, missing in zip(names, torch.stack(unwritten).tolist(), strict=True):
        if missing:
            raise RuntimeError(
                f"vLLM did not load {name} of {type(model).__name__} (or it is not finite), which "
                "would leave old weights in place; set generation.backend=hf."
            )


def _loaded_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that files hold, as they hold them: neither quantised nor derived ones."""
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            continue
        if hasattr(module, "process_weights_after_loading"):  # attention's own
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.dtype in _WEIGHT_DTYPES and parameter.numel():
                yield name, parameter
