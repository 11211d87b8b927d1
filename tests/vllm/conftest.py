"""One vLLM for the tests of a file, and the engine on transformers with the same model."""

import os

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Place
from slurmgpu.llm.models.source import find_model
from tests.support.command_line import CommandLine
from tests.support.tiny_models import make_wide_adder


def open_on_cpu(engine, folder, gpus=0, **options):
    return open_engine(
        EngineOptions(find_model(str(folder)), **{"engine": engine, "precision": "fp32", **options}),
        Place("cpu", gpus),
    )


@pytest.fixture(autouse=True)
def _as_before():
    """Not checked here: vLLM sets variables and sys.excepthook for its whole process, and its engine stays open."""


@pytest.fixture(scope="session")
def wide_adder(tmp_path_factory):
    """The folder of the adder, with heads that are large enough for vLLM."""
    return make_wide_adder(tmp_path_factory.mktemp("model") / "adder")


@pytest.fixture(scope="module")
def vllm(wide_adder):
    """An engine for the tests of a file. None of these opens another: one that is closed ends all of its process."""
    opened = open_on_cpu("vllm", wide_adder)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def calls(vllm):
    """The command line by a Python that has imported vLLM, which takes ten seconds of a processor.

    vLLM looks at a model's class in a process of its own, unless it finds in its cache what it saw there.
    """
    modules = ["vllm.entrypoints.llm", "slurmgpu.llm.vllm_engine.engine"]
    forking = CommandLine(imports=modules, env={"VLLM_CACHE_ROOT": str(vllm._node.cache)})
    yield forking
    forking.close()


@pytest.fixture(scope="session")
def reference(wide_adder):
    return open_on_cpu("transformers", wide_adder, batching="static")
