"""The suffixes that mark a text in code, or on a command line, as the name of a file."""

CONFIGURATIONS = frozenset({".yaml", ".yml", ".toml", ".json", ".ini", ".cfg", ".conf", ".gin"})
TEXTS = frozenset({".txt", ".md", ".j2", ".jinja", ".jinja2", ".prompt", ".csv", ".tsv"})
"""Prompts, lists of words, small tables."""
SCRIPTS = frozenset({".py", ".sh", ".bash", ".zsh", ".pl", ".rb", ".R", ".r", ".jl", ".lua", ".js", ".mjs", ".awk"})
PROGRAMS = SCRIPTS | {".cu", ".cuh", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".pyx"}
