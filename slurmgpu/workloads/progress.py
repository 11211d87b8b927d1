"""What the built-in workloads tell of their work while it goes on, for who watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from slurmgpu.llm.engine import Engine, Output, Question, Request, Scores

TELL_S = 2.0
"""So seldom is something told in the middle of a batch."""

T = TypeVar("T")


class Telling:
    """Tells by `tell`, the task's, how many of `things` are done, such as "texts embedded"."""

    def __init__(self, tell: Callable[[str], None], things: str) -> None:
        self._tell, self._things = tell, things
        self._n_done, self._told = 0, time.monotonic()

    def add(self, n_done: int) -> None:
        """So many more are done."""
        self._n_done += n_done
        self._told = time.monotonic()
        self._tell(f"{self._n_done:,} {self._things}")

    def each(self, found: Iterable[T]) -> Iterator[T]:
        """The same, told as they come: every few seconds, and at the end."""
        n_new = 0
        for one in found:
            n_new += 1
            if time.monotonic() - self._told >= TELL_S:
                self.add(n_new)
                n_new = 0
            yield one
        if n_new:
            self.add(n_new)


class ToldEngine:
    """An engine that tells how many answers it has given."""

    def __init__(self, engine: Engine, tell: Callable[[str], None]) -> None:
        self._engine = engine
        self._answers, self._scores = Telling(tell, "answers"), Telling(tell, "prompts scored")

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """As the engine itself."""
        return self._answers.each(self._engine.generate(requests))

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """As the engine itself."""
        return self._scores.each(self._engine.score(questions))

    def close(self) -> None:
        """As the engine itself."""
        self._engine.close()
