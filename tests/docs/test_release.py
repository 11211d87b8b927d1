"""A release: what `make dist` builds works where nothing else is, and `make docs` builds a site without a warning."""

import html
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import slurmgpu as package
from tests.support.browser import browser  # noqa: F401

ROOT = Path(__file__).parents[2]
VERSION = package.__version__
SHIPPED = {"slurmgpu": "slurmgpu", "containers": "slurmgpu/definitions", "sbatch": "slurmgpu/sbatch"}
"""The folders of the repository that a wheel has, and what they are called in it."""


def run(*command, expect=0, **options):
    """The output of a command that ends as expected, both streams together."""
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800, **options
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


# What is built


def build(folder, *options):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *options, ROOT)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """What `make dist` makes: the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    return dist / f"slurmgpu-{VERSION}-py3-none-any.whl"


def shipped():
    """The repository's files that a release has, by their path in it."""
    found = (path for folder in SHIPPED for path in (ROOT / folder).rglob("*") if path.is_file())
    return [str(path.relative_to(ROOT)) for path in found if path.suffix != ".pyc"]


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    expected = {}
    for name in shipped():
        folder, _, rest = name.partition("/")
        expected[f"{SHIPPED[folder]}/{rest}"] = (ROOT / name).read_bytes()
    assert content.keys() == expected.keys()
    assert content == expected


def test_the_sdist_has_what_a_wheel_is_built_of_and_no_other(dist):
    with tarfile.open(dist / f"slurmgpu-{VERSION}.tar.gz") as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    around = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore", "PKG-INFO"}
    assert names == {*shipped(), *around}


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_repository(wheel, tmp_path):
    build(tmp_path, "--wheel")
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_changelog_begins_with_this_version():
    heading = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading
    assert heading[1] == VERSION


# The wheel, where nothing else is


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment with the wheel and what it declares to need: no extra, and nothing of the clone.

    The dependencies are links to this environment's, so that no test needs the network, nor a minute of pip. What
    slurmgpu imports without declaring it is missing.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / ".venv", symlinks=True)
    python = folder / ".venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", wheel, cwd=folder)
    [packages] = (folder / ".venv" / "lib").glob("python*/site-packages")
    link_requirements(packages, own(packages))
    return python


def own(packages):
    [found] = distributions(name="slurmgpu", path=[str(packages)])
    return found


def link_requirements(folder, wanted: Distribution, *extras):
    """Link what a distribution with these extras needs, and what that needs, from this environment into `folder`."""
    waiting, seen = [(wanted, ("", *extras))], set()
    while waiting:
        found, extras = waiting.pop()
        for requirement in map(Requirement, found.requires or ()):
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
                continue
            name = canonicalize_name(requirement.name)
            if name != "slurmgpu" and (name, *sorted(requirement.extras)) not in seen:
                seen.add((name, *sorted(requirement.extras)))
                needed = distribution(name)
                waiting.append((needed, ("", *requirement.extras)))
                for top in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
                    if not (folder / top).exists():
                        (folder / top).symlink_to(needed.locate_file(top))


@pytest.fixture(scope="module")
def call(installed):
    """The output of `slurmgpu …`, typed in a folder beside that environment."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    folder = installed.parent.parent.parent / "project"
    folder.mkdir()

    def typed(*argv, expect=0, path=(), **env):
        searched = [*path, installed.parent, os.environ["PATH"]]
        environ = {**inherited, "PATH": ":".join(map(str, searched)), "NO_COLOR": "1", "COLUMNS": "200", **env}
        return run(installed.parent / "slurmgpu", *argv, expect=expect, cwd=folder, env=environ)

    typed.folder = folder
    return typed


WORKLOAD = """
from slurmgpu import Array

class MyWorkload:
    columns = {"length": Array("int32")}
    batch_size = 4

    def load(self, task):
        pass

    def __call__(self, items):
        return [{"length": len(item.data["text"])} for item in items]
"""


@pytest.fixture(scope="module")
def complete(call):
    """A run of the file that `init` writes."""
    assert "written: my_workload.py, items.jsonl, slurmgpu.toml" in call("init")
    (call.folder / "my_workload.py").write_text(WORKLOAD)
    (call.folder / "items.jsonl").write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in range(40)))
    assert "40 of 40 rows" in call("submit", "--executor", "local", "--gpus", "0", "--tasks", "2")
    return call.folder / "runs" / "slurmgpu"


def test_the_installed_command_tells_its_version(call, installed):
    assert VERSION in call("--version").split()
    found = run(installed, "-c", "import slurmgpu; print(slurmgpu.__file__)", cwd="/")
    assert Path(found.strip()).is_relative_to(installed.parent.parent)


def test_a_run_is_complete_with_the_declared_dependencies_alone(call, complete, installed):
    assert json.loads((complete / "report.json").read_text())["complete"]
    code = "import slurmgpu; print(slurmgpu.open('runs/slurmgpu/merged.h5')['length'][:].sum())"
    assert run(installed, "-c", code, cwd=call.folder).strip() == str(sum(range(40)))


VERSIONS = """
import greeting
from slurmgpu import Text

