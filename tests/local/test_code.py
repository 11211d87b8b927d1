"""The snapshot of the user's modules: what is in it, that tasks import nothing else, what is told of changes."""

import ast
import errno
import importlib.metadata
import json
import os
import sys
import textwrap
import zipfile
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import h5py
import pytest

from slurmgpu import open as slurmgpu_open
from slurmgpu.code import imported_modules, named_files, snapshots, user_code
from slurmgpu.code.capture import snapshot_of
from slurmgpu.code.namesakes import refuse_other_modules
from slurmgpu.code.snapshots import tree_digest
from slurmgpu.code.versions import in_words, makers_of, rows_by_code, stretches_of, within
from slurmgpu.errors import SlurmGPUError
from slurmgpu.operations.resubmit import Request, foresee
from slurmgpu.plan.checked_workload import refuse_other_columns
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.directory import Run
from tests.support.runs import kill_workers, let_go, report, start, wait_until, wait_until_held

WORKLOAD = """
import time
from pathlib import Path

from helpers.signs import SIGN
from slurmgpu import Array, Text


class Signed:
    columns = {"x": Array("int64"), "said": Text()}
    batch_size = 2

    def __init__(self, *, held: str = "") -> None:
        self.held = held

    def load(self, task) -> None:
        pass

    def __call__(self, items):
        while self.held and Path(self.held).exists():
            time.sleep(0.05)
        import late

        return [{"x": SIGN * (1 + item.index), "said": late.said()} for item in items]
"""
SIGNS = """
# A helper.
SIGN = 1
"""
LATE = """
from pathlib import Path


def said():
    return (Path(__file__).parent / "words.txt").read_text()
"""


READ = "Tasks read these files when they run, not as they are now: words.txt."
NAMES = ["helpers/__init__.py", "helpers/signs.py", "late.py", "signed.py"]


