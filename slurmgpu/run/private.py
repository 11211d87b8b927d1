"""The private parts of a run: commands and Slurm options that may hold tokens, in a file of mode 0600.

All who may read a run directory can read run.json and submissions.jsonl. There `on_end`, `setup`, the values of
`export`, and what looks like a token in other options are replaced by dots; `private.json` has the originals. These are
executed, so the file is used only if nobody but its reader or root can have written it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.own_files import read_own
from slurmgpu.util.redact import HIDDEN, hidden

log = logging.getLogger(__name__)

NAME = "private.json"
MODE = 0o600
MOST_BYTES = 16 << 20
OF_SBATCH = ("slurm", "merge")
"""The tables of sbatch options, in a plan and in a submission."""
WHOLLY = ("setup", "export")
"""Options whose values are hidden as a whole."""
PLAN = "plan"


Shown = TypeVar("Shown", bound=Mapping[str, Any])
"""A plan or a submission."""


def public(value: Shown) -> Shown:
    """A plan or a submission without its private parts."""
    shown: dict[str, Any] = dict(value)
    for table in OF_SBATCH:
        if isinstance(value.get(table), Mapping):
            shown[table] = _public_options(value[table])
    if value.get("on_end"):
        shown["on_end"] = HIDDEN
    return cast(Shown, shown)


def _public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = hidden(options)
    for name in WHOLLY:
        if options.get(name) and not (name == "export" and options[name] in ("ALL", "NONE", "NIL")):
            shown[name] = [HIDDEN] if isinstance(options[name], list) else HIDDEN
    return shown


def keep(folder: Path, key: str, value: Shown) -> Shown:
    """The public part of a plan or a submission; the rest is kept in `folder` under `key`."""
    shown = public(value)
    secret = {name: value[name] for name in (*OF_SBATCH, "on_end") if name in value and shown[name] != value[name]}
    if secret:
        known = _read(folder, to_keep=True)
        known[key] = secret
        write_bytes(folder / NAME, (json.dumps(known, indent=2) + "\n").encode(), mode=MODE)
    return shown


def reveal(folder: Path, key: str, shown: Shown) -> Shown:
    """The plan or submission whose public part is `shown`; `shown` itself if this user may not read the rest.

    Only values that are hidden in `shown` are taken from private.json.
    """
    if not is_hidden(shown):
        return shown
    secret = _read(folder).get(key)
    if not isinstance(secret, dict) or any(public(secret).get(name) != shown.get(name) for name in secret):
        return shown
    return cast(Shown, {**shown, **secret})


def is_hidden(value: Mapping[str, Any]) -> bool:
    """Whether a part of a plan or a submission is hidden."""
    return HIDDEN in json.dumps([value.get(name) for name in (*OF_SBATCH, "on_end")], ensure_ascii=False)


def refuse_hidden(folder: Path, options: Mapping[str, Any]) -> None:
    """Raise SlurmGPUError if options that are needed are hidden."""
    names = [name for name, value in options.items() if HIDDEN in json.dumps(value, ensure_ascii=False)]
    if names:
        raise SlurmGPUError(
            f"Only the owner of this run, who submitted it, may read its {' and '.join(names)} ({folder / NAME}). "
            f"Give your own with --slurm {names[0]}=…, or have the owner do this."
        )


def _read(folder: Path, *, to_keep: bool = False) -> dict[str, Any]:
    """The content of private.json. If it cannot be used: empty, or SlurmGPUError if it is about to be replaced."""
    try:
        value = json.loads(read_own(folder / NAME, max_bytes=MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if to_keep:
            raise SlurmGPUError(
                f"{folder / NAME}, which holds on_end and setup, cannot be used: {error}. "
                f"If it is yours, `chmod 600` it, or remove it and give them again."
            ) from error
        log.debug("%s is not used: %s", folder / NAME, error)
        return {}
    return value if isinstance(value, dict) else {}
