"""What a user's class may have: it is read in one place, checked at planning, and may come from a package."""

import ast
import json
import os
import re
from pathlib import Path

import pytest

from slurmgpu import submit
from slurmgpu.cli import completion
from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.adapted import Adapted, adapt, near_misses
from slurmgpu.loader.build import template_of
from slurmgpu.loader.modules import load_class
from slurmgpu.loader.names import BUILT_IN, hidden_by_built_in, resolve_use
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.run_file import read_toml

PACKAGE = Path(__file__).parents[2] / "slurmgpu"
BESIDE = {"workloads", "llm", "training", "influence"}

CLASS = """
from functools import cached_property
from pathlib import Path

from slurmgpu import Array


class Rows:
    columns = {{"x": Array("float32")}}
    batch_size = 4

    def load(self, task):
        pass

    def __call__(self, items):
        return [{{"x": 1.0}} for item in items]

    {more}
"""


@pytest.fixture
def having(tmp_path):
    """What makes a project whose workload has more, and plans it."""

    def make(more):
        source = CLASS.format(more=more.replace("\n", "\n    "))
        (tmp_path / "mine.py").write_text(source)
        (tmp_path / "items.jsonl").write_text('{"text": "a"}\n' * 8)
        run_file = 'input = "items.jsonl"\n[workload]\nuse = "mine.py:Rows"\n[resources]\ngpus = 0\n'
        (tmp_path / "slurmgpu.toml").write_text(run_file)
        with draft_run(tmp_path / "slurmgpu.toml") as draft:
            return draft

    return make


def reads_of_users_objects(path):
    """The calls of getattr, hasattr and setattr in a file whose first argument is called as users' objects are."""
    for call in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = ast.unparse(call.args[0]).rpartition(".")[2].lstrip("_")
            if name in ("workload", "cls", "user"):
                yield f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"


def test_the_core_reads_users_objects_in_one_room():
    core = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in BESIDE]
    found = [each for path in core for each in reads_of_users_objects(path)]
    assert {each.partition(":")[0] for each in found} == {"loader/adapted.py", "loader/members.py"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "batch_size = 'auto'",
            "batch_size = 'auto'; expected a whole number of at least 1. Set it in the class or in",
        ),
        ("batch_size = True", "batch_size = True; expected a whole number of at least 1."),
        ("takes_one = 'yes'", "takes_one = 'yes'; expected True or False."),
        ("def resumes(self): pass", "resumes = a method, resumes(self); expected True or False."),
        ("processes = 4", "processes = 4; expected 'one' or 'per-gpu'."),
        ("fields = 'text'", "fields = 'text'; expected a list of names."),
        ("texts = 'prompt'", "texts = 'prompt'; expected a list of names of settings, as an attribute of the class."),
        ("@property\ndef texts(self): return ('a',)", "texts = a property; expected a list of names of settings"),
        ("advice = ['text']", "advice = ['text']; expected a mapping of fields to sentences."),
        ("paths = 'model.pt'", "paths = 'model.pt'; expected a list of paths."),
        ("def paths(self): return []", "paths = a method, paths(self); expected a list of paths."),
        ("environ = ['A=1']", "environ = ['A=1']; expected a mapping of names to texts."),
        ("frozen_settings = 'x'", "frozen_settings = 'x'; expected a mapping of settings to values."),
        ("default_items = [1]", "default_items = [1]; expected a list of mappings."),
        ("exports = ['loud']", "exports = ['loud']; expected a mapping of formats to functions"),
        ("place = 'one'", "place = 'one'; expected a method, place(self, share)."),
        ("def place(self): pass", "place = a method, place(self); expected a method, place(self, share)."),
        ("def place(self, share): pass", "place(share) returned None; expected a Placement."),
        ("check_input = True", "check_input = True; expected a method, check_input(self, files, n_items)."),
        ("def sort_key(self): pass", "sort_key = a method, sort_key(self); expected a method, sort_key(self, item)."),
        ("summarize = 'mean'", "summarize = 'mean'; expected a method, summarize(self, merged)."),
        ("def check_here(self, path): pass", "check_here = a method, check_here(self, path); expected a method"),
        ("fetch = 'model'", "fetch = 'model'; expected a method, fetch(self)."),
    ],
)
def test_an_attribute_of_a_wrong_type_is_refused_at_planning_in_a_sentence(having, tmp_path, more, said):
    with pytest.raises(SlurmGPUError) as caught:
        having(more)
    assert f"Workload {tmp_path / 'mine.py'}:Rows" in str(caught.value)
    assert said in str(caught.value)