@pytest.fixture
def signed(tmp_path, monkeypatch):
    """A project whose workload imports a package, and within its call a module that reads a file beside it."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("helpers", "late", "vanishing"):  # another test's
            monkeypatch.delitem(sys.modules, name)

    def make(executor="local", **top):
        folder = tmp_path / "project"
        (folder / "helpers").mkdir(parents=True, exist_ok=True)
        (folder / "helpers" / "__init__.py").touch()
        (folder / "helpers" / "signs.py").write_text(SIGNS)
        (folder / "late.py").write_text(LATE)
        (folder / "unused.py").write_text("x = 1\n")
        (folder / "words.txt").write_text("first words")
        (folder / "signed.py").write_text(WORKLOAD)
        (folder / "items.jsonl").write_text("".join(f'{{"i": {i}}}\n' for i in range(8)))
        keys = {"input": "items.jsonl", "run_dir": "run", "shard_items": 2, "lease_s": 4.0, "html": False, **top}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        text += '\n[workload]\nuse = "signed.py:Signed"\n\n[resources]\ngpus = 0\n'
        text += f'executor = "{executor}"\n\n[settings]\n'
        (folder / "slurmgpu.toml").write_text(text)
        return folder

    return make


def values(folder, name="x"):
    with h5py.File(folder / "run" / "merged.h5") as file:
        return file[name][:].tolist()


def held(folder):
    """Have the items of the project wait until `let_go`."""
    (folder / "held").touch()
    with open(folder / "slurmgpu.toml", "a") as file:
        file.write(f"held = {json.dumps(str(folder / 'held'))}\n")


def lack(folder, shard):
    (folder / "run" / "shards" / f"{shard:05d}.h5").unlink()


def codes(folder):
    return [line["code"]["digest"] for line in Run.open(folder / "run").submissions()]


def makers(folder):
    from slurmgpu.shards.shard_file import read_directory

    run = Run.open(folder / "run")
    return {shard: read_directory(run.shard_path(shard)).made_by["code"] for shard in run.published()}


def test_the_snapshot_has_what_the_workload_imports_and_every_shard_names_it(signed, slurmgpu):
    folder = signed()
    slurmgpu("submit", cwd=folder, expect=0)
    [digest] = codes(folder)
    about = json.loads((folder / "run" / "code" / f"{digest}.json").read_text())
    assert [file["name"] for file in about["files"]] == NAMES
    assert (folder / "run" / "code" / digest / "late.py").read_text() == LATE
    assert about["distributions"]["numpy"]
    assert set(makers(folder).values()) == {digest}


def test_a_task_that_waits_never_runs_what_was_edited_since(signed, slurmgpu):
    folder = signed()
    held(folder)
    process = start("submit", cwd=folder)
    wait_until_held(folder, 0)
    # The workload is loaded, and late.py is not imported yet; a second worker imports all of it later.
    (folder / "helpers" / "signs.py").write_text("SIGN = -1\n")
    (folder / "late.py").write_text("def said():\n    return 'edited'\n")
    (folder / "signed.py").write_text("not Python at all\n")
    kill_workers(folder)
    let_go(folder)
    process.communicate(timeout=200)
    assert process.returncode == 0
    assert values(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert bytes(values(folder, "said/values")).decode() == 8 * "first words"


def test_a_file_beside_a_module_is_read_as_it_is(signed, slurmgpu):
    folder = signed()
    held(folder)
    process = start("submit", cwd=folder)
    wait_until_held(folder, 0)
    (folder / "words.txt").write_text("new words")
    let_go(folder)
    process.communicate(timeout=200)
    assert bytes(values(folder, "said/values")).decode() == 8 * "new words"


@pytest.mark.parametrize("ahead_s", [0, 5])
def test_code_that_is_edited_while_it_is_imported_computes_as_the_snapshot_has_it(ahead_s, signed, slurmgpu, tmp_path):
    """Also where the clock of this machine is ahead of that of the file system."""
    folder = signed("debug")
    shifted = f"import time\n\nnow = time.time\ntime.time = lambda: now() + {ahead_s}\n"
    (tmp_path / "shifted").mkdir()
    (tmp_path / "shifted" / "sitecustomize.py").write_text(shifted)
    edit = "import pathlib\n\npath = pathlib.Path(__file__).parents[1] / 'signed.py'\n"
    edit += "path.write_text(path.read_text().replace('(1 + item', '(5 + item'))\n"
    (folder / "helpers" / "signs.py").write_text(edit + SIGNS)
    slurmgpu("submit", cwd=folder, expect=0, PYTHONPATH=tmp_path / "shifted")
    [kept] = (folder / "run" / "code").rglob("signed.py")
    assert "(5 + item" in kept.read_text()
    assert values(folder) == [5, 6, 7, 8, 9, 10, 11, 12]


def test_comments_and_layout_are_no_change_and_a_sign_is_told_at_once(signed, slurmgpu):
    folder = signed("debug")
    slurmgpu("submit", cwd=folder, expect=0)
    (folder / "helpers" / "signs.py").write_text("SIGN = (1)   # the sign\n")
    lack(folder, 0)
    assert "has changed" not in slurmgpu("resubmit", "run", cwd=folder, expect=0).stderr
    (folder / "helpers" / "signs.py").write_text("SIGN = -1\n")
    lack(folder, 1)
    said = slurmgpu("resubmit", "run", cwd=folder, expect=0).stderr
    assert "The code has changed since submission 2: helpers/signs.py differs." in said
    first, second, third = codes(folder)
    assert first == second != third
    assert f"are computed by {third[:4]}, former ones were by {first[:4]}" in said
    assert values(folder) == [1, 2, -3, -4, 5, 6, 7, 8]
    assert makers(folder) == {0: first, 1: third, 2: first, 3: first}
    lack(folder, 1)
    said = slurmgpu("resubmit", "run", "--code", first[:4], cwd=folder, expect=0).stderr
    assert f"The code of submission 2 is used, {first[:4]}." in said
    assert values(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    (folder / "signed.py").unlink()
    lack(folder, 2)
    said = slurmgpu("resubmit", "run", cwd=folder, expect=2).stderr
    assert "no longer exists" in said
    assert "--code former" in said
    slurmgpu("resubmit", "run", "--code", "former", cwd=folder, expect=0)
    assert values(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    lack(folder, 2)
    assert "expected 'former', or the digest" in slurmgpu("resubmit", "run", "--code", "x", cwd=folder, expect=2).stderr


def test_the_rows_of_two_versions_are_told_apart_and_computed_again(signed, slurmgpu):
    folder = signed("debug")
    slurmgpu("submit", cwd=folder, expect=0)
    [version] = report(folder)["code"]
    assert (version["items"], version["submissions"], set(version["files"])) == (8, [1], {*NAMES})
    (folder / "helpers" / "signs.py").write_text("SIGN = -1\n")
    lack(folder, 1)
    # Also where the rows of the shard that is gone are in merged.h5: those are theirs who have computed them.
    assert values(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    (folder / "run" / "merged.h5").unlink()
    said = slurmgpu("resubmit", "run", cwd=folder, expect=0).stdout
    first, second = codes(folder)
    words = f"code: 6 rows by {first[:4]}, 2 by {second[:4]}"
    assert words in said
    assert words in slurmgpu("status", "run", cwd=folder, expect=0).stdout
    told = report(folder)["code"]
    assert [(version["digest"], version["items"]) for version in told] == [(first, 6), (second, 2)]
    with slurmgpu_open(folder / "run" / "merged.h5") as merged:
        assert merged.code.tolist() == 2 * [first] + 2 * [second] + 4 * [first]
    with slurmgpu_open(folder / "run" / "shards" / "00001.h5") as shard:
        assert shard.code.tolist() == 2 * [second]
    [items] = folder.glob("items.*")
    items.rename(folder / "away")
    assert "cannot be read" in slurmgpu("resubmit", "run", "--other-code", cwd=folder, expect=2).stderr
    (folder / "away").rename(items)
    content, times = items.read_bytes(), (items.stat().st_atime_ns, items.stat().st_mtime_ns)
    items.write_bytes(b"x" * len(content))  # which no look at the file tells, but its reader
    os.utime(items, ns=times)
    said = slurmgpu("resubmit", "run", "--other-code", cwd=folder, expect=0).stderr
    assert "Not recomputed: 6 items; the former rows stay. Repeat the command to compute the rest." in said
    items.write_bytes(content)
    os.utime(items, ns=times)
    said = slurmgpu("resubmit", "run", "--other-code", cwd=folder, expect=0)
    assert "6 items are recomputed, in 3 shards" in said.stderr
    assert "Not recomputed" not in said.stderr
    assert values(folder) == [-1, -2, -3, -4, -5, -6, -7, -8]
    assert [(version["digest"], version["items"]) for version in report(folder)["code"]] == [(second, 8)]
    said = slurmgpu("resubmit", "run", "--other-code", cwd=folder, expect=2).stderr
    assert "the current code computed all rows" in said
    slurmgpu("resubmit", "run", "--other-code", "--code", first, cwd=folder, expect=0)
    assert values(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    # What a merge takes out of an earlier merged.h5 stays by the code that computed it.
    for path in (folder / "run" / "shards").glob("00002*"):
        path.unlink()
    (folder / "helpers" / "signs.py").write_text("SIGN = 5\n")
    slurmgpu("merge", "run", cwd=folder, expect=0)
    assert values(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(version["digest"], version["items"]) for version in report(folder)["code"]] == [(first, 8)]


def test_stretches_keep_apart_what_is_whose():
    by = {"code": "a", "revisions": [{"code": "b", "items": [[2, 4]]}, {"code": "c", "items": [[3, 4], [9, 10]]}]}
    found = stretches_of(by, 0, 10)
    assert found == [(0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 9, "a"), (9, 10, "c")]
    assert stretches_of(makers_of(found), 0, 10) == found
    assert within(found, 1, 4) == [(1, 2, "a"), (2, 3, "b"), (3, 4, "c")]
    assert rows_by_code(found) == {"a": 7, "b": 1, "c": 2}
    versions = [{"digest": "9f2c11", "items": 1920}, {"digest": None, "items": 80}]
    assert in_words(versions) == "1,920 rows by 9f2c, 80 by unknown code"


def test_a_snapshot_that_was_changed_is_not_computed_with(signed, slurmgpu):
    folder = signed("debug")
    slurmgpu("submit", cwd=folder, expect=0)
    [digest] = codes(folder)
    lack(folder, 0)
    (folder / "run" / "code" / digest / "late.py").write_text("def said():\n    return 'somebody else'\n")
    assert "was changed" in slurmgpu("resubmit", "run", "--code", "former", cwd=folder, expect=2).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_snapshot_that_a_stranger_has_put_there_is_not_computed_with(signed, slurmgpu):
    folder = signed("debug")
    slurmgpu("submit", cwd=folder, expect=0)
    [digest] = codes(folder)
    assert (folder / "run" / "code").stat().st_mode & 0o022 == 0
    lack(folder, 0)
    os.chown(folder / "run" / "code" / digest, 12345, 12345)
    said = slurmgpu("resubmit", "run", "--code", "former", cwd=folder, expect=2).stderr
    assert "belongs to the user with the number 12345" in said


@pytest.mark.parametrize("file", ["signed.py", "helpers/signs.py"])
def test_a_syntax_error_is_the_users_with_file_and_line(signed, slurmgpu, file):
    folder = signed("debug")
    slurmgpu("submit", cwd=folder, expect=0)
    (folder / file).write_text("x = 1\ndef broken(:\n")
    lack(folder, 0)
    for command in (["submit", "--run-dir", "other"], ["check"], ["resubmit", "run"]):
        done = slurmgpu(*command, cwd=folder, expect=2)
        assert f"{folder / file}, line 2, is not Python: invalid syntax" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    (folder / file).write_text("import json\nfrom json import nothing_like_it\n")
    done = slurmgpu("submit", "--run-dir", "other", cwd=folder, expect=2)
    assert f"{folder / file}, line 2, has ImportError: cannot import name 'nothing_like_it'" in done.stderr


def test_what_the_process_imported_before_is_not_taken_for_what_is_on_disk(signed):
    folder = signed()
    for sign in (1, -1):
        (folder / "helpers" / "signs.py").write_text(f"SIGN = {sign}\n")
        with draft_run(folder / "slurmgpu.toml") as draft:
            [file] = [file for file in draft.code.files if file.name == "helpers/signs.py"]
            assert file.source.decode() == f"SIGN = {sign}\n"
            assert sign == sys.modules["helpers.signs"].SIGN
    imported_modules.forget_changed()


def test_an_editable_install_is_in_the_snapshot(signed, slurmgpu, tmp_path):
    folder, source = signed(), tmp_path / "mylib" / "src"
    (source / "mylib").mkdir(parents=True)
    (source / "mylib" / "__init__.py").write_text("from mylib.core import SIGN\n")
    (source / "mylib" / "core.py").write_text("SIGN = 3\n")
    (folder / "helpers" / "signs.py").write_text("from mylib import SIGN\n")
    # What a .pth file of an editable install does, without installing into this environment.
    site = tmp_path / "usersite"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(source)!r})\n")
    slurmgpu("submit", cwd=folder, expect=0, PYTHONPATH=str(site))
    [digest] = codes(folder)
    about = json.loads((folder / "run" / "code" / f"{digest}.json").read_text())
    assert {"mylib/__init__.py", "mylib/core.py"} < {file["name"] for file in about["files"]}
    (source / "mylib" / "core.py").write_text("SIGN = 5\n")
    assert values(folder) == [3, 6, 9, 12, 15, 18, 21, 24]
    lack(folder, 0)
    said = slurmgpu("resubmit", "run", cwd=folder, expect=0, PYTHONPATH=str(site)).stderr
    assert "mylib/core.py differs" in said
    assert values(folder) == [5, 10, 9, 12, 15, 18, 21, 24]


def test_processes_that_a_workload_spawns_import_the_snapshot(signed, slurmgpu):
    folder = signed()
    (folder / "late.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor


            def sign(_):
                from helpers.signs import SIGN

                return str(SIGN)


            def said():
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    return next(pool.map(sign, [0]))
            """
        )
    )
    (folder / "items.jsonl").write_text('{"i": 0}\n')
    held(folder)
    process = start("submit", cwd=folder)
    wait_until_held(folder, 0)
    (folder / "helpers" / "signs.py").write_text("SIGN = -1\n")
    let_go(folder)
    process.communicate(timeout=200)
    assert bytes(values(folder, "said/values")).decode() == "1"


