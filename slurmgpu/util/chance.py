"""Random numbers that are apart from Python's: a workload may seed those alike in all tasks, and count on its own."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
