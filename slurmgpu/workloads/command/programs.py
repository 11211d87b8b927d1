"""The program of a command and its scripts: which they are, and whether they can be started on this machine."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import count, islice, takewhile
from pathlib import Path

from slurmgpu.code.file_kinds import SCRIPTS
from slurmgpu.code.files_in_source import OUTPUT_OPTIONS
from slurmgpu.code.locator import Locator, is_others
from slurmgpu.code.started_modules import INTERPRETERS, file_of_module, module_of
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.util.users import resolved
from slurmgpu.workloads.command.placeholders import Slot

_FIRST_BYTES = 256
"""How many bytes of a file Linux reads to find out how to run it: BINPRM_BUF_SIZE."""
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|Rscript|julia|perl|ruby|lua|node|bash|sh|zsh")
_BEFORE_IT = re.compile(r"env|nice|ionice|nohup|stdbuf|time|timeout|taskset|numactl")
"""Launchers that keep the files and the working folder for their program, unlike containers or ssh."""
_ANOTHER_FOLDER = ("-C", "--chdir")
_OF_CODE = re.compile(r"-\w*[ceE]|-m|--eval")
"""Options before a program as text, or the name of a module."""
_LONGEST_ENTRY = 1 << 12
_MOST_ENTRIES = 1000
"""How many entries of a folder for outputs are looked at."""
_CODE = SCRIPTS | {".ipynb"}
"""Suffixes of files that are code."""
_LONGEST_SCRIPT = 1 << 20
"""The largest file, in bytes, that is taken for one of the user's scripts."""
_IMPORTED = re.compile(rb"(?m)^[ \t]*(?:from|import)[ \t]+([A-Za-z_]\w*)")
RUN_MODULE = str(Path(__file__).with_name("run_module.py"))
"""The script that runs like `-m MODULE`, given FOLDER and MODULE, with the modules of FOLDER first."""


def check_program(program: str, path: str | None) -> None:
    """Refuse a program that this machine lacks or cannot start; `path` is the PATH to search."""
    if why_not := why_not_started(program, path):
        raise SlurmGPUError(f"command: {program} cannot be started: {why_not}")
    if shutil.which(program, path=path) is not None:
        return
    where = f"at {Path(program).absolute()}" if "/" in program else "on the PATH"
    is_beside = "/" not in program and os.path.isfile(program)
    beside = f" A file of that name is here: write './{program}'." if is_beside else ""
    raise SlurmGPUError(
        f"command: there is no program {program!r} {where}.{beside} Correct run, load its module or environment before "
        f"you submit, or set PATH under [settings] env."
    )


def filled_folders(arguments: Sequence[Sequence[str | Slot]]) -> Iterator[tuple[str, str, str]]:
    """The folders with files that options for outputs name: the option, the folder, and one of its entries.

    Of a path with placeholders, `fits/{name}`, it is the folder before the first, and an entry that a call may name.
    """
    option = ""
    for pieces in arguments:
        text = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        name, _, value = text.partition("=") if text.startswith("-") else (option, "", text)  # --out=fits, --out fits
        option = text if text.startswith("-") else ""
        folder, begin = os.path.split(value) if len(pieces) > 1 else (value, "")
        if folder and name.lstrip("-").replace("-", "_") in OUTPUT_OPTIONS:
            rest = "".join(glob.escape(piece) if isinstance(piece, str) else "*" for piece in (begin, *pieces[1:]))
            pattern = rest.partition("/")[0] or "*"
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                found = (each.path for each in islice(entries, _MOST_ENTRIES) if fnmatch(each.name, pattern))
                for path in islice(found, 1):
                    yield name, folder, path


def why_not_started(program: str, path: str | None) -> str | None:
    """Why `program`, a path or a name on `path`, cannot be started, as a sentence; None if nothing is found.

    Reads the `#!` line of a script and looks for its interpreter, for `env` on `path`. An executable file that is
    neither a script nor text may have a format that this machine runs.
    """
    if "/" in program and os.path.isdir(program):  # Path.is_dir raises where it may not look
        return "it is a folder; run begins with a program."
    if "/" in program and os.path.isfile(program) and not os.access(program, os.X_OK):
        return _not_executable(program)
    found = shutil.which(program, path=path)
    start = None if found is None else _start_of(found, _FIRST_BYTES)
    if start is None:  # it may be executable and not readable; the error of its start says what it is
        return None
    if start.startswith(b"#!"):
        return _fault_of_interpreter(start[2:].partition(b"\n")[0], program, path)
    if not start:
        return "the file is empty."
    if b"\0" in start:
        return None
    return f"it has no #! line that names its interpreter, such as #!/bin/sh. Add one{_or_by_name(program)}."