def test_a_run_that_was_only_planned_has_no_former_code(signed, slurmgpu):
    folder = signed("debug")
    slurmgpu("plan", cwd=folder, expect=0)
    assert "was never submitted" in slurmgpu("resubmit", "run", "--code", "former", cwd=folder, expect=2).stderr
    slurmgpu("resubmit", "run", "--executor", "debug", cwd=folder, expect=0)
    assert report(folder)["complete"]


def test_columns_that_have_changed_are_refused_before_anything_is_queued(signed, slurmgpu):
    folder = signed("debug")
    halves = WORKLOAD.replace("SIGN * (1 + item.index)", "item.index / 2")
    (folder / "signed.py").write_text(halves)
    slurmgpu("submit", cwd=folder, expect=0)
    assert report(folder)["errors_by_class"] == {"item_error": 4}
    (folder / "signed.py").write_text(halves.replace('Array("int64")', 'Array("float64", (2,)), "y": Text()'))
    for more in ([], ["--dry-run"]):
        done = slurmgpu("resubmit", "run", "--failed", *more, cwd=folder, expect=2)
        assert (
            "'x' was array of int64 and is array of float64 and shape (2,), 'y' was absent and is text." in done.stderr
        )
    assert len(codes(folder)) == 1
    (folder / "signed.py").write_text(WORKLOAD)
    slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0)
    assert values(folder) == [0, 2, 1, 4, 2, 6, 3, 8]


