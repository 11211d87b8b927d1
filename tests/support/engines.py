"""Engines and workloads that tests load on the CPU, fake engines, and what goes into engines and comes out."""

import random
from pathlib import Path

from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Output, Place
from slurmgpu.llm.models.source import find_model
from slurmgpu.workload import TaskContext
from tests.support.tiny_models import CHARACTERS


def load_on_cpu(workload):
    """The workload, loaded as by a task without a GPU."""
    workload.load(TaskContext("cpu", 0, Path()))
    return workload


def engine(folder, **options):
    """An engine on the CPU, in fp32."""
    return open_engine(EngineOptions(find_model(str(folder)), **{"precision": "fp32", **options}), Place("cpu"))


def texts(n_texts, seed=0, most=60):
    """Texts of 3 to `most` characters."""
    rng = random.Random(seed)
    return ["".join(rng.choices(CHARACTERS, k=rng.randint(3, most))) for _ in range(n_texts)]


def by_id(outputs):
    return {output.id: output for output in outputs}


def tokens_of(outputs):
    return {output.id: output.tokens.tolist() for output in outputs}


class Says:
    """An engine that always gives the same answer, and records its requests; `n_truncated` is per request."""

    def __init__(self, answer, n_truncated=lambda request: 0):
        self.answer, self.n_truncated, self.asked = answer, n_truncated, []

    def generate(self, requests):
        self.asked += requests
        for request in requests:
            yield Output(request.id, self.answer, n_truncated=self.n_truncated(request))


def with_seen_shapes(engine, monkeypatch):
    """The shapes of the ids that a transformers engine reads from now on."""
    forward, seen = engine._prefill.forward, []

    def watched(ids, *rest, **more):
        seen.append(tuple(ids.shape))
        return forward(ids, *rest, **more)

    monkeypatch.setattr(engine._prefill, "forward", watched)
    return seen
