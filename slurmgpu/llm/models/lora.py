"""Add LoRA adapters to a loaded model with peft."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models.adapters import Adapters
from slurmgpu.llm.models.source import ModelSource
from slurmgpu.util.amounts import some_of

log = logging.getLogger(__name__)

FEW = 3
"""The number of wrong weights that a message names."""


class Switch:
    """Switches between adapters of one model, which holds all of them."""

    def __init__(self, wrapped: Any, names: Mapping[str, str]) -> None:
        self._wrapped, self._names = wrapped, names
        self._now: str | None = None

    def use(self, name: str) -> bool:
        """Use this adapter, or none for ""; returns whether that is a change."""
        if name == self._now:
            return False
        tuner = self._wrapped.base_model
        if name == "":
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            self._wrapped.set_adapter(self._names[name])
        self._now = name
        return True


def merge_adapter(model: Any, source: ModelSource) -> Any:
    """The model with an adapter merged into its weights, which costs nothing afterwards."""
    wrapped = _wrap(model, source, "default")
    merged = wrapped.merge_and_unload(safe_merge=True)
    log.info("merged the adapter %s, of rank %s, into the model", source.name, source.config.get("r"))
    return merged


def hold_adapters(model: Any, adapters: Adapters) -> Switch:
    """Load several adapters into a model, in place, without using one yet."""
    names = {name: f"adapter_{number}" for number, name in enumerate(adapters.sources)}
    wrapped = None
    for name, source in adapters.sources.items():
        if wrapped is None:
            wrapped = _wrap(model, source, names[name])
        else:
            with _misfits(source):
                wrapped.load_adapter(str(source.folder), adapter_name=names[name])
            _check_weights(wrapped, source, names[name])
    assert wrapped is not None
    wrapped.eval()
    switch = Switch(wrapped, names)
    switch.use("")
    log.info("loaded %d adapters: %s", len(names), ", ".join(names))
    return switch


def _wrap(model: Any, source: ModelSource, name: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise SlurmGPUError(
            f"adapter is set, which needs the package peft, and that cannot be imported here ({error}). "
            f"Install it with `pip install 'slurmgpu[lora]'`; for an image, add it to the definition."
        ) from error
    with _misfits(source):
        wrapped = PeftModel.from_pretrained(model, str(source.folder), adapter_name=name)
    _check_weights(wrapped, source, name)
    wrapped.eval()
    return wrapped


@contextlib.contextmanager
def _misfits(source: ModelSource) -> Iterator[None]:
    """Raise SlurmGPUError if the adapter that the block loads does not fit the model."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # layers that the model lacks, or weights of another size
        said = " ".join(str(error).split())[:300]
        raise _misfit(source, said) from error


def _check_weights(wrapped: Any, source: ModelSource, name: str) -> None:
    """Refuse an adapter that lacks weights of a layer that it names; peft only warns."""
    from peft.utils import get_peft_model_state_dict, load_peft_weights

    stored = set(load_peft_weights(str(source.folder), device="cpu"))
    expected = set(get_peft_model_state_dict(wrapped, adapter_name=name))
    for names, verb in ((expected - stored, "lacks"), (stored - expected, "has, and the model has no layer for,")):
        if names:
            raise _misfit(source, f"it {verb} {some_of(sorted(names), FEW)}")


def _misfit(source: ModelSource, said: str) -> SlurmGPUError:
    base = source.config.get("base_model_name_or_path")
    trained = f" It was trained on {base}." if base else ""
    return SlurmGPUError(
        f"adapter {source.name!r}, in {source.folder}, does not fit the model: {said}.{trained} Set model to that one."
    )
