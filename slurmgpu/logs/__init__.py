"""Log files: how they are written, which belong to an attempt, and their lines in the order of their times.

May import: run, util.
"""

from slurmgpu.logs.files import UNKNOWN, LogFile, attempts_with_logs, files_of, merge_files
from slurmgpu.logs.lines import Line, merged, read_lines, text_of, without_colours
from slurmgpu.logs.places import (
    LINE_BYTES,
    TAIL_BYTES,
    last_end,
    line_around,
    line_number,
    places_of,
    search_until,
    tail_start,
    time_start,
)
from slurmgpu.logs.times import zone_of
from slurmgpu.util.logging import LogFormatter, log_to_stderr

__all__ = [
    "LINE_BYTES",
    "TAIL_BYTES",
    "UNKNOWN",
    "Line",
    "LogFile",
    "LogFormatter",
    "attempts_with_logs",
    "files_of",
    "last_end",
    "line_around",
    "line_number",
    "log_to_stderr",
    "merge_files",
    "merged",
    "places_of",
    "read_lines",
    "search_until",
    "tail_start",
    "text_of",
    "time_start",
    "without_colours",
    "zone_of",
]
