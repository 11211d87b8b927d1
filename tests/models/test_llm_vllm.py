"""The vLLM engine, against a stand-in with vLLM 0.33's own signatures whose answers a real model computes.

vLLM itself needs a GPU and its own PyTorch, so it is in no test. What is recorded here was read from the wheel
vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl: entrypoints/llm.py, engine/arg_utils.py, sampling_params.py,
outputs.py, logprobs.py and model_executor/layers/quantization/__init__.py.
"""

import os
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm import vllm_engine
from slurmgpu.llm.engine import EngineOptions, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.models import find_model
from tests.support.tiny_models import make_llama

# LLM.__init__ names these; its **kwargs go to EngineArgs, of whose fields these are some.
LLM_ARGUMENTS = """
    model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code allowed_local_media_path
    allowed_media_domains tensor_parallel_size dtype quantization revision tokenizer_revision chat_template seed
    gpu_memory_utilization cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_params
    enforce_eager enable_return_routed_experts return_sampling_mask disable_custom_all_reduce hf_token hf_overrides
    mm_processor_kwargs pooler_config structured_outputs_config profiler_config attention_config kv_cache_memory_bytes
    compilation_config quantization_config logits_processors spec_method spec_model spec_tokens
    max_model_len enable_prefix_caching generation_config
"""
DTYPES = {"auto", "half", "float16", "bfloat16", "float", "float32"}
QUANTIZATION_METHODS = """
    awq auto_awq fp8 fbgemm_fp8 fp_quant modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed auto_gptq gptq gptq_marlin
    awq_marlin humming compressed-tensors experts_int8 quark moe_wna16 torchao inc mxfp4 gpt_oss_mxfp4 deepseek_v4_fp8
    online fp8_per_tensor fp8_per_block fp8_per_channel int8_per_channel_weight_only nvfp4_per_token mxfp8
"""
MAX_LOGPROB_TOKEN_IDS = 128


