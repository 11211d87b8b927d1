"""What became of an item, or every failure of a class, and the places in logs that tell of it.

May import: report, logs, run, util.
"""

from slurmgpu.search.classes import Event, events_of_class
from slurmgpu.search.excerpts import Excerpt, excerpt_of_attempt, excerpt_of_death
from slurmgpu.search.index import read_index
from slurmgpu.search.items import Story, excerpt_of_item, story_of_item

__all__ = [
    "Event",
    "Excerpt",
    "Story",
    "events_of_class",
    "excerpt_of_attempt",
    "excerpt_of_death",
    "excerpt_of_item",
    "read_index",
    "story_of_item",
]
