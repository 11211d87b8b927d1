"""Modules of a snapshot are imported, whatever hooks and editable installs are in front of Python's own finders."""

import errno
import hashlib
import importlib.util
import inspect
import sys
import threading
import time
from importlib.machinery import FileFinder, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

import slurmgpu
from slurmgpu.code import imported_modules, importer, present_files, snapshots
from slurmgpu.code.locator import Locator
from slurmgpu.code.snapshots import ReadFile, Snapshot, SourceFile, tree_digest
from tests.support.unprivileged import locked_folder, unprivileged


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A function that has modules in a snapshot, edits their files, and imports from the snapshot from then on."""
    base, run = tmp_path / "base", tmp_path / "run"
    (run / "code").mkdir(parents=True)
    (run / "run.json").touch()
    monkeypatch.setattr(sys, "path", [str(base), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    before = {*sys.modules}

    def using(files, namespaces=()):
        found = []
        for name, source in files.items():
            path, parts = base / name, (base / name).relative_to(base).with_suffix("").parts
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("VALUE = 'edited'\n")
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            digest, sha256 = tree_digest(source, name), hashlib.sha256(source).hexdigest()
            found.append(SourceFile(name, str(path), (module,), digest, sha256, source))
        snapshot = Snapshot(tuple(found), {}, namespaces=namespaces)
        snapshots.write(run, snapshot)
        return importer.using(run, snapshot.digest)

    yield using
    for name in {*sys.modules} - before:
        del sys.modules[name]
    sys.path_importer_cache.clear()


HOOKED = {"hooked/__init__.py": b"", "hooked/core.py": b"VALUE = 'submitted'\n"}


class Marking(SourceFileLoader):
    """Compiles a module's source in its own way, as the loaders of typeguard, jaxtyping and beartype do."""

    def source_to_code(self, data, path, **options):
        return super().source_to_code(bytes(data) + b"MARKED = True\n", path, **options)


class Instrumenting:
    """As typeguard's finder: Python's own finder is asked first."""

    def find_spec(self, fullname, path=None, target=None):
        spec = PathFinder.find_spec(fullname, path, target) if fullname.startswith("hooked.") else None
        if spec is not None:
            spec.loader = Marking(fullname, spec.loader.path)
        return spec


class Chained:
    """As the loader of wrapt: what another loader does, and something after it."""

    def __init__(self, loader):
        self.create_module, self.loader = loader.create_module, loader

    def exec_module(self, module):
        self.loader.exec_module(module)
        module.MARKED = True


