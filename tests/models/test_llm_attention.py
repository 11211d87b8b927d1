"""The attention of a step of one token a row."""

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention

from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.transformers_engine import attention
from tests.support.tiny_models import make_llama

N_ROWS, N_HEADS, N_KEYS, WIDTH = 3, 6, 11, 8


@pytest.fixture
def heads(monkeypatch):
    """The heads of the keys that PyTorch gets."""
    found, real = [], torch.nn.functional.scaled_dot_product_attention

    def seen(query, key, value, **options):
        found.append(key.shape[1])
        return real(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    return found


def inputs(n_columns=1, n_shared=3, seed=0):
    made = torch.Generator().manual_seed(seed)
    query = torch.randn(N_ROWS, N_HEADS, n_columns, WIDTH, generator=made)
    key, value = (torch.randn(N_ROWS, N_HEADS // n_shared, N_KEYS, WIDTH, generator=made) for _ in range(2))
    mask = torch.rand(N_ROWS, 1, n_columns, N_KEYS, generator=made) > 0.3
    mask[..., 0] = True
    sizes = {"hidden_size": N_HEADS * WIDTH, "num_attention_heads": N_HEADS, "num_key_value_heads": N_HEADS // n_shared}
    return LlamaAttention(LlamaConfig(**sizes), 0).eval(), query, key, value, mask


@pytest.mark.parametrize("n_shared", [1, 2, 3, 6])
@pytest.mark.parametrize("n_columns", [1, 4])
@pytest.mark.parametrize("kind", ["bool", "added", "none"])
def test_attention_is_that_of_transformers(n_shared, n_columns, kind):
    module, *given, mask = inputs(n_columns, n_shared)
    masks = {"bool": mask, "added": torch.where(mask, 0.0, torch.finfo(torch.float32).min), "none": None}
    expected, _ = sdpa_attention_forward(module, *given, masks[kind], scaling=0.3)
    found, _ = attention.attend(module, *given, masks[kind], scaling=0.3)
    assert found.shape == (N_ROWS, n_columns, N_HEADS, WIDTH)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_keys_are_not_copied_for_the_heads_that_share_them(heads):
    module, *given = inputs()
    attention.attend(module, *given)
    assert heads == [2]


def test_a_compiled_step_copies_none_either(heads):
    module, *given = inputs()
    expected, _ = attention.attend(module, *given)
    compiled = torch.compile(attention.attend, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(module, *given)[0], expected)
    assert {*heads} == {2}


@pytest.mark.parametrize(
    "more",
    [{"dropout": 0.5}, {"softcap": 30.0}, {"position_bias": torch.zeros(N_ROWS, N_HEADS, 1, N_KEYS)}, {"cache": []}],
    ids=lambda more: next(iter(more)),
)
def test_arguments_of_some_models_are_left_to_transformers(monkeypatch, more):
    seen = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **options: seen.append(options))
    module, *given = inputs()
    attention.attend(module, *given, scaling=0.3, sliding_window=None)
    assert seen == []
    attention.attend(module, *given, scaling=0.3, **more)
    assert seen == [{"scaling": 0.3, **more}]


def test_a_query_may_be_for_all_rows():
    module, query, key, value, _ = inputs()
    mask = torch.ones(1, 1, 1, N_KEYS, dtype=torch.bool)
    found, _ = attention.attend(module, query[:1], key, value, mask)
    expected, _ = attention.attend(module, query[:1].expand_as(query), key, value, mask)
    torch.testing.assert_close(found, expected)


def test_the_engine_computes_steps_so(tmp_path, monkeypatch):
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    seen = []
    real = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda *given, **more: seen.append(given[1].shape[2]) or real(*given, **more)
    )
    options = EngineOptions(find_model(str(make_llama(tmp_path))), precision="fp32")
    [answer] = open_engine(options, Place("cpu")).generate([Request(0, Prompt("12+5="), Sampling(max_tokens=3), 0)])
    assert answer.error is None
    assert 1 in seen