def test_a_process_that_has_imported_the_class_compares_the_columns_that_it_has_now(signed, slurmgpu):
    folder = signed("debug")
    halves = WORKLOAD.replace("SIGN * (1 + item.index)", "item.index / 2")
    (folder / "signed.py").write_text(halves)
    slurmgpu("submit", cwd=folder, expect=0)
    run, again = Run.open(folder / "run"), Request({}, failed=True)
    for whole in (WORKLOAD, halves.replace("/ 2", "// 2")):
        (folder / "signed.py").write_text(whole)
        assert foresee(run, again, force=False).again.n_items == 4
        (folder / "signed.py").write_text(halves.replace('Array("int64")', 'Array("float64")'))
        with pytest.raises(SlurmGPUError, match="'x' was array of int64 and is array of float64"):
            foresee(run, again, force=False)


def test_columns_are_not_compared_where_only_the_image_has_a_module(signed, slurmgpu):
    folder = signed("debug")
    slurmgpu("submit", cwd=folder, expect=0)
    plan = Run.open(folder / "run").plan
    (folder / "signed.py").write_text("import inside_the_image_alone\n" + WORKLOAD)
    refuse_other_columns(replace(plan, container={"image": "image.sif"}))
    with pytest.raises(SlurmGPUError, match="needs the module 'inside_the_image_alone', which is not installed here"):
        refuse_other_columns(plan)


def test_a_module_named_by_a_setting_or_imported_by_a_made_up_name_is_in_it(signed):
    folder = signed()
    (folder / "kinds").mkdir()
    for name in ("__init__", "red", "blue"):
        (folder / "kinds" / f"{name}.py").touch()
    (folder / "kinds" / "__init__.py").write_text("import importlib\ndef kind(n): return importlib.import_module(n)\n")
    (folder / "rules.py").write_text("def check(text, item): return True\n")
    (folder / "signed.py").write_text("import kinds\n" + WORKLOAD.replace("held: str", "rule: str = '', held: str"))
    with open(folder / "slurmgpu.toml", "a") as file:
        file.write('rule = "rules.py:check"\n')
    with draft_run(folder / "slurmgpu.toml") as draft:
        names = {file.name for file in draft.code.files}
        assert {"rules.py", "kinds/red.py", "kinds/blue.py"} < names
        again = snapshot_of(draft.plan, None, None)
    assert again.digest == draft.code.digest
    imported_modules.forget_changed()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x = 1 # one", "x=(1)\n\n", True),
        ("def f(a, b=2): return a", "def f(a,\n      b = 2):\n    # note\n    return a", True),
        ("x = 'a' 'b'", 'x = "ab"', True),
        ("x = 1", "x = 1.0", False),
        ("x = 1", "x = True", False),
        ("x = None", "x = ...", False),
        ("def f(): 'doc'", "def f(): 'dock'", False),
        ("x = a - b", "x = b - a", False),
        ("x = " + hex(10**5000), "x = " + hex(10**5000 + 1), False),
        ("x = " + "+".join(["1"] * 5000), "x = " + "+".join(["1"] * 5000) + " # note", False),
    ],
)
def test_the_digest_is_that_of_the_syntax_tree(one, other, same):
    found = tree_digest(one.encode(), "a.py") == tree_digest(other.encode(), "a.py")
    assert found == same


