"""The Hugging Face hub, and its cache on disk. What lies in the cache is found without asking anybody."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import FULL

SMALL_FILES = [
    *("config.json", "generation_config.json", "tokenizer_config.json", "*.index.json"),
    *("modules.json", "sentence_bert_config.json", "*/config.json"),
]
"""What planning reads of a model, none of it its weights."""

OTHER_FRAMEWORKS = ["*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite", "*.mlmodel", "*.ot"]
"""Weights, a second time, that transformers does not load with PyTorch."""

PICKLED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "original/*", "metal/*", "consolidated*"]
"""Weights that are a second copy where there are safetensors."""

NOT_WRITTEN = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""What a cache that cannot be written to answers."""

FETCH = "`slurmgpu check --fetch` on a machine with network downloads it"


def cache_folder() -> Path:
    """The folder of the hub's cache, as huggingface_hub finds it in the environment."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    # As text, which has no other way to expand variables.
    return Path(os.path.expandvars(os.path.expanduser(named))).absolute()  # noqa: PTH111


def repository_folder(repository: str) -> Path:
    """Where the cache keeps a repository: its snapshots, and the files that they link to."""
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def cached(repository: str, revision: str | None) -> Path | None:
    """The snapshot of a repository that is in the cache; None where there is none, or no config.json in it."""
    folder = repository_folder(repository)
    commit = revision or "main"
    with contextlib.suppress(OSError):  # a commit has no file there
        commit = (folder / "refs" / commit).read_text("utf-8").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def download(repository: str, revision: str | None) -> Path:
    """The snapshot of a repository, its small files downloaded; SlurmGPUError says why there is none."""
    return Path(_snapshot(repository, revision, allow_patterns=SMALL_FILES))


def download_all(repository: str, revision: str | None) -> Path:
    """The snapshot of a repository, downloaded with its weights, tokenizer and code; of weights, safetensors alone."""
    small = _snapshot(repository, revision, allow_patterns=SMALL_FILES)
    revision = Path(small).name
    needless = OTHER_FRAMEWORKS + (PICKLED if _has_safetensors(repository, revision) else [])
    return Path(_snapshot(repository, revision, ignore_patterns=needless))


def _has_safetensors(repository: str, revision: str) -> bool:
    names = _ask(repository, revision, lambda hub: hub.list_repo_files(repository, revision=revision))
    return any(name.endswith(".safetensors") and "/" not in name for name in names)


def _snapshot(repository: str, revision: str | None, **patterns: Any) -> str:
    return str(_ask(repository, revision, lambda hub: hub.snapshot_download(repository, revision=revision, **patterns)))


def _ask(repository: str, revision: str | None, question: Callable[[Any], Any]) -> Any:
    """What huggingface_hub answers to a question; its errors become sentences."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise SlurmGPUError(
            f"model {repository!r} is no folder, and not in the hub's cache, {cache_folder()}; to ask the hub for it: "
            f"pip install 'slurmgpu[llm]'."
        ) from error
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # each retry is a warning, and what comes of them is said below
    try:
        return question(huggingface_hub)
    except Exception as error:  # The client's errors share no base, and its network library changes.
        raise _refusal(repository, revision, error) from error
    finally:
        logger.setLevel(level)


class UnknownRepositoryError(SlurmGPUError):
    """The hub has no repository of this name, or none that this user may know of."""


class UnreachedError(SlurmGPUError):
    """The hub did not answer, or was not to be asked."""


def _refusal(repository: str, revision: str | None, error: Exception) -> SlurmGPUError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return SlurmGPUError(
            f"model {repository!r} is gated: accept its licence at https://huggingface.co/{repository}, and set "
            f"HF_TOKEN to a token of that account, or type `hf auth login`."
        )
    if "RevisionNotFoundError" in kinds:
        return SlurmGPUError(f"model {repository!r} has no revision {revision!r} on the hub. Correct `revision`.")
    if isinstance(error, OSError) and error.errno in NOT_WRITTEN:
        return SlurmGPUError(
            f"model {repository!r} cannot be written into the hub's cache, {cache_folder()}: "
            f"{os.strerror(error.errno)}. Set HF_HOME to a place where you may write, and where there is room."
        )
    at = f" at revision {revision!r}" if revision else ""
    beginning = f"model {repository!r}{at} is no folder here, and neither the hub nor its cache gives it"
    expected = 'expected a folder, a name on the hub, or "package:NAME".'
    if "RepositoryNotFoundError" in kinds:
        return UnknownRepositoryError(
            f"{beginning}: there is no such repository, or it is private; {expected} For a private one set HF_TOKEN to "
            f"a token of an account that may read it."
        )
    if "HFValidationError" in kinds:
        return SlurmGPUError(f"{beginning}: it is no name of a repository; {expected}")
    # Hub errors come with paragraphs, and addresses.
    said = " ".join(str(error).split())[:300]
    return UnreachedError(
        f"{beginning}: the cache is {cache_folder()}, and the hub was not reached. {FETCH}; HF_HOME must be the same "
        f"there and here. ({type(error).__name__}: {said})"
    )
