"""Data sets of the Hugging Face hub as files in its cache: `hf://datasets/OWNER/NAME[@REVISION][/PATH]`."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.amounts import count_of, some_of
from slurmgpu.util.exceptions import described
from slurmgpu.util.logging import quiet

PREFIX = "hf://"
CONVERTED = "refs/convert/parquet"
"""The revision with the hub's own conversion of a data set: CONFIG/SPLIT/0000.parquet."""

_NAMED = re.compile(
    r"datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[^/]+))?(?:/(?P<path>.+))?"
)
_SNAPSHOT = re.compile(r"datasets--(?P<owner>.+?)--(?P<name>.+)")
_MAGIC = re.compile(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])")
_N_SHOWN = 5


@dataclass(frozen=True)
class Dataset:
    """Files of a data set; `path` may be a glob."""

    name: str
    revision: str
    path: str

    def __str__(self) -> str:
        return f"{PREFIX}datasets/{self.name}@{self.revision}/{self.path}"


def download(named: str, *, newest: bool = False) -> list[Path]:
    """The files of a data set in the hub's cache, in order; missing files are downloaded.

    If the cache has all files of a revision, the hub is not asked, except with `newest`. SlurmGPUError if a file cannot
    be downloaded, or if the hub has converted only a part of the data set.
    """
    with quiet("huggingface_hub"):  # it warns of each retry
        return _downloaded(_parse(named), _library(named), newest=newest)


def _downloaded(dataset: Dataset, library: Any, *, newest: bool) -> list[Path]:
    try:
        if not newest and (found := _cached(library, dataset)):
            return found
        commit = library.resolve_revision(dataset.name, repo_type="dataset", revision=dataset.revision)
        names = library.list_repo_files(dataset.name, repo_type="dataset", revision=commit)
        return _fetched(library, replace(dataset, revision=commit), names)
    except SlurmGPUError:
        raise
    except Exception as error:  # the library's errors share no base class
        if (refusal := _refusal(dataset, error)) is not None:
            raise refusal from error
        if newest and (found := _cached(library, dataset)):
            return found
        said = " ".join(described(error).split())[:300]
        raise SlurmGPUError(
            f"{dataset} is incomplete in the hub's cache, and the hub cannot be reached. `slurmgpu check --fetch` on a "
            f"machine with network downloads it; HF_HOME must be the same there and here. "
            f"({said})"
        ) from error


def _cached(library: Any, dataset: Dataset) -> list[Path] | None:
    """The files in the cache; None if one is missing, or if the cache does not list the files."""
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        files = library.get_cached_repo_tree(dataset.name, repo_type="dataset", revision=dataset.revision)
        return _fetched(library, dataset, [file.path for file in files], offline=True)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None


def origin(path: Path) -> str | None:
    """The name on the hub, with the commit, of a file in the hub's cache; None for other files."""
    for folder in path.parents if "snapshots" in path.parts else ():  # an input may have 100,000 other files
        found = _SNAPSHOT.fullmatch(folder.name)
        inner = path.relative_to(folder).parts
        if found and inner[0] == "snapshots":
            return f"{PREFIX}datasets/{found['owner']}/{found['name']}@{inner[1]}/{'/'.join(inner[2:])}"
    return None


def _parse(named: str) -> Dataset:
    found = _NAMED.fullmatch(named.removeprefix(PREFIX))
    if not found:
        raise SlurmGPUError(
            f"The input {named!r} names no data set; expected hf://datasets/OWNER/NAME@REVISION/PATH, where PATH may "
            f"be a glob. Without @REVISION/PATH it is the hub's conversion to Parquet."
        )
    revision, path = found["revision"], found["path"]
    if path is None:
        if revision not in (None, CONVERTED):
            raise SlurmGPUError(
                f"The input {named!r} has a revision but no files. Add them, for example {named}/data/train-*.parquet."
            )
        return Dataset(found["name"], CONVERTED, "**/*.parquet")
    return Dataset(found["name"], unquote(revision or "main"), path)


