"""A knowledge graph's files: dictionaries of names, and triples in the order of their lines."""

from __future__ import annotations

import codecs
import difflib
import hashlib
import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.util.regular_files import open_given
from slurmgpu.util.users import expanded
from slurmgpu.workloads.tracin.kge.torch_archive import unreadable

LOOKED_THROUGH = 20_000
"""The most names that are searched for one like an unknown name; a dictionary may have millions."""

TURN = r"The ids come first; swap the columns with: awk -F'\t' -v OFS='\t' '{print $2, $1}' OLD > NEW"
CORRECT = "Correct it and plan again."

COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip --keep"),
    b"BZh": ("bzip2", "bunzip2 --keep"),
    b"\xfd7zXZ": ("xz", "unxz --keep"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""The first bytes of compressed files, with the program that wrote them and the command that decompresses them."""


@dataclass(frozen=True)
class Dictionary:
    """The names of entities or relations, and their ids. `digest` is the file's."""

    path: str
    ids: Mapping[str, int]
    digest: str = ""

    @cached_property
    def size(self) -> int:
        """The rows that a table needs: the largest id + 1. Ids may have gaps."""
        return max(self.ids.values(), default=-1) + 1

    @cached_property
    def names(self) -> Mapping[int, str]:
        """The name of each id."""
        return {number: name for name, number in self.ids.items()}


@dataclass(frozen=True)
class Graph:
    """The training triples (n, 3) in line order, the dictionaries of their ids, and the files' digests by path."""

    train: NDArray[np.int64]
    entities: Dictionary
    relations: Dictionary
    digests: Mapping[str, str] = field(default_factory=dict)


def read_graph(train: str | Path, entities: str | Path, relations: str | Path) -> Graph:
    """The training triples and both dictionaries."""
    names, predicates = read_dictionary(entities), read_dictionary(relations)
    content = _read(train)
    triples = _triples(content, str(train), names, predicates)
    if not len(triples):
        raise SlurmGPUError(f"{train} is empty; expected training triples. {CORRECT}")
    digests = {str(train): _digest(content), str(entities): names.digest, str(relations): predicates.digest}
    return Graph(triples, names, predicates, digests)


def read_dictionary(path: str | Path) -> Dictionary:
    """The ids of the names in a file of lines `name`, tab, `id`: each name and each id once, in any order."""
    content = _read(path)
    ids: dict[str, int] = {}
    lines: dict[int, int] = {}
    for line, name, number in _numbered(content, str(path), "name"):
        if name in ids:
            said = f"expected each name once, found {name!r} again, as in line {lines[ids[name]]}"
            raise SlurmGPUError(f"{path}, line {line}: {said}. {CORRECT}")
        if number in lines:
            said = f"expected each id once, found {number} again, as in line {lines[number]}"
            raise SlurmGPUError(f"{path}, line {line}: {said}. {CORRECT}")
        ids[name] = number
        lines[number] = line
    if not ids:
        raise SlurmGPUError(f"{path} is empty; expected lines of a name, a tab and an id. {CORRECT}")
    return Dictionary(str(path), ids, _digest(content))


def read_triples(path: str | Path, entities: Dictionary, relations: Dictionary) -> NDArray[np.int64]:
    """The triples (n, 3) in a file of lines `head`, tab, `relation`, tab, `tail`: row i is line i (0-based)."""
    return _triples(_read(path), str(path), entities, relations)


def read_lines(path: str | Path) -> Sequence[str]:
    """The lines of a file of triples."""
    return _lines(_read(path), str(path))


def parse_triple(text: str, entities: Dictionary, relations: Dictionary) -> tuple[int, int, int]:
    """The ids (head, relation, tail) of one line; ItemError for a wrong one."""
    fields = text.removesuffix("\n").removesuffix("\r").split("\t")
    if fields == [""]:
        raise ItemError("expected head, relation and tail separated by tabs, found an empty line.")
    if len(fields) != 3:
        found = f"{len(fields)} fields" if len(fields) > 1 else f"no tab in {_cut(text)!r}"
        raise ItemError(f"expected head, relation and tail separated by tabs, found {found}.")
    head, relation, tail = fields
    return triple_of(head, relation, tail, entities, relations)


def triple_of(head: str, relation: str, tail: str, entities: Dictionary, relations: Dictionary) -> tuple[int, int, int]:
    """The ids of three names; ItemError for an unknown one."""
    return _id(head, entities, "head"), _id(relation, relations, "relation"), _id(tail, entities, "tail")


def read_names(path: str | Path) -> Mapping[int, str]:
    """The labels of entities by id, from a file of lines `label`, tab, `id`. Labels may repeat."""
    labels: dict[int, str] = {}
    for line, label, number in _numbered(_read(path), str(path), "label"):
        if number in labels:
            said = f"expected each id once, found {number} again, for {labels[number]!r} and {label!r}"
            raise SlurmGPUError(f"{path}, line {line}: {said}. {CORRECT}")
        labels[number] = label
    return labels


def read_edge_map(path: str | Path) -> Mapping[str, str]:
    """The labels of relations by their names in the dictionary, such as {"predicate:27": "biolink:treats"}.

    The file maps a relation's meaning, JSON with a field `predicate` or any other text, to its name.
    """
    expected = 'a JSON object such as {"{\\"predicate\\": \\"biolink:treats\\"}": "predicate:27"}'
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise SlurmGPUError(f"{path}: expected {expected}, found no JSON ({error}). {CORRECT}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content.values()):
        raise SlurmGPUError(f"{path}: expected {expected}, found other JSON. {CORRECT}")
    labels: dict[str, str] = {}
    for meaning, name in content.items():
        if name in labels:
            raise SlurmGPUError(f"{path}: expected each relation once, found {name!r} twice. {CORRECT}")
        labels[name] = label_of(meaning)
    return labels


def label_of(meaning: str) -> str:
    """The predicate of a relation that is described in JSON; else the text."""
    try:
        predicate = json.loads(meaning)["predicate"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return meaning
    return predicate if isinstance(predicate, str) else meaning


def _read(path: str | Path) -> bytes:
    try:
        with open_given(expanded(path)) as file:
            content = file.read()
    except OSError as error:
        raise unreadable(path, error) from error
    for start, (program, command) in COMPRESSED.items():
        if content.startswith(start):
            raise SlurmGPUError(
                f"{path} is compressed by {program}; expected plain text. "
                f"Decompress it ({command} {shlex.quote(str(path))})."
            )
    return content


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _lines(content: bytes, path: str) -> Sequence[str]:
    """The lines of a text without their ends, newlines or CRLF; inputs are split in the same way."""
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"the byte 0x{content[error.start]:02x}"
        raise SlurmGPUError(f"{path}, line {line}: expected UTF-8, found {found}. Convert the file.") from error
    text = text.replace("\r\n", "\n").removesuffix("\n")
    return text.split("\n") if content else []


def _numbered(content: bytes, path: str, what: str) -> Iterable[tuple[int, str, int]]:
    """Each line's number from 1, the text before the last tab, and the id after it."""
    for line, text in enumerate(_lines(content, path), 1):
        name, tab, number = text.rpartition("\t")
        if not tab or not (number.isascii() and number.isdigit()):
            found = repr(_cut(text)) if text else "an empty line"
            said = f"expected a {what}, a tab and an id such as 17, found {found}"
            turned = tab and text[: text.find("\t")].isdecimal()
            how = TURN if turned else CORRECT
            raise SlurmGPUError(f"{path}, line {line}: {said}. {how}")
        yield line, name, int(number)


def _triples(content: bytes, path: str, entities: Dictionary, relations: Dictionary) -> NDArray[np.int64]:
    lines = _lines(content, path)
    of_entity, of_relation = entities.ids, relations.ids
    rows = (line.split("\t") for line in lines)
    try:
        flat = itertools.chain.from_iterable((of_entity[h], of_relation[r], of_entity[t]) for h, r, t in rows)
        return np.fromiter(flat, np.int64, 3 * len(lines)).reshape(-1, 3)
    except (KeyError, ValueError):
        raise _refusal(lines, path, entities, relations) from None


def _refusal(lines: Sequence[str], path: str, entities: Dictionary, relations: Dictionary) -> SlurmGPUError:
    first, n_wrong = "", 0
    for number, line in enumerate(lines, 1):
        fields = line.split("\t")
        if len(fields) == 3 and {fields[0], fields[2]} <= entities.ids.keys() and fields[1] in relations.ids:
            continue
        n_wrong += 1
        if not first:
            try:
                parse_triple(line, entities, relations)
            except ItemError as error:
                first = f"{path}, line {number}: {error}"
    more = {1: "", 2: " One more line is wrong."}.get(n_wrong, f" {n_wrong - 1:,} more lines are wrong.")
    return SlurmGPUError(f"{first}{more} {CORRECT}")


def _id(name: str, dictionary: Dictionary, role: str) -> int:
    found = dictionary.ids.get(name)
    if found is None:
        known = f"the {len(dictionary.ids):,} names of {dictionary.path}"
        raise ItemError(f"expected one of {known} as {role}, found {_cut(name)!r}.{_like(name, dictionary.ids)}")
    return found


def _like(name: str, known: Iterable[str]) -> str:
    near = (other for other in known if abs(len(other) - len(name)) <= 2)
    close = difflib.get_close_matches(name, itertools.islice(near, LOOKED_THROUGH), n=1, cutoff=0.8)
    return f" Did you mean {close[0]!r}?" if close else ""


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"