def test_attributes_may_be_absent_none_properties_and_iterators(having, tmp_path):
    plain = having("").plan
    assert (plain.batch_size, plain.paths, plain.environ, plain.exports, plain.summarizes) == (4, (), {}, [], False)
    names = [name for name in vars(Adapted) if name not in ("batch_size", "columns") and not name.startswith("_")]
    optional = [name for name in names if name not in ("user", "name", "call", "load", "check")]
    assert len(optional) == 24
    nothing = "\n".join(f"{name} = None" for name in (*optional, "texts"))
    assert having(nothing).plan.fingerprint == plain.fingerprint
    more = "environ = {'A': 1}\n@cached_property\ndef paths(self):\n    return Path('.').glob('items.*')\n"
    given = having(f"{more}def sort_key(self, item): return 0\nresumes = True")
    assert given.plan.paths == (str(tmp_path / "items.jsonl"),)
    assert given.plan.environ == {"A": "1"}
    assert given.resumes


def test_an_attribute_that_is_not_used_is_not_read():
    class Own:
        takes_one = True

        @property
        def paths(self):
            raise FileNotFoundError

    assert adapt(Own(), "own.py:Own").takes_one


def test_a_name_that_is_nearly_one_that_is_looked_for_is_told_once(having, tmp_path, slurmgpu):
    names = {
        "summarise": "summarize",
        "sortkey": "sort_key",
        "sort_keys": "sort_key",
        "takes_item": "takes_one",
        "lod": "load",
    }
    names |= {"export": "exports", "sortKey": "sort_key"}
    for name, meant in names.items():
        [note] = having(f"{name} = None").notes
        assert f"Rows: nothing uses {name!r}; slurmgpu looks for {meant!r}." in note
    having("def summarise(self, merged): return {}")
    for more in (["--dry-run"], []):
        done = slurmgpu("submit", "--executor", "debug", *more, cwd=tmp_path, expect=0)
        assert " ".join((done.stdout + done.stderr).split()).count("nothing uses 'summarise'") == 1


def test_python_and_check_tell_of_a_near_miss_as_well(having, tmp_path, slurmgpu, caplog):
    having("def summarise(self, merged): return {}")
    checked = slurmgpu("check", cwd=tmp_path)
    assert " ".join(checked.stdout.split()).count("nothing uses 'summarise'") == 1
    submit(tmp_path / "slurmgpu.toml", executor="debug", run_dir=tmp_path / "again")
    assert caplog.text.count("nothing uses 'summarise'") == 1


def test_what_the_class_uses_itself_or_takes_as_a_setting_is_no_near_miss(having):
    assert having("").notes == ()
    uses = "def summarise(self): pass\ndef rows(self): return [self.summarise() for _ in ()]"
    assert having(uses).notes == ()
    assert having("field = 'text'\ndef __init__(self, field: str = 'text'): pass").notes == ()
    assert having("_summarise = None").notes == ()


@pytest.mark.parametrize("full_name", BUILT_IN.values())
def test_built_in_workloads_have_no_near_miss(full_name, tmp_path):
    cls = load_class(full_name, tmp_path)
    assert near_misses(adapt(cls.__new__(cls), full_name)) == []


FROM_ARGS = """
    @staticmethod
    def from_args(text, folder, stem):
        lines = [("--loud", f"{folder.name} {stem}")]
        return Translated({"loud": text}, "a.txt", [{"n": 1}], {"gpus": 2}, lines)
"""


