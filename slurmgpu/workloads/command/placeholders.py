"""The placeholders in a command line: the mode that they imply, and their values in a call."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean

FORMATS = ("jsonl", "json", "csv", "parquet", "npz", "npy")
"""The formats of `{out}`; the first is the default."""
IN_FORMATS = ("items", "jsonl", "json", "csv", "parquet")
"""Formats of `{in}`: lines with index, seed and data; JSON lines, a list, or a table, of the index and the fields."""
PARQUET = "parquet"

MAX_ARGUMENT_BYTES = 128 * 1024
"""The longest argument that Linux takes, with its final NUL: MAX_ARG_STRLEN, execve(2)."""

IN, OUT, START, END = "in", "out", "start", "end"
OF_A_SLICE = (IN, START, END)
SLICE, ONE, STREAM = "slice", "one", "stream"
FILE = ":file"
"""Suffix of a field's name: pass the path of a file with the field's content instead of the content."""
_NAME = re.compile(r"[\w-]+")
_PARAMETERS = {
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh"), '"$1"'),
    "fish": "$argv[1]",
    "python": "sys.argv[1]",
    "perl": "$ARGV[0]",
    "ruby": "ARGV[0]",
    "node": "process.argv[1]",
    "julia": "ARGS[1]",
    "php": "$argv[1]",
    "Rscript": "commandArgs(TRUE)[1]",
}
"""How code refers to the argument after it, by the program that runs the code."""
_BEFORE_CODE = re.compile(r"-[A-Za-z]*(?:c[eux]*|[eEpr])|--eval|--print")
"""Options of these before code: `bash -ceu`, `perl -ne`, `php -r`. Some also come before a script: `bash -e run.sh`."""
_WITH_VALUE = re.compile(r"-[A-Za-z]*o|-[IOXW]|--(?:rcfile|init-file)")
"""Options of these that take their value as the next argument, as in `bash -euo pipefail -c`."""
_PLAIN = re.compile(rb"[\w@%+=:,./-]+", re.ASCII)
"""Values that are the same in code of a shell as in an argument, as in `shlex.quote`."""
_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class Slot:
    """A placeholder: `in`, `out`, `start`, `end`, or the name of a field, with `:file` to pass it as a file."""

    name: str


@dataclass(frozen=True)
class CommandLine:
    """The arguments, each a sequence of texts and slots; `out` is the format of `{out}`, None without one.

    `items` is the format of `{in}`.
    """

    arguments: tuple[tuple[str | Slot, ...], ...]
    out: str | None
    items: str = IN_FORMATS[0]

    def __contains__(self, name: str) -> bool:
        return Slot(name) in self._slots()

    @property
    def fields(self) -> tuple[str, ...]:
        """The item fields in the command line, in order."""
        names = (slot.name for slot in self._slots())
        return tuple(dict.fromkeys(name.removesuffix(FILE) for name in names if name not in (*OF_A_SLICE, OUT)))

    @property
    def meant_as_text(self) -> dict[str, str]:
        """How to escape fields that may be braces of a shell, awk or JSON, as in `${HOME}`, by field."""
        found: dict[str, str] = {}
        for pieces in self.arguments:
            for before, piece in zip(("", *pieces), pieces, strict=False):
                if not isinstance(piece, Slot):
                    continue
                name = piece.name.removesuffix(FILE)
                dollar = "$" if isinstance(before, str) and before.endswith("$") else ""
                if name in self.fields and (dollar or not _NAME.fullmatch(name)):
                    found.setdefault(name, f"{dollar}{{{{{piece.name}}}}}")
        return found

    @property
    def in_files(self) -> tuple[str, ...]:
        """The fields that are passed as files."""
        names = (slot.name for slot in self._slots())
        return tuple(dict.fromkeys(name.removesuffix(FILE) for name in names if name.endswith(FILE)))

    @property
    def texts(self) -> dict[int, str]:
        """The arguments without placeholders, by position."""
        pieces = {
            number: each for number, each in enumerate(self.arguments) if not any(isinstance(p, Slot) for p in each)
        }
        return {number: "".join(map(str, each)) for number, each in pieces.items()}

    @functools.cached_property
    def code(self) -> dict[int, str]:
        """The program, such as a shell, that runs an argument as code, by the argument's position."""
        found, program, option, comes = {}, "", "", False
        for place in range(len(self.arguments)):
            text = self.texts.get(place, "")
            if text.startswith("-"):
                comes = comes or (_interpreter(program) in _PARAMETERS and _BEFORE_CODE.fullmatch(text) is not None)
            elif not (_interpreter(program) in _PARAMETERS and _WITH_VALUE.fullmatch(option)):
                if comes:
                    found[place] = program
                program, comes = text, False
            option = text
        return found

    @property
    def named(self) -> tuple[str, ...]:
        """The placeholders of a slice in the command line."""
        return tuple(name for name in OF_A_SLICE if name in self)

    def fill(self, values: Mapping[str, str], data: Mapping[str, Any]) -> list[bytes]:
        """The arguments of one call; `values` fill the slice's placeholders, and `data` the fields.

        ItemError if a field is missing, or cannot be an argument.
        """
        filled = []
        for place, pieces in enumerate(self.arguments):
            parts = [
                piece.encode("utf-8", "surrogateescape")
                if isinstance(piece, str)
                else os.fsencode(values[piece.name])
                if piece.name in values
                else _argument(piece.name, data, self.code.get(place))
                for piece in pieces
            ]
            filled.append(b"".join(parts))
            if len(filled[-1]) >= MAX_ARGUMENT_BYTES:
                names = ", ".join(f"{{{piece.name}}}" for piece in pieces if isinstance(piece, Slot))
                raise ItemError(
                    f"the argument with {names} has {len(filled[-1]):,} bytes; Linux takes less than "
                    f"{MAX_ARGUMENT_BYTES:,}. Use {{in}}, or stream = true."
                )
        return filled

    def _slots(self) -> list[Slot]:
        return [piece for pieces in self.arguments for piece in pieces if isinstance(piece, Slot)]


