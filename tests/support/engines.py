"""Engines and workloads that tests load on the CPU, and what goes into engines and comes out."""

import random
from pathlib import Path

from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Place
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
