import gc
import importlib
from importlib.util import find_spec

import pytest

from tests.support.command_line import CommandLine
from tests.support.tiny_heads import CHAT, make_head
from tests.support.tiny_models import make_llama

MODULES = (
    "slurmgpu.llm.transformers_engine.engine",
    "slurmgpu.page.page",
    "torch",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
)
"""What a run in one process, by the executor `debug`, takes six seconds of a processor to import."""


@pytest.fixture(autouse=True, scope="session")
def _imported():
    """What is imported is left out of garbage collections, of which each would take 0.2 s, and an engine makes one."""
    if find_spec("torch") and find_spec("transformers"):
        for module in MODULES:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _stays_frozen():
    """An engine of continuous batches makes Python look at all objects again whenever it frees its cache.

    It then collects several times, which was most of the time of such a test. For a module, since its engines are
    closed after its last test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _frozen():
    """So is what was imported and made before this test: to free memory, an engine collects all garbage."""
    gc.freeze()


@pytest.fixture(scope="session")
def slurmgpu(_imported):
    """The command line as that of the other tests, by a Python that has imported PyTorch and transformers as well."""
    calls = CommandLine(imports=MODULES)
    yield calls
    calls.close()


@pytest.fixture(scope="session")
def nothing(tmp_path_factory):
    """The folder of a random model: enough to check settings."""
    return str(make_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory):
    """The folder of a Llama with one output, and a chat template."""
    return str(make_head(tmp_path_factory.mktemp("reward"), num_labels=1, template=CHAT))


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """The folder of a BERT of three classes."""
    labels = {"id2label": {0: "bad", 1: "good", 2: "other"}, "label2id": {"bad": 0, "good": 1, "other": 2}}
    return str(make_head(tmp_path_factory.mktemp("classifier"), "bert", **labels))
