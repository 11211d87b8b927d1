"""Names in a shell script: files beside it, files in the folder where it runs, and Python modules."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SUFFIXES = frozenset({".sh", ".bash", ".zsh"})
_FIRST_LINE = re.compile(rb"#!.*\b(?:ba|z|da|k)?sh\b")
_COMMENT = re.compile(r"(?m)(?:^|\s)#.*$")
_USAGE = re.compile(r"(?im)^.*\busage:.*$")
"""A line that says how a program is called."""
_FOR_OUTPUT = r"(?:-o|--(?:out|output|save|dump|results?|log)(?:[-_](?:file|path|to|json|csv|name))?)"
_WRITTEN = re.compile(rf"(?:>[>|]?\s*|\btee\s+(?:-a\s+|--append\s+)?|(?<!\S){_FOR_OUTPUT}[ =]\s*)([^\s;&|]+)")
_OUTPUT = re.compile(r"(?<![>\w-])[12&]?>\|?\s*[\"']?([^\s;&|<>()\"'$`*?{]*\.[A-Za-z]\w{0,9})[\"']?(?=[\s;&|)]|$)")
"""A redirection to a file with a fixed name and a suffix; not `>>`, which appends."""
_QUOTED = re.compile(r"'([^'\n]*)'")
"""Code of another program if it has a blank: in awk, `$2 > limit.x` compares and writes no file."""
_CHANGES_FOLDER = re.compile(r"(?:^|[\s;&|(])(?:cd|pushd)\s")
_ASSIGNED = re.compile(r"(?m)^[ \t]*(?:(?:export|local|readonly)[ \t]+)?(\w+)=[\"']?([^\s\"';]+)")
_WORD = re.compile(r"[^\s\"'`;|&()<>]+")
_CD = re.compile(r"\bcd\s")
_ITS_FOLDER = re.compile(r"dirname|BASH_SOURCE|\$\{?0|%/\*")
_PYTHON_PATH = re.compile(r"\bPYTHONPATH=[\"']?([^\s\"';]+)")
_GPUS = re.compile(r"\bCUDA_VISIBLE_DEVICES=[\"']?(?!\$\{?CUDA_VISIBLE_DEVICES)[\w$]")
_MODULE = re.compile(r"\s(?:-m|--module)\s+([A-Za-z_][\w.]*)")


@dataclass(frozen=True)
class NamesInShell:
    """What a script names: files `beside` it, files `here`, in the folder where it runs, and Python modules.

    `path` are the folders that it puts on PYTHONPATH, relative to where it runs. `chooses_gpus` says whether it sets
    CUDA_VISIBLE_DEVICES. `outputs` are the files that it writes under a fixed name, unless it `changes_folder`.
    """

    beside: frozenset[str]
    here: frozenset[str]
    modules: frozenset[str]
    path: tuple[str, ...]
    chooses_gpus: bool
    outputs: frozenset[str]
    changes_folder: bool


def is_shell(source: bytes, suffix: str) -> bool:
    """Whether a file is a script of a shell, by its suffix or its first line."""
    return suffix in _SUFFIXES or _FIRST_LINE.match(source) is not None


def commands_in(source: bytes) -> str:
    """The text of a script, its continued lines joined, without comments and lines that say how it is called."""
    return without_usage(_COMMENT.sub("", source.decode("utf-8", "replace").replace("\\\n", " ")))


def without_usage(text: str) -> str:
    """A text without the lines that say how a program is called."""
    return _USAGE.sub("", text)


def names_in(text: str) -> NamesInShell:
    """The words in a script's commands that may name files or modules.

    `$HERE/train.py` and `$(dirname "$0")/train.py` count as files beside the script.
    """
    without_code = _QUOTED.sub(lambda found: " " if re.search(r"\s", found[1]) else found[0], text)
    changes_folder = _CHANGES_FOLDER.search(text) is not None
    outputs = frozenset() if changes_folder else frozenset(_OUTPUT.findall(without_code))
    written = {each.replace('"', "").replace("'", "") for each in _WRITTEN.findall(text)}
    variables = {each.strip("${}") for each in written if each.startswith("$")}
    written |= {value for name, value in _ASSIGNED.findall(text) if name in variables}
    text = _WRITTEN.sub(" ", text)
    words = {word.rpartition("=")[2] for word in _WORD.findall(text)} - written
    beside = {word.partition("/")[2].lstrip("/") for word in words if word.startswith(("$", "/"))} - {""}
    here = {word for word in words if not word.startswith(("$", "/"))}
    modules = frozenset(_MODULE.findall(text))
    path = tuple(folder for found in _PYTHON_PATH.findall(text) for folder in folders_in(found))
    if any((cd := _CD.search(part)) and _ITS_FOLDER.search(part, cd.end()) for part in re.split(r"[\n;&]", text)):
        beside, here = beside | here, set()
    return NamesInShell(frozenset(beside), frozenset(here), modules, path, sets_gpus(text), outputs, changes_folder)


def is_for_output(option: str) -> bool:
    """Whether an option's name says that its value is an output file: `--output`, `--log-file`, `-o`."""
    return re.fullmatch(_FOR_OUTPUT, option) is not None


def sets_gpus(text: str) -> bool:
    """Whether a text sets CUDA_VISIBLE_DEVICES to GPUs, as in `env CUDA_VISIBLE_DEVICES=1`."""
    return _GPUS.search(text) is not None


def is_before_code(option: str) -> bool:
    """Whether the next argument is shell code, as after `bash -lc` and `bash -ceu`."""
    return re.fullmatch(r"-[A-Za-z]*c[eux]*", option) is not None


def folders_in(python_path: str) -> list[str]:
    """The folders of a PYTHONPATH, without those that contain variables."""
    return [folder for folder in python_path.split(":") if folder and "$" not in folder]
