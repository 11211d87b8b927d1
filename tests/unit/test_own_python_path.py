"""With which PYTHONPATH another Python imports the same slurmgpu, and everything else as the user's Python does."""

import os
import site

import pytest

from slurmgpu.util import packages


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A Python's own packages, and a clone, each with slurmgpu; and a folder with other packages."""
    for name in ("site-packages", "clone"):
        (tmp_path / name / "slurmgpu").mkdir(parents=True)
        (tmp_path / name / "slurmgpu" / "__init__.py").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("site-packages")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "link")])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    return tmp_path


@pytest.mark.parametrize(
    ("home", "given", "added"),
    [
        ("site-packages", None, None),
        ("site-packages", "other", None),
        ("site-packages", "other:clone", "site-packages:other:clone"),
        ("site-packages", "other:link", None),
        ("clone", None, "clone"),
        ("clone", "other", "clone:other"),
        ("clone", "other:clone", None),
        ("clone", "link:clone", "clone:link:clone"),
    ],
)
def test_the_folder_of_slurmgpu_comes_first_only_where_another_python_would_not_look_there(
    folders, monkeypatch, home, given, added
):
    def path(names):
        return os.pathsep.join(str(folders / name) for name in names.split(":"))

    monkeypatch.setattr(packages, "HOME", str(folders / home))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given:
        monkeypatch.setenv("PYTHONPATH", path(given))
    assert packages.own_python_path() == ({"PYTHONPATH": path(added)} if added else {})


def test_the_folder_of_slurmgpu_is_added_to_one_that_is_relative(folders, monkeypatch):
    """Another Python may start in another folder: the one that reads a pickle starts beside the run file."""
    home = str(folders / "clone")
    monkeypatch.chdir(home)
    monkeypatch.setattr(packages, "HOME", home)
    monkeypatch.setenv("PYTHONPATH", ".")
    assert packages.own_python_path() == {"PYTHONPATH": f"{home}{os.pathsep}."}
