"""Globs have the matches of Python's, and an error where a folder cannot be listed: Python's takes it for empty."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmgpu.code.tracer import Scope, Tracer
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import find, list_files
from slurmgpu.llm.models.source import named_in
from slurmgpu.util.globs import matches
from slurmgpu.workloads.tracin.planning import checkpoint_paths
from tests.support.unprivileged import unprivileged


@pytest.fixture
def parts() -> Iterator[Path]:
    """A folder in which any user may look, with one that nobody but root may list or enter; pytest's own is closed."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for year in ("2023", "2024"):
        (folder / "parts" / year).mkdir(parents=True)
        for name in ("x.jsonl", "x.jpg", "x.py", "x.pt", "x.safetensors"):
            (folder / "parts" / year / name).write_text("{}\n")
    (folder / "parts" / "2024").chmod(0)
    list_files("parts/2023/*.jpg", folder)  # formats are imported as root, who may read Python's own files
    yield folder
    (folder / "parts" / "2024").chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize("pattern", ["parts/**/*.jsonl", "parts/*/x.jsonl", "**/x.jsonl", "parts/20*/*"])
def test_a_glob_over_a_folder_that_may_not_be_listed_is_refused(parts: Path, pattern: str) -> None:
    with unprivileged(), pytest.raises(SlurmGPUError) as raised:
        find(pattern, parts)
    assert str(raised.value) == (
        f"Input {parts}/parts/2024 cannot be listed: Permission denied. Make it readable, or leave it out."
    )
    with unprivileged():
        assert find("parts/2023/*.jsonl", parts) == [parts / "parts/2023/x.jsonl"]


def test_so_are_globs_of_files_that_are_items_of_checkpoints_and_folders_of_models(parts: Path) -> None:
    said = "parts/2024.* cannot be listed: Permission denied"
    with unprivileged(), pytest.raises(SlurmGPUError, match=said):
        list_files("parts/*/*.jpg", parts)
    with unprivileged(), pytest.raises(SlurmGPUError, match=said):
        checkpoint_paths(f"{parts}/parts/*/*.pt")
    with unprivileged(), pytest.raises(SlurmGPUError, match=said):
        named_in(parts / "parts" / "2024", ["*.safetensors"])


def test_modules_of_such_a_folder_are_told_to_be_missing_in_the_snapshot(parts: Path) -> None:
    (parts / "parts" / "2024").rename(parts / "parts" / "shut")
    with unprivileged():
        tracer = Tracer(Scope(parts, None))
        tracer.code.add_below(["parts"])
    (parts / "parts" / "shut").rename(parts / "parts" / "2024")
    [said] = tracer.finish().notes
    assert said == f"{parts}/parts/shut cannot be listed (Permission denied), so its modules are not in the snapshot."


def test_an_error_that_lasts_is_refused_and_one_that_passes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("1")
    listed, errors = os.scandir, [errno.ESTALE]

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if errors:
            raise OSError(errors.pop(), "no answer", path)
        return listed(path)

    monkeypatch.setattr("slurmgpu.util.shared_files.time.sleep", lambda _: None)
    monkeypatch.setattr(os, "scandir", scandir)
    assert matches("*.txt", tmp_path) == {str(tmp_path / "a.txt")}
    errors[:] = [errno.ENFILE]
    with pytest.raises(SlurmGPUError, match="cannot be listed: no answer"):
        find("*.txt", tmp_path)


PATTERNS = [
    *("*", "**", "**/*", "*.txt", "a/*.txt", "**/*.txt", "*/b/*.txt", "a/**/c/*", "**/b/**", "a/../*.txt", "./*.txt"),
    *(".*", ".h/*", "**/.x.txt", "[ab]/*", "a?/*", "link/*.txt", "*/d.txt", "gone/*", "f.txt/*"),
    *("*/f.txt", "loop/*", "*/*/*", "dangling*", "[[]1].txt", "A/*", "a//b/*.txt"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_matches_are_those_of_pythons_glob(tmp_path: Path, pattern: str) -> None:
    for name in ("f.txt", "a/d.txt", "a/b/d.txt", "a/b/c/e.txt", "ab/d.txt", ".h/x.txt", "b/.x.txt", "[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    for given, folder in ((pattern, tmp_path), (f"{tmp_path}/{pattern}", Path("/"))):
        found = glob.glob(given, root_dir=folder, recursive=True)  # noqa: PTH207 - it is the one to compare with
        assert {os.path.normpath(name) for name in matches(given, folder)} == {
            os.path.normpath(folder / name) for name in found
        }


def test_nothing_is_below_a_folder_that_is_not_there_or_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f.txt").touch()
    assert matches("gone/**", tmp_path) == matches("f.txt/**", tmp_path) == matches("*", tmp_path / "gone") == set()


def test_a_folder_in_a_circle_of_links_is_listed_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").touch()
    (tmp_path / "a" / "up").symlink_to("..")
    assert matches("**/*.txt", tmp_path) == {str(tmp_path / "a/x.txt")}