class Versions:
    columns = {"version": Text()}
    batch_size = 40

    def __call__(self, items):
        return [{"version": greeting.VERSION} for item in items]
"""


def test_tasks_import_what_pip_installed_on_pythonpath_before_what_lies_beside_slurmgpu(
    call, complete, installed, tmp_path
):
    [packages] = installed.parent.parent.glob("lib/python*/site-packages")
    for folder, version in ((packages, "1.0"), (tmp_path, "2.0")):
        about = folder / f"greeting-{version}.dist-info"
        for made in (about, folder / "greeting"):
            made.mkdir()
        (folder / "greeting" / "__init__.py").write_text(f"VERSION = '{version}'\n")
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: greeting\nVersion: {version}\n")
        (about / "RECORD").write_text("greeting/__init__.py,,\n")
    (call.folder / "versions.py").write_text(VERSIONS)
    (call.folder / "versions.toml").write_text('input = "items.jsonl"\n[workload]\nuse = "versions.py:Versions"\n')
    on = ("--executor", "local", "--gpus", "0", "--run-dir", tmp_path / "run")
    call("submit", "versions.toml", *on, PYTHONPATH=str(tmp_path))
    code = "import slurmgpu; print(*{*slurmgpu.open('run/merged.h5')['version'][:]})"
    assert run(installed, "-c", code, cwd=tmp_path).strip() == "2.0"


def test_without_the_extra_a_page_is_refused_in_a_sentence(call, complete):
    assert "pip install 'slurmgpu[html]'" in call("report", complete, "--html", "page.html", expect=2)


def test_with_the_extra_the_page_has_its_template_its_style_and_its_script(call, complete, installed, tmp_path):
    [packages] = installed.parent.parent.glob("lib/python*/site-packages")
    extra = tmp_path / "extra"
    extra.mkdir()
    link_requirements(extra, own(packages), "html")
    call("report", complete, "--html", tmp_path / "page.html", PYTHONPATH=str(extra))
    page = (tmp_path / "page.html").read_text()
    assert "<style>" in page
    assert "<script>" in page
    assert "40" in page


def test_plan_names_scripts_that_are_there(call, complete, installed):
    printed = call("plan", "--run-dir", "other", "--gpus", "2", "--array")
    scripts = [Path(name) for name in re.findall(r"\S+\.sbatch", printed)]
    assert [script.name for script in scripts] == ["array.sbatch", "merge.sbatch"]
    for script in scripts:
        assert script.is_relative_to(installed.parent.parent)
        assert script.read_text() == (ROOT / "sbatch" / script.name).read_text()


def test_an_image_is_built_of_a_definition_that_came_along(call, tmp_path):
    """In place of a runtime: a program that keeps the definition file that it is given."""
    (tmp_path / "apptainer").write_text(f'#!/bin/bash\ncp "${{@: -1}}" {tmp_path}/given\nexit 1\n')
    (tmp_path / "apptainer").chmod(0o755)
    call("image", "build", "--cpu", "-o", tmp_path / "image.sif", path=[tmp_path], expect=2)
    assert (tmp_path / "given").read_text() == (ROOT / "containers" / "slurmgpu-cpu.def").read_text()


def test_the_installed_command_completes_commands_and_runs(call, complete):
    script = call("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    [variable] = set(re.findall(r"_\w+_COMPLETE", script))

    def offered(words):
        env = {variable: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        return call(**env).split()

    assert offered("slurmgpu re") == ["resubmit", "report"]
    assert offered("slurmgpu report ru") == ["runs/slurmgpu"]


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--fail-on-warning", "--keep-going", "-c", ROOT / "docs", "-d", folder / "doctrees")
    run(sys.executable, "-m", "sphinx", *options, ROOT, folder / "site")
    return folder / "site"


def test_every_page_of_the_docs_is_on_the_site_and_in_its_navigation(site):
    names = [page.relative_to(ROOT).with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert len(names) > 40
    first = (site / "README.html").read_text()
    assert [str(name) for name in names if not (site / name).exists() or f'href="{name}"' not in first] == []


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {
        page: {html.unescape(name) for name in re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()
    }
    dead = []
    for page, text in pages.items():
        for link in map(html.unescape, re.findall(r'<a [^>]*?href="([^"]*)"', text)):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if ":" not in link and (not target.exists() or (anchor and anchor not in anchors[target])):
                dead.append((str(page.relative_to(site)), link))
    assert dead == []


def test_the_reference_has_every_public_name_with_its_docstring(site):
    page = (site / "docs" / "reference" / "python.html").read_text()
    assert {name for name in package.__all__ if f'id="slurmgpu.{name}"' not in page} == set()
    for name in ("submit", "Merged", "Workload"):
        first_line = getattr(package, name).__doc__.splitlines()[0]
        assert first_line.split("`")[0].split(";")[0] in html.unescape(page)


def test_the_site_is_searched_without_a_server(site, browser):  # noqa: F811
    browser.open(site / "search.html")
    browser.driver.get((site / "search.html").as_uri() + "?q=preempted")
    browser.driver.implicitly_wait(60)
    found = browser.driver.find_element("css selector", "#search-results li a[href*='reference/failures.html']")
    assert "Failure classes" in found.text
    assert browser.requests() == []
