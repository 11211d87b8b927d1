"""Find models by name, and read, check and fetch their files, without torch and transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models import hub
from slurmgpu.util.amounts import gb, some_of
from slurmgpu.util.globs import matches
from slurmgpu.util.hashing import digest_of
from slurmgpu.util.shared_files import list_names, read_given
from slurmgpu.util.users import expanded

QUANTIZATIONS = ("8bit", "4bit", "fp8")
"""Suffixes of a model's name that quantise it, after a hyphen."""

ADAPTER_CONFIG = "adapter_config.json"
"""The config file of a LoRA adapter."""

PACKAGE = "package:"

VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "tekken.json", "*.tiktoken", "tokenization_*.py")
"""Every tokenizer has at least one of these files; some have their own code."""

MATTERS = (
    *("config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "*processor_config.json", "*.py"),
    *("*.safetensors", "*.index.json", "pytorch_model*", "adapter_*"),
)
"""Files that `from_pretrained` reads; other files in the folder may change."""

N_READERS = 8

_POINTER, _MOST_OF_POINTER = b"version https://git-lfs.github.com/spec/", 1024
"""The beginning of a pointer of Git LFS, and more bytes than one has, by its specification."""


@dataclass(frozen=True)
class ModelSource:
    """A model and its small files.

    `folder` has at least config.json, and `config` is its content; `quantization` is the suffix of the name ("8bit",
    "4bit", "fp8") or None. For a model from the hub, `repository` is its name there, `revision` the commit, and `asked`
    the revision in the settings.
    """

    name: str
    folder: Path
    revision: str | None
    quantization: str | None
    config: Mapping[str, Any]
    repository: str | None = None
    asked: str | None = None


def find_model(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """The model with this name: a folder, a name on the hub, or "package:NAME"; SlurmGPUError if there is none.

    A name may end in -8bit, -4bit or -fp8, unless the whole name is a folder or a model on the hub.
    """
    stem, _, quantization = model.rpartition("-")
    if quantization not in QUANTIZATIONS or _as_named(model, revision) is not None:
        stem, quantization = model, ""
    try:
        folder, repository = locate(stem, revision)
    except hub.UnknownRepositoryError:
        if not quantization:
            raise
        quantization = ""  # some names on the hub end like this
        folder, repository = locate(model, revision)
    config = read_json(folder / "config.json")
    _check(model, folder, config, quantization, trust_remote_code=trust_remote_code)
    commit = revision if repository is None else folder.name
    return ModelSource(model, folder, commit, quantization or None, config, repository, revision)


def served_model(model: str, revision: str | None, *, is_here: bool) -> ModelSource:
    """The model of a server: the server's name for it, or, if it `is_here`, a file or as in `find_model`."""
    path = expanded(model)
    if not is_here:
        return ModelSource(model, path, None, None, {})
    if path.is_file():  # a GGUF
        return ModelSource(model, path.absolute(), None, None, {})
    source = find_model(model, revision=revision)
    if source.quantization is not None:
        raise SlurmGPUError(
            f'model {model!r}: with engine = "server" only the server can quantise. Remove -{source.quantization}, and '
            f"give the command in serve its option for quantisation."
        )
    return source


def _as_named(model: str, revision: str | None, marker: str = hub.MODEL_CONFIG) -> tuple[Path, str | None] | None:
    folder = expanded(model)
    if model and folder.is_dir():
        return folder.absolute(), None
    if _is_path(model) or model.startswith(PACKAGE):
        return None
    snapshot = hub.cached(model, revision, marker)
    return None if snapshot is None else (snapshot, model)


def locate(model: str, revision: str | None = None, marker: str = hub.MODEL_CONFIG) -> tuple[Path, str | None]:
    """The folder with a model's small files, and its name on the hub if it is from there; without suffix.

    A snapshot in the hub's cache counts only if it has the file `marker`.
    """
    if model.startswith(PACKAGE):
        return _in_package(model.removeprefix(PACKAGE)), None
    found = _as_named(model, revision, marker)
    if found is not None:
        if found[1] is None:
            _refuse_pointers(found[0])
        return found
    if "://" in model:
        *_, name = model.partition("://")
        short = "/".join(name.split("/")[1:3])
        raise SlurmGPUError(f"model {model!r} is a URL; expected the model's name on the hub, here {short!r}.")
    if _is_path(model):
        raise SlurmGPUError(
            f"there is no folder {model!r}{'' if Path(model).is_absolute() else f' in {Path.cwd()}'};"
            ' expected the folder of a model, its name on the hub, or "package:NAME".'
            f"{hub.similar_folder(model)}"
        )
    return hub.download(model, revision), model


def _refuse_pointers(folder: Path) -> None:
    """SlurmGPUError if a file of a model is a pointer of Git LFS, which a clone without it has for large files."""
    for path in named_in(folder, MATTERS):
        if path.is_file() and path.stat().st_size < _MOST_OF_POINTER:
            with open(path, "rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    raise SlurmGPUError(
                        f"{path} is a pointer of Git LFS, not the file. Type `git lfs pull` in {folder}."
                    )


def _is_path(model: str) -> bool:
    return not model or model.startswith(("/", ".", "~")) or model.count("/") > 1


def _in_package(name: str) -> Path:
    """The model's folder in an installed package, found without importing it: its imports may be slow."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        raise SlurmGPUError(
            f"there is no package {name!r} here; install it, or correct the name, which is for `import`."
        )
    roots = spec.submodule_search_locations or ()
    try:
        configs = [Path(path) for root in roots for path in matches("**/config.json", root)]
    except OSError as error:
        raise _unlisted(error) from error
    folders = sorted(str(path.parent) for path in configs if "model_type" in read_json(path))
    if len(folders) != 1:
        raise SlurmGPUError(
            f"package {name!r} has {len(folders)} model folders: {', '.join(folders) or 'none'}; expected one. Set "
            f"model to the path of a folder."
        )
    return Path(folders[0])


def named_in(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The entries of a model's folder that match one of the patterns, in order; [] if there is no folder.

    SlurmGPUError if it cannot be listed: for `Path.glob` such a folder is empty.
    """
    try:
        names = list_names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unlisted(error) from error
    return [folder / name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _unlisted(error: OSError) -> SlurmGPUError:
    return SlurmGPUError(f"The model folder {error.filename} cannot be listed: {error.strerror}. Make it readable.")


def read_json(path: Path) -> Any:
    """The content of a JSON file; an empty mapping if there is no such file."""
    try:
        return json.loads(read_given(path).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SlurmGPUError(f"{path} cannot be read as JSON: {getattr(error, 'strerror', None) or error}.") from error


def _check(model: str, folder: Path, config: Any, quantization: str, *, trust_remote_code: bool) -> None:
    if not config and (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "the model that it was trained on"
        raise SlurmGPUError(
            f"model {model!r} is a LoRA adapter, not a whole model; expected model = {base!r} and adapter = {model!r}."
        )
    if not isinstance(config, Mapping) or not config:
        raise SlurmGPUError(
            f"model {model!r}: {folder} has no config.json; expected a model folder with config.json, weights and "
            f"tokenizer, as written by `save_pretrained`."
        )
    if quantization and (own := config.get("quantization_config")):
        method = own.get("quant_method", "unknown method")
        raise SlurmGPUError(
            f"model {model!r}: the suffix -{quantization} quantises a model, and the checkpoint in {folder} is already "
            f"quantised (quantization_config in its config.json: {method}). Remove the suffix."
        )
    if "model_type" not in config and "auto_map" in config and not trust_remote_code:
        raise SlurmGPUError(
            f"model {model!r} has its own code, which does not run without your permission. Read the code in {folder}, "
            f"and if you trust it, set trust_remote_code = true."
        )


def cache_of(source: ModelSource) -> Path | None:
    """The hub cache that has a model; None for a model that is not from the hub."""
    return None if source.repository is None else source.folder.parent.parent.parent


def files_of(source: ModelSource) -> list[Path]:
    """Paths that a container needs to load a model; in the hub's cache including the targets of links."""
    if source.name.startswith(PACKAGE):
        return []  # the image has its own package
    # snapshots/COMMIT/FILE → ../../blobs/DIGEST
    return [source.folder if source.repository is None else source.folder.parent.parent]


def fetch(source: ModelSource) -> str:
    """Download a model's weights, tokenizer and code to the hub's cache; returns a sentence with size and path."""
    return fetch_files(source.folder, source.repository, source.asked)


def fetch_files(folder: Path, repository: str | None, revision: str | None) -> str:
    """Download the result of `locate` from the hub; returns a sentence with size and path."""
    if repository is None:
        return f"the model is in {folder}, {_size(folder)}: nothing to download"
    try:
        folder = hub.download_all(repository, revision)
    except hub.UnreachedError:
        if not _is_whole(folder):
            raise
        at = _at(repository, folder, revision)
        return f"{at} is in the cache, {folder}, {_size(folder)}; the hub could not be reached"
    return f"{_at(repository, folder, revision)} is in {folder}, {_size(folder)}"


def _at(repository: str, folder: Path, revision: str | None) -> str:
    asked = "" if revision is None or folder.name.startswith(revision) else f" ({revision})"
    return f"{repository} at {folder.name[:12]}{asked}"


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has weights and a tokenizer; it never contains incomplete files."""
    indices = [folder / f"{name}.index.json" for name in ("model.safetensors", "pytorch_model.bin")]
    listed = next((set(read_json(path).get("weight_map", {}).values()) for path in indices if path.is_file()), set())
    single = named_in(folder, ("*.safetensors", "pytorch_model*.bin"))
    has_weights = all((folder / name).is_file() for name in listed) and bool(listed or single)
    return has_weights and bool(named_in(folder, VOCABULARIES))


def _size(folder: Path) -> str:
    return gb(sum(path.stat().st_size for path in map(Path, matches("**", folder)) if path.is_file()))


def digests_of(source: ModelSource) -> dict[str, str] | None:
    """A digest of each file in a model's folder that loading reads; None for models from the hub or a package.

    Those are pinned by a commit or a version. Digests ignore times, so that a copy of the folder is equal.
    """
    if source.repository is not None or source.name.startswith(PACKAGE):
        return None
    if source.folder.is_file():
        return {source.folder.name: digest_of(source.folder)}
    paths = [path for path in named_in(source.folder, MATTERS) if path.is_file()]
    with ThreadPoolExecutor(N_READERS) as readers:
        return {path.name: digest for path, digest in zip(paths, readers.map(digest_of, paths), strict=True)}


def check_unchanged(source: ModelSource, planned: Mapping[str, str]) -> None:
    """SlurmGPUError with the changed files if a model's folder has changed since planning."""
    found = digests_of(source) or {}
    changes = {
        "changed": [name for name in planned if name in found and found[name] != planned[name]],
        "missing": [name for name in planned if name not in found],
        "new": [name for name in found if name not in planned],
    }
    if any(changes.values()):
        said = "; ".join(
            f"{some_of(names, 1)} {'is' if len(names) == 1 else 'are'} {how}" for how, names in changes.items() if names
        )
        raise SlurmGPUError(
            f"The model in {source.folder} has changed since this run was planned: {said}. Restore the former files "
            f"and resubmit, or plan a new run in another run directory."
        )
