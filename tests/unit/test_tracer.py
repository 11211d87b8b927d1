"""Which files a snapshot has, by which names, and how much work it is to find them."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from slurmgpu.code import names_in_shell
from slurmgpu.code.snapshot_names import SnapshotNames
from slurmgpu.code.tracer import Scope, Tracer


def test_files_of_a_snapshot_keep_their_places_and_no_two_have_one_name():
    names = SnapshotNames(Path("/lab/trial"))
    names.add_script(Path("/lab/src/one.py"))
    assert names.new(Path("/lab/trial/kinds/red.py"), "kinds.red") == "kinds/red.py"
    assert names.new(Path("/lab/src/one.py"), None) == "src/one.py"
    assert names.new(Path("/opt/tools/__init__.py"), "tools") == "tools/__init__.py"
    assert names.new(Path("/opt/other/kinds/red.py"), "kinds.red") == "2/kinds/red.py"
    assert names.new(Path("/opt/x/kinds/red.py"), "kinds.red") == "3/2/kinds/red.py"
    assert names.new(Path("/opt/bin/tools"), None) == "2/tools"  # a folder has that name


def n_calls_to_trace(folder: Path, n_modules: int) -> int:
    """How many functions are called to trace a package of so many modules."""
    package = folder / f"lib{n_modules}"
    package.mkdir()
    for number in range(n_modules):
        (package / f"m{number}.py").write_text("X = 1\n")
    lines = [f"from {package.name} import m{number}" for number in range(n_modules)]
    (package / "__init__.py").write_text("\n".join(lines))
    tracer, events = Tracer(Scope(folder, None)), Counter()
    tracer.code.add_module(package.name)
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        trace = tracer.finish()
    finally:
        sys.setprofile(None)
    assert len(trace.files) == n_modules + 1
    return events["call"]


def test_a_package_of_four_times_as_many_modules_takes_four_times_the_work(tmp_path):
    few, many = (n_calls_to_trace(tmp_path, n_modules) for n_modules in (50, 200))
    assert many < 5 * few


def test_a_file_that_is_nested_too_deeply_is_said_to_be_followed_in_part(tmp_path):
    (tmp_path / "near.py").write_text("")
    (tmp_path / "deep.py").write_text(f"import near\nx = {'+'.join(['x'] * 370)}\n")
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_module("deep")
    trace = tracer.finish()
    assert [file.name for file in trace.files] == ["deep.py", "near.py"]
    assert trace.notes == (
        f"Some imports and reads of {tmp_path}/deep.py are unknown, because it is nested too deeply.",
    )


def test_a_default_is_read_whatever_folders_are_made_by_os_path_join(tmp_path):
    """The `path` of `os.path` is no variable."""
    (tmp_path / "model.yaml").write_text("size: 3\n")
    (tmp_path / "one.py").write_text(
        "import os\n\nos.makedirs(os.path.join('out', 'x'))\n\n"
        "def load(path='model.yaml'):\n    return open(path).read()\n"
    )
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_script(tmp_path / "one.py")
    assert [file.name for file in tracer.finish().read] == ["model.yaml"]


READS = {
    "a folder in a variable": "DATA = Path(__file__).parent / 'pkg' / 'data'\nX = (DATA / 'words.txt').read_text()",
    "folders one by one": "D = join(dirname(__file__), 'pkg')\nD = join(D, 'data')\nX = open(join(D, 'words.txt'))",
    "files": "from importlib import resources\nX = (resources.files('pkg.data') / 'words.txt').read_text()",
    "a module": "from importlib import resources\nfrom pkg import data\nX = resources.read_text(data, 'words.txt')",
    "get_data": "import pkgutil\nX = pkgutil.get_data('pkg', 'data/words.txt')",
}


@pytest.mark.parametrize("source", READS.values(), ids=READS)
@pytest.mark.parametrize("is_beside", [True, False])
def test_what_code_reads_in_a_folder_that_it_names_before_is_known(tmp_path, monkeypatch, source, is_beside):
    folder = tmp_path / ("lab" if is_beside else "elsewhere")
    for path in ("pkg/__init__.py", "pkg/data/__init__.py", "pkg/data/words.txt", "pkg/data/others.txt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    (folder / "one.py").write_text(f"from os.path import *\nfrom pathlib import Path\n{source}\n")
    monkeypatch.syspath_prepend(str(folder))
    tracer = Tracer(Scope(tmp_path / "lab", None))
    tracer.code.add_module("one")
    assert [file.path for file in tracer.finish().read] == [str(folder / "pkg" / "data" / "words.txt")]


def test_links_that_lead_nowhere_runs_and_folders_with_data_do_not_change_what_is_known_as_read(tmp_path):
    many = [f"class_{number}" for number in range(101)]
    for path in ("data/words.txt", "runs/digits/run.json", *(f"images/{name}/words.txt" for name in many)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for name in many:
        (tmp_path / name).symlink_to(name)  # a loop
    texts = ["data", "images", "runs/digits", "words.txt", "run.json", *many]
    (tmp_path / "one.py").write_text("\n".join(f"x = {text!r}" for text in texts))
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_module("one")
    assert [file.name for file in tracer.finish().read] == ["data/words.txt"]


def test_what_a_module_of_an_editable_install_reads_further_up_is_known(tmp_path, monkeypatch):
    for path in ("words.txt", "src/pkg/__init__.py", "src/pkg/words.txt", "src/pkg/models/__init__.py"):
        (tmp_path / "project" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / path).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "project" / "src"))
    (tmp_path / "project" / "src" / "pkg" / "models" / "net.py").write_text(
        "from pathlib import Path\nPACKAGE = Path(__file__).parents[1]\nPROJECT = PACKAGE.parent.parent\n"
        "X = (PACKAGE / 'words.txt').read_text()\n"
    )
    tracer = Tracer(Scope(tmp_path / "lab", None))
    tracer.code.add_module("pkg.models.net")
    assert [file.path for file in tracer.finish().read] == [str(tmp_path / "project" / "src" / "pkg" / "words.txt")]


def test_home_and_what_is_above_it_are_not_searched_for_what_code_reads_also_behind_a_link(tmp_path, monkeypatch):
    for path in ("words.txt", "me/words.txt", "me/pkg/__init__.py"):
        (tmp_path / "disk" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / path).write_text("")
    (tmp_path / "home").symlink_to("disk")
    (tmp_path / "disk" / "me" / "pkg" / "net.py").write_text("X = Path(__file__).parents[2] / 'words.txt'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "disk" / "me"))
    for home, n_read in ((tmp_path / "home" / "me", 0), (tmp_path / "disk" / "me", 0), (tmp_path / "elsewhere", 1)):
        monkeypatch.setenv("HOME", str(home))
        tracer = Tracer(Scope(tmp_path / "lab", None))
        tracer.code.add_module("pkg.net")
        assert len(tracer.finish().read) == n_read


PROSE = {
    "a document": "usage() {\n  cat <<EOF\nusage: x.sh ITEM > out.json\nEOF\n}",
    "echo": 'echo "Usage: CUDA_VISIBLE_DEVICES=0 $0 ITEM > out.json" >&2; exit 2',
    "echo to a user": "[ -n \"$1\" ] || { echo 'by hand: srun ./x.sh 3'; exit 2; }",
    "printf": 'printf "%s\\n" "usage: srun $0 a > out.json"',
    "a variable": "USAGE=\"\nusage: srun ./x.sh > out.json, of 'a'\n\"",
    "a default": ': "${1:?usage: ${0##*/} ITEM > out.json, by srun ./x.sh}"',
    "a call": 'die "usage: x.sh ITEM > out.json"',
}
COMMANDS = {
    "the word behind a quote": "grep 'x' usage.log > out.json; awk '{print}' a",
    "a written document": "cat <<EOF > out.json\nusage: x\nEOF",
    "a program": "python - <<'EOF' > out.json\nprint('usage')\nEOF",
    "code in quotes": 'bash -c "python x.py > out.json"',
    "what another shell runs": 'echo "python x.py > out.json" | bash',
    "what is printed of commands": 'echo "{\\"score\\": $(python x.py > out.json)}"',
    "behind a document": "cat <<EOF >&2\nusage: x\nEOF\npython x.py > out.json",
}


@pytest.mark.parametrize(
    ("text", "is_prose"),
    [(t, True) for t in PROSE.values()] + [(t, False) for t in COMMANDS.values()],
    ids=[*PROSE, *COMMANDS],
)
def test_what_a_script_only_says_is_no_command(tmp_path, text, is_prose):
    script = tmp_path / "x.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_script(script)
    notes = " ".join(tracer.finish().notes)
    assert (notes == "") if is_prose else ("x.sh writes out.json under the same name" in notes)


def test_what_a_program_says_to_its_user_starts_no_step(tmp_path):
    script = tmp_path / "x.py"
    says = (
        'import argparse, os, sys\nUSAGE = "usage: srun ./x.py $SLURM_ARRAY_TASK_ID"\nn = 3\n'
        'parser = argparse.ArgumentParser(description="by srun ./x.py")\n'
        'parser.add_argument("--n", help="default: SLURM_ARRAY_TASK_ID")\n'
        'print("by srun ./x.py", f"by srun ./x.py {n}")\n'
        'if n > 4:\n    raise ValueError(f"start {n} by srun ./x.py")\n'
    )
    for text, expected in ((says, ()), (says + 'print(os.environ["SLURM_ARRAY_TASK_ID"])\n', ("reads SLURM_ARRAY",))):
        script.write_text(text)
        tracer = Tracer(Scope(tmp_path, None))
        tracer.code.add_script(script)
        notes = tracer.finish().notes
        assert len(notes) == len(expected)
        assert all(words in note for words, note in zip(expected, notes, strict=True))


def test_a_long_script_of_a_shell_is_read_once_and_not_once_for_each_line():
    """Blank lines, and a line of which each word changes the folder, took minutes."""
    lines = "\n" * 100_000 + "cd x " * 100_000 + '\npython "$(dirname "$0")/train.py" --config a.yaml\n'
    lines += "usage " * 20_000 + "a=b;" * 20_000 + "a=b " * 20_000
    names = names_in_shell.names_in(names_in_shell.commands_in(lines.encode()))
    assert "a.yaml" in names.here
    assert "train.py" in names.beside


def test_what_pip_has_installed_into_a_folder_on_the_path_is_not_the_users(tmp_path, monkeypatch):
    folder, target = tmp_path / "lab", tmp_path / "target"
    for path in ("lab/mine.py", "target/beside.py", "target/one.py", "target/several/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for name, recorded in (("one-1.0", "one.py,sha256=x,0"), ("several-2.0", "several/__init__.py,,")):
        (target / f"{name}.dist-info").mkdir()
        (target / f"{name}.dist-info" / "RECORD").write_text(f"{recorded}\n{name}.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(str(target))
    (folder / "mine.py").write_text("import beside, one, several\n")
    tracer = Tracer(Scope(folder, None))
    tracer.code.add_module("mine")
    assert {Path(file.path).name for file in tracer.finish().files} == {"beside.py", "mine.py"}
    # An image has neither them nor the user's own, but may have packages such as NumPy.
    (folder / "mine.py").write_text("import beside, one, several, numpy, json\n")
    tracer = Tracer(Scope(folder, []))
    tracer.code.add_module("mine")
    [note] = tracer.finish().notes
    shown = [f"{name} ({target / path})" for name, path in
             (("beside", "beside.py"), ("one", "one.py"), ("several", "several/__init__.py"))]  # fmt: skip
    assert f"tasks import the image's versions, if any: {', '.join(shown)}." in note


def test_modules_of_a_namespace_that_installed_distributions_share_are_the_users(tmp_path, monkeypatch):
    installed = ("one/acme/core/__init__.py", "two/site-packages/acme/other.py")
    for path in ("lab/mine.py", "own/acme/mine.py", "own/utils/mine.py", *installed):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "one" / "acme_core-1.0.dist-info").mkdir()
    (tmp_path / "one" / "acme_core-1.0.dist-info" / "RECORD").write_text("acme/core/__init__.py,,\n")
    for folder in ("one", "two/site-packages", "own"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    (tmp_path / "lab" / "mine.py").write_text("import acme.mine, acme.core, acme.other, utils.mine\n")
    tracer = Tracer(Scope(tmp_path / "lab", None))
    tracer.code.add_module("mine")
    found = tracer.finish()
    names = {file.path.removeprefix(f"{tmp_path}/") for file in found.files}
    assert names == {"lab/mine.py", "own/acme/mine.py", "own/utils/mine.py"}
    assert found.namespaces == ("acme", "utils")
    assert found.packages & {"acme", "utils"} == {"acme"}  # whose versions are recorded