@pytest.fixture
def installed(tmp_path, slurmgpu):
    """An installed package that has a workload `theirs`, and another one `embed`; what runs commands with it."""
    site = tmp_path / "site"
    (site / "theirs").mkdir(parents=True)
    (site / "theirs" / "__init__.py").write_text(CLASS.format(more="template = '# loud = true\\n'"))
    info = site / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "theirs = theirs:Rows\nembed = theirs:Rows\nodd = theirs\n"
    (info / "entry_points.txt").write_text(f"[slurmgpu.workloads]\n{points}")
    (tmp_path / "items.jsonl").write_text('{"text": "a"}\n' * 8)

    def call(*argv, use="theirs", **env):
        run_file = f'input = "items.jsonl"\n[workload]\nuse = "{use}"\n[resources]\ngpus = 0\n'
        (tmp_path / "slurmgpu.toml").write_text(run_file)
        return slurmgpu(*argv, cwd=tmp_path, PYTHONPATH=str(site), **env)

    return call


def test_a_workload_of_an_installed_package_is_used_by_its_short_name(installed, tmp_path):
    done = installed("submit", "--executor", "debug", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "8 of 8 rows" in done.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["workload"] == "theirs:Rows"


def test_a_name_that_no_package_has_or_has_wrongly_is_refused_with_those_there_are(installed):
    assert "nor from an installed package" in (said := installed("submit", "--dry-run", use="qqqq").stderr)
    assert re.findall(r"Known: (.*)\.", " ".join(said.split())) == [", ".join(sorted({*BUILT_IN, "odd", "theirs"}))]
    said = " ".join(installed("submit", "--dry-run", use="odd").stderr.split())
    assert "the entry point of theirs is 'theirs'; expected 'package.module:Class'" in said


def test_a_built_in_workload_goes_before_another_of_its_name_and_this_is_said(installed, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve_use("embed", tmp_path) == BUILT_IN["embed"]
    [said] = hidden_by_built_in("embed")
    assert said == 'use = "embed" is the built-in workload; theirs has one of the same name: use = "theirs:Rows".'
    assert hidden_by_built_in("theirs") == hidden_by_built_in("train") == []


def test_init_and_tab_know_the_workloads_of_packages(installed, tmp_path, monkeypatch):
    assert installed("init", "theirs", "-o", "new.toml").returncode == 0
    text = (tmp_path / "new.toml").read_text()
    assert 'use = "theirs"\n' in text
    assert "# loud = true\n" in text
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert completion.complete_workload("th") == ["theirs"]
    assert completion.complete_workload("em") == ["embed"]


def test_a_package_says_what_init_writes_and_what_the_arguments_of_a_script_mean(installed, tmp_path):
    package = tmp_path / "site" / "theirs"
    (package / "template.toml").write_text("loud = true\n")
    beside = 'Path(__file__).with_name("template.toml")'
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")  # a machine of a cluster, wherever this runs
    (tmp_path / "sbatch").chmod(0o755)
    written, path = {}, f"{tmp_path}:{os.environ['PATH']}"
    for name, template in (("path", beside), ("whole", f"Template({beside}, input=None, gpus=1, array=False)")):
        source = CLASS.format(more=f"template = {template}\n{FROM_ARGS}")
        (package / "__init__.py").write_text(f"from slurmgpu.workload import Template, Translated\n{source}")
        assert installed("init", "theirs", "-o", f"{name}.toml", PATH=path).returncode == 0
        written[name] = read_toml(tmp_path / f"{name}.toml")
    assert written["path"]["settings"] == written["whole"]["settings"] == {"loud": True}
    on_slurm = {"executor": "slurm", "gpus": 4, "array": True}
    assert (written["path"]["input"], written["path"]["resources"]) == ("items.jsonl", on_slurm)
    assert ("input" in written["whole"], written["whole"]["resources"]) == (False, {"executor": "slurm", "gpus": 1})

    done = installed("init", "theirs", "--from-args", "--loud yes", "-o", tmp_path / "new.toml")
    assert f"--loud  {tmp_path.name} new\n" in done.stdout
    found = read_toml(tmp_path / "new.toml")
    assert (found["workload"]["use"], found["settings"], found["input"]) == ("theirs", {"loud": "--loud yes"}, "a.txt")
    assert json.loads((tmp_path / "new.tests.jsonl").read_text()) == {"n": 1}


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_built_in_workload_says_what_init_writes(name, tmp_path):
    proposed = template_of(name, tmp_path)
    assert proposed.settings == PACKAGE / "workloads" / name / "template.toml"
    assert all(file.is_file() for file in proposed.files.values())
    assert read_toml(proposed.settings)
