"""Access to the Hugging Face hub and its cache on disk, which is read without the network."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.exceptions import described
from slurmgpu.util.logging import quiet
from slurmgpu.util.shared_files import FULL
from slurmgpu.util.users import expanded

MODEL_CONFIG = "config.json"

SMALL_FILES = [
    *("config.json", "generation_config.json", "tokenizer_config.json", "*.index.json"),
    *("modules.json", "sentence_*_config.json", "*/config.json", "adapter_config.json"),
    *("config_sentence_transformers.json", "preprocessor_config.json", "processor_config.json"),
]
"""Model files that planning reads; no weights."""

OTHER_FRAMEWORKS = ["*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite", "*.mlmodel", "*.ot"]
"""Weight files that transformers does not load with PyTorch."""

PICKLED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "original/*", "metal/*", "consolidated*"]
"""Weight files that are redundant if there are safetensors."""

NOT_WRITTEN = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Errors that mean the cache cannot be written."""

FETCH = "Download it with `slurmgpu check --fetch` on a machine with network"


def cache_folder() -> Path:
    """The folder of the hub's cache, as huggingface_hub finds it in the environment."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    # pathlib cannot expand variables.
    return Path(os.path.expandvars(os.path.expanduser(named))).absolute()


def cached(repository: str, revision: str | None, marker: str = MODEL_CONFIG) -> Path | None:
    """The snapshot of a repository in the cache; None without a snapshot that has the file `marker`."""
    folder = cache_folder() / f"models--{repository.replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(OSError):  # a commit has no ref
        commit = (folder / "refs" / commit).read_text("utf-8").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if (snapshot / marker).is_file() else None


def download(repository: str, revision: str | None) -> Path:
    """Download a repository's small files; returns the snapshot's folder."""
    return Path(_snapshot(repository, revision, allow_patterns=SMALL_FILES))


def download_all(repository: str, revision: str | None) -> Path:
    """Download a repository with weights, tokenizer and code; if it has safetensors, no other weights."""
    small = _snapshot(repository, revision, allow_patterns=SMALL_FILES)
    revision = Path(small).name
    names = _ask(repository, revision, lambda hub: hub.list_repo_files(repository, revision=revision))
    has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
    needless = OTHER_FRAMEWORKS + (PICKLED if has_safetensors else [])
    return Path(_snapshot(repository, revision, ignore_patterns=needless))


def _snapshot(repository: str, revision: str | None, **patterns: Any) -> str:
    return str(_ask(repository, revision, lambda hub: hub.snapshot_download(repository, revision=revision, **patterns)))


def _ask(repository: str, revision: str | None, question: Callable[[Any], Any]) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise SlurmGPUError(
            f"model {repository!r} is not a folder, and not in the hub's cache, {cache_folder()}. To download it, "
            f"first pip install 'slurmgpu[llm]'."
        ) from error
    try:
        with quiet("huggingface_hub"):  # it warns of each retry
            return question(huggingface_hub)
    except Exception as error:  # its errors share no base class
        raise _refusal(repository, revision, error) from error


def similar_folder(model: str) -> str:
    """` Did you mean …?` with a folder of nearly this name, to append to a sentence; empty if there is none."""
    path = expanded(model)
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except OSError:
        return ""  # the error that this would be appended to is the one to be read
    close = difflib.get_close_matches(path.name, sorted(names), n=1)
    return f" Did you mean {str(Path(model).with_name(close[0]))!r}?" if close else ""


class UnknownRepositoryError(SlurmGPUError):
    """The hub has no repository with this name that the user may see."""


class UnreachedError(SlurmGPUError):
    """The hub did not answer, or the client is offline."""


def _refusal(repository: str, revision: str | None, error: Exception) -> SlurmGPUError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return SlurmGPUError(
            f"model {repository!r} is gated: accept its licence at https://huggingface.co/{repository}, and set "
            f"HF_TOKEN to a token of that account, or run `hf auth login`."
        )
    if "RevisionNotFoundError" in kinds:
        return SlurmGPUError(f"model {repository!r} has no revision {revision!r} on the hub. Correct `revision`.")
    if isinstance(error, OSError) and error.errno in NOT_WRITTEN:
        return SlurmGPUError(
            f"model {repository!r} cannot be written into the hub's cache, {cache_folder()}: "
            f"{os.strerror(error.errno)}. Set HF_HOME to a folder that you may write to, on a disk with free space."
        )
    at = f" at revision {revision!r}" if revision else ""
    beginning = f"model {repository!r}{at} is neither a folder here, nor on the hub, nor in its cache"
    expected = f'expected a folder, a name on the hub, or "package:NAME".{similar_folder(repository)}'
    if "RepositoryNotFoundError" in kinds:
        return UnknownRepositoryError(
            f"{beginning}: the repository does not exist, or is private; {expected} For a private one set HF_TOKEN to "
            f"a token of an account that may read it."
        )
    if "HFValidationError" in kinds:
        return SlurmGPUError(f"{beginning}: the name is not valid; {expected}")
    # Hub errors have paragraphs and URLs.
    said = " ".join(described(error).split())[:300]
    return UnreachedError(
        f"model {repository!r}{at} is neither a folder here nor in the hub's cache, {cache_folder()}, and the hub was "
        f"not reached.{similar_folder(repository)} {FETCH}; HF_HOME must be the same there and here. ({said})"
    )