def test_the_digest_of_an_f_string_is_that_of_other_pythons(monkeypatch):
    parse, source = ast.parse, b"def f(x, w): return f'{x:>{w}}'"
    known = tree_digest(source, "a.py")

    def parse_as_python_3_12_1(*arguments):
        tree = parse(*arguments)
        [spec] = [
            each.format_spec for each in ast.walk(tree) if isinstance(each, ast.FormattedValue) and each.format_spec
        ]
        spec.values.append(ast.Constant(""))
        return tree

    monkeypatch.setattr(ast, "parse", parse_as_python_3_12_1)
    assert tree_digest(source, "a.py") == known


def test_digests_are_told_by_as_many_digits_as_tell_them_apart():
    assert snapshots.short("9f2c1111", ["77ab0000"]) == "9f2c"
    assert snapshots.short("9f2c1111", ["9f2c1000"]) == "9f2c11"


def names_in(folder, **more):
    with draft_run(folder / "slurmgpu.toml") as draft:
        imported_modules.forget_changed()
        code = snapshot_of(draft.plan, None, None, **more)
    return [file.name for file in code.files], [sentence for sentence in code.left_out if READ not in sentence]


def test_a_process_that_plans_again_parses_what_was_edited_and_nothing_else(signed, monkeypatch):
    folder, parse, parsed = signed(), ast.parse, set()
    names_in(folder)
    monkeypatch.setattr(ast, "parse", lambda source, *more: parsed.add(source) or parse(source, *more))
    names_in(folder)
    assert not parsed
    (folder / "signed.py").write_text("import rules\n" + WORKLOAD)
    (folder / "rules.py").write_text("# of another run\n")
    names, _ = names_in(folder)
    assert "rules.py" in names
    assert parsed == {(folder / name).read_bytes() for name in ("signed.py", "rules.py")}


def test_a_plan_repeats_no_warning_of_pythons_about_the_users_code(signed, recwarn):
    folder = signed()
    (folder / "signed.py").write_text("from rules import *\n" + WORKLOAD)
    (folder / "rules.py").write_text('DIGIT = "\\d"\n')
    assert "rules.py" in names_in(folder)[0]
    assert [each for each in recwarn if each.filename == "<unknown>"] == []


def test_code_may_name_a_link_that_leads_to_itself(signed):
    folder = signed()
    (folder / "signed.py").write_text(WORKLOAD + '\nBEST = "latest.json"\n')
    (folder / "latest.json").symlink_to("latest.json")
    assert "signed.py" in names_in(folder)[0]


@pytest.mark.parametrize(("argv", "found"), [("3", False), ('["rules.py", "--fast"]', True)])
def test_argv_is_a_setting_like_any_other_of_a_workload(signed, argv, found):
    folder = signed()
    (folder / "rules.py").touch()
    (folder / "signed.py").write_text(WORKLOAD.replace("held: str", "argv: object = (), held: str"))
    with open(folder / "slurmgpu.toml", "a") as file:
        file.write(f"argv = {argv}\n")
    with draft_run(folder / "slurmgpu.toml") as draft:
        assert (str(folder / "rules.py") in {file.path for file in (*draft.code.files, *draft.code.read)}) is found


def test_all_distributions_are_read_only_for_a_package_that_none_is_named_after(signed, monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: asked.append(1) or {})
    folder = signed()
    names_in(folder)
    assert not asked
    (folder / "signed.py").write_text("try:\n    import of_another_name\nexcept ImportError:\n    pass\n" + WORKLOAD)
    names_in(folder)
    assert asked


def test_plugins_whose_names_are_made_up_behind_a_package_are_in_it(signed):
    folder = signed()
    for package in ("reds", "blues", "greens", "greys"):
        (folder / package).mkdir()
        (folder / package / "one.py").touch()
    (folder / "signed.py").write_text(
        "from importlib import import_module\n"
        "def plug(name):\n"
        "    import_module(f'reds.{name}'), import_module('blues.' + name), import_module('greens.%s' % name)\n"
        "    return import_module('greys.{}'.format(name))\n" + WORKLOAD
    )
    names, left_out = names_in(folder)
    assert {"reds/one.py", "blues/one.py", "greens/one.py", "greys/one.py"} < set(names)
    assert left_out == []
    with open(folder / "signed.py", "a") as file:
        file.write("\n\ndef other(name):\n    return __import__(name)\n")
    _, [said] = names_in(folder)
    line = len((folder / "signed.py").read_text().splitlines())
    assert f"{folder / 'signed.py'}, line {line}, imports a module whose name is computed at run time" in said


