"""What a trace asks of a Python file, by its content: a process that plans many runs parses each content once."""

from __future__ import annotations

import ast
import functools
import warnings
from dataclasses import dataclass

from slurmgpu.code.files_in_source import FilesInSource, folders_above, texts_in
from slurmgpu.code.imports_in_source import ImportsInSource
from slurmgpu.code.snapshots import digest_of

_MANY_FILES = 1024


@dataclass(frozen=True)
class SourceFacts:
    """What a Python file imports and names; None if it is nested too deeply to be looked through.

    `n_above` is how many folders up from its own it looks for others. `texts` are those of a script, and `digest` is a
    module's.
    """

    imports: ImportsInSource | None
    named: FilesInSource | None
    n_above: int
    texts: tuple[str, ...]
    digest: str


@functools.lru_cache(_MANY_FILES)
def facts_of(source: bytes, package: str, *, is_script: bool) -> SourceFacts:
    """The facts of a file of `package`, which may be ""; SyntaxError, ValueError or RecursionError if it has none."""
    tree = parsed(source)
    texts = tuple(texts_in(tree)) if is_script else ()
    digest = "" if is_script else digest_of(source, "", tree)
    imports = named = None
    n_above = 0
    try:
        imports = ImportsInSource(tree, package)
        n_above = folders_above(tree) if b"__file__" in source else 0
        named = FilesInSource(tree)
    except RecursionError:  # an expression of a thousand operators
        pass
    return SourceFacts(imports, named, n_above, texts, digest)


def parsed(source: bytes) -> ast.Module:
    """The syntax tree of a file, without Python's warnings about it: they come, with its name, where it is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