def parse(run: Sequence[str], values: Mapping[str, str | bool | int | float] | None = None) -> CommandLine:
    """The command line in the setting `run`; SlurmGPUError if it is not valid.

    `values` fill the placeholders with their names.
    """
    if not run or not run[0]:
        raise SlurmGPUError('command: run is empty; expected a program and its arguments, as in ["wc", "{in}"].')
    formats: dict[str, set[str]] = {IN: set(), OUT: set()}
    slots = tuple(_pieces(text, formats) for text in run)
    texts = _texts_of(values or {}, {piece.name for pieces in slots for piece in pieces if isinstance(piece, Slot)})
    arguments = tuple(
        tuple(texts.get(piece.name, piece) if isinstance(piece, Slot) else piece for piece in pieces)
        for pieces in slots
    )
    if any(isinstance(piece, Slot) for piece in slots[0]):
        quoted = " Each argument is a text of its own: remove the quotes around the command." if " " in run[0] else ""
        raise SlurmGPUError(
            f"command: run begins with {run[0]!r}, which has a placeholder; expected the name of a program.{quoted}"
        )
    if any("\0" in text for text in (*run, *texts.values())):
        raise SlurmGPUError("command: run has a NUL character, which no argument can hold. Leave it out.")
    for name, found in formats.items():
        if len(found) > 1:
            raise SlurmGPUError(f"command: run has {{{name}}} in two formats, {' and '.join(sorted(found))}; use one.")
    return CommandLine(arguments, next(iter(formats[OUT]), None), next(iter(formats[IN]), IN_FORMATS[0]))


def _texts_of(values: Mapping[str, str | bool | int | float], used: Collection[str]) -> dict[str, str]:
    """The values as parts of arguments: text as it is, others as JSON; SlurmGPUError for an unused one."""
    for name in values:
        if name in (*OF_A_SLICE, OUT) or not _NAME.fullmatch(name):
            raise SlurmGPUError(
                f"command: values has {name!r}; expected a name of letters, digits, _ and -, and none of "
                f"{', '.join((*OF_A_SLICE, OUT))}."
            )
        if name not in used:
            raise SlurmGPUError(
                f"command: values has {name!r}, and run has no {{{name}}}. Use it in run, or remove it from values."
            )
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _pieces(text: str, formats: Mapping[str, set[str]]) -> tuple[str | Slot, ...]:
    pieces: list[str | Slot] = []
    end = 0
    for token in _TOKEN.finditer(text):
        pieces.append(text[end : token.start()])
        end = token.end()
        if token[0] in ("{{", "}}"):
            pieces.append(token[0][0])
        elif not token[1]:
            raise SlurmGPUError(
                f"command: run has {token[0]!r} in {text!r}, which is not a placeholder. "
                f"Name a field, as in {{text}}, or write {{{{ and }}}} for literal braces."
            )
        else:
            pieces.append(_slot(token[1], formats))
    pieces.append(text[end:])
    return tuple(piece for piece in pieces if piece != "")


