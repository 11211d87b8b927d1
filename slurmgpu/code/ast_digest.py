"""The digest of a file's syntax tree, by which one sees that code has changed, and not its comments or layout."""

from __future__ import annotations

import ast
import hashlib

from slurmgpu.util.hashing import DIGITS

_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""What a syntax tree says twice, or of comments."""


def tree_digest(source: bytes, path: str) -> str:
    """The digest of a file's syntax tree, the same on each Python that reads it; SyntaxError for what is no Python.

    A docstring counts: programs read it.
    """
    words: list[str] = []
    try:
        _spell(ast.parse(source, path), words)
    except RecursionError:  # an expression of a thousand operators
        return hashlib.sha256(source).hexdigest()[:DIGITS]
    return hashlib.sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:DIGITS]


def _spell(node: object, words: list[str]) -> None:
    """Append a syntax tree as words. Not ast.dump's, where empty fields come and go with versions of Python."""
    if isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name not in _LEFT_OUT and (isinstance(node, ast.Constant) or (value is not None and value != [])):
                words.append(name)
                _spell(value, words)
        words.append(")")
    elif isinstance(node, list):
        words.append("[")
        for each in node:
            _spell(each, words)
        words.append("]")
    else:  # hex: Python refuses to write out a number of many decimals
        words.append(f"{type(node).__name__} {hex(node) if type(node) is int else repr(node)}")
