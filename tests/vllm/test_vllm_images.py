"""The engine on vLLM with images beside text; in `make test-vllm`. Idefics3 needs no torchvision there."""

import numpy as np
import pytest

from slurmgpu.llm.interface.engine import Prompt, Question, Request, Sampling
from tests.support.engines import by_id, engine
from tests.support.tiny_vision_models import make_idefics3, make_png


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = make_idefics3(tmp_path_factory.mktemp("model"), num_attention_heads=2)  # which vLLM takes on CPUs
    found = [engine(folder, engine=name, images=True) for name in ("vllm", "transformers")]
    yield found
    found[0].close()


def prompts():
    return [
        Prompt("What?" * (number + 1), images=tuple(make_png(10 * number + part, 20 + 9 * number) for part in range(n)))
        for number, n in enumerate((1, 2, 1, 2))
    ]


def test_answers_about_images_are_those_of_the_other_engine_and_a_bad_prompt_fails_alone(engines, tmp_path):
    requests = [Request(n, prompt, Sampling(max_tokens=6, logprobs=True)) for n, prompt in enumerate(prompts())]
    image = (make_png(1),)
    bad = [
        (Prompt("?", images=(str(tmp_path / "nowhere.png"),)), 8),
        (Prompt("x" * 490, images=image), 8),  # beyond the context with the image's own tokens
        (Prompt("x" * 460, images=image), 40),  # beyond it with those of the answer
    ]
    requests += [Request(4 + n, prompt, Sampling(max_tokens=most)) for n, (prompt, most) in enumerate(bad)]
    found, expected = (by_id(engine.generate(requests)) for engine in engines)
    for number in range(4):
        assert found[number].tokens.tolist() == expected[number].tokens.tolist()
        assert found[number].n_prompt_tokens == expected[number].n_prompt_tokens
        np.testing.assert_allclose(found[number].logprobs, expected[number].logprobs, atol=2e-4)
    assert "nowhere.png cannot be read: No such file" in found[4].error
    assert [found[number].error for number in (5, 6)] == [expected[number].error for number in (5, 6)]
    assert "with max_tokens = 40 exceeds the context of 512 tokens" in found[6].error


def test_samples_about_images_depend_on_their_keys_alone(engines):
    requests = [
        Request(n, prompt, Sampling(max_tokens=6, temperature=1.0), key=n + 9) for n, prompt in enumerate(prompts())
    ]
    together = {each.id: each.tokens.tolist() for each in engines[0].generate(requests)}
    apart = {each.id: each.tokens.tolist() for request in requests[::-1] for each in engines[0].generate([request])}
    assert together == apart


def test_scores_behind_images_are_those_of_the_other_engine(engines, tmp_path):
    asked = [*prompts(), Prompt("?", images=(str(tmp_path / "nowhere.png"),))]
    questions = [Question(number, prompt, ("cat", "car", "d")) for number, prompt in enumerate(asked)]
    found, expected = (by_id(engine.score(questions)) for engine in engines)
    for number in range(4):
        np.testing.assert_allclose(found[number].logprobs, expected[number].logprobs, atol=2e-4)
    assert found[4].error == expected[4].error
