"""Readings of this task's GPUs by NVML, as far as the package nvidia-ml-py, the driver and the card support them.

Function names are NVML's: https://docs.nvidia.com/deploy/nvml-api/. No CUDA context is made, so no GPU memory is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurmgpu.util.exceptions import described

log = logging.getLogger(__name__)

THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""The nvmlClocksEventReasons that mean throttling; the others are idleness and settings."""


@dataclass(frozen=True)
class Reading:
    """A GPU at one moment; None is unknown.

    `utilisation` is the percentage of the last period of up to a second in which a kernel ran; memory is that of all
    processes on the card, without what the driver reserves; `energy_j` and `ecc_errors` (uncorrected ones) count since
    the driver was loaded; `throttle` is a mask of THROTTLE_REASONS.
    """

    utilisation: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_w: float | None
    energy_j: float | None
    ecc_errors: int | None
    throttle: int | None


class Card:
    """One GPU, or one MIG instance."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = _text(lambda: nvml.nvmlDeviceGetUUID(handle))
        self.name = _text(lambda: nvml.nvmlDeviceGetName(handle))
        self.is_mig = (self.uuid or "").startswith("MIG-")
        # NVML has some values only for the card of an instance.
        card = _try(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) if self.is_mig else handle
        self.card_handle = handle if card is None else card

    def read(self) -> Reading:
        """A reading. A MIG instance has its own memory; temperature, errors and clocks are those of its card."""
        nvml, card = self._nvml, self.card_handle
        # Its first version counts what the driver keeps for itself as used: 0.6 GB of an H200.
        memory = _try(lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2))
        if memory is None:  # older drivers
            memory = _try(nvml.nvmlDeviceGetMemoryInfo, self._handle)
        rates = None if self.is_mig else _try(nvml.nvmlDeviceGetUtilizationRates, card)
        power_mw = None if self.is_mig else _try(nvml.nvmlDeviceGetPowerUsage, card)
        energy_mj = None if self.is_mig else _try(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(card))
        throttle = _try(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(card))
        if throttle is None:  # the name before nvidia-ml-py 12.535, and of older drivers
            throttle = _try(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return Reading(
            utilisation=None if rates is None else int(rates.gpu),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_c=_try(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
            power_w=None if power_mw is None else power_mw / 1000,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            ecc_errors=_try(lambda: nvml.nvmlDeviceGetTotalEccErrors(card, uncorrected, volatile)),
            throttle=None if throttle is None else throttle & sum(THROTTLE_REASONS),
        )


class Cards:
    """The cards of a task, and the Xid errors that the driver reports for them."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self.cards = [Card(nvml, handle) for handle in handles]
        self.driver = _text(lambda: nvml.nvmlSystemGetDriverVersion())
        self._events = _try(nvml.nvmlEventSetCreate)
        if self._events is not None:
            for card in self.cards:
                _try(nvml.nvmlDeviceRegisterEvents, card.card_handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def xids(self) -> list[int]:
        """The numbers of the Xid errors since the last call: https://docs.nvidia.com/deploy/xid-errors/."""
        found: list[int] = []
        # NVML may report one error many times; the rest is read next time.
        while self._events is not None and len(found) < 100:
            event = _try(lambda: self._nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:  # also in an old module, which lacks that
                event = _try(lambda: self._nvml.nvmlEventSetWait(self._events, 0))
            if event is None:
                break  # no event, which is the error "Timeout"
            found.append(int(event.eventData))
        return found

    def close(self) -> None:
        """Shut NVML down."""
        if self._events is not None:
            _try(self._nvml.nvmlEventSetFree, self._events)
        _try(self._nvml.nvmlShutdown)


def open_cards(ids: Sequence[str] | None) -> Cards | None:
    """The cards that `ids` name, as CUDA_VISIBLE_DEVICES does, or all; None without package, driver or cards."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception as error:
        # ImportError, or an error of the module's own; neither is a reason to stop a task.
        log.debug("no GPU telemetry: %s", described(error))
        return None
    handles = _handles(nvml, ids)
    if not handles:
        log.debug("no GPU telemetry: NVML shows none of the GPUs %s", ids)
        _try(nvml.nvmlShutdown)
        return None
    return Cards(nvml, handles)


def _handles(nvml: Any, ids: Sequence[str] | None) -> list[Any]:
    # NVML also counts cards that Slurm's device cgroup hides, and refuses their handles.
    numbers = range(_try(nvml.nvmlDeviceGetCount) or 0)
    shown = [found for n in numbers if (found := _try(nvml.nvmlDeviceGetHandleByIndex, n)) is not None]
    if ids is None:
        return shown
    if len(ids) == len(shown) and all(one.isdecimal() for one in ids):
        return shown  # all of them, even if CUDA and NVML number them differently
    return [found for one in ids if (found := _handle(nvml, one, shown)) is not None]


def _handle(nvml: Any, one: str, shown: Sequence[Any]) -> Any:
    if one.isdecimal():
        return shown[int(one)] if int(one) < len(shown) else None
    for name in (one, one.encode()):  # of an old module
        if (exact := _try(nvml.nvmlDeviceGetHandleByUUID, name)) is not None:
            return exact
    # CUDA takes an abbreviated UUID, too.
    matching = [handle for handle in shown if (_text(partial(nvml.nvmlDeviceGetUUID, handle)) or "").startswith(one)]
    return matching[0] if len(matching) == 1 else None


def _text(call: Callable[[], Any]) -> str | None:
    """A text of NVML, or None; old modules, as nvidia-ml-py3, which is called pynvml as well, give bytes."""
    found = _try(call)
    return found.decode() if isinstance(found, bytes) else found


def _try(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call of NVML, or None: many cards do not support many calls."""
    try:
        return call(*arguments)
    except Exception as error:
        # NVMLError, and AttributeError for a function that this version of the module lacks.
        log.debug("NVML: %s", described(error))
        return None
