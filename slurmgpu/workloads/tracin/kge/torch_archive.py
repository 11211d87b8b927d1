"""Read a PyTorch checkpoint without PyTorch, which the machine that plans a run may lack.

A checkpoint is a zip archive: `data.pkl` describes the tensors, the other files are their bytes. Only `data.pkl` is
read, and each tensor becomes a stand-in. Only the few functions below are called for names in a file. NumPy objects,
such as the random state in PyKEEN's own checkpoints, are left out.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.exceptions import described
from slurmgpu.util.regular_files import open_given

PLAIN = {"builtins", "collections", "torch"}
"""Packages with classes that `torch.load(weights_only=True)` reads; it refuses all others."""

WEIGHTS = "torch.save(model.state_dict(), PATH)"

SECTIONS = ("model_state_dict", "state_dict")
"""Keys under which a checkpoint has the model's state dict, if it is not one itself."""

DICTIONARIES = {"entities": "entity_to_id_dict", "relations": "relation_to_id_dict"}
"""Keys under which PyKEEN's training loop keeps the ids of names."""


class Stored(NamedTuple):
    """A storage's stand-in: its dtype, and its file in the archive."""

    dtype: str
    key: str


@dataclass(frozen=True)
class Shape:
    """A tensor's stand-in. `place` is its file in the archive and its first number there."""

    shape: tuple[int, ...]
    dtype: str
    place: tuple[str, int] | None = field(default=None, compare=False)


class UnknownGlobalError(Exception):
    """A file names a class or function that is not known here."""


