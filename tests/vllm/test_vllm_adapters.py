"""LoRA adapters in the real vLLM: answers and scores of each request are those of its own adapter alone."""

import random

import numpy as np
import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.settings import engine_options
from tests.support.tiny_adapters import write_adapter
from tests.support.tiny_models import CHARACTERS, make_llama
from tests.vllm.conftest import open_on_cpu

SHARED = "we are here and they are singing to all of you, and then to nobody else: "


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and by name an adapter of it and the model that has it in its weights; of two ranks."""
    folder = tmp_path_factory.mktemp("lora")
    model = make_llama(folder / "model", head_dim=32)
    ranks = {"de": 4, "fr": 16}
    return model, {name: write_adapter(folder / name, model, rank, rank) for name, rank in ranks.items()}


def options_of(model, **settings):
    return engine_options(str(model), {"engine": "vllm", "precision": "fp32", "chat": False, **settings})


def test_each_request_has_its_own_adapter_whatever_is_in_the_batch(folders):
    model, adapters = folders
    rng = random.Random(0)
    texts = [SHARED + "".join(rng.choices(CHARACTERS, k=rng.randint(3, 30))) for _ in range(8)]
    asked = [(text, name) for text in texts for name in ("de", "", "fr")]
    requests = [Request(n, Prompt(text, adapter=name), Sampling(max_tokens=8)) for n, (text, name) in enumerate(asked)]
    questions = [Question(n, Prompt(text, adapter=name), ("y", "n")) for n, (text, name) in enumerate(asked)]
    table = {name: str(adapter) for name, (adapter, _) in adapters.items()}
    engine = open_engine(options_of(model, adapter="{language}", adapters=table), Place("cpu"))
    try:
        answers = {output.id: output.text for output in engine.generate(requests)}
        scores = {found.id: found.logprobs for found in engine.score(questions)}
    finally:
        engine.close()
    differing = set()
    for name, folder in {"": model, **{name: merged for name, (_, merged) in adapters.items()}}.items():
        reference = open_on_cpu("transformers", folder, batching="static", chat=False)
        own = [n for n, (_, adapter) in enumerate(asked) if adapter == name]
        plain = [Request(n, Prompt(asked[n][0]), Sampling(max_tokens=8)) for n in own]
        assert {n: answers[n] for n in own} == {output.id: output.text for output in reference.generate(plain)}
        for found in reference.score([Question(n, Prompt(asked[n][0]), ("y", "n")) for n in own]):
            np.testing.assert_allclose(scores[found.id], found.logprobs, atol=1e-3)
        differing.add(answers[own[0]])
    assert len(differing) == 3


def test_an_adapter_that_vllm_does_not_compute_is_refused(folders, tmp_path):
    model, _ = folders
    large, _ = write_adapter(tmp_path / "large", model, 1, rank=600)
    with pytest.raises(SlurmGPUError, match="vLLM takes a rank of at most 512"):
        options_of(model, adapter=str(large))
