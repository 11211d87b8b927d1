"""Find, check and pin a model's LoRA adapters, in peft's format, without torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.models import hub
from slurmgpu.llm.models.source import ADAPTER_CONFIG, ModelSource, digests_of, locate, read_json

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_FIELD = re.compile(r"\{([^{}]+)\}")
_PINNED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)")


@dataclass(frozen=True)
class AdapterField:
    """Chooses an item's adapter by the name in the item's `field`."""

    field: str
    names: tuple[str, ...]

    def of(self, data: Mapping[str, Any]) -> str:
        """The name of the item's adapter; "", which is the model itself, if the field is empty."""
        if self.field not in data:
            raise ItemError(f"no field {self.field!r}, which names the adapter.{did_you_mean(self.field, data)}")
        name = data[self.field]
        if name is None or name == "":
            return ""
        if name not in self.names:
            known = ", ".join(self.names)
            raise ItemError(f"field {self.field!r} holds {name!r:.80}; expected a name in adapters: {known}")
        return str(name)


@dataclass(frozen=True)
class Adapters:
    """A model's adapters: one for all items, named "", or several, from which the items choose by `choice`."""

    sources: Mapping[str, ModelSource] = field(default_factory=dict)
    choice: AdapterField | None = None


def choice_of(settings: Mapping[str, Any]) -> AdapterField | None:
    """How items choose among the adapters in the settings; None if there is at most one.

    SlurmGPUError if `adapter` and `adapters` do not belong together.
    """
    adapter, adapters = settings.get("adapter"), settings.get("adapters") or {}
    found = None if adapter is None else _FIELD.fullmatch(adapter)
    if adapters and found is None:
        raise SlurmGPUError(
            f"adapters has {len(adapters)} names, and adapter is {adapter!r}; expected the item field with the name of "
            f'an adapter, such as adapter = "{{language}}".'
        )
    if found is not None and not adapters:
        raise SlurmGPUError(
            f"adapter is {adapter!r}, a field of items, and adapters is not set; expected a table with an adapter for "
            f'each value of this field, such as adapters = {{de = "lora/de", fr = "lora/fr"}}.'
        )
    return None if found is None else AdapterField(found[1], tuple(adapters))


def find_adapters(settings: Mapping[str, Any]) -> Adapters:
    """The adapters in the settings; SlurmGPUError for one that is missing or not a LoRA adapter."""
    choice = choice_of(settings)
    if settings.get("adapter") is None:
        return Adapters()
    named = {"": settings["adapter"]} if choice is None else settings["adapters"]
    return Adapters({name: _find(where) for name, where in named.items()}, choice)


def pinned(source: ModelSource) -> str:
    """The name of an adapter, with its commit if it is from the hub."""
    return source.name if source.repository is None else f"{source.repository}@{source.revision}"


def check_adapted(model: ModelSource, adapters: Adapters) -> None:
    """Refuse adapters for a quantised model."""
    if not adapters.sources:
        return
    if model.quantization is not None or "quantization_config" in model.config:
        raise SlurmGPUError(
            f"adapter is set, and model {model.name!r} is quantised; expected a model in bf16, fp16 or fp32. Remove "
            f"the suffix of its name, or merge the adapter into the model beforehand."
        )


def _find(where: str) -> ModelSource:
    named = _PINNED.fullmatch(where)
    name, revision = (where, None) if named is None else (named["name"], named["revision"])
    try:
        folder, repository = locate(name, revision, marker=ADAPTER_CONFIG)
    except SlurmGPUError as error:
        raise SlurmGPUError(f"adapter {where!r}: {error}") from error
    config = read_json(folder / ADAPTER_CONFIG)
    if not config:
        advice = (
            "; it is a whole model: set model to it, without adapter." if (folder / "config.json").is_file() else "."
        )
        raise SlurmGPUError(
            f"adapter {where!r}: {folder} has no {ADAPTER_CONFIG}; expected the folder of a LoRA adapter from peft's "
            f"`save_pretrained`{advice}"
        )
    if config.get("peft_type") != "LORA":
        raise SlurmGPUError(
            f"adapter {where!r} has the type {config.get('peft_type')}; expected LORA. Merge it into its model with "
            f"peft, and set model to the result."
        )
    if repository is None and not any((folder / each).is_file() for each in WEIGHTS):
        raise SlurmGPUError(f"adapter {where!r}: {folder} lacks {WEIGHTS[0]}. Copy the whole folder again.")
    return ModelSource(
        where, folder, revision if repository is None else folder.name, None, config, repository, revision
    )


def rank_of(source: ModelSource) -> int:
    """The largest rank of an adapter's matrices."""
    ranks = [source.config.get("r") or 1, *(source.config.get("rank_pattern") or {}).values()]
    return max(map(int, ranks))


def digest_of_adapter(source: ModelSource) -> str:
    """An identifier of an adapter's content: the hub's commit, or a digest of its files."""
    files = digests_of(source)
    told = source.revision if files is None else json.dumps(sorted(files.items()))
    return hashlib.blake2b(f"{source.repository} {told}".encode(), digest_size=16).hexdigest()


def refuse_missing_adapters(adapters: Adapters) -> None:
    """Refuse adapters of the hub whose weights are not in its cache."""
    for source in adapters.sources.values():
        if not any((source.folder / each).is_file() for each in WEIGHTS):
            raise SlurmGPUError(
                f"adapter {source.name!r}: its weights are not in the hub's cache, {hub.cache_folder()}, and tasks do "
                f"not download. {hub.FETCH}."
            )
