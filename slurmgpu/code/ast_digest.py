"""The digest of a file's syntax tree, which ignores comments and layout."""

from __future__ import annotations

import ast
import hashlib

from slurmgpu.util.hashing import DIGITS

_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Redundant fields of syntax trees, and type comments."""


def tree_digest(source: bytes, path: str) -> str:
    """The digest of a file's syntax tree with docstrings, the same in each version of Python; or SyntaxError."""
    words: list[str] = []
    try:
        _spell(ast.parse(source, path), words)
    except RecursionError:  # an expression of a thousand operators
        return hashlib.sha256(source).hexdigest()[:DIGITS]
    return hashlib.sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:DIGITS]


def _spell(node: object, words: list[str]) -> None:
    """Append a syntax tree as words; the output of ast.dump depends on the version of Python."""
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
    else:  # hex: Python refuses to print very long decimal numbers
        words.append(f"{type(node).__name__} {hex(node) if type(node) is int else repr(node)}")