TEXTS = """
import importlib, json, pkgutil
from pathlib import Path

import plugs
from walked import registry

SHOWN = Path("shown.yaml").read_text()
CACHE = Path(__file__).parent / "kept" / "cache.json"
TARGETS = {"net": "nets.deep.Net", "head": "heads:Head", "metric": "scores.loss", "other": "scores.txt", "numpy.sum": 1}

for each in pkgutil.walk_packages(plugs.__path__, "plugs."):
    importlib.import_module(each.name)


HISTORY: str = "history.json"
BOTH = "both.json"
parser.add_argument("--cache-file", default="options.json")


def keep(state, path="states.json", *, events="events.txt", words="other.json"):
    with open(path, "w") as file:
        file.write(state)


@hydra.main("conf", version_base=None)
def main(conf):
    exec(open("set_up.py").read())
    json.dump(conf, open("seen.json", "w"))
    CACHE.parent.joinpath("state.json").touch()
    with CACHE.open("w") as file:
        file.write(str(SHOWN) + open("other.json").read())
    Path("made.yaml").write_text("")
    os.replace("new.tmp", BOTH)
    open(BOTH, "r+"), gzip.open("zipped.json", "wt"), codecs.open("words.json"), Path("ends.json").rename("begins.json")
    open("sub/part.json", "w").write("")
    Path(HISTORY).write_text("")
    open(conf.events, "a").write("")
    open(parser.parse_args().cache_file, "w").write("")
    return (Path(__file__).parent / "prompts" / "short.txt").read_text()
"""


def test_what_only_texts_name_is_in_it_or_told(signed):
    folder = signed()
    empty = """nets/__init__.py nets/deep.py nets/other.py scores.py plugs/__init__.py plugs/one.py walked/two.py
        layers/__init__.py layers/of_conf.py set_up.py scores.txt prompts/short.txt seen.json made.yaml other.json
        kept/cache.json state.json shown.yaml sub/part.json history.json options.json states.json events.txt
        both.json zipped.json words.json begins.json"""
    files = dict.fromkeys(empty.split(), "")
    files["heads.py"] = "def Head(): return 1\n"
    files["walked/registry.py"] = (
        "import pkgutil\nmodules = list(pkgutil.iter_modules([__file__.rpartition('/')[0]]))\n"
    )
    files["conf/net/small.yaml"] = "net:\n  _target_: layers.of_conf.Layer\n  name: scores.loss\n"
    files["walked/__init__.py"] = "RUN, OTHER = 'run.toml', 'other.json'\n"
    files["run.toml"] = "[workload]\nuse = 'signed.py:Signed'\n"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "texts.py").write_text(TEXTS + "INPUT = 'items.txt'\n")
    (folder / "items.txt").write_text("an item\n")
    top = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(top.replace("items.jsonl", "items.txt"))
    (folder / "signed.py").write_text("def later(): import texts\n" + WORKLOAD)
    with draft_run(folder / "slurmgpu.toml") as draft:
        names = {file.name for file in draft.code.files}
        read = {file.name for file in draft.code.read}
    imported_modules.forget_changed()
    assert names - {*NAMES, "texts.py"} == {
        *("nets/__init__.py", "nets/deep.py", "heads.py", "plugs/__init__.py", "plugs/one.py"),
        *("walked/__init__.py", "walked/registry.py", "walked/two.py", "layers/__init__.py", "layers/of_conf.py"),
    }
    found = "set_up.py scores.txt prompts/short.txt conf/net/small.yaml other.json words.json words.txt shown.yaml"
    assert read == {*found.split()}


def test_configurations_are_looked_for_among_data_and_earlier_runs(signed, monkeypatch):
    folder = signed()
    files = """conf.yaml group/small.yml data/rows.json outputs/day/.hydra/config.yaml outputs/day/made.yaml
        .dvc/lock.yaml runs/one/run.json runs/one/job.yaml wandb/one.yaml multirun/day/multirun.yaml"""
    for name in files.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "net.py").write_text("class Net: pass\n")
    (folder / "conf.yaml").write_text("\n".join(f"net.layer_{number}.weight: 1" for number in range(1000)))
    text = "def main():\n    initialize(config_path='.')\n"
    (folder / "signed.py").write_text(text + WORKLOAD)
    parsed = []
    monkeypatch.setattr(user_code, "defined_in", lambda tree: parsed.append(tree) or frozenset())
    with draft_run(folder / "slurmgpu.toml") as draft:
        read = {file.name for file in draft.code.read}
    assert read == {"conf.yaml", "group/small.yml", "words.txt"}
    assert len(parsed) == 1
    monkeypatch.setattr(named_files, "MANY_BESIDE_CONFIGURATIONS", 3)
    _, left_out = names_in(folder)
    assert left_out[0] == (
        f"{folder} has many files, so it is not checked whether all configurations in it stay unchanged."
    )


