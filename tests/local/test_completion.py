"""What Tab offers: in a real bash, through the script that --show-completion prints."""

import json
import os
import pty
import pwd
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from slurmgpu.cli import completion
from slurmgpu.cli.app import app
from slurmgpu.errors import SlurmGPUError
from slurmgpu.faults import KINDS
from slurmgpu.loader.names import BUILT_IN
from slurmgpu.merge.export import FORMATS
from slurmgpu.operations.probe import SUFFIX
from slurmgpu.run.failures import POLICIES
from tests.support.pretend_runs import pretend_run

ENVIRON = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
PROBE = """
eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 slurmgpu --show-completion bash)"
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"; COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    _slurmgpu_completion slurmgpu
    printf '%s\\n' "${COMPREPLY[@]}" ---
done
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs at several depths, some behind blanks and quotes, and run files."""
    folder = tmp_path_factory.mktemp("completion")
    pretend_run(folder / "my runs" / "a b" / "run 1", 300, n_tasks=2)
    pretend_run(folder / "my runs" / "ada's", 300, n_tasks=2)
    pretend_run(folder / "other" / "deep" / "run2", 300, n_tasks=2)
    probe = pretend_run(folder / "other" / "deep" / "run2-probe", 300, n_tasks=2).folder / "run.json"
    value = json.loads(probe.read_text())
    probe.write_text(json.dumps({**value, "look": "probe"}, indent=2))
    (folder / ".hidden").mkdir()
    (folder / "embed.toml").touch()
    (folder / "notes.txt").touch()
    return folder


def raw(word):
    """A word as bash hands it over: as it was typed, quotes and all."""
    return "'" + word.replace("'", "'\\''") + "'"


@pytest.fixture(scope="module")
def offered(folder):
    """What bash is offered for each of these lines, whose last word is the one that is completed."""
    lines = {
        "runs": ["status", ""],
        "within blanks": ["status", "my\\ runs/"],
        "one way": ["status", "oth"],
        "in quotes": ["status", '"my runs/ad'],
        "run files": ["submit", ""],
        "folders": ["list", "o"],
        "attempts": ["logs", "other/deep/run2", ""],
        "attempts of a run with blanks": ["logs", "my\\ runs/a\\ b/run\\ 1", "4711_1"],
        "no such run": ["logs", "nowhere", ""],
        "workloads": ["init", ""],
        "executors": ["submit", "--executor", ""],
        "devices": ["submit", "--device", "c"],
        "formats": ["export", "other/deep/run2", "--format", ""],
        "classes": ["logs", "other/deep/run2", "--class", "c"],
        "faults": ["submit", "--inject", "crash@17,c"],
        "after": ["submit", "--after", "other/"],
        "options": ["resubmit", "--mail"],
        "commands": ["li"],
    }
    typed = "".join(" ".join(map(raw, ["slurmgpu", *words])) + "\n" for words in lines.values())
    done = subprocess.run(["bash", "-c", PROBE], cwd=folder, env=ENVIRON, input=typed, capture_output=True, text=True)
    assert done.stderr == ""
    answers = [answer.splitlines() for answer in done.stdout.split("---\n")]
    return lambda name: answers[list(lines).index(name)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs", ["my\\ runs/", "other/"]),
        ("within blanks", ["my\\ runs/ada\\'s", "my\\ runs/a\\ b/"]),
        ("one way", ["other/deep/run2"]),
        ("in quotes", ["my runs/ada's"]),
        ("run files", ["embed.toml", "my\\ runs/", "other/"]),
        ("folders", ["other/deep/"]),
        ("attempts", ["4711_0", "4711_1", "4711_0.0", "4711_1.0"]),
        ("attempts of a run with blanks", ["4711_1", "4711_1.0"]),
        ("no such run", []),
        ("workloads", list(BUILT_IN)),
        ("executors", ["slurm", "local", "debug"]),
        ("devices", ["cpu"]),
        ("formats", list(FORMATS)),
        ("classes", [name for name in POLICIES if name.startswith("c")]),
        ("faults", ["crash@17,cuda_oom@", "crash@17,crash@"]),
        ("after", ["other/deep/run2"]),
        ("options", ["--mail-user"]),
        ("commands", ["list"]),
    ],
)
def test_bash_is_offered_what_fits(offered, name, words):
    assert offered(name) == words