def _start_of(path: str, n_bytes: int) -> bytes | None:
    """The first bytes of a file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(n_bytes)
    except OSError:
        return None


def _not_executable(program: str) -> str:
    return f"it is not executable. Type chmod +x {shlex.quote(program)}{_or_by_name(program)}."


def _or_by_name(program: str) -> str:
    runs = INTERPRETERS.get(Path(program).suffix)
    return f", or write {runs} {shlex.quote(program)} instead" if runs else ""


def _fault_of_interpreter(line: bytes, program: str, path: str | None) -> str | None:
    """What is wrong with the interpreter in a `#!` line, as the end of a sentence; None if nothing is."""
    words = line.strip(b" \t").replace(b"\t", b" ").split(b" ")
    if not words[0].strip():
        return "its #! line names no interpreter, such as #!/bin/sh."
    interpreter, rest = words[0], [word for word in words[1:] if word]
    by_env = rest[0] if Path(os.fsdecode(interpreter)).name == "env" and len(rest) == 1 else None
    if (by_env or interpreter).endswith(b"\r"):
        return (
            "its #! line ends with a carriage return, as in files from Windows: Linux takes it as part of the name. "
            f"Type sed -i 's/\\r$//' {shlex.quote(program)}"
        )
    if not os.path.exists(interpreter):
        return f"its interpreter {interpreter.decode(errors='replace')} is not on this machine. Correct its #! line."
    if by_env is None or by_env.startswith(b"-") or shutil.which(os.fsdecode(by_env), path=path) is not None:
        return None
    shown = by_env.decode(errors="replace")
    return f"its interpreter {shown}, which env looks for, is not on the PATH. Correct its #! line, or PATH."


def is_launcher(program: str) -> bool:
    """Whether a program is an interpreter, or starts one, by its name."""
    return _LAUNCHER.fullmatch(Path(program).name) is not None


def check_script(texts: Mapping[int, str]) -> None:
    """Refuse a command if the script for its interpreter or launcher does not exist.

    The script is the first argument with the suffix of a script; code after `-c`, `-lc` and `-e` and modules after `-m`
    are not checked. The launcher is the program, or the program after `env` and the like. Arguments of other programs
    are not checked: they may only look like a script, or name files in an image or on another machine.
    """
    launcher = next((number for number in sorted(texts) if is_launcher(texts[number])), None)
    if launcher is None or not _keeps_place([texts.get(number) for number in range(launcher)]):
        return
    behind = takewhile(lambda text: text is not None, map(texts.get, count(launcher + 1)))  # up to a placeholder
    script = next(
        (text for text in behind if text and (_OF_CODE.fullmatch(text) or Path(text).suffix in INTERPRETERS)), None
    )
    if script is None or script.startswith("-") or Path(script).is_file():
        return
    path = Path(script)
    beside: list[str] = []
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        beside = [str(path.with_name(each.name)) for each in entries if each.name.endswith(path.suffix)]
    raise SlurmGPUError(
        f"command: there is no script {script!r} for {Path(texts[launcher]).name} at {path.absolute()}."
        f"{did_you_mean(script, beside)}"
    )


def scripts_of(program: str, texts: Mapping[int, str], path: str | None) -> list[Path]:
    """The scripts among the arguments; the one that the command starts comes before those that are its arguments.

    These are: files below the working folder, which is the run file's folder; files elsewhere whose names are
    those of code and that are not installed; the file of a module that Python or a launcher runs by
    `-m package.module`, with the files of its packages; the script of a program on `path` that imports the user's
    modules. A launcher is none of them, also in an environment below the working folder.
    """
    here = Path.cwd().resolve()
    found = [Path(text) for text in texts.values() if not is_launcher(text)]
    if (module := module_of(texts)) is not None and (file := file_of_module(module[1])) is not None:
        packages = [folder / "__init__.py" for folder in file.parents if folder != Path()]
        found = [file, *(each for each in packages if each.is_file()), *found]
    places = [(each, resolved(each)) for each in found]
    entry = entry_script(program, path)
    return ([] if entry is None else [entry]) + [
        each
        for each, place in places
        if (place.is_relative_to(here) or (place.suffix in _CODE and not is_others(str(place)))) and _is_script(each)
    ]


def _is_script(path: Path) -> bool:
    """Whether a file is a script, by its suffix or its first line; data files are not copied."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST_SCRIPT:
            return False
        with open(path, "rb") as file:
            return path.suffix in _CODE or file.read(2) == b"#!"
    except OSError:
        return False


def entry_script(program: str, path: str | None) -> Path | None:
    """The script of a program on `path` that imports the user's modules; None for any other program.

    It is what pip writes for an entry point, `from of_a_lab.cli import main`, also for an editable install.
    """
    found = None if "/" in program else shutil.which(program, path=path)
    source = None if found is None else _start_of(found, _LONGEST_ENTRY)
    if found is None or source is None or not source.startswith(b"#!") or b"\0" in source:
        return None
    where = Locator(Path.cwd(), None)
    tops = {name.decode() for name in _IMPORTED.findall(source)}
    return Path(found) if any((place := where.look(top)) and place.path for top in sorted(tops)) else None


def _keeps_place(arguments: Sequence[str | None]) -> bool:
    """Whether a launcher, such as `env A=1` or `nice -n 5`, keeps this process's files and folder for its program.

    None stands for an argument that depends on the item.
    """
    former = ""
    for text in arguments:
        if text is None or text.startswith(_ANOTHER_FOLDER):
            return False
        is_of_former = bool(former) and (former.startswith("-") or "=" in text or text[:1] in "-0123456789")
        if not (is_of_former or _BEFORE_IT.fullmatch(Path(text).name)):
            return False
        former = text
    return True
