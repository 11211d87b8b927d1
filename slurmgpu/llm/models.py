"""Models by name: where their files are, and what those say without being loaded. No torch, no transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm import hub

QUANTIZATIONS = ("8bit", "4bit", "fp8")
"""What may follow a model's name, after a hyphen."""

PACKAGE = "package:"

VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "tekken.json", "*.tiktoken", "tokenization_*.py")
"""Files, one of which any tokenizer has; of some of its own code."""


@dataclass(frozen=True)
class ModelSource:
    """A model: what `from_pretrained` takes (`source`), and what its small files say.

    `folder` holds at least config.json; `quantization` is what a suffix of the name asks for ("8bit", "4bit", "fp8"),
    or None; `config` is the content of config.json. `source` is a folder, too, so that loading asks no network.
    Of a model of the hub, `repository` is its name there, `revision` the commit, and `asked` the revision asked for.
    """

    name: str
    source: str
    folder: Path
    revision: str | None
    quantization: str | None
    config: Mapping[str, Any]
    repository: str | None = None
    asked: str | None = None


def find_model(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """The model of that name: a folder, a name on the hub, or "package:NAME"; a sentence where there is none.

    A name may end in -8bit, -4bit or -fp8, unless it is as a whole that of a folder, or of a model of the hub.
    """
    found = _as_named(model, revision)
    quantization = None
    if found is None:
        stem, _, suffix = model.rpartition("-")
        if suffix in QUANTIZATIONS:
            found, quantization = _without_suffix(model, stem, suffix, revision)
        else:
            found = locate(model, revision)
    folder, repository = found
    config = read_json(folder / "config.json")
    _check(model, folder, config, quantization, trust_remote_code=trust_remote_code)
    commit = revision if repository is None else folder.name
    return ModelSource(model, str(folder), folder, commit, quantization, config, repository, revision)


def _as_named(model: str, revision: str | None) -> tuple[Path, str | None] | None:
    """The model of the whole name, if it is a folder or in the hub's cache."""
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder.absolute(), None
    if _is_path(model) or model.startswith(PACKAGE):
        return None
    snapshot = hub.cached(model, revision)
    return None if snapshot is None else (snapshot, model)


def _without_suffix(
    model: str, stem: str, suffix: str, revision: str | None
) -> tuple[tuple[Path, str | None], str | None]:
    try:
        return locate(stem, revision), suffix
    except hub.UnknownRepositoryError:
        return locate(model, revision), None  # some names on the hub do end so


def locate(model: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The folder with a model's small files, and its name on the hub if it is from there. No suffix is understood."""
    if model.startswith(PACKAGE):
        return _in_package(model.removeprefix(PACKAGE)), None
    found = _as_named(model, revision)
    if found is not None:
        return found
    if "://" in model:
        *_, name = model.partition("://")
        short = "/".join(name.split("/")[1:3])
        raise SlurmGPUError(f"model {model!r} is an address; expected the model's name on the hub, here {short!r}.")
    if _is_path(model):
        raise SlurmGPUError(
            f"there is no folder {model!r}, seen from {Path.cwd()};"
            ' expected the folder of a model, its name on the hub, or "package:NAME".'
        )
    return hub.download(model, revision), model


def _is_path(model: str) -> bool:
    return not model or model.startswith(("/", ".", "~")) or model.count("/") > 1


def _in_package(name: str) -> Path:
    """The model's folder in an installed package, found without importing it: its imports may be slow."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        raise SlurmGPUError(f"there is no package {name!r} here; install it, or give the name that `import` takes.")
    roots = spec.submodule_search_locations or ()
    configs = [path for root in roots for path in Path(root).rglob("config.json")]
    folders = sorted(str(path.parent) for path in configs if "model_type" in read_json(path))
    if len(folders) != 1:
        raise SlurmGPUError(
            f"package {name!r} has {', '.join(folders) or 'none'}; expected the folder of one model."
            " Give the path of a folder instead."
        )
    return Path(folders[0])


def read_json(path: Path) -> Any:
    """What a JSON file holds; an empty mapping where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SlurmGPUError(f"{path} cannot be read as JSON: {error}.") from error


def _check(model: str, folder: Path, config: Any, quantization: str | None, *, trust_remote_code: bool) -> None:
    if not isinstance(config, Mapping) or not config:
        raise SlurmGPUError(
            f"model {model!r}: {folder} has no config.json; expected the folder of a model, as `save_pretrained` and "
            f"the hub make it, with config.json, the weights and the tokenizer."
        )
    if quantization and (own := config.get("quantization_config")):
        method = own.get("quant_method", "of its own")
        raise SlurmGPUError(
            f"model {model!r}: the suffix -{quantization} asks for a quantised variant, and the checkpoint in {folder} "
            f"is one already (quantization_config in its config.json: {method}). Leave the suffix out."
        )
    if "model_type" not in config and "auto_map" in config and not trust_remote_code:
        raise SlurmGPUError(
            f"model {model!r} comes with code of its own, which is not run unless you say so: read it, in {folder}, "
            f"and set trust_remote_code = true."
        )


def cache_of(source: ModelSource) -> Path | None:
    """The hub's cache in which a model was found; None for a model that is not of the hub."""
    return None if source.repository is None else source.folder.parent.parent.parent


def files_of(source: ModelSource) -> list[Path]:
    """What a container must see to load a model: its folder; of the hub's cache also what links in it lead to."""
    if source.name.startswith(PACKAGE):
        return []  # the image has a package of its own
    # snapshots/COMMIT/FILE → ../../blobs/DIGEST
    return [source.folder if source.repository is None else source.folder.parent.parent]


def fetch(source: ModelSource) -> str:
    """Download a model's weights, tokenizer and code to the hub's cache; a sentence with size and place."""
    return fetch_files(source.folder, source.repository, source.asked)


def fetch_files(folder: Path, repository: str | None, revision: str | None) -> str:
    """Download what `locate` found on the hub; a sentence with size and place."""
    if repository is None:
        return f"the model lies in {folder}, {_size(folder)}: there is nothing to download"
    try:
        folder = hub.download_all(repository, revision)
    except hub.UnreachedError:
        if not _is_whole(folder):
            raise
        at = _at(repository, folder, revision)
        return f"{at} is in the cache, {folder}, {_size(folder)}; the hub was not reached"
    return f"{_at(repository, folder, revision)} is in {folder}, {_size(folder)}"


def _at(repository: str, folder: Path, revision: str | None) -> str:
    asked = "" if revision is None or folder.name.startswith(revision) else f" ({revision})"
    return f"{repository} at {folder.name[:12]}{asked}"


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has weights and a tokenizer: its files appear once they are complete."""
    indices = [folder / f"{name}.index.json" for name in ("model.safetensors", "pytorch_model.bin")]
    listed = next((set(read_json(path).get("weight_map", {}).values()) for path in indices if path.is_file()), set())
    single = [path for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern)]
    has_weights = all((folder / name).is_file() for name in listed) and bool(listed or single)
    return has_weights and any(next(folder.glob(pattern), None) for pattern in VOCABULARIES)


def _size(folder: Path) -> str:
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