class Redirecting:
    """As the finder of an editable install by scikit-build-core, whose packages have two folders."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, fullname, path=None, target=None):
        files = {"hooked": self.folder / "hooked" / "__init__.py", "hooked.core": self.folder / "hooked" / "core.py"}
        if fullname not in files:
            return None
        spec = importlib.util.spec_from_file_location(fullname, files[fullname])
        if fullname == "hooked":
            spec.submodule_search_locations = [str(self.folder / "hooked"), str(self.folder / "built" / "hooked")]
        else:
            spec.loader = Chained(spec.loader)
        return spec


class Chaining:
    """As the finder of wrapt: all finders are asked, itself left out."""

    def __init__(self):
        self.at_work = False

    def find_spec(self, fullname, path=None, target=None):
        if self.at_work or not fullname.startswith("hooked."):
            return None
        self.at_work = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.at_work = False
        spec.loader = Chained(spec.loader)
        return spec


def core():
    import hooked.core

    return hooked.core


def test_an_editable_install_by_a_finder_is_imported_from_the_snapshot(edited, tmp_path):
    sys.meta_path.insert(0, Redirecting(tmp_path / "base"))
    with edited(HOOKED):
        assert core().VALUE == "submitted"
        assert core().__file__ == str(tmp_path / "base" / "hooked" / "core.py")
        assert sys.modules["hooked"].__path__[1:] == [str(tmp_path / "base" / "built" / "hooked")]
        assert importer.bypassed() == []


@pytest.mark.parametrize("hook", [Instrumenting, Chaining])
def test_a_hook_that_the_workload_installs_instruments_the_snapshot(edited, hook):
    with edited(HOOKED):
        sys.meta_path.insert(0, hook())
        assert (core().VALUE, core().MARKED) == ("submitted", True)
        assert inspect.getsource(core()) == "VALUE = 'submitted'\n"
        assert importer.bypassed() == []
        [place] = [i for i, finder in enumerate(sys.meta_path) if isinstance(finder, importer.Finder)]
        assert place == 0
    assert type(sys.meta_path) is list
    assert [type(finder) for finder in sys.meta_path].count(hook) == 1


def test_a_hook_into_the_search_of_folders_instruments_the_snapshot(edited):
    with edited(HOOKED):
        sys.path_hooks.insert(0, FileFinder.path_hook((Marking, [".py"])))
        sys.path_importer_cache.clear()
        assert (core().VALUE, core().MARKED) == ("submitted", True)


def test_a_finder_of_what_is_nowhere_is_not_asked_about_the_snapshot(edited):
    class Installing:
        def find_spec(self, fullname, path=None, target=None):
            raise AssertionError(f"{fullname} would be installed")

    files = {**HOOKED, "spaced/core.py": b"VALUE = 'submitted'\n"}
    with edited(files, ("spaced",)):
        sys.meta_path.append(Installing())
        assert core().VALUE == "submitted"
        assert importlib.import_module("spaced.core").VALUE == "submitted"


def test_a_loader_that_cannot_be_given_source_does_not_come_before_the_snapshot(edited, caplog):
    class Odd:
        def find_spec(self, fullname, path=None, target=None):
            return importlib.util.spec_from_loader(fullname, self) if fullname == "hooked.core" else None

        def exec_module(self, module):
            raise AssertionError

    with edited(HOOKED):
        sys.meta_path.insert(0, Odd())
        assert core().VALUE == "submitted"
    assert "hooked.core is imported from the snapshot of the code, not by Odd" in caplog.text


def test_what_another_loader_imports_from_disk_is_told(edited, tmp_path):
    class Reading(Marking):
        def get_code(self, fullname):
            with open(self.path, "rb") as file:
                return compile(file.read(), self.path, "exec")

    class Hook(Instrumenting):
        def find_spec(self, fullname, path=None, target=None):
            spec = super().find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = Reading(fullname, spec.loader.path)
            return spec

    with edited(HOOKED):
        sys.meta_path.insert(0, Hook())
        assert core().VALUE == "edited"
        assert importer.bypassed() == [str(tmp_path / "base" / "hooked" / "core.py")]


def without_finder():
    return [each for each in sys.meta_path if not isinstance(each, importer.Finder)]


CHANGES = {
    "pop": lambda found, hook: found.pop(0),
    "pop the last": lambda found, hook: found.pop(),
    "read and pop": lambda found, hook: found[0] is hook and found.pop(0),
    "del": lambda found, hook: found.__delitem__(0),
    "del by enumerate": lambda found, hook: found.__delitem__(next(i for i, each in enumerate(found) if each is hook)),
    "del by index": lambda found, hook: found.__delitem__(found.index(hook)),
    "insert again": lambda found, hook: found.insert(0, "other"),
    "insert before Python's": lambda found, hook: found.insert(found.index(PathFinder), "other"),
    "insert behind": lambda found, hook: found.insert(99, "other"),
    "append": lambda found, hook: found.append("other"),
    "add": lambda found, hook: found.__iadd__(["other"]),
    "remove": lambda found, hook: found.remove(hook),
    "restore": lambda found, hook: found.__setitem__(slice(None), list(found)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_workload_does_with_the_list_of_finders_leaves_the_snapshot_the_first(edited, change):
    hook = Instrumenting()
    with edited(HOOKED):
        finder = next(iter(sys.meta_path))
        sys.meta_path.insert(0, hook)
        expected = without_finder()
        assert expected[0] is sys.meta_path[0] is hook
        assert CHANGES[change](sys.meta_path, hook) is not finder
        CHANGES[change](expected, hook)
        assert list(sys.meta_path) == [finder, *expected]
        assert core().VALUE == "submitted"


def test_the_snapshot_is_the_first_again_in_a_list_that_the_workload_makes_with_it(edited):
    with edited(HOOKED):
        finder, *others = sys.meta_path
        sys.meta_path = [hook := Instrumenting(), finder, *others]
        assert core().VALUE == "submitted"
        assert list(sys.meta_path) == [finder, hook, *others]


def test_a_list_without_the_snapshot_is_told(edited, tmp_path):
    with edited(HOOKED):
        sys.meta_path = without_finder()
        assert core().VALUE == "edited"
        file = tmp_path / "base" / "hooked" / "core.py"
        assert str(file) in importer.bypassed()
        assert str(file) not in importer.outside(file.parent)
        assert importer.present_files().as_submitted(file).read_text() == "VALUE = 'submitted'\n"
    assert importer.bypassed() == []
    assert importer.present_files().as_submitted(file) == file


def test_a_file_named_as_a_module_of_python_itself_is_not_imported_in_its_place(edited):
    with edited({"time.py": b"VALUE = 1\n"}):
        assert importlib.util.find_spec("time").origin == "built-in"


def test_a_package_that_an_editable_install_maps_to_a_folder_of_another_name_is_located(tmp_path, monkeypatch):
    class Mapping:
        def find_spec(self, fullname, path=None, target=None):
            file = tmp_path / "lib" / "__init__.py"
            return importlib.util.spec_from_file_location(fullname, file) if fullname == "spaced.tools" else None

    (tmp_path / "path" / "spaced").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    for name in ("__init__", "core"):
        (tmp_path / "lib" / f"{name}.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "path")])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Mapping()])
    locator = Locator(tmp_path, None)
    names = ("spaced", "spaced.tools", "spaced.tools.core", "spaced.other")
    files = {name: place and place.path for name in names for place in [locator.locate(name)]}
    inits = {"spaced": None, "spaced.tools": f"{tmp_path}/lib/__init__.py"}
    assert files == {**inits, "spaced.tools.core": f"{tmp_path}/lib/core.py", "spaced.other": None}


def test_the_copy_of_a_script_finds_what_is_beside_the_script(edited, tmp_path, monkeypatch):
    base = tmp_path / "base"
    for name in ("configs/train.yaml", "tools/words.txt", "tools/__pycache__/lib.pyc", "many/0", "many/1", ".root"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    (base / "runs").symlink_to(tmp_path)  # the run directory lies below it
    (base / "latest").symlink_to("latest")
    monkeypatch.setattr(present_files, "MANY_BESIDE", 6)
    with edited({"tools/run.py": b"import lib\n", "tools/lib.py": b"VALUE = 1\n", "many/lib.py": b""}):
        for number in range(2, 8):
            (base / "many" / str(number)).touch()
        copy = importer.present_files().as_submitted(base / "tools" / "run.py")
        importer.present_files().as_submitted(base / "tools" / "lib.py")
    assert copy.read_bytes() == b"import lib\n"
    root = copy.parents[1]
    assert [(root / name).read_text() for name in ("configs/train.yaml", "tools/words.txt", ".root")] == [
        *("configs/train.yaml", "tools/words.txt", ".root")
    ]
    assert sorted(path.name for path in (root / "tools").iterdir()) == ["lib.py", "run.py", "words.txt"]
    assert sorted(path.name for path in (root / "many").iterdir()) == ["lib.py"]
    assert not (root / "runs").exists()
    assert (copy.parent / "lib.py").read_text() == "VALUE = 1\n"


def test_a_read_that_fails_for_a_moment_is_no_change(tmp_path, monkeypatch):
    script, conf = tmp_path / "run.py", tmp_path / "conf.yaml"
    script.write_bytes(b"import lib\n")
    conf.write_bytes(b"n: 1\n")
    file = SourceFile("run.py", str(script), (), "", "", b"import lib\n")
    read = ReadFile("conf.yaml", str(conf), hashlib.sha256(b"n: 1\n").hexdigest())
    present = present_files.PresentFiles(tmp_path / "copies", {file.path: file}, [read])
    failed = []

    def open_second_time(path, mode):
        if path not in failed:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return open(path, mode)

    monkeypatch.setattr(present_files, "open", open_second_time, raising=False)
    assert (present.as_submitted(script), present.look_at_read_files()) == (script, [])
    assert failed == [str(script), str(conf)]
    conf.write_bytes(b"n: 2\n")
    assert present.look_at_read_files() == [str(conf)]


def test_a_module_whose_folder_may_not_be_entered_by_now_is_told_as_gone():
    with locked_folder() as locked:
        former = Snapshot((SourceFile("file.py", f"{locked}/file", ("file",), "", "", b""),), {})
        with unprivileged():
            assert snapshots.changes(former, Snapshot((), {})) == ["file.py is gone"]


@pytest.mark.parametrize("became", ["gone", "a package", "as it was"])
def test_a_namespace_is_as_it_was_submitted(edited, tmp_path, became):
    with edited({"spaced/inner/core.py": b"VALUE = 'submitted'\n"}, ("spaced", "spaced.inner")):
        folder = tmp_path / "base" / "spaced"
        (folder / "inner" / "other.py").write_text("")
        if became == "gone":
            folder.rename(tmp_path / "moved")
        elif became == "a package":
            (folder / "__init__.py").write_text("raise ImportError('not as it was submitted')\n")
            (folder / "inner" / "__init__.py").write_text("raise ImportError('not as it was submitted')\n")
        importlib.invalidate_caches()
        from spaced.inner.core import VALUE

        assert VALUE == "submitted"
        assert list(sys.modules["spaced"].__path__) == [str(folder)]
        if became != "gone":
            import spaced.inner.other

            assert spaced.inner.other.__file__ == str(folder / "inner" / "other.py")


def test_the_script_that_python_runs_is_not_told_as_imported(monkeypatch, tmp_path):
    for name in ("__main__", "helper"):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
    found = [path for path in importer.outside(tmp_path) if Path(path).is_relative_to(tmp_path)]
    assert found == [str(tmp_path / "helper.py")]


def test_a_run_in_a_clone_of_slurmgpu_is_not_told_each_of_its_files():
    package = Path(slurmgpu.__file__).parent
    found = importer.outside(package.parent)
    assert str(Path(__file__)) in found  # a module of whoever runs here
    assert [path for path in found if Path(path).is_relative_to(package)] == []


def test_one_thread_at_a_time_has_python_look_at_folders_again(monkeypatch):
    """PathFinder deletes entries that it has listed before: of two threads one would find a KeyError."""
    inside, most = [], []

    def invalidate():
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()

    monkeypatch.setattr(importlib, "invalidate_caches", invalidate)
    threads = [threading.Thread(target=imported_modules.invalidate_caches) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