def test_modules_by_a_star_and_compiled_ones_are_in_it_or_told(signed):
    folder = signed()
    (folder / "stars").mkdir()
    (folder / "stars" / "__init__.py").write_text("nothing = 1\n__all__ = ['one', 'nothing']\n")
    (folder / "stars" / "one.py").touch()
    (folder / "stars" / "two.py").touch()
    fast = folder / f"fast{EXTENSION_SUFFIXES[0]}"
    fast.write_bytes(b"no library at all")
    text = "from stars import *\ntry:\n    import fast\nexcept ImportError:\n    pass\n"
    (folder / "signed.py").write_text(text + WORKLOAD)
    with draft_run(folder / "slurmgpu.toml") as draft:
        code = draft.code
    imported_modules.forget_changed()
    assert {file.name for file in code.files} == {*NAMES, "stars/__init__.py", "stars/one.py"}
    assert [file.name for file in code.read] == [fast.name, "words.txt"]
    fast.write_bytes(b"another one")
    assert snapshots.read_and_changed(code.read) == [fast.name]


LATE_CONFIG = """
        while self.held and Path(self.held).exists():
            time.sleep(0.05)
        self.sign = SIGN * int(Path("conf.yaml").read_text())
"""


def test_rows_by_a_file_that_has_changed_since_it_was_submitted_are_by_unknown_code(signed, slurmgpu):
    """As of a configuration that the workload reads when it is loaded."""
    folder = signed()
    (folder / "conf.yaml").write_text("1")
    text = WORKLOAD.replace("        pass\n", LATE_CONFIG).replace('"x": SIGN', '"x": self.sign')
    (folder / "signed.py").write_text(text)
    held(folder)
    process = start("submit", cwd=folder)
    wait_until((folder / "run" / "run.json").exists, "a run")
    (folder / "conf.yaml").write_text("2")
    let_go(folder)
    said, _ = process.communicate(timeout=200)
    assert "code: 8 rows by unknown code" in said
    assert values(folder) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [(version["digest"], version["items"]) for version in report(folder)["code"]] == [(None, 8)]
    log = "".join(path.read_text() for path in (folder / "run" / "logs").rglob("*.log"))
    assert f"changed since it was submitted, so rows are computed by unknown code: {folder / 'conf.yaml'}" in log
    lack(folder, 0)
    said = slurmgpu("resubmit", "run", "--code", "former", cwd=folder, expect=0).stderr
    assert "That code reads conf.yaml, which has changed since" in said
    said = slurmgpu("resubmit", "run", "--other-code", cwd=folder, expect=0).stderr
    assert "The code has changed since submission 2: conf.yaml differs." in said
    assert [(version["digest"], version["items"]) for version in report(folder)["code"]] == [(codes(folder)[-1], 8)]


def test_what_cannot_be_taken_is_told_at_submit_and_in_the_report(signed, slurmgpu):
    folder = signed("debug")
    (folder / f"fast{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library at all")
    text = "try:\n    import fast\nexcept ImportError:\n    fast = None\n" + WORKLOAD
    (folder / "signed.py").write_text(text)
    said = slurmgpu("submit", cwd=folder, expect=0).stderr
    sentence, read = report(folder)["code"][0]["left_out"]
    assert READ in read
    assert "Compiled modules are not in the snapshot" in sentence
    assert str(folder / f"fast{EXTENSION_SUFFIXES[0]}") in sentence
    assert sentence in said
    [digest] = codes(folder)
    assert json.loads((folder / "run" / "code" / f"{digest}.json").read_text())["left_out"] == [sentence, read]


def test_a_folder_that_code_puts_on_the_path_is_known_to_a_resubmission(signed, slurmgpu, tmp_path):
    folder, shared = signed("debug"), tmp_path / "shared"
    shared.mkdir()
    (shared / "outside.py").write_text("import beyond\nTIMES = beyond.TIMES\n")
    (shared / "beyond.py").write_text("TIMES = 10\n")
    begin = f"import sys\nsys.path.append({str(shared)!r})\nfrom outside import TIMES\n"
    (folder / "signed.py").write_text(begin + WORKLOAD.replace("SIGN * (", "TIMES * SIGN * ("))
    slurmgpu("submit", cwd=folder, expect=0)
    lack(folder, 0)
    (shared / "beyond.py").write_text("TIMES = 100\n")
    said = slurmgpu("resubmit", "run", cwd=folder, expect=0).stderr
    assert "beyond.py differs" in said
    assert "no longer imported" not in said
    assert set(report(folder)["code"][0]["files"]) == {*NAMES, "outside.py", "beyond.py"}


def test_a_folder_that_is_on_the_path_by_dots_is_in_the_snapshot(signed, slurmgpu, tmp_path):
    folder, shared = signed("debug"), tmp_path / "shared"
    shared.mkdir()
    (shared / "outside.py").write_text("TIMES = 10\n")
    begin = "import sys\nsys.path.append('..')\nfrom shared.outside import TIMES\n"
    (folder / "signed.py").write_text(begin + WORKLOAD.replace("SIGN * (", "TIMES * SIGN * ("))
    slurmgpu("submit", cwd=folder, expect=0)
    assert values(folder) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert set(report(folder)["code"][0]["files"]) == {*NAMES, "shared/outside.py"}
    [digest] = codes(folder)
    about = json.loads((folder / "run" / "code" / f"{digest}.json").read_text())
    assert str(shared / "outside.py") in {file["path"] for file in about["files"]}


