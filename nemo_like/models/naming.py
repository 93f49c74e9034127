"""The three spellings of a tensor's name, and of its shape: on disk, in memory, in an engine.

- *On disk*, in refits and in the manifest: as the model's publisher wrote it, one matrix per
  expert (``experts.3.gate_proj.weight``). Every version of transformers reads these names, and so
  does vLLM, which packs them in its own way.
- *In memory*: as transformers' modules have it, experts stacked (``experts.gate_up_proj``), with
  what wrappers put into the name (``causal_lm.``, ``.base_layer``).
- *In an engine*: ``hf`` has the names in memory; vLLM translates those on disk itself.

The translation uses transformers' own table, by which ``from_pretrained`` and ``save_pretrained``
convert. A conversion that transformers adds works here without a change.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
)

from nemo_like.errors import RunError

_WRAPPERS = ("causal_lm.", "_checkpoint_wrapped_module.", "_orig_mod.")
_ADAPTED = ".base_layer"  # peft's, once for each adapter around a module
_ADAPTER = ".default."  # the one adapter's name in peft
_Collected: TypeAlias = dict[str, list[str]]
"""Sources of a first target, by the pattern that they matched, or their own name."""


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter, by its name on the way or in a model of peft's."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The name in memory without what wrappers put into it; of an adapter: its name in files.

    Adapters of several parameters of one module are nested, so theirs keep ``base_layer``.

    >>> plain_name("causal_lm.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> plain_name("causal_lm.model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> plain_name("model.layers.0.mlp.experts.base_layer.lora_A.default.weight")
    'model.layers.0.mlp.experts.base_layer.lora_A.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.replace(_ADAPTER, ".") if is_adapter(name) else name.replace(_ADAPTED, "")


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Tensors of one spelling that become tensors of the other, by a change of names at least."""

    sources: dict[str, tuple[str, ...]]
    """What is needed, by the pattern of the table that it matched, in the order to stack it in."""
    targets: tuple[str, ...]
    converter: WeightConverter | None = None
    """Changes shapes too; None: the one source is the one target."""

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def stacks(self) -> bool:
        """Whether row i of the target is made of the i-th source of each pattern, and no other."""
        if self.converter is None or len(self.targets) > 1:
            return False
        first, *others = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(_keeps_rows(each) for each in others)
        )

    def rows(self, first: int, end: int) -> "Translation":
        """Of ``stacks``: that of some rows of the target alone."""
        rows = {pattern: names[first:end] for pattern, names in self.sources.items()}
        return replace(self, sources=rows)


class Naming:
    """Translates names and tensors of one architecture: of a model without wrappers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes = {name: t.to("meta") for name, t in model.state_dict().items()}
        self._reading = get_model_conversion_mapping(model)
        # As ``save_pretrained`` does it: without names that only older files have.
        written = get_model_conversion_mapping(model, add_legacy=False)[::-1]
        self._writing = [
            each.reverse_transform() for each in written if not isinstance(each, PrefixChange)
        ]

    def from_disk(self, stored: Iterable[str]) -> dict[str, Translation]:
        """How tensors in memory are made of files that have ``stored``, by each one's name."""
        renamings, converters = _parts(deepcopy(self._reading))
        prefix, known = self._model.base_model_prefix, self._shapes
        found: dict[str, _Collected] = defaultdict(lambda: defaultdict(list))
        for key in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:  # a folder that has names in memory
                name, pattern = rename_source_key(key, [], [], prefix, known)
            if name in known:
                found[name][pattern or key].append(key)
        translations = [self._translation(*each, converters) for each in found.items()]
        return {target: each for each in translations for target in each.targets}

    def to_disk(self, names: Iterable[str]) -> list[Translation]:
        """How tensors in memory leave, in that order; RunError if they could not be read back."""
        renamings, converters = _parts(deepcopy(self._writing))
        found: dict[str, _Collected] = defaultdict(lambda: defaultdict(list))
        for key in names:
            name, pattern = key, None
            for each in converters:
                name, pattern = each.rename_source_key(name)
                if pattern is not None:
                    break
            for each in renamings:
                name, _ = each.rename_source_key(name)
            found[name][pattern or key].append(key)
        translations, written = [], {}
        for name, collected in found.items():
            one = self._translation(name, collected, converters)
            made = self.convert(one, self._shapes.__getitem__)
            written |= made
            translations.append(replace(one, targets=tuple(made)))
        self._check_return([name for one in translations for name in one.names], written)
        return translations

    @torch.no_grad()
    def convert(self, translation: Translation, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The targets, of sources that ``get`` gives by their names."""
        if translation.converter is None:
            return {translation.targets[0]: get(translation.names[0])}
        converter = deepcopy(translation.converter)
        for pattern, names in translation.sources.items():
            converter.collected_tensors[pattern] = [get(name) for name in names]  # pyright: ignore
        made: dict[str, Any] = converter.convert(
            translation.targets[0], model=self._model, config=self._model.config
        )
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def in_memory(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """By names in memory; what has to wait is copied. Adapters and the unknown pass through."""
        waiting: dict[str, Tensor] = {}
        for name, tensor in tensors:
            one = self._on_disk.get(name)
            if one is None or one.converter is None:
                yield (one.targets[0] if one else name), tensor
                continue
            waiting[name] = tensor.clone()
            if all(each in waiting for each in one.names):
                yield from self.convert(one, waiting.pop).items()

    @property
    def names_of_experts(self) -> set[str]:
        """Last parts of names on disk that are stacked in memory (``gate_proj``)."""
        _, converters = _parts(self._reading)
        return {
            pattern.removesuffix(".weight").rpartition(".")[2]
            for each in converters
            if any(isinstance(operation, MergeModulelist) for operation in each.operations)
            for pattern in each.source_patterns
        }

    @cached_property
    def _on_disk(self) -> dict[str, Translation]:
        """What each tensor on disk is needed for, by its name."""
        written = [name for one in self.to_disk(self._shapes) for name in one.targets]
        return {name: one for one in self.from_disk(written).values() for name in one.names}

    def _translation(
        self, first: str, collected: _Collected, converters: Sequence[WeightConverter]
    ) -> Translation:
        pattern, targets = next(iter(collected)), (first,)
        converter = next((each for each in converters if pattern in each.source_patterns), None)
        if converter is not None:
            head, *_ = converter.target_patterns
            targets = tuple(first.replace(head, each) for each in converter.target_patterns)
        sources = {pattern: tuple(names) for pattern, names in collected.items()}
        return Translation(sources=sources, targets=targets, converter=converter)

    def _check_return(self, names: Iterable[str], written: Mapping[str, Tensor]) -> None:
        back: dict[str, Tensor] = {}
        for one in self.from_disk(written).values():
            back |= self.convert(one, written.__getitem__)
        for name in names:
            if name not in back or back[name].shape != self._shapes[name].shape:
                raise RunError(
                    f"transformers has a name in files for {name} of {type(self._model).__name__} "
                    "from which it would not load it again."
                )


def _parts(transforms: Iterable[Any]) -> tuple[list[Any], list[WeightConverter]]:
    every = list(transforms)
    converters = [each for each in every if isinstance(each, WeightConverter)]
    return [each for each in every if not isinstance(each, WeightConverter)], converters


def _keeps_rows(operation: Any) -> bool:
    if isinstance(operation, Concatenate):
        return operation.dim != 0
    return isinstance(operation, Transpose) and 0 not in (operation.dim0, operation.dim1)
