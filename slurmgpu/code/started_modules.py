"""The modules that a command line runs by name: `python -m NAME`, `torchrun -m NAME` and the like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

INTERPRETERS = {
    **dict.fromkeys((".R", ".r"), "Rscript"),
    ".py": "python",
    ".sh": "sh",
    ".bash": "bash",
    ".zsh": "zsh",
    ".pl": "perl",
    ".rb": "ruby",
    ".jl": "julia",
    ".lua": "lua",
    ".js": "node",
    ".mjs": "node",
}
"""The interpreter of a script by its suffix, where it is not executable."""
_PYTHON = re.compile(r"python[\d.]*")
_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of Python's whose value may be the next argument."""
_OF_MODULE = frozenset({"-m", "--module"})
_LAUNCHING = re.compile(r"torchrun|accelerate|deepspeed")


def module_of(texts: Mapping[int, str]) -> tuple[int, str] | None:
    """The position and the name of the module below the working folder that the arguments run; None without one.

    That is NAME in `python -m NAME`, `torchrun -m NAME`, `accelerate launch -m NAME`, `deepspeed --module NAME` and
    `python -m torch.distributed.run -m NAME`.
    """
    return next((found for found in modules_in(texts) if file_of_module(found[1]) is not None), None)


def modules_in(texts: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """The positions and the names of modules that the arguments may run: that of Python, then what it may start."""
    places = iter(sorted(texts))
    is_launched = False
    for place in places:
        text = texts[place]
        if _PYTHON.fullmatch(Path(text).name) or _LAUNCHING.fullmatch(Path(text).name):
            is_launched = bool(_LAUNCHING.fullmatch(Path(text).name))
            break
    for place in places:
        text = texts[place]
        if text in _OF_MODULE and (name := texts.get(place + 1)) is not None:
            if all(part.isidentifier() for part in name.split(".")):  # neither a placeholder nor a variable
                yield place + 1, name
            next(places, None)
            is_launched = True  # torch.distributed.run, say
        elif text in _WITH_VALUE and not is_launched:
            next(places, None)
        elif text == "-c" or (not text.startswith("-") and (not is_launched or Path(text).suffix in INTERPRETERS)):
            return  # a script: what follows is its own


def file_of_module(name: str) -> Path | None:
    """The file that `python -m NAME` runs, relative to the working folder; None if it is not below that."""
    path = Path(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)
