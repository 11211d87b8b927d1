"""What is bound into a container without being asked for, and that a workload finds it there."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import slurmgpu as package
from slurmgpu.containers.command import needed_binds
from slurmgpu.containers.links import names
from slurmgpu.containers.settings import Bind, ContainerError
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.binds import MANY_FOLDERS, MOST_BYTES, container_binds
from slurmgpu.plan.container_spec import contain, packages_of
from slurmgpu.plan.run_file import ContainerTable
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan
from tests.support.nightly import by_night
from tests.support.runs import report

LOCAL = ("submit", "--executor", "local", "--gpus", "0")

READS = """
import os
from pathlib import Path
from slurmgpu import Text

class Reads:
    columns = {"found": Text()}
    batch_size = 4

    def __init__(self, path: str = "", variables: str = ""):
        self.path, self.variables = path, variables.split()

    def load(self, task):
        folders = [*([self.path] if self.path else []), *(os.environ[name] for name in self.variables)]
        self.found = " ".join((Path(folder) / "config.json").read_text() for folder in folders)
        self.home = ",".join(sorted(os.listdir(Path.home()))) if Path.home().exists() else "none"

    def __call__(self, items):
        return [{"found": f"{self.found} {self.home}"} for item in items]
"""


@pytest.fixture
def reading(project, apptainer):
    """A project whose workload reads `config.json` in folders; its container shows nothing but what is bound."""

    def make(settings=None, **changes):
        folder = project(8, settings=settings or {}, container=apptainer.table(**({"strict": True} | changes)))
        (folder / "reads.py").write_text(READS)
        run_file = folder / "slurmgpu.toml"
        run_file.write_text(run_file.read_text().replace("workloads.py:Rows", "reads.py:Reads"))
        return folder

    return make


@pytest.fixture
def big(tmp_path):
    """A folder elsewhere, on which there is room."""
    folder = tmp_path / "srv" / "big"
    folder.mkdir(parents=True)
    return folder


def found(folder):
    with package.open(folder / "run" / "merged.h5") as merged:
        return merged["found"][0]


def moved(path, to):
    """Move a file or folder away, and leave a link over a second one in its place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, to)
    hop = to.parent.parent / "hops" / path.name
    hop.parent.mkdir(exist_ok=True)
    hop.symlink_to(os.path.relpath(to, hop.parent))
    path.symlink_to(hop)


def replace(folder, *pairs):
    run_file = folder / "slurmgpu.toml"
    text = run_file.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    run_file.write_text(text)


def test_a_linked_run_directory_and_linked_input_are_found_inside(reading, slurmgpu, big):
    folder = reading()
    (folder / "data").mkdir()
    for name in ("a", "b"):
        shutil.copy(folder / "items.jsonl", folder / "data" / f"{name}.jsonl")
    (folder / "runs").mkdir()
    moved(folder / "data" / "b.jsonl", big / "files" / "b.jsonl")
    moved(folder / "data", big / "data")
    moved(folder / "runs", big / "runs")
    replace(folder, ('"items.jsonl"', '"data/*.jsonl"'), ('run_dir = "run"', 'run_dir = "runs/run"'))
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert report(folder / "runs")["complete"]


def test_a_linked_folder_of_a_setting_a_variable_and_a_bind_is_found_inside(reading, slurmgpu, big, tmp_path):
    models = {name: tmp_path / "project" / "cache" / name for name in ("setting", "variable", "bind")}
    settings = {"path": str(models["setting"]), "variables": "HF_HOME MODEL"}
    folder = reading(settings, env={"MODEL": True})
    replace(folder, ("binds = [", f'binds = ["{models["bind"]}", '))
    for name, model in models.items():
        model.mkdir(parents=True)
        (model / "config.json").write_text(f"weights of the {name}")
        moved(model, big / "models" / name)
    slurmgpu(*LOCAL, cwd=folder, expect=0, MODEL=str(models["bind"]), HF_HOME=str(models["variable"]))
    assert found(folder).startswith("weights of the setting weights of the variable weights of the bind")