def test_what_tab_inserts_at_a_real_prompt_is_the_run_though_its_path_holds_blanks(folder):
    screen = at_a_prompt(folder, ["slurmgpu status my\\ runs/a\\ \t", "\r"], until=r"run 1  .*of .*items")
    assert "run 1" in screen
    screen = at_a_prompt(folder, ['slurmgpu status "my runs/ad\t', "\r"], until=r"ada's  .*of .*items")
    assert "ada's" in screen


ODD = ["$(id)", "\\$(id)", "`id`", "a;id", "a\nid", "plain"]
"""Names of folders that are commands where a shell takes them as they are."""


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (None, ["a;id", "plain"]),  # zsh evaluates what Typer says to it, in double quotes
        ('"r/', ["a;id", "plain"]),
        ("'r/", ["$(id)", "\\$(id)", "`id`", "a;id", "plain"]),
        ('"r"/', ["plain"]),
        ("r/", ["\\$\\(id\\)", "\\\\\\$\\(id\\)", "\\`id\\`", "a\\;id", "plain"]),
    ],
)
def test_a_name_that_the_shell_would_run_is_not_offered(tmp_path, monkeypatch, typed, names):
    for name in ODD:
        (tmp_path / "r" / name / "tasks").mkdir(parents=True)
        (tmp_path / "r" / name / "run.json").touch()
    for name in ODD:
        (tmp_path / "r" / "plain" / "tasks" / f"{name}.0.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMP_WORDS", raising=False)
    if typed is not None:
        monkeypatch.setenv("COMP_WORDS", f"slurmgpu\nstatus\n{typed}")
        monkeypatch.setenv("COMP_CWORD", "2")
    assert sorted(completion.complete_run("r/")) == sorted(f"r/{name}" for name in names)
    context = typer.Context(typer.main.get_command(app).commands["logs"])
    context.params = {"folder": "r/plain"}
    assert completion.complete_task(context, "") == ["plain", "plain.0"]


def test_the_words_are_those_that_there_are():
    assert tuple(FORMATS) == completion.FORMATS
    assert tuple(f"{name}{'@' if kind.takes else ''}" for name, kind in KINDS.items()) == completion.FAULTS
    assert completion.PROBE == SUFFIX


def test_completion_imports_nothing_heavy(folder):
    code = "import sys; from slurmgpu.cli import completion as c; c.complete_workload('')\n"
    code += "c.complete_class('')\n"
    code += "from slurmgpu.cli import app; import json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert not {"numpy", "h5py", "torch", "submitit", "pydantic"} & set(json.loads(done.stdout))
    assert "importlib.metadata" not in json.loads(done.stdout)


def at_a_prompt(folder, keys, until):
    """What an interactive bash shows once these keys were pressed, up to where `until` is found."""
    (folder / "rc").write_text(
        'PS1="ready> "; bind "set bell-style none"; bind "set enable-bracketed-paste off"\n'
        'eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 slurmgpu --show-completion bash)"\n'
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "--noprofile", "--rcfile", "rc", "-i"], {**ENVIRON, "TERM": "dumb"})
    try:
        shown = _read(terminal, "ready> ")
        for key in keys[:-1]:
            os.write(terminal, key.encode())
            shown += _read(terminal, r"run\\? 1|ada's")  # Tab has been answered: the word is whole
        os.write(terminal, keys[-1].encode())
        return shown + _read(terminal, until)
    finally:
        os.write(terminal, b"\x03exit\r")
        os.close(terminal)
        os.waitpid(pid, 0)


def _read(terminal, until, timeout_s=120):
    shown, deadline = "", time.monotonic() + timeout_s
    while not re.search(until, shown):
        assert time.monotonic() < deadline, f"waited for {until!r}; the terminal shows:\n{shown}"
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def test_completion_without_a_home_directory_is_refused_in_a_sentence(monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(SlurmGPUError, match="into your home directory, which is not known here: set HOME"):
        app(["--install-completion", "bash"])