def _library(named: str) -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.errors import CachedRepoTreeNotFoundError  # noqa: F401 - since 2.4
    except ImportError as error:
        raise SlurmGPUError(f"{named} needs huggingface_hub 2.4 or later: pip install 'slurmgpu[hub]'.") from error
    return huggingface_hub


def _fetched(library: Any, dataset: Dataset, names: Sequence[str], *, offline: bool = False) -> list[Path]:
    chosen = _chosen(dataset, names)
    snapshot = library.snapshot_download(
        dataset.name,
        repo_type="dataset",
        revision=dataset.revision,
        allow_patterns=[*map(glob.escape, chosen)],
        local_files_only=offline,
    )
    return [Path(snapshot) / name for name in chosen]


def _chosen(dataset: Dataset, names: Sequence[str]) -> list[str]:
    """The files on the hub that a path or a glob names, sorted."""
    fits: Callable[[str], object] = re.compile(_regex(dataset.path)).fullmatch
    chosen = [dataset.path] if dataset.path in names else sorted(filter(fits, names))
    if not chosen:
        raise SlurmGPUError(f"{dataset} matches no file. There are {some_of(sorted(names), _N_SHOWN)}.")
    partial = next((name for name in chosen if re.search(r"(^|/)partial-", name)), None)
    if partial:
        raise SlurmGPUError(
            f"{dataset} has {partial}: the hub converted only the first part of this data set to Parquet. Name the "
            f"data set's own files, for example {PREFIX}datasets/{dataset.name}@main/data/*.parquet."
        )
    folders = sorted({name.rpartition("/")[0] for name in chosen})
    if dataset.path == "**/*.parquet" and len(folders) > 1:
        raise SlurmGPUError(
            f"{PREFIX}datasets/{dataset.name} has splits or configurations in {count_of(len(folders), 'folder')}, "
            f"{', '.join(folders[:_N_SHOWN])}{' …' if len(folders) > _N_SHOWN else ''}. Name one of them, for example "
            f"{PREFIX}datasets/{dataset.name}@{CONVERTED}/{folders[0]}/*.parquet."
        )
    return chosen


def _regex(pattern: str) -> str:
    """A glob as a regular expression; `*` stays within a folder, `**` does not."""
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = _MAGIC.split(pattern)
    return "".join(
        re.escape(part) if number % 2 == 0 else known.get(part) or part.replace("[!", "[^")
        for number, part in enumerate(parts)
    )


def _refusal(dataset: Dataset, error: Exception) -> SlurmGPUError | None:
    """An error with advice, if the hub has answered; None if it was not reached."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    where = f"{PREFIX}datasets/{dataset.name}"
    if "GatedRepoError" in kinds:
        return SlurmGPUError(
            f"{where} is gated: accept its terms at https://huggingface.co/datasets/{dataset.name}, and set HF_TOKEN "
            f"to a token of that account, or run `hf auth login`."
        )
    if "RepositoryNotFoundError" in kinds:
        return SlurmGPUError(
            f"{where} does not exist on the hub, or is private. Correct the name, or set HF_TOKEN to a token of an "
            f"account that may read it."
        )
    if "RevisionNotFoundError" in kinds and dataset.revision == CONVERTED:
        return SlurmGPUError(
            f"The hub has not converted {where} to Parquet. Name its own files, such as {where}@main/data/*.jsonl."
        )
    if "RevisionNotFoundError" in kinds:
        return SlurmGPUError(f"{where} has no revision {dataset.revision!r} on the hub. Correct it.")
    if "HFValidationError" in kinds:
        return SlurmGPUError(f"{where} is not a valid name on the hub. Correct it.")
    if isinstance(error, OSError) and error.errno is not None:
        return SlurmGPUError(
            f"{dataset} cannot be written into the hub's cache: {error}. Set HF_HOME to a folder that you may write "
            f"to, on a disk with free space."
        )
    return None
