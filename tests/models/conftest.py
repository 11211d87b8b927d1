import pytest

from tests.support.command_line import CommandLine

MODULES = (
    "slurmgpu.llm.transformers_engine",
    "slurmgpu.page.page",
    "torch",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
)
"""What a run in one process, by the executor `debug`, takes six seconds of a processor to import."""


@pytest.fixture(scope="session")
def slurmgpu():
    """The command line as that of the other tests, by a Python that has imported PyTorch and transformers as well."""
    calls = CommandLine(imports=MODULES)
    yield calls
    calls.close()
