"""Random numbers independent of Python's global generator, which a workload may seed alike in all tasks."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
