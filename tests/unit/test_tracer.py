"""Which files a snapshot has, by which names, and how much work it is to find them."""

import sys
from collections import Counter
from pathlib import Path

import numpy
import pytest

from slurmgpu.code import kept_files, names_in_shell, read_files
from slurmgpu.code.snapshot_names import SnapshotNames
from slurmgpu.code.tracer import Scope, Trace, Tracer
from slurmgpu.errors import SlurmGPUError


def test_files_of_a_snapshot_keep_their_places_and_no_two_have_one_name():
    names = SnapshotNames(Path("/lab/trial"))
    names.add_script(Path("/lab/src/one.py"))
    assert names.new(Path("/lab/trial/kinds/red.py"), "kinds.red") == "kinds/red.py"
    assert names.new(Path("/lab/src/one.py"), None) == "src/one.py"
    assert names.new(Path("/opt/tools/__init__.py"), "tools") == "tools/__init__.py"
    assert names.new(Path("/opt/other/kinds/red.py"), "kinds.red") == "2/kinds/red.py"
    assert names.new(Path("/opt/x/kinds/red.py"), "kinds.red") == "3/2/kinds/red.py"
    assert names.new(Path("/opt/bin/tools"), None) == "2/tools"  # a folder has that name


def write(folder: Path, files: dict[str, str] | list[str]) -> Path:
    """Write texts, or empty files, into a folder."""
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(files[path] if isinstance(files, dict) else "")
    return folder


def traced(folder: Path, *modules: str, packages=None, inputs=()) -> Trace:
    """The trace of the code that imports these modules."""
    tracer = Tracer(Scope(folder, packages, inputs))
    for module in modules:
        tracer.code.add_module(module, needed=True)
    return tracer.finish()


def names(files) -> list[str]:
    return [file.name for file in files]


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
    trace = traced(tmp_path, "deep")
    assert [file.name for file in trace.files] == ["deep.py", "near.py"]
    assert trace.notes == (
        f"Some imports and reads of {tmp_path}/deep.py are unknown, because it is nested too deeply.",
    )


def test_what_the_run_file_names_is_kept_once_with_what_it_finds_beside_it(tmp_path):
    write(tmp_path, {"sub/one.py": "import beside\n", "sub/beside.py": "", "sub/two.py": "", "bad.py": "x =\n"})
    tracer = Tracer(Scope(tmp_path, None))
    for module in ("sub/one.py", "sub/one.py", "sub/two", "beside", "beside", "gone.py", "bad.py"):
        tracer.code.add_named(module)
    kept = {file.name: file.modules for file in tracer.finish().files}
    assert kept == {"bad.py": (), "sub/one.py": (), "sub/beside.py": ("beside",)}
    with pytest.raises(SlurmGPUError, match=r"gone\.py of the run's workload no longer exists"):
        tracer.code.add_named("gone.py", needed=True)
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_named("bad", needed=True)
    with pytest.raises(SlurmGPUError, match=r"bad\.py, line 1, is not Python"):
        tracer.finish()


def test_only_packages_that_code_imports_are_those_whose_versions_are_recorded(tmp_path):
    """Not the words of a command line that look like modules."""
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_named("yaml")
    tracer.code.add_named("two words")
    tracer.named.add_text("h5py.File", (tmp_path,))
    assert tracer.finish().packages == frozenset()
    tracer.code.add_named("numpy.linalg", needed=True)
    assert tracer.finish().packages == {"numpy"}


def test_a_file_that_one_module_needs_and_another_may_lack_is_needed(tmp_path):
    write(tmp_path, {"one.py": "try:\n    import bad\nexcept SyntaxError:\n    pass\nimport two\n", "bad.py": "x =\n"})
    assert names(traced(tmp_path, "one").files) == ["bad.py", "one.py"]
    write(tmp_path, {"two.py": "import bad\n"})
    with pytest.raises(SlurmGPUError, match=r"bad\.py, line 1, is not Python"):
        traced(tmp_path, "one")