def peek(path: str | Path) -> Mapping[str, Any] | None:
    """A checkpoint's content, with a Shape for each tensor; None if only PyTorch can read it."""
    if not _is_archive(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            content = _Reader(io.BytesIO(archive.read(_index_of(archive.namelist(), path)))).load()
    except UnknownGlobalError as error:
        if str(error).split(".")[0] in PLAIN:
            return None
        raise SlurmGPUError(refusal(path, f"an object of {error}")) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except SlurmGPUError:
        raise
    except Exception as error:  # a truncated or overwritten pickle can raise any error
        raise damaged(path, described(error)) from error
    if not isinstance(content, Mapping):
        found = "tensor" if isinstance(content, Shape) else type(content).__name__
        raise SlurmGPUError(refusal(path, f"a {found}"))
    return content


def state_of(content: Mapping[str, Any], path: str | Path) -> Mapping[str, Any]:
    """The state dict in a checkpoint's content, at its top or in one of SECTIONS."""
    state = next((content[key] for key in SECTIONS if isinstance(content.get(key), Mapping)), content)
    others = [key for key, value in state.items() if not hasattr(value, "shape")]
    if not state or others:
        keys = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise SlurmGPUError(
            f"{path}: expected a model's state dict, or one under {' or '.join(SECTIONS)}, found {keys}. "
            f"Write it with {WEIGHTS}."
        )
    return state


def told_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config in a checkpoint's content, with facts about model and training, and PyKEEN's dictionaries."""
    found = [content[key] for key in ("config", "model_config") if isinstance(content.get(key), Mapping)]
    ids = {key: content[key] for key in DICTIONARIES.values() if isinstance(content.get(key), Mapping)}
    return ids | {key: value for config in found for key, value in config.items()}


def number_in(path: str | Path, tensor: Shape) -> float | None:
    """The value of a one-element tensor, read from its checkpoint; None for more elements or a dtype not in NUMBERS."""
    if math.prod(tensor.shape) != 1 or tensor.place is None or tensor.dtype not in NUMBERS:
        return None
    (key, at), code = tensor.place, NUMBERS[tensor.dtype]
    size = 2 if tensor.dtype == "bfloat16" else struct.calcsize(code)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            folder = _index_of(names, path).removesuffix("data.pkl")
            is_big = f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") == b"big"
            with archive.open(f"{folder}data/{key}") as file:
                file.seek(at * size)
                data = file.read(size)
    except OSError as error:
        raise unreadable(path, error) from error
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise damaged(path, described(error)) from error
    if len(data) != size:
        raise damaged(path, f"{key} ends before number {at}")
    if tensor.dtype == "bfloat16":  # the upper half of a float32
        data = data + b"\0\0" if is_big else b"\0\0" + data
    return float(struct.unpack((">" if is_big else "<") + code, data)[0])


def refusal(path: str | Path, found: str) -> str:
    """The sentence for a file that holds something other than weights."""
    return (
        f"{path} holds {found}, and loading that could run code from the file; expected only weights. If you trust the "
        f"file, load it once with torch.load(PATH, weights_only=False), and write the weights with {WEIGHTS}."
    )


def damaged(path: str | Path, found: str) -> SlurmGPUError:
    """The error for a file that ends too early or holds something else."""
    return SlurmGPUError(f"{path} is not a complete PyTorch checkpoint ({found}). Copy or save it again.")


def _is_archive(path: str | Path) -> bool:
    """Whether a file has the zip format; before PyTorch 1.6 it was a pickle."""
    try:
        with open_given(path) as file:
            start = file.read(4)
    except OSError as error:
        raise unreadable(path, error) from error
    if start == b"PK\x03\x04":
        return True
    if start[:1] == pickle.PROTO:
        return False
    raise damaged(path, f"it starts with {start!r}" if start else "it is empty")


def _index_of(names: list[str], path: str | Path) -> str:
    found = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise damaged(path, "an archive without data.pkl")
    if found[0].replace("data.pkl", "constants.pkl") in names:
        raise SlurmGPUError(refusal(path, "a TorchScript program"))
    return found[0]


def unreadable(path: str | Path, error: OSError) -> SlurmGPUError:
    """The error for a file that cannot be read."""
    return SlurmGPUError(f"Cannot read {path}: {error.strerror}. Correct the path, and plan again.")


class LeftOut:
    """The stand-in for any NumPy object; it keeps only a type's name."""

    def __init__(self, *args: object) -> None:
        self.name = args[0] if args and isinstance(args[0], str) else ""

    def __setstate__(self, state: object) -> None:
        """Keep nothing."""


def _number(dtype: LeftOut, data: bytes = b"") -> float | LeftOut:
    code = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i"}.get(dtype.name)
    return LeftOut() if code is None else float(struct.unpack(code, data)[0])


STAND_INS: Mapping[str, Any] = {
    "_codecs.encode": lambda text, _encoding="latin1": text.encode("latin1"),  # bytes in older pickle protocols
    "numpy.dtype": LeftOut,
    "numpy.ndarray": LeftOut,
    **{
        f"numpy.{core}.{name}": stand_in
        for core in ("core", "_core")  # before NumPy 2, and since
        for name, stand_in in (
            ("multiarray._reconstruct", LeftOut),
            ("numeric._frombuffer", LeftOut),
            ("multiarray.scalar", _number),
        )
    },
}
"""Replacements for names, used here and when PyTorch reads the tensors."""

FUNCTIONS: Mapping[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "torch.Size": tuple,
    # storage, offset, size, stride, requires_grad, hooks, dtype
    "torch._utils._rebuild_tensor_v2": lambda storage, offset, size, *_: Shape(
        tuple(size), storage.dtype, (storage.key, offset)
    ),
    "torch._utils._rebuild_tensor_v3": lambda storage, offset, size, *others: Shape(
        tuple(size), others[3], (storage.key, offset)
    ),
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}

STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Untyped": "untyped",
}
NUMBERS = dict(
    zip(
        ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
        ("d", "f", "e", "f", "q", "i", "h", "b", "B"),
        strict=True,
    )
)
"""The `struct` codes of the dtypes that `number_in` reads."""
DTYPES = {*STORAGES.values(), "uint16", "uint32", "uint64"}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name in the file."""
        path = f"{module}.{name}"
        for known in (FUNCTIONS, STAND_INS):
            if path in known:
                return known[path]
        storage = STORAGES.get(name.removesuffix("Storage"))
        if module in ("torch", "torch.storage") and name.endswith("Storage") and storage:
            return storage
        if module == "torch" and name in DTYPES:
            return name
        raise UnknownGlobalError(path)

    def persistent_load(self, identity: Any) -> Stored:
        """The stand-in for a storage: ("storage", dtype, file name, device, count)."""
        return Stored(str(identity[1]), str(identity[2]))