def _slot(name: str, formats: Mapping[str, set[str]]) -> Slot:
    first, colon, rest = name.partition(":")
    if first not in formats:
        return Slot(name)
    known = IN_FORMATS if first == IN else FORMATS
    if colon and rest not in known:
        raise SlurmGPUError(
            f"command: run has {{{name}}}, but {{{first}}} has no format {rest!r}.{did_you_mean(rest, known)}"
        )
    formats[first].add(rest or known[0])
    return Slot(first)


def mode_of(line: CommandLine, *, stream: bool) -> str:
    """How a program is called: for a slice of the input, for one item, or once as a stream; see SLICE, ONE, STREAM."""
    found = [*line.named, *([OUT] if line.out else []), *line.fields]
    if stream:
        if found:
            raise SlurmGPUError(
                f"command: stream = true, and run has {{{found[0]}}}. A stream reads its items from "
                f"standard input: remove one of the two.{escape_in_words(line.meant_as_text.get(found[0]))}"
            )
        return STREAM
    if not found:
        raise SlurmGPUError(
            "command: run has no placeholder for an item, so all calls would be the same. Name a field of the "
            "items, as in {text}, use {in} and {out}, or set stream = true."
        )
    if line.fields and line.named:
        field = next(iter(line.meant_as_text), line.fields[0])
        raise SlurmGPUError(
            f"command: run has {{{field}}}, a field of one item, and {{{line.named[0]}}}, which stands "
            f"for a slice. Use one or the other; {{in}} has all fields.{escape_in_words(line.meant_as_text.get(field))}"
        )
    if line.fields or line.out is None:
        return ONE
    if IN not in line and not (START in line and END in line):
        raise SlurmGPUError("command: run has {out}, but nothing says for which items. Add {in}, or {start} and {end}.")
    return SLICE


def escape_in_words(text: str | None) -> str:
    """How to escape the program's own braces, to append to an error."""
    return "" if text is None else f" If the braces are the program's own, write {text}."


def _interpreter(program: str) -> str:
    """The name of a program without its folder and version."""
    return Path(program).name.rstrip("0123456789.")


def _argument(name: str, data: Mapping[str, Any], runs_it: str | None) -> bytes:
    """A field as (a part of) an argument; `runs_it` is the program that runs the argument as code, if any."""
    found = content_of(name, data)
    if runs_it is not None and not _PLAIN.fullmatch(found):
        parameter = _PARAMETERS[_interpreter(runs_it)]
        behind = f" {runs_it!r} and" if parameter == '"$1"' else ""
        raise ItemError(
            f"{{{name}}} stands in code, and {runs_it} would run its value, {found.decode(errors='replace')!r:.80}, as "
            f"code. Write {parameter} instead, and after the code{behind} {{{name}}} as an argument of its own"
        )
    if b"\0" in found:
        raise ItemError(
            f"field {name!r} has a NUL character, which no argument can hold. Write {{{name}:file}} for a file with "
            f"its content"
        )
    return found


def content_of(name: str, data: Mapping[str, Any]) -> bytes:
    """A field as bytes: text and bytes as they are, an image of a data set as its bytes, all else as JSON."""
    if name not in data:
        raise ItemError(f"no field {name!r}.{did_you_mean(name, data)}")
    value = data[name]
    if value is None:
        raise ItemError(f"field {name!r} is null; expected a value, which can be an argument")
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        value = value["bytes"]
    try:
        return value if isinstance(value, bytes) else _as_text(value).encode("utf-8", "surrogateescape")
    except (TypeError, ValueError) as error:
        raise ItemError(f"field {name!r} cannot be an argument: {error}") from error


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    found = as_json(value)
    # What JSON writes as text, such as a date, has no quotes in an argument.
    return str(json.loads(found)) if found.startswith('"') else found


def as_json(value: Any) -> str:
    """JSON in ASCII, so that a program reads the same text in every locale; ValueError for NaN and Infinity."""
    try:
        return json.dumps(value, default=plain, allow_nan=False)
    except ValueError as error:
        if "Out of range float" in str(error):
            raise ValueError("it has NaN or Infinity, which JSON does not have; use null") from error
        raise


def plain(value: Any) -> Any:
    """A JSON value for bytes, a date, or a NumPy number or array, which Parquet, tar and HDF5 give."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    for name in ("isoformat", "tolist"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"JSON has no type for {type(value).__name__}")
