"""The methods of a training class: the arguments the loop calls them with, and which of them an object has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.broken_process import is_broken_cuda
from slurmgpu.util.exceptions import described
from slurmgpu.util.out_of_memory import is_out_of_memory

NEEDED = ("model", "data", "loss")
CALLED_WITH: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "data": ("split",),
    "loss": ("model", "batch"),
    "weight": ("batch",),
    "metrics": ("model", "batch"),
    "optimizer": ("model",),
    "scheduler": ("optimizer", "n_steps"),
    "collate": ("samples",),
    "tokens": ("batch",),
    "flops": ("batch",),
    "blocks": ("model",),
}
"""The arguments of each method of a training class that the loop calls; all but `NEEDED` are optional."""


def as_called(name: str) -> str:
    """A method as the loop calls it: `metrics(model, batch)`."""
    return f"{name}({', '.join(CALLED_WITH[name])})"


def optional_method(user: Any, name: str) -> Callable[..., Any] | None:
    """The user's method of this name; None without one, or for an attribute that cannot be called, which is ignored."""
    found = getattr(user, name, None)
    return found if callable(found) else None


def counting_method(user: Any, name: str, column: str) -> Callable[[Any], float] | None:
    """The user's method that counts something in a batch, only for `column`; SlurmGPUError if it gives no number."""
    count = optional_method(user, name)
    if count is None:
        return None
    about = (
        f"The training loop calls a method of this name for each batch, only for {column}: leave it out, or rename it "
        f"if it is for something else."
    )

    def counted(batch: Any) -> float:
        called = f"{type(user).__name__}.{as_called(name)}"
        try:
            given = count(batch)
        except Exception as error:  # the user's code may raise any
            if is_out_of_memory(error) or is_broken_cuda(error):
                raise
            raise SlurmGPUError(f"{called} raised {described(error)}. {about}") from error
        try:
            return float(given)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError of a tensor of several numbers
            if is_broken_cuda(error):  # a kernel that failed earlier is told where its tensor is read
                raise
            raise SlurmGPUError(f"{called} gave a {type(given).__name__}; expected a number. {about}") from error

    return counted