def test_a_large_package_from_elsewhere_is_left_out_and_one_beside_the_run_file_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "_MANY_FILES", 3)
    files = {f"{package}/{name}.py": "" for package in ("lab/own", "elsewhere/large") for name in "abcd"}
    for package, imports in (("lab/own", "own"), ("elsewhere/large", "large")):
        files[f"{package}/__init__.py"] = f"from {imports} import a, b, c, d\n"
    write(tmp_path, files | {"lab/one.py": "import own, large\n", "elsewhere/small/__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    found = traced(tmp_path / "lab", "one", "small")
    assert {name.partition("/")[0] for name in names(found.files)} == {"one.py", "own", "small"}
    assert found.packages == {"large"}
    assert found.notes == ("large has more than 3 modules: they are not in the snapshot of the code.",)


def test_data_inputs_run_files_and_files_of_the_system_or_of_others_are_not_known_as_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read_files, "_LARGEST_READ", 20_000)
    monkeypatch.setattr(read_files, "_OF_THE_SYSTEM", (f"{tmp_path}/etc/",))
    texts = ["conf.yaml", "data.csv", "items.txt", "run.toml", "own.toml", "etc/system.yaml", pytest.__file__]
    write(tmp_path, dict.fromkeys(texts[:-1], "x: 1\n") | {"one.py": f"X = {texts}\n", "data.csv": 20_001 * "1"})
    write(tmp_path, {"run.toml": "[workload]\nuse = 'a'\n", "own.toml": "[workloads]\n"})
    assert names(traced(tmp_path, "one", inputs=[str(tmp_path / "items.txt")]).read) == ["conf.yaml", "own.toml"]


def test_a_file_that_code_names_is_that_of_the_first_folder_which_has_it(tmp_path):
    write(tmp_path, dict.fromkeys(("pkg/one.py", "pkg/two.py"), "X = open('words.txt')\n"))
    write(tmp_path, ["words.txt", "pkg/words.txt"])
    assert names(traced(tmp_path, "pkg.one", "pkg.two").read) == ["pkg/words.txt"]


def test_modules_that_a_configuration_names_are_kept_and_what_only_looks_like_one_is_not(tmp_path):
    conf = "a: net.Net\nb: net.part.Part\nc: loss.value\nd: other.Missing\ne: ./skipped.Net\nf: any.name\n"
    files = {"net/__init__.py": "", "net/part.py": "class Part: ...\n", "loss.py": "", "other.py": "def found(): ...\n"}
    files |= {"skipped.py": "Net = 1\n", "any.py": "def __getattr__(name): ...\n"}
    write(tmp_path, files | {"one.py": "X = open('conf.yaml')\n", "conf.yaml": conf})
    kept = ["any.py", "net/__init__.py", "net/part.py", "one.py"]
    assert names(traced(tmp_path, "one").files) == kept


def test_any_module_of_a_package_that_imports_by_computed_names_is_kept(tmp_path):
    source = "import importlib\ndef load(name): return importlib.import_module(name)\n"
    files = {"pkg/__init__.py": source, "pkg/a.py": "", "pkg/sub/b.py": "", "pkg/not-a-name/c.py": "", "pkg/d.txt": ""}
    found = traced(write(tmp_path, files), "pkg")
    assert (names(found.files), found.notes) == (["pkg/__init__.py", "pkg/a.py", "pkg/sub/b.py"], ())
    assert found.namespaces == ("pkg.sub",)
    # One that lists the modules of another package imports these, and no others.
    write(tmp_path, {"one.py": f"import pkg, pkgutil\nX = pkgutil.iter_modules(pkg.__path__)\n{source}"})
    assert traced(tmp_path, "one").notes == ()


def test_a_star_imports_what_a_package_says_and_a_module_no_others(tmp_path):
    files = {"lib/pkg/__init__.py": "__all__ = ['a', 'not a name']\n", "lib/pkg/a.py": "", "lib/pkg/b.py": ""}
    found = traced(write(tmp_path, files | {"one.py": "from lib.pkg import *\nfrom gone import *\n"}), "one")
    assert names(found.files) == ["lib/pkg/__init__.py", "lib/pkg/a.py", "one.py"]


PROGRAMS = {
    "one.sh": "#!/bin/bash\npython run.py\nbash two.sh\npython -m tool\n",
    "two.sh": "python run.py --config conf.yaml; bash two.sh\n",
    "run.py": "import words, numpy\nopen('next.py')\nopen('run.py')\nimportlib.import_module(name)\n",
    "next.py": "import later\nopen('run.py')\n",
    "words.py": "X = open('words.txt')\n",
    "later.py": "",
    "words.txt": "",
    "conf.yaml": "",
    "tool/__main__.py": "from . import inner\n",
    "tool/inner.py": "",
    "unused.py": "",
}


def test_programs_that_run_from_disk_are_followed_with_what_they_import_start_and_read(tmp_path):
    write(tmp_path, PROGRAMS)
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_script(tmp_path / "one.sh")
    found = tracer.finish()
    assert names(found.files) == ["one.sh"]
    read = "conf.yaml later.py next.py run.py tool/__main__.py tool/inner.py two.sh words.py words.txt"
    assert names(found.read) == read.split()
    assert found.packages == {"numpy"}
    left_out, _ = found.notes
    assert left_out.startswith(f"{tmp_path}/run.py, line 4, imports a module whose name is computed at run time. ")


def test_packages_in_an_image_that_a_program_from_disk_imports_are_among_those_of_the_code(tmp_path):
    write(tmp_path, {"run.py": "import numpy, h5py\n", "one.sh": "python run.py\n"})
    tracer = Tracer(Scope(tmp_path, [("packages/numpy", str(Path(numpy.__file__).parent))]))
    tracer.code.add_script(tmp_path / "one.sh")
    assert tracer.finish().packages == {"numpy"}


def test_programs_from_disk_search_the_folders_that_the_run_searches(tmp_path):
    write(tmp_path, {"lib/far.py": "", "run.py": "import far\n", "one.sh": "python run.py\n"})
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.search(["lib", "none"], is_first=False)
    tracer.code.add_script(tmp_path / "one.sh")
    assert names(tracer.finish().read) == ["lib/far.py", "run.py"]


def test_a_module_that_programs_find_before_its_copy_is_known_as_read(tmp_path):
    script = "sys.path.insert(0, '')\nsys.path.insert(0, 'lib')\nsys.path.append('other')\nimport near, far, beside\n"
    write(tmp_path, {"lib/near.py": "", "other/far.py": "", "beside.py": "", "one.py": script})
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.add_script(tmp_path / "one.py")
    found = tracer.finish()
    assert names(found.files) == ["beside.py", "lib/near.py", "one.py", "other/far.py"]
    assert names(found.read) == ["lib/near.py"]


def test_a_module_in_a_folder_that_a_script_of_a_shell_puts_on_the_path_is_read_and_kept(tmp_path):
    line = 'PYTHONPATH=lib python "$(dirname "$0")/go.py" "$(dirname "$0")/gone.py"'
    write(tmp_path, {"one.sh": f"#!/bin/sh\n{line}\n", "go.py": "import near\n", "lib/near.py": "", "lib/two.py": ""})
    tracer = Tracer(Scope(tmp_path, None))
    for script in ("one.sh", "lib/two.py"):
        tracer.code.add_script(tmp_path / script)
    found = tracer.finish()
    assert names(found.files) == ["go.py", "lib/near.py", "lib/two.py", "one.sh"]
    assert names(found.read) == ["lib/near.py"]
    assert len(found.notes) == 1


def test_a_module_that_is_also_read_as_a_file_is_kept_and_a_folder_without_modules_is_none(tmp_path):
    write(tmp_path, {"one.py": "X = open('two.py')\nimport three, empty.gone\n", "three.py": "import two\n"})
    write(tmp_path, ["two.py", "empty/words.txt"])
    found = traced(tmp_path, "one")
    assert (names(found.files), found.read, found.namespaces) == (["one.py", "three.py", "two.py"], (), ())


def test_what_is_installed_is_not_the_users_also_where_their_path_has_its_folder(tmp_path):
    write(tmp_path, {"one.py": "import numpy\n"})
    tracer = Tracer(Scope(tmp_path, None))
    tracer.code.search([str(Path(numpy.__file__).parents[1])], is_first=True)
    tracer.code.add_module("one")
    found = tracer.finish()
    assert (names(found.files), found.packages) == (["one.py"], {"numpy"})


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
    write(folder, ["pkg/__init__.py", "pkg/data/__init__.py", "pkg/data/words.txt", "pkg/data/others.txt"])
    (folder / "one.py").write_text(f"from os.path import *\nfrom pathlib import Path\n{source}\n")
    monkeypatch.syspath_prepend(str(folder))
    assert [file.path for file in traced(tmp_path / "lab", "one").read] == [str(folder / "pkg" / "data" / "words.txt")]


def test_links_that_lead_nowhere_runs_and_folders_with_data_do_not_change_what_is_known_as_read(tmp_path):
    many = [f"class_{number}" for number in range(101)]
    write(tmp_path, ["data/words.txt", "runs/digits/run.json", *(f"images/{name}/words.txt" for name in many)])
    for name in many:
        (tmp_path / name).symlink_to(name)  # a loop
    texts = ["data", "images", "runs/digits", "words.txt", "run.json", *many]
    (tmp_path / "one.py").write_text("\n".join(f"x = {text!r}" for text in texts))
    assert [file.name for file in traced(tmp_path, "one").read] == ["data/words.txt"]


def test_what_a_module_of_an_editable_install_reads_further_up_is_known(tmp_path, monkeypatch):
    write(tmp_path / "project", ["words.txt", "src/pkg/__init__.py", "src/pkg/words.txt", "src/pkg/models/__init__.py"])
    monkeypatch.syspath_prepend(str(tmp_path / "project" / "src"))
    (tmp_path / "project" / "src" / "pkg" / "models" / "net.py").write_text(
        "from pathlib import Path\nPACKAGE = Path(__file__).parents[1]\nPROJECT = PACKAGE.parent.parent\n"
        "X = (PACKAGE / 'words.txt').read_text()\n"
    )
    assert [file.path for file in traced(tmp_path / "lab", "pkg.models.net").read] == [
        str(tmp_path / "project" / "src" / "pkg" / "words.txt")
    ]


def test_home_and_what_is_above_it_are_not_searched_for_what_code_reads_also_behind_a_link(tmp_path, monkeypatch):
    write(tmp_path / "disk", ["words.txt", "me/words.txt", "me/pkg/__init__.py"])
    (tmp_path / "home").symlink_to("disk")
    (tmp_path / "disk" / "me" / "pkg" / "net.py").write_text("X = Path(__file__).parents[2] / 'words.txt'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "disk" / "me"))
    for home, n_read in ((tmp_path / "home" / "me", 0), (tmp_path / "disk" / "me", 0), (tmp_path / "elsewhere", 1)):
        monkeypatch.setenv("HOME", str(home))
        assert len(traced(tmp_path / "lab", "pkg.net").read) == n_read


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
    write(tmp_path, ["lab/mine.py", "target/beside.py", "target/one.py", "target/several/__init__.py"])
    for name, recorded in (("one-1.0", "one.py,sha256=x,0"), ("several-2.0", "several/__init__.py,,")):
        (target / f"{name}.dist-info").mkdir()
        (target / f"{name}.dist-info" / "RECORD").write_text(f"{recorded}\n{name}.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(str(target))
    (folder / "mine.py").write_text("import beside, one, several\n")
    assert {Path(file.path).name for file in traced(folder, "mine").files} == {"beside.py", "mine.py"}
    # An image has neither them nor the user's own, but may have packages such as NumPy.
    (folder / "mine.py").write_text("import beside, one, several, numpy, json\n")
    [note] = traced(folder, "mine", packages=[]).notes
    shown = [f"{name} ({target / path})" for name, path in
             (("beside", "beside.py"), ("one", "one.py"), ("several", "several/__init__.py"))]  # fmt: skip
    assert f"tasks import the image's versions, if any: {', '.join(shown)}." in note


def test_modules_of_a_namespace_that_installed_distributions_share_are_the_users(tmp_path, monkeypatch):
    installed = ("one/acme/core/__init__.py", "two/site-packages/acme/other.py")
    write(tmp_path, ["lab/mine.py", "own/acme/mine.py", "own/utils/mine.py", *installed])
    (tmp_path / "one" / "acme_core-1.0.dist-info").mkdir()
    (tmp_path / "one" / "acme_core-1.0.dist-info" / "RECORD").write_text("acme/core/__init__.py,,\n")
    for folder in ("one", "two/site-packages", "own"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    (tmp_path / "lab" / "mine.py").write_text("import acme.mine, acme.core, acme.other, utils.mine\n")
    found = traced(tmp_path / "lab", "mine")
    names = {file.path.removeprefix(f"{tmp_path}/") for file in found.files}
    assert names == {"lab/mine.py", "own/acme/mine.py", "own/utils/mine.py"}
    assert found.namespaces == ("acme", "utils")
    assert found.packages & {"acme", "utils"} == {"acme"}  # whose versions are recorded