def test_a_module_in_an_archive_on_the_path_is_told_and_refused_where_tasks_would_not_find_it(
    signed, tmp_path, monkeypatch
):
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped.py", "x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "zipped.zip"))
    folder = signed()
    (folder / "signed.py").write_text("import zipped\n" + WORKLOAD)
    with draft_run(folder / "slurmgpu.toml") as draft:
        code = draft.code
    imported_modules.forget_changed()
    assert [file.name for file in code.files] == NAMES
    assert [file.path for file in code.read] == [str(folder / "words.txt"), str(tmp_path / "zipped.zip")]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "zipped.zip"))
    refuse_other_modules(code.files, ["zipped"], folder)
    monkeypatch.delenv("PYTHONPATH")
    importlib.import_module("zipped")
    with pytest.raises(SlurmGPUError, match=r"imported zipped from .*zipped\.zip, but tasks will not find it"):
        refuse_other_modules(code.files, ["zipped"], folder)


def test_a_file_that_may_be_imported_and_cannot_be_read_is_told(signed, monkeypatch):
    folder = signed()
    (folder / "secret.py").touch()
    (folder / "signed.py").write_text("try:\n    import secret\nexcept OSError:\n    pass\n" + WORKLOAD)
    read = Path.read_bytes

    def refuse(path):
        if path.name == "secret.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    with draft_run(folder / "slurmgpu.toml") as draft:
        imported_modules.forget_changed()
        monkeypatch.setattr(Path, "read_bytes", refuse)
        code = snapshot_of(draft.plan, None, None)
        assert [file.name for file in code.files] == NAMES
        assert code.left_out == (
            f"{folder / 'secret.py'} cannot be read and is not in the snapshot: Permission denied.",
            draft.code.left_out[0],  # a file that is read
        )
        (folder / "signed.py").write_text("import secret\n" + WORKLOAD)
        with pytest.raises(SlurmGPUError, match=r"secret\.py, which the workload imports, cannot be read: Permission"):
            snapshot_of(draft.plan, None, None)


def test_what_is_gone_is_told_apart_from_what_is_not_imported_any_more(tmp_path):
    (tmp_path / "kept.py").touch()
    files = [snapshots.SourceFile(name, str(tmp_path / name), (), "d", "", b"") for name in ("gone.py", "kept.py")]
    before, now = snapshots.Snapshot(tuple(files), {}), snapshots.Snapshot((), {})
    assert snapshots.changes(before, now) == ["gone.py is gone", "kept.py is no longer imported"]


def test_two_modules_whose_names_are_one_to_the_runs_file_system_are_refused_before_anything_is_queued(
    tmp_path, monkeypatch
):
    """Shares of a Windows server, and ext4 with casefold; tasks would find the first one changed, again and again."""
    files = [snapshots.SourceFile(name, str(tmp_path / name), (), "d", "", b"") for name in ("Nets.py", "nets.py")]
    opened = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *given, **more: opened(str(path).replace("Nets", "nets"), *given, **more)
    )
    with pytest.raises(SlurmGPUError, match=r"/nets\.py cannot be kept in .*ignores upper and lower case"):
        snapshots.write(tmp_path, snapshots.Snapshot(tuple(files), {}))
    assert list((tmp_path / "code").iterdir()) == []


def test_a_module_that_has_vanished_is_missed_before_anything_is_queued(signed, monkeypatch):
    folder = signed()
    for name in ("vanishing", "helpers/vanishing"):
        (folder / f"{name}.py").touch()
    (folder / "signed.py").write_text("import vanishing\nfrom helpers import vanishing\n" + WORKLOAD)
    with draft_run(folder / "slurmgpu.toml") as draft:
        imported_modules.forget_changed()
        before = draft.code
        (folder / "helpers" / "vanishing.py").unlink()
        snapshot_of(draft.plan, None, None, former=before)  # helpers/__init__.py may have that name
        (folder / "vanishing.py").unlink()
        with pytest.raises(SlurmGPUError, match=r"imports vanishing, whose file \S+ no longer exists.*--code former"):
            snapshot_of(draft.plan, None, None, former=before)
        installed = folder / "installed" / "site-packages"
        installed.mkdir(parents=True)
        (installed / "vanishing.py").touch()
        monkeypatch.syspath_prepend(str(installed))
        assert [file.name for file in snapshot_of(draft.plan, None, None, former=before).files] == NAMES
        (installed / "vanishing.py").unlink()
        (folder / "signed.py").write_text("try:\n    import vanishing\nexcept ImportError:\n    pass\n" + WORKLOAD)
        assert [file.name for file in snapshot_of(draft.plan, None, None, former=before).files] == NAMES
        # One import says that it is a module, and another that it is needed.
        both = "try:\n    import helpers.vanishing\nexcept ImportError:\n    pass\nfrom helpers import vanishing\n"
        (folder / "signed.py").write_text(both + WORKLOAD)
        with pytest.raises(SlurmGPUError, match=r"imports helpers.vanishing, whose file \S+ no longer exists"):
            snapshot_of(draft.plan, None, None, former=before)
