"""Lines of the logs that explain failed items and attempts; a log that cannot be read is left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slurmgpu.logs.places import search_until
from slurmgpu.page.facts import Reason
from slurmgpu.page.words import plain
from slurmgpu.run.directory import Run
from slurmgpu.search.cached_run import CachedRun, cached
from slurmgpu.search.excerpts import Excerpt, excerpt_of_attempt, excerpt_of_death
from slurmgpu.search.items import NOBODY, excerpt_of_item, story_of_item
from slurmgpu.util.shared_files import list_names, retried

log = logging.getLogger(__name__)

MAX_LINES = 30
MAX_EXCERPTS = 20
"""The number of reasons with an excerpt, for items and for attempts."""
MAX_CHARACTERS = 6000
PATIENCE_S = 30.0
"""The time limit for searching logs."""


def add_excerpts(run: Run, items: Sequence[Reason], attempts: Sequence[Reason], holes: Sequence[dict[str, Any]]) -> str:
    """Add an excerpt of the logs to each reason, and the cause to each missing shard.

    Returns a sentence if the logs cannot be read, else an empty text.
    """
    try:
        retried(run.logs.stat)
        list_names(run.logs)
    except OSError as error:
        return f"No lines of logs are shown, because logs/ in the run directory cannot be read: {error.strerror}."
    run = cached(run)
    deadline = time.monotonic() + PATIENCE_S
    with search_until(deadline):
        for reason in items[:MAX_EXCERPTS]:
            _fill(reason, partial(excerpt_of_item, run, reason.first, MAX_LINES), deadline)
        for reason in attempts[:MAX_EXCERPTS]:
            _fill(reason, partial(_of_attempt, run, reason), deadline)
        for hole in holes[:MAX_EXCERPTS]:
            if not hole["why"] and time.monotonic() < deadline:
                hole["why"] = _why_missing(run, hole["start"])
    return ""


def _why_missing(run: Run, item: int) -> str:
    try:
        story = story_of_item(run, item, 1)
    except Exception:
        log.warning("the page does not say why item %d is missing", item, exc_info=True)
        return ""
    why = story.sentence.partition("is not published")[2].lstrip(":;, ")
    return "" if NOBODY in why else plain(why)


def _of_attempt(run: CachedRun, reason: Reason) -> Excerpt | None:
    if reason.death is None:
        return excerpt_of_attempt(run, reason.first, MAX_LINES)
    record = run.logged.get(reason.first)
    return None if record is None else excerpt_of_death(run, record, reason.death, MAX_LINES)


def _fill(reason: Reason, find: Callable[[], Excerpt | None], deadline: float) -> None:
    if time.monotonic() > deadline:
        return
    try:
        if (found := find()) is not None:
            lines, mark = found.texts(), found.mark
            before, at, behind = (
                plain("\n".join(part)) for part in (lines[:mark], lines[mark : mark + 1], lines[mark + 1 :])
            )
            reason.where = found.where
            reason.excerpt = [before[-MAX_CHARACTERS:], at[:MAX_CHARACTERS], behind[:MAX_CHARACTERS]]
    except Exception:
        log.warning("the page has no lines of the log on %s: %s", reason.first, reason.failure, exc_info=True)