@dataclass
class SamplingParams:
    """Fields and defaults of vllm.SamplingParams that the engine sets, and its checks of them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True

    def __post_init__(self):
        assert 0 <= self.temperature <= 2
        assert 0 < self.top_p <= 1
        assert self.top_k >= -1
        assert 0 <= self.min_p <= 1
        assert self.max_tokens >= 1
        assert not any(not text for text in self.stop or [])
        assert self.detokenize or not self.stop, "stop strings are only supported when detokenize is True"
        assert self.seed is None or -(2**63) <= self.seed < 2**63  # kept as int64
        if self.logprob_token_ids is not None:
            assert len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS
            assert self.logprobs is None or self.logprobs == len(self.logprob_token_ids)


@dataclass
class Logprob:
    """vllm.logprobs.Logprob."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """vllm.outputs.CompletionOutput."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """vllm.outputs.RequestOutput."""

    request_id: str
    outputs: list[CompletionOutput] = field(default_factory=list)


class LLM:
    """vllm.LLM, as far as it is used: greedy tokens of a real model; answers that are too long are aborted."""

    def __init__(self, model, **kwargs):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert set(kwargs) <= set(LLM_ARGUMENTS.split())
        assert kwargs["dtype"] in DTYPES
        assert kwargs["quantization"] in [None, *QUANTIZATION_METHODS.split()]
        assert kwargs["generation_config"] == "vllm"  # else the checkpoint's suggestions would be taken
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "VLLM_DP_SIZE"} & set(os.environ)
        LLM.made = {"model": model, **kwargs}
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model_config = types.SimpleNamespace(max_model_len=kwargs.get("max_model_len", 2048))
        self.calls = []

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None, priority=None):
        assert use_tqdm is False
        assert len(prompts) == len(sampling_params)
        assert all(set(prompt) == {"prompt_token_ids"} for prompt in prompts)
        self.calls.append(sampling_params)
        pairs = enumerate(zip(prompts, sampling_params, strict=True))
        return [
            RequestOutput(str(i), [self._complete(prompt["prompt_token_ids"], each)]) for i, (prompt, each) in pairs
        ]

    @torch.inference_mode()
    def _complete(self, prompt, params):
        if len(prompt) + params.max_tokens > 300:
            return CompletionOutput(0, "", [], None, None, "abort")
        tokens, logprobs, reason = [], [], "length"
        for _ in range(params.max_tokens):
            row = self.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            ids = [tokens[-1], *(params.logprob_token_ids or [])]
            logprobs.append({token: Logprob(float(row[token])) for token in ids})
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if tokens[-1] == self.tokenizer.eos_token_id or any(stop in text for stop in params.stop or []):
                reason = "stop"
                break
        wanted = params.logprobs is not None or params.logprob_token_ids is not None
        return CompletionOutput(0, "", tokens, None, logprobs if wanted else None, reason)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def engine(llama, monkeypatch):
    """Opens the engine on the stand-in: `engine(precision=…)`."""
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "VLLM_DP_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    for name in ("VLLM_LOGGING_STREAM", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "kept")

    def make(gpus=1, name=None, **options):
        found = find_model(str(name or llama))
        return open_engine(
            EngineOptions(found, **{"engine": "vllm", "precision": "fp32"} | options), Place("cuda:0", gpus)
        )

    return make


@pytest.fixture
def reference(llama):
    torch.set_num_threads(1)
    return open_engine(EngineOptions(find_model(str(llama)), precision="fp32", batching="static"), Place("cpu"))


def requests(**sampling):
    texts = ["1+1=", "abc", "what is 7", "9" * 30, "2"]
    return [Request(n, Prompt(text), Sampling(max_tokens=4 + 5 * n, **sampling), n) for n, text in enumerate(texts)]


@pytest.mark.parametrize("sampling", [{}, {"stop": ("a", "3")}, {"logprobs": True}, {"logprobs": True, "stop": ("e",)}])
def test_its_answers_are_read_as_those_of_the_other_engine(engine, reference, sampling):
    expected = {output.id: output for output in reference.generate(requests(**sampling))}
    for found in engine().generate(requests(**sampling)):
        wanted = expected[found.id]
        assert (found.text, found.finish_reason, found.error) == (wanted.text, wanted.finish_reason, None)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.n_prompt_tokens == wanted.n_prompt_tokens
        if "logprobs" in sampling:
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
        else:
            assert found.logprobs is None


@pytest.mark.parametrize(
    ("choices", "n_ways"), [(("a", "b"), 1), (("1", "12", "123", "ab", "ac"), 1), (("yes", "yes", "no", " no"), 2)]
)
def test_its_scores_are_those_of_the_other_engine(engine, reference, choices, n_ways):
    questions = [Question(number, Prompt(text), choices, n_ways) for number, text in enumerate(("1+1=", "abc"))]
    expected = {scores.id: scores for scores in reference.score(questions)}
    for found in engine().score(questions):
        np.testing.assert_allclose(found.logprobs, expected[found.id].logprobs, atol=1e-4)
        assert found.n_tokens.tolist() == expected[found.id].n_tokens.tolist()
        assert found.n_prompt_tokens == expected[found.id].n_prompt_tokens
        assert found.error is None


def test_a_sample_has_its_own_seed_and_a_greedy_answer_none(engine):
    opened = engine()
    list(
        opened.generate(
            [Request(0, Prompt("1"), Sampling(max_tokens=1, temperature=0.7, top_k=5, min_p=0.1), 2**62 + 1)]
        )
    )
    list(opened.generate([Request(0, Prompt("1"), Sampling(max_tokens=1), 7)]))
    [[sampled], [greedy]] = opened._llm.calls
    assert (sampled.seed, sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (
        2**62 + 1,
        0.7,
        5,
        1,
        0.1,
    )
    assert (greedy.seed, greedy.temperature) == (None, 0)


def test_more_tokens_than_it_allows_are_asked_for_in_parts(monkeypatch, engine, reference):
    monkeypatch.setattr(vllm_engine, "MOST_LOGPROB_TOKENS", 3)
    [question] = [Question(0, Prompt("1+1="), tuple("abcdefgh"))]
    [found], [expected] = (list(each.score([question])) for each in (engine(), reference))
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


def test_what_fails_is_the_error_of_its_request(engine):
    asked = [
        Request(0, Prompt("1" * 400), Sampling(max_tokens=300)),
        Request(1, Prompt("1" * 280), Sampling(max_tokens=100)),
        Request(2, Prompt("1"), Sampling(max_tokens=2, temperature=2.5)),
        Request(3, Prompt("1"), Sampling(max_tokens=2)),
    ]
    found = {output.id: output.error for output in engine(max_context=512).generate(asked)}
    assert "exceeds the context of 512 tokens" in found[0]
    assert found[1] == "vLLM ended the request: abort"
    assert found[2] == "temperature is 2.5; vLLM allows at most 2"
    assert found[3] is None
    [scores] = engine().score([Question(0, Prompt("1" * 310), ("a", "b"))])
    assert scores.error == "vLLM ended the request: abort"


@pytest.mark.parametrize(
    ("suffix", "quantization"), [("", None), ("-fp8", "fp8"), ("-8bit", "int8_per_channel_weight_only")]
)
def test_model_precision_and_variant_reach_it(engine, llama, suffix, quantization):
    engine(gpus=4, name=f"{llama}{suffix}", precision="bf16", max_context=1024)
    expected = {"model": str(llama), "tensor_parallel_size": 4, "dtype": "bfloat16", "quantization": quantization}
    expected |= {"seed": 0, "max_model_len": 1024, "enable_prefix_caching": True, "trust_remote_code": False}
    assert expected.items() <= LLM.made.items()


@pytest.mark.parametrize(
    ("suffix", "place", "reason"),
    [
        ("-4bit", Place("cuda:0", 1), "vLLM makes no 4bit variant"),
        ("", Place("cuda:0", 1, 0, 2), 'set .* processes = "one"'),
        ("", Place("cpu", 0), "needs a GPU"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(llama, suffix, place, reason):
    with pytest.raises(SlurmGPUError, match=reason):
        open_engine(EngineOptions(find_model(f"{llama}{suffix}"), engine="vllm"), place)


def test_an_image_without_it_is_told_which_has_it(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_LOGGING_STREAM", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "kept")
    with pytest.raises(SlurmGPUError, match="slurmgpu image build --vllm"):
        open_engine(EngineOptions(find_model(str(llama)), engine="vllm"), Place("cuda:0", 1))
