"""What is in a checkpoint of PyTorch, without PyTorch: the machine that plans a run may have none.

A checkpoint is a zip archive whose `data.pkl` says what the tensors are, and whose other files are their bytes. Of the
former a stand-in for each tensor is made; the bytes are not read. Nothing that a file names is ever called, but for the
few functions below. What NumPy wrote, such as the state of its random numbers in PyKEEN's own checkpoints, is left out.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError

PLAIN = {"builtins", "collections", "torch"}
"""Packages of which `torch.load(weights_only=True)` itself knows some classes; of others it refuses all."""

WEIGHTS = "torch.save(model.state_dict(), PATH)"


@dataclass(frozen=True)
class Shape:
    """A tensor's stand-in."""

    shape: tuple[int, ...]
    dtype: str


class UnknownGlobalError(Exception):
    """A file names something that is not among the few that are known here."""


def peek(path: str | Path) -> Mapping[str, Any] | None:
    """What a checkpoint holds, with a Shape for each tensor; None if only PyTorch can tell."""
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
    except Exception as error:  # a pickle that is cut off or overwritten can raise any
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(content, Mapping):
        found = "tensor" if isinstance(content, Shape) else type(content).__name__
        raise SlurmGPUError(refusal(path, f"a {found}"))
    return content


def refusal(path: str | Path, found: str) -> str:
    """The sentence for a file that holds something else than weights."""
    return (
        f"{path} holds {found}, and reading that would run code out of the file; expected the weights alone. Load it "
        f"once where you trust it, with torch.load(PATH, weights_only=False), and write them with {WEIGHTS}."
    )


def damaged(path: str | Path, found: str) -> SlurmGPUError:
    """The error for a file that ends too early or holds something else."""
    return SlurmGPUError(
        f"{path}: expected a checkpoint of PyTorch, whole, found none ({found}). Copy or save it once more."
    )


def _is_archive(path: str | Path) -> bool:
    """Whether a file is in today's format; not, if it is in the one before PyTorch 1.6."""
    try:
        with open(path, "rb") as file:
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
    """The error for a file that the system does not give."""
    return SlurmGPUError(f"cannot read {path}: {error.strerror}. Correct the path, and plan again.")


def _tensor(storage: str, offset: int, size: tuple[int, ...], *_others: object) -> Shape:
    return Shape(tuple(size), storage)


def _typed_tensor(storage: str, offset: int, size: tuple[int, ...], *others: Any) -> Shape:
    return Shape(tuple(size), others[3])  # stride, requires_grad, hooks, dtype


def _parameter(tensor: Shape, *_others: object) -> Shape:
    return tensor


class LeftOut:
    """What stands for an object of NumPy, whatever it is made from: nothing of it is kept but a type's name."""

    def __init__(self, *args: object) -> None:
        self.name = args[0] if args and isinstance(args[0], str) else ""

    def __setstate__(self, state: object) -> None:
        """Keep nothing."""


def _number(dtype: LeftOut, data: bytes = b"") -> float | LeftOut:
    """A number of NumPy, such as a learning rate may be."""
    code = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i"}.get(dtype.name)
    return LeftOut() if code is None else float(struct.unpack(code, data)[0])


def _bytes(text: str, _encoding: str = "latin1") -> bytes:
    """Bytes as older protocols of pickle have them."""
    return text.encode("latin1")


STAND_INS: Mapping[str, Any] = {
    "_codecs.encode": _bytes,
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
"""What takes the place of names, both here and where PyTorch reads the tensors."""

FUNCTIONS = {
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
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
DTYPES = {*STORAGES.values(), "uint16", "uint32", "uint64"}


class _Reader(pickle.Unpickler):
    """Makes the stand-ins, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the file stands for."""
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

    def persistent_load(self, identity: Any) -> str:
        """A storage: ("storage", its dtype, the name of its file, where it was, how many numbers)."""
        return str(identity[1])