def test_a_snapshot_of_links_to_blobs_is_found_inside(reading, slurmgpu, tmp_path):
    hub = tmp_path / "hub" / "models--x"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "abc").mkdir(parents=True)
    (hub / "blobs" / "123").write_text("weights")
    (hub / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/123")
    folder = reading({"path": str(hub / "snapshots" / "abc")})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert found(folder).startswith("weights")


ASKS = """
from slurmgpu import Text
from slurmgpu.llm.models.source import cache_of, files_of, find_model

class Reads:
    columns = {"found": Text()}
    batch_size = 4

    def __init__(self, revision=None):
        self.model = find_model("lab/model", revision=revision)
        self.paths, self.environ = files_of(self.model), {"HF_HUB_CACHE": cache_of(self.model)}
        self.frozen_settings = {"revision": self.model.revision}

    def load(self, task):
        self.found = self.model.config["model_type"] + self.model.revision

    def __call__(self, items):
        return [{"found": self.found} for item in items]
"""


def test_a_model_in_the_hubs_cache_in_home_is_found_inside_where_home_is_not(reading, slurmgpu, tmp_path):
    hub = tmp_path / "home" / ".cache" / "huggingface" / "hub" / "models--lab--model"
    for part in ("blobs", "refs", "snapshots/abc"):
        (hub / part).mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    (hub / "blobs" / "123").write_text('{"model_type": "llama"}')
    (hub / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/123")
    folder = reading(home="none")
    (folder / "reads.py").write_text(ASKS)
    slurmgpu(*LOCAL, cwd=folder, expect=0, HOME=str(tmp_path / "home"), XDG_CACHE_HOME="", HF_HOME="", HF_HUB_CACHE="")
    assert found(folder) == "llamaabc"


@pytest.mark.parametrize("home", ["private", by_night("none")])
def test_input_that_lies_in_home_does_not_bring_home_in(reading, slurmgpu, home):
    folder = reading(strict=False, home=home)
    # In the true home: one below /tmp is seen with /tmp.
    with (
        tempfile.NamedTemporaryFile("w", dir=Path.home(), suffix=".jsonl") as items,
        tempfile.NamedTemporaryFile(dir=Path.home(), suffix=".secret") as secret,
    ):
        items.write((folder / "items.jsonl").read_text())
        items.flush()
        replace(folder, ('"items.jsonl"', f'"~/{Path(items.name).name}"'))
        slurmgpu(*LOCAL, cwd=folder, expect=0)
        assert Path(items.name).name in found(folder)
        assert Path(secret.name).name not in found(folder)


@pytest.mark.nightly
def test_a_setting_that_begins_with_a_tilde_is_no_path(reading, slurmgpu):
    folder = reading({"path": "~5 words of a prompt"})
    (folder / "~5 words of a prompt").mkdir()
    (folder / "~5 words of a prompt" / "config.json").write_text("here")
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert report(folder)["complete"]


LAB = """
from slurmgpu import Text

class Wool:
    columns = {"found": Text()}
    batch_size = 4
    def load(self, task): pass
    def __call__(self, items): return [{"found": f"%s {__file__}" } for item in items]
"""


def test_a_file_of_a_workload_elsewhere_is_found_inside_with_those_beside_it(reading, slurmgpu, big):
    (big / "lib").mkdir()
    (big / "lib" / "wool.py").write_text("import beside\n" + LAB % "{beside.WORD}")
    (big / "lib" / "beside.py").write_text("WORD = 'beside'\n")
    folder = reading()
    (folder / "linked.py").symlink_to(big / "lib" / "wool.py")
    replace(folder, ("reads.py:Reads", "linked.py:Wool"))
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    assert found(folder) == f"beside {big}/lib/wool.py"


def namespace(folder):
    for number, name in ((1, "embed"), (2, "wool")):
        (folder / f"part{number}" / "lab").mkdir(parents=True)
        (folder / f"part{number}" / "lab" / f"{name}.py").write_text(LAB % "lab")
    second = folder / "part2" / "lab" / "wool.py"
    second.write_text("import lab.embed\n" + second.read_text())
    return "lab.wool:Wool", "part1:part2", "lab /opt/slurmgpu/.1/lab/wool.py"


def linked(folder):
    (folder / "real-1.0").mkdir()
    (folder / "real-1.0" / "__init__.py").write_text(LAB % "real")
    (folder / "mypkg").symlink_to("real-1.0")
    return "mypkg:Wool", "", "real /opt/slurmgpu/mypkg/__init__.py"


def source_layout(folder):
    source = folder.parent.parent / "project" / "src" / "mine"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text(LAB % "mine")
    return "mine:Wool", "../../project/src", "mine /opt/slurmgpu/mine/__init__.py"


@pytest.mark.parametrize("kind", [namespace, by_night(linked), by_night(source_layout)])
def test_a_package_is_found_inside_by_the_name_by_which_it_is_imported(reading, slurmgpu, big, kind):
    folder = reading()
    use, paths, expected = kind(big)
    replace(folder, ("reads.py:Reads", use))
    path = os.pathsep.join(os.path.normpath(big / part) for part in paths.split(":"))
    slurmgpu(*LOCAL, cwd=folder, expect=0, PYTHONPATH=path)
    assert found(folder) == expected


def make_run(base, files=(), settings=None, workload="slurmgpu.workloads.embed:Embed", paths=(), folders=()):
    """A run as far as binds depend on it."""
    base.mkdir(exist_ok=True)
    values = dict.fromkeys(Plan.__dataclass_fields__) | {"search_path": str(base), "settings": settings or {}}
    values |= {"workload": workload, "input": {"files": [{"path": str(path)} for path in files]}}
    values["input"]["folders"] = [str(folder) for folder in folders]
    values["paths"] = [str(path) for path in paths]
    return Run(base / "run", Plan(**values))


def own(run):
    """What is bound beside the run's own two folders."""
    return [bind for bind in container_binds(run) if bind.src not in (str(run.folder), run.plan.search_path)]


@pytest.mark.parametrize("text", ["~", "~nobody knows this one", "/", "..", "/tmp", "a\0b", "x" * 5000, "", "."])
def test_a_text_that_is_no_path_of_the_runs_own_binds_nothing(tmp_path, monkeypatch, text):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    (tmp_path / "home" / "me" / "project").mkdir(parents=True)
    assert own(make_run(tmp_path / "home" / "me" / "project", settings={"prompt": [{"text": text}]})) == []


def test_what_a_workload_reads_is_bound_read_only_with_what_its_links_lead_to(tmp_path, big):
    folder = tmp_path / "models"
    folder.mkdir()
    (big / "weights").write_text("w")
    (folder / "model.safetensors").symlink_to(big / "weights")
    run = make_run(tmp_path / "project", paths=[folder])
    assert set(own(run)) == {Bind(str(path), str(path), read_only=True) for path in (folder, big)}


def test_files_directly_in_home_or_a_shared_folder_are_bound_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    (tmp_path / "home" / "me").mkdir(parents=True)
    real = tmp_path / "home" / "me" / "data"
    real.mkdir()
    (tmp_path / "data").symlink_to(real)
    files = ["/tmp/a.txt", "/var/tmp/b.txt", tmp_path / "home/c.txt", tmp_path / "home/me/d.txt", "/etc/e.txt"]
    run = make_run(tmp_path / "project", [*files, tmp_path / "data" / "f.txt"])
    # tmp_path itself is above home.
    assert {bind.dst for bind in own(run)} == {*map(str, files), str(tmp_path / "data"), str(real)}
    assert all(bind.read_only for bind in own(run))
    many = make_run(tmp_path / "project", [f"/tmp/{number}.txt" for number in range(MOST_BYTES // 10)])
    with pytest.raises(ContainerError, match=r"6553 files .* directly in /tmp .* folder of their own"):
        container_binds(many)


def test_input_below_a_folder_that_is_bound_anyway_needs_no_bind(tmp_path, big):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "data").symlink_to(big)
    files = [tmp_path / "project" / f"{part}" / "i.txt" for part in range(300)]
    run = make_run(tmp_path / "project", [*files, tmp_path / "project" / "data" / "i.txt"])
    assert own(run) == [Bind(str(big), str(big), read_only=True)]


def test_folders_of_files_that_are_items_are_bound_and_home_is_not(tmp_path, monkeypatch, big):
    (tmp_path / "link").symlink_to(big)
    run = make_run(tmp_path / "project", folders=[tmp_path / "link", tmp_path / "project" / "photos"])
    assert set(own(run)) == {Bind(str(path), str(path), read_only=True) for path in (tmp_path / "link", big)}
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(ContainerError, match=r"has files in .*/home, which is not bound as a whole"):
        container_binds(make_run(tmp_path / "project", folders=[tmp_path / "home"]))


def test_of_thousands_of_input_folders_those_above_them_are_bound(tmp_path):
    files = [f"/data/{day}/{hour}/{part}/i.txt" for day in range(5) for hour in range(24) for part in range(25)]
    run = make_run(tmp_path / "project", [*files, "/other/i.txt"])
    assert {bind.dst for bind in own(run)} == {*(f"/data/{day}" for day in range(5)), "/other"}
    assert len(own(run)) <= MANY_FOLDERS
    assert len(needed_binds([Bind(path, path) for path in files])) == len(files)


def test_a_path_has_a_name_for_every_link_on_its_way(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "hop").symlink_to("a/../a")
    (tmp_path / "link").symlink_to(tmp_path / "hop" / "b")
    (tmp_path / "loop").symlink_to("loop")
    path = str(tmp_path / "link" / "x")
    assert names(path, {}) == [path, f"{tmp_path}/hop/b/x", f"{tmp_path}/a/b/x"]
    assert names("/", {}) == ["/"]
    assert names(str(tmp_path / "loop"), {})[0] == str(tmp_path / "loop")


def test_where_links_lead_is_bound_and_a_link_within_a_bind_is_left_to_itself(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "data").symlink_to(tmp_path / "big")
    base, data, real = (str(tmp_path / name) for name in ("base", "base/data", "big"))
    given = [Bind(base, base), Bind(data, data, read_only=True)]
    assert sorted(needed_binds(given), key=str) == [Bind(base, base), Bind(real, real, read_only=True)]
    assert sorted(needed_binds(needed_binds(given)), key=str) == [Bind(base, base), Bind(real, real, read_only=True)]
    # What the user binds there stays; it is bound as the more generous where both are the same.
    assert Bind("/else", real) in needed_binds([*given, Bind("/else", real)])
    assert Bind(real, real) in needed_binds([*given, Bind(real, real)])
    elsewhere = Bind(data, "/mnt/data")
    assert needed_binds([elsewhere]) == [elsewhere]


@pytest.mark.parametrize("change", [{"home": "private"}, {"home": "none"}, {"strict": True}])
@pytest.mark.parametrize("where", ["home/me", "home"])
def test_a_run_file_directly_in_a_home_that_is_kept_out_is_refused(tmp_path, monkeypatch, apptainer, change, where):
    (tmp_path / "home" / "me").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    table = ContainerTable.model_validate(apptainer.table(**change))
    name = "slurmgpu.workloads.embed:Embed"
    with pytest.raises(SlurmGPUError, match="Move the run file into a folder of its own"):
        contain(table, name, tmp_path / where / "slurmgpu.toml", None)
    (tmp_path / "home" / "me" / "project").mkdir()
    assert contain(table, name, tmp_path / "home" / "me" / "project" / "slurmgpu.toml", None)
    assert contain(ContainerTable.model_validate(apptainer.table()), name, tmp_path / where / "slurmgpu.toml", None)


def test_a_package_in_the_run_files_folder_needs_no_bind(tmp_path, monkeypatch):
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "__init__.py").touch()
    (tmp_path / "single.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("near", "single"):
        __import__(name)
        assert packages_of(f"{name}:X", tmp_path) == ()
        assert packages_of(f"{name}:X", tmp_path / "else") != ()
        del sys.modules[name]
    assert json.dumps(packages_of("json:X", tmp_path))


def test_a_package_is_bound_by_the_name_by_which_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "real-1.0").mkdir()
    (tmp_path / "real-1.0" / "__init__.py").touch()
    (tmp_path / "mypkg").symlink_to("real-1.0")
    (tmp_path / "project" / "src" / "mine").mkdir(parents=True)
    (tmp_path / "project" / "src" / "mine" / "__init__.py").touch()
    for name, folder, path in (("mypkg", ".", "real-1.0"), ("mine", "project/src", "project/src/mine")):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        __import__(name)
        assert packages_of(f"{name}:X", tmp_path / "project") == ((name, str(tmp_path / path)),)
        del sys.modules[name]
