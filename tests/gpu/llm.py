"""Language models on a GPU, with random weights of real shapes: memory, precision, speed, the sampler, variants."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.util.broken_process import is_broken_cuda
from slurmgpu.util.exceptions import described
from tests.gpu.findings import Machine, NotHeld, NotMeasured, bandwidth, best_of, finding, hold, logs_of, seconds_of

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig

    from slurmgpu.llm.interface.engine import EngineOptions, Output, Place, Request
    from slurmgpu.llm.prompts.encoded import Encoded, Finished
    from slurmgpu.llm.transformers_engine.decoding_choice import DecodingChoice
    from slurmgpu.llm.transformers_engine.engine import TransformersEngine
    from slurmgpu.llm.transformers_engine.graph_check import Verdict
    from slurmgpu.llm.transformers_engine.static import StaticBatches

SHAPE_SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
SHAPE_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
SHAPE_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
SHAPE_COMPILED = {**SHAPE_1B, "num_hidden_layers": 2}
"""Compiling the steps of 16 layers takes a fast host more than a minute, and would show no more than 2 layers."""
TOY = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
N_WORDS, N_TOY_WORDS = 128_256, 512
N_COMPILED = 32_000
"""The vocabulary with SHAPE_COMPILED; with a larger one, the head would dwarf the two layers."""
N_LARGE, N_TOY_LARGE = 200_000, 2_000
"""The vocabulary of the sampler's finding."""
BLOCK_BYTES = 256 << 20
CONTEXT_BYTES = 1.2e9
"""More than CUDA and a desktop take of an empty card."""
WEIGHTS_OFF, VARIANT_OFF = 0.02, 0.1
"""By what share weights on the card may differ from what placement predicts: plain, and quantised."""
OF_PLAIN = 1.5
"""How many times as far from fp32 the engine's results in bf16 may be as the model's own in bf16."""
ONE_BY_ONE, BY_HAND = 10.0, 1.2
"""How many times as fast the engine must be as `model.generate`: prompt by prompt, and in its best sorted batches."""
OF_NEEDED = 0.4
"""The share of the memory of a batch that it gets, to be halved twice."""
GRAPHS_GAIN = 1.3
"""How many times as fast static batches with CUDA graphs must be as eager ones, from prompts to answers."""
SAMPLER_SHARE = 0.1
"""The largest share of a decoding step that sampling may take, both with the most rows of the graphs' self-check."""
N_DRAWS = 8
"""Draws that are timed together: a draw is launched while the GPU computes the step before it."""
SMALL_GPU_BYTES = 20e9
"""On a card with less memory, the model has 0.4 billion parameters instead of 1.5."""
SET_UP_S = 60.0
"""The seconds to set up what findings share: the model, its engines, and the check of its graphs."""
LARGE_GPU_BYTES = 30e9
"""The memory that the finding with 8 billion parameters needs."""


def prepare(_: Machine) -> None:
    """Import what takes seconds."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import slurmgpu.llm.transformers_engine.engine
    import slurmgpu.workloads.collect.workload  # noqa: F401


def _make_config(folder: Path, shape: dict[str, int], n_words: int) -> LlamaConfig:
    """The configuration of a Llama in bf16 without an end token; writes a tokenizer whose tokens are words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder.mkdir(exist_ok=True)  # a finding before may have failed in making it
    vocabulary = {"<pad>": 0, **{f"w{i}": i for i in range(1, n_words)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>").save_pretrained(folder)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(
        vocab_size=n_words,
        num_key_value_heads=shape["num_attention_heads"] // 4,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        **shape,
        **ends,
    )


def _make_model(folder: Path, device: str, shape: dict[str, int], n_words: int, kind: str = "LlamaForCausalLM") -> Path:
    """A random Llama of that configuration."""
    import torch
    import transformers

    from slurmgpu.util.out_of_memory import free_memory

    config = _make_config(folder, shape, n_words)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, kind)(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    free_memory()
    return folder


def _make_hollow_model(folder: Path, device: str, shape: dict[str, int], n_words: int) -> Path:
    """The same with layers of zeros, which are holes in the file: that is faster than writing 16 GB.

    See https://huggingface.co/docs/safetensors#format.
    """
    import torch
    from transformers import LlamaForCausalLM

    config = _make_config(folder, shape, n_words)
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = LlamaForCausalLM(config).state_dict()
    header, end = dict[str, Any](), 0
    for name, each in weights.items():
        begin, end = end, end + 2 * each.numel()
        header[name] = {"dtype": "BF16", "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        for name, each in weights.items():
            if ".layers." not in name:
                file.seek(first + header[name]["data_offsets"][0])
                random = torch.randn(each.shape, dtype=torch.bfloat16, device=device)
                file.write(random.view(torch.int16).cpu().numpy().data)
        file.truncate(first + end)
    return folder


@functools.cache
def _model(machine: Machine) -> Path:
    """A model of 1.5 billion parameters, of 0.4 on a small card, or a toy."""
    return _make_model(machine.folder / "model", machine.device, _shape(machine), machine.pick(N_WORDS, N_TOY_WORDS))


def _shape(machine: Machine) -> dict[str, int]:
    import torch

    if not machine.on_gpu:
        return TOY
    is_small = torch.cuda.get_device_properties(machine.device).total_memory < SMALL_GPU_BYTES
    return SHAPE_SMALL if is_small else SHAPE_1B


def _options(folder: Path | str, **settings: Any) -> EngineOptions:
    from slurmgpu.llm.settings import engine_options

    return engine_options(str(folder), settings)


def _place(machine: Machine) -> Place:
    from slurmgpu.llm.interface.engine import Place

    return Place(machine.device, gpus=min(1, machine.n_gpus))


@functools.cache
def _engine(machine: Machine, **settings: Any) -> TransformersEngine:
    return _engine_of(machine, _model(machine), **settings)


def _engine_of(machine: Machine, model: Path, **settings: Any) -> TransformersEngine:
    from slurmgpu.llm.transformers_engine.engine import TransformersEngine

    return TransformersEngine(_options(model, **settings), _place(machine))


def _texts(machine: Machine, rng: np.random.Generator, lengths: Sequence[int]) -> list[str]:
    """Random texts with these numbers of tokens."""
    n_words = machine.pick(N_WORDS, N_TOY_WORDS)
    return [" ".join(f"w{i}" for i in rng.integers(1, n_words, length)) for length in lengths]


def _requests(texts: Sequence[str], lengths: Sequence[int], **sampling: Any) -> list[Request]:
    from slurmgpu.llm.interface.engine import Prompt, Request, Sampling

    pairs = enumerate(zip(texts, lengths, strict=True))
    return [Request(i, Prompt(text), Sampling(max_tokens=n, **sampling), key=1000 + i) for i, (text, n) in pairs]


def _some(machine: Machine, *, shared: bool = False, n_tokens: int = 32, **sampling: Any) -> list[Request]:
    """Requests of different lengths; `shared` gives them a common beginning of 320 tokens."""
    rng, n = np.random.default_rng(1), machine.pick(24, 4)
    lengths = rng.integers(20, machine.pick(300, 40), n).tolist()
    texts = _texts(machine, rng, lengths)
    if shared:
        [beginning] = _texts(machine, rng, [320])
        texts = [f"{beginning} {text}" for text in texts]
    return _requests(texts, [machine.pick(n_tokens, 6)] * n, **sampling)


def _free(machine: Machine) -> int:
    import torch

    return int(torch.cuda.mem_get_info(machine.device)[0])


def _allocated(machine: Machine) -> int:
    """The bytes that PyTorch has allocated on the card; 0 without one."""
    import torch

    return torch.cuda.memory_allocated(machine.device) if machine.on_gpu else 0


def _forget(machine: Machine) -> None:
    """Close the engines and free the card."""
    from slurmgpu.util.out_of_memory import free_memory

    _by_graphs.cache_clear()
    _engine.cache_clear()
    free_memory()


# Memory


@finding()
def the_usable_share_can_be_allocated(machine: Machine) -> str:
    """On an empty card, weights and cache can fill what placement assumes is usable: 92 % less 1.5 GB."""
    import torch

    from slurmgpu.llm.placement.needs import usable

    machine.needs_gpu()
    total, held = torch.cuda.get_device_properties(machine.device).total_memory, list[torch.Tensor]()
    of_others = total - _free(machine) - torch.cuda.memory_reserved(machine.device) - CONTEXT_BYTES
    if of_others > 0:
        raise NotMeasured(f"others use {of_others / 1e9:.1f} GB of the card")
    # No more than that: the memory of some cards is the host's, and some drivers go on in it.
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        while len(held) * BLOCK_BYTES < usable(total):
            held.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=machine.device))
    filled = len(held) * BLOCK_BYTES
    held.clear()
    torch.cuda.empty_cache()
    figures = f"{filled / 1e9:.1f} of {total / 1e9:.1f} GB ({filled / total:.1%}), placement assumes "
    figures += f"{usable(total) / 1e9:.1f}"
    return hold(filled >= usable(total), figures)


def _foretold(machine: Machine, folder: Path) -> str:
    """The memory of a model's weights and planned batch: predicted, and used."""
    import torch

    from slurmgpu.llm.placement.needs import look_at, usable
    from slurmgpu.llm.transformers_engine.engine import TransformersEngine

    model = look_at(_options(folder, batching="static"))
    before = 0
    if machine.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(machine.device)
        before = _free(machine)
    options = _options(folder, batching="static", batch_tokens=machine.pick(model.batch_tokens, 1024))
    engine = TransformersEngine(options, _place(machine))
    weights = sum(each.numel() * each.element_size() for each in engine._loaded.model.parameters())
    figures = f"weights {weights / 1e9:.3f} GB, predicted {model.memory.weights / 1e9:.3f}"
    good = abs(weights / model.memory.weights - 1) <= WEIGHTS_OFF
    answer, n_rows = machine.pick(48, 4), machine.pick(8, 2)
    prompt = machine.pick(model.batch_tokens // n_rows - answer, 40)
    texts = _texts(machine, np.random.default_rng(2), [prompt] * n_rows)
    outputs = list(engine.generate(_requests(texts, [answer] * n_rows)))
    good &= not any(output.error for output in outputs)
    if machine.on_gpu:
        # The allocator's cache is no need: it is freed when memory is short. The peak is above what is held now.
        torch.cuda.empty_cache()
        above = torch.cuda.max_memory_allocated(machine.device) - _allocated(machine)
        used = before - _free(machine) + above
        total = torch.cuda.get_device_properties(machine.device).total_memory
        over, room = used - model.memory.weights - model.memory.cache, total - usable(total)
        figures += f"; {used / 1e9:.2f} GB with a batch of {n_rows} x {prompt + answer} tokens, predicted "
        figures += f"{(model.memory.weights + model.memory.cache) / 1e9:.2f}, {over / 1e9:.2f} more; reserved for that "
        figures += f"{room / 1e9:.2f}"
        good &= over <= room
    engine.close()
    return hold(good, figures)


@finding(limit_s=SET_UP_S)
def placement_foretells_the_memory_of_a_small_model(machine: Machine) -> str:
    """The weights of a small model have the predicted size, and the planned batch fits what placement reserves."""
    return _foretold(machine, _model(machine))


# CUDA graphs


@functools.cache
def _by_graphs(machine: Machine, precision: str) -> tuple[StaticBatches, DecodingChoice]:
    """Static batches with CUDA graphs, which `_check` has checked."""
    from slurmgpu.llm.interface.batching import Budget
    from slurmgpu.llm.transformers_engine.decoding_choice import DecodingChoice
    from slurmgpu.llm.transformers_engine.static import StaticBatches

    engine = _eager(machine, precision)
    options = _options(_model(machine), precision=precision, cuda_graphs=machine.pick("auto", True))
    budget = Budget(machine.pick(engine._static._budget.tokens, 2048), _place(machine))
    choice = DecodingChoice(engine._loaded, options, _place(machine), engine._prefill, budget)
    _check(machine, choice)
    return StaticBatches(engine._static._chooser, budget, engine._prefill, choice), choice


def _check(machine: Machine, choice: DecodingChoice) -> Verdict:
    """The verdict of the self-check of CUDA graphs; without a GPU, the check calls the same work eagerly."""
    from tests.support.eager_runner import EagerRunner

    if machine.on_gpu:
        choice.decide()
    else:
        choice.use(lambda _: EagerRunner(), "eager")
    if choice.verdict is None:
        raise NotHeld("CUDA graphs were not tried; the log has the reason")
    return choice.verdict


def _eager(machine: Machine, precision: str) -> TransformersEngine:
    """The engine whose static batches, when called directly, run eagerly."""
    batching = "static" if precision == "fp32" else machine.pick("continuous", "static")
    return _engine(machine, precision=precision, batching=batching)


def _answers(machine: Machine, precision: str, requests: Sequence[Request]) -> list[Finished]:
    """The answers with CUDA graphs; NotHeld if the engine gave graphs up."""
    batches, choice = _by_graphs(machine, precision)
    found = list(batches.generate(_encoded(_eager(machine, precision), requests)))
    hold(choice.uses_slots, "the engine gave CUDA graphs up; the log has the reason")
    return found


@finding(limit_s=SET_UP_S + 15)
def cuda_graphs_pass_their_self_check(machine: Machine) -> str:
    """The self-check finds steps with CUDA graphs correct and faster, in bf16 and fp32, for 1, 32 and 4 long rows."""
    figures, good = [], True
    for precision in ("bf16", "fp32"):
        verdict = _by_graphs(machine, precision)[1].verdict
        assert verdict is not None  # else _by_graphs raises
        good &= verdict.reason is None
        figures.append(f"{precision}: {verdict.reason or verdict}")
    return hold(good, "; ".join(figures))


@finding(limit_s=SET_UP_S)
def the_sampler_is_cheap_and_the_cpus(machine: Machine) -> str:
    """With a vocabulary of 200,000, sampling takes at most 10 % of a step in a CUDA graph, and draws the CPU's tokens.

    This is the sampling of static batches, after the step. In continuous batches it is part of the step's graph: its
    time is reported, without a limit.
    """
    import torch

    from slurmgpu.llm.interface import sampling as drawing
    from slurmgpu.llm.interface.engine import Sampling
    from slurmgpu.llm.interface.sampling import choose, leave_next
    from slurmgpu.llm.interface.sampling_rules import Rules
    from slurmgpu.llm.transformers_engine.grammars import unpack

    verdict = _by_graphs(machine, "bf16")[1].verdict
    assert verdict is not None  # else _by_graphs raises
    if not verdict.trials:
        raise NotMeasured(f"there is no step in a CUDA graph to compare with: {verdict.reason}")
    most = max(verdict.trials, key=lambda trial: trial.n_rows)
    n_tokens, n_rows = machine.pick(N_LARGE, N_TOY_LARGE), most.n_rows
    logits = (torch.randn(n_rows, n_tokens, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    keys, positions = list(range(n_rows)), torch.arange(n_rows)
    there, at = logits.to(machine.device), positions.to(machine.device)

    def greatest(logits: torch.Tensor, rules: Rules, positions: torch.Tensor) -> torch.Tensor:
        return leave_next(logits, rules, positions).argmax(-1)

    figures, n_off, seconds = [], 0, 0.0
    for settings in ({}, {"top_p": 0.9}, {"top_k": 50}):
        sampling = [Sampling(temperature=0.8, **settings)] * n_rows
        on_cpu = choose(logits, Rules.of(sampling, keys), positions)
        rules = Rules.of(sampling, keys, machine.device)
        behind = functools.partial(choose, there, rules, at)
        within, found = _replayed(machine, functools.partial(greatest, there, rules, at))
        times = [
            best_of(5, functools.partial(_repeat, N_DRAWS, work), machine.device) / N_DRAWS for work in (behind, within)
        ]
        differ = [int((tokens.cpu() != on_cpu).sum()) for tokens in (behind(), found)]
        n_off, seconds = max(n_off, *differ), max(seconds, times[0])
        figures.append(
            f"{settings or 'all tokens'}: {times[0] * 1e3:.2f} ms, in a graph {times[1] * 1e3:.2f} ms, "
            f"{differ[0]} and {differ[1]} of {n_rows} tokens differ from the CPU's"
        )
    # Bits of the tokens that a structure allows, as of a grammar.
    bits = torch.randint(256, (n_rows, n_tokens // 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sampling = [Sampling(temperature=0.8, top_p=0.9)] * n_rows
    of_allowed = [
        choose(each, Rules.of(sampling, keys, each.device), place, unpack(these, n_tokens)).cpu()
        for each, place, these in ((logits, positions, bits), (there, at, bits.to(machine.device)))
    ]
    is_allowed = unpack(bits, n_tokens)[torch.arange(n_rows), of_allowed[1]]
    differ = [int((of_allowed[0] != of_allowed[1]).sum()), int((~is_allowed).sum())]
    n_off = max(n_off, differ[0], 2 * differ[1])
    figures.append(f"of half of the tokens {differ[0]} differ, and {differ[1]} are not allowed")
    figures.append(f"a step of the model, in a graph, {most.slots_s * 1e3:.2f} ms")
    with _warnings(drawing.__name__) as said:
        drawing._kernels.clear()
        by_kernels = drawing._kernels_of(there.device) is not None
    figures.append(f"with {'two kernels' if by_kernels else '; '.join(['operations of PyTorch', *said])}")
    # Rounding may change one token: at the edge of what top_p keeps, or where two scores nearly tie.
    is_cheap = seconds <= SAMPLER_SHARE * most.slots_s or not machine.on_gpu
    return hold(n_off <= 1 and is_cheap and (by_kernels or not machine.on_gpu), "; ".join(figures))


def _repeat(n: int, work: Callable[[], object]) -> None:
    for _ in range(n):
        work()


def _replayed(machine: Machine, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """A function that replays the work as a CUDA graph, and its output; without a GPU, the work and a result."""
    import torch

    if not machine.on_gpu:
        return work, work()
    stream = torch.cuda.Stream(machine.device)
    stream.wait_stream(torch.cuda.current_stream(machine.device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(machine.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = work()
    graph.replay()
    return graph.replay, found


# The same answers by every route


def _encoded(engine: TransformersEngine, requests: Sequence[Request]) -> list[Encoded]:
    return [engine._codec.encode(request) for request in requests]


@contextlib.contextmanager
def _warnings(logger: str) -> Iterator[list[str]]:
    """The warnings that a logger emits inside the context."""
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(logger)
    log.addHandler(listener)
    try:
        yield said
    finally:
        log.removeHandler(listener)


def _by_continuous(engine: TransformersEngine, encoded: Sequence[Encoded]) -> list[Finished]:
    """The answers of continuous batching; NotHeld, with the reason, if the engine gave it up."""
    if engine._continuous is None:
        raise NotMeasured("this model cannot use continuous batching here")
    with _warnings("slurmgpu.llm.transformers_engine.continuous") as said:
        found = list(engine._continuous.generate(encoded))
    hold(not engine._continuous.given_up, "; ".join(said))
    return found


def _within(
    machine: Machine,
    way: Callable[[TransformersEngine, Sequence[Encoded]], list[Finished]],
    **how: Any,
) -> str:
    """Compare the greedy answers of `way` in bf16 with those in fp32, by fp32's scores.

    Tokens may miss the best score by the engine's own tolerance, or by OF_PLAIN times the model's own miss in bf16.
    """
    from slurmgpu.llm.transformers_engine.selfcheck import TOLERANCE

    requests = _some(machine, **how)
    reference = _engine(machine, precision="fp32", batching="static")
    expected = list(reference._static.generate(_encoded(reference, requests)))
    engine = _engine(machine, precision="bf16", batching=machine.pick("continuous", "static"))
    found = way(engine, _encoded(engine, requests))
    if engine._continuous is not None:
        engine._continuous.release()  # its cache has most of the memory
    wanted = {each.encoded.request.id: each.tokens for each in expected}
    if errors := [each.error for each in found if each.error]:
        raise NotHeld(f"{len(errors)} errors: {errors[0]}")
    if sorted(each.encoded.request.id for each in found) != sorted(wanted):
        raise NotHeld("not every request was answered exactly once")
    same = sum(wanted[each.encoded.request.id] == each.tokens for each in found)
    missed = max(_miss(reference, each, each.tokens) for each in found)
    alone = max(_miss(reference, each, _logits(engine, each).argmax(-1).tolist()) for each in expected)
    figures = f"{same} of {len(found)} answers are equal; tokens miss fp32's best score by {missed:.3f} of the range, "
    figures += f"the model's own in bf16 by {alone:.3f}"
    return hold(missed <= max(TOLERANCE["bf16"], OF_PLAIN * alone), figures)


def _logits(engine: TransformersEngine, answer: Finished) -> torch.Tensor:
    """The model's own logits (position, vocabulary) for each token of an answer, given the tokens before it."""
    import torch

    model = engine._loaded.model
    with torch.inference_mode():
        inputs = torch.tensor([[*answer.encoded.tokens, *answer.tokens[:-1]]], device=model.device)
        found: torch.Tensor = model(input_ids=inputs, use_cache=False, logits_to_keep=len(answer.tokens)).logits[0]
    return found.float()


def _miss(reference: TransformersEngine, answer: Finished, tokens: Sequence[int]) -> float:
    """How far these tokens of an answer are below the best score, at most, as a share of the scores' range."""
    import torch

    scores = _logits(reference, answer)
    taken = scores.gather(-1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0]
    best = scores.amax(-1)
    return float(((best - taken) / (best - scores.mean(-1)).clamp(min=1e-6)).max())


def _static(engine: TransformersEngine, encoded: Sequence[Encoded]) -> list[Finished]:
    return list(engine._static.generate(encoded))


@finding(limit_s=SET_UP_S)
def static_batches_in_bf16_answer_as_fp32(machine: Machine) -> str:
    """By fp32's scores, greedy tokens of static batches in bf16 are as good as the model's own in bf16."""
    return _within(machine, _static)


@finding(limit_s=SET_UP_S)
def a_shared_prefix_in_bf16_answers_as_fp32(machine: Machine) -> str:
    """So are greedy tokens in bf16 of prompts that share their first 320 tokens, which are computed once."""
    return _within(machine, _static, shared=True)


@finding(limit_s=SET_UP_S)
def continuous_batches_in_bf16_answer_as_fp32(machine: Machine) -> str:
    """So are greedy tokens of continuous batching in bf16; sampled ones pass its self-check against static batches."""
    machine.needs_gpu()
    said = _within(machine, _by_continuous)
    engine = _engine(machine, precision="bf16", batching="continuous")
    _by_continuous(engine, _encoded(engine, _some(machine, n_tokens=8, temperature=1.0)[:8]))
    engine._release()
    return said


@finding(limit_s=SET_UP_S)
def scores_are_those_of_the_model_alone(machine: Machine) -> str:
    """Log-probabilities of labels and of texts are the model's own: in fp32 to 0.001, in bf16 as close to fp32."""
    import torch

    from slurmgpu.llm.interface.engine import Passage, Question

    labels, requests = (" w11", " w222", " w33", " w44"), _some(machine, shared=True)
    ours, alone, of_texts, texts_alone = {}, {}, {}, {}
    for precision in ("fp32", "bf16"):
        batching = machine.pick("continuous", "static") if precision == "bf16" else "static"
        engine = _engine(machine, precision=precision, batching=batching)
        found = engine.score([Question(each.id, each.prompt, labels) for each in requests])
        ours[precision] = np.stack([each.logprobs for each in sorted(found, key=lambda each: each.id)])
        tokens = engine._loaded.tokenizer([label.strip() for label in labels], add_special_tokens=False)["input_ids"]
        read = sorted(
            engine.likelihoods([Passage(each.id, each.prompt) for each in requests]), key=lambda each: each.id
        )
        rows, of_tokens = [], []
        for each in _encoded(engine, requests):
            with torch.inference_mode():
                inputs = torch.tensor([each.tokens], device=machine.device)
                scores = engine._loaded.model(input_ids=inputs).logits[0].float().log_softmax(-1)
            rows.append(scores[-1, [label[0] for label in tokens]].cpu().numpy())
            of_tokens.append(scores[:-1].gather(-1, inputs[0, 1:, None])[:, 0].cpu().numpy())
        alone[precision], texts_alone[precision] = np.stack(rows), np.concatenate(of_tokens)
        n_read = [len(each) for each in of_tokens]
        of_texts[precision] = np.concatenate([each.logprobs[-n:] for each, n in zip(read, n_read, strict=True)])
    off = {name: float(abs(ours[name] - ours["fp32"]).max()) for name in ours}
    off |= {f"{name} alone": float(abs(alone[name] - ours["fp32"]).max()) for name in alone}
    same = float((ours["bf16"].argmax(1) == ours["fp32"].argmax(1)).mean())
    figures = f"fp32 is off by {off['fp32 alone']:.1e}, bf16 by {off['bf16']:.3f}, the model's own bf16 by "
    figures += f"{off['bf16 alone']:.3f}; {same:.2f} of the best labels are the same"
    good = off["fp32 alone"] <= 1e-3 and off["bf16"] <= max(0.1, OF_PLAIN * off["bf16 alone"])
    exact = texts_alone["fp32"]
    of_fp32, of_bf16, own = (float(abs(each - exact).max()) for each in (*of_texts.values(), texts_alone["bf16"]))
    figures += f"; of {len(exact):,} tokens of texts fp32 is off by {of_fp32:.1e}, bf16 by {of_bf16:.3f}, the model's "
    figures += f"own bf16 by {own:.3f}"
    return hold(good and of_fp32 <= 1e-3 and of_bf16 <= max(0.1, OF_PLAIN * own), figures)


@finding(limit_s=SET_UP_S + 15)
def samples_do_not_depend_on_the_batch(machine: Machine) -> str:
    """Samples in fp32 are the same in small and large batches; in bf16 some differ, as the docs say."""
    from slurmgpu.llm.interface.batching import Budget
    from slurmgpu.llm.transformers_engine.decoding_choice import DecodingChoice
    from slurmgpu.llm.transformers_engine.static import StaticBatches

    # Small batches have one or two rows, so they take many steps.
    requests, shares = _some(machine, n_tokens=16, temperature=1.0, top_p=0.9)[:8], {}
    for precision in ("fp32", "bf16"):
        batching = machine.pick("continuous", "static") if precision == "bf16" else "static"
        engine, found = _engine(machine, precision=precision, batching=batching), []
        for tokens in (400, 65_536):
            budget = Budget(tokens, _place(machine))
            options = _options(_model(machine))
            eager = DecodingChoice(engine._loaded, options, _place(machine), engine._prefill, budget)
            batches = StaticBatches(engine._static._chooser, budget, engine._prefill, eager)
            finished = batches.generate(_encoded(engine, requests))
            found.append({each.encoded.request.id: each.tokens for each in finished})
        shares[precision] = sum(found[0][i] == found[1][i] for i in found[0]) / len(requests)
    figures = f"{shares['fp32']:.0%} of {len(requests)} samples are equal in fp32, {shares['bf16']:.0%} in bf16"
    return hold(shares["fp32"] == 1.0, figures)


@finding(limit_s=SET_UP_S)
def a_batch_that_is_out_of_memory_is_halved(machine: Machine) -> str:
    """A batch of prompts that runs out of the GPU's memory is made smaller until it fits; in fp32 no token changes."""
    machine.needs_gpu()
    import torch

    from slurmgpu.llm.interface.batching import Budget
    from slurmgpu.llm.transformers_engine.decoding_choice import DecodingChoice
    from slurmgpu.llm.transformers_engine.static import StaticBatches
    from slurmgpu.util.out_of_memory import free_memory

    engine, found = _engine(machine, precision="fp32", batching="static"), []
    encoded = _encoded(engine, _some(machine, n_tokens=4)[:8])
    config = engine._loaded.model.config
    # What reading all of them takes: the cache, and three inputs or outputs of a layer's products.
    n_tokens = len(encoded) * max(len(each.tokens) for each in encoded)
    needed = n_tokens * (engine._loaded.kv_bytes + 3 * 4 * config.intermediate_size)
    budget = Budget(65_536, _place(machine))
    eager = DecodingChoice(engine._loaded, _options(_model(machine)), _place(machine), engine._prefill, budget)
    batches = StaticBatches(engine._static._chooser, budget, engine._prefill, eager)
    try:
        for left in (None, OF_NEEDED * needed):
            engine._prefill.forget()
            free_memory()
            if left is not None:
                total = torch.cuda.get_device_properties(machine.device).total_memory
                share = (torch.cuda.memory_reserved(machine.device) + left) / total
                torch.cuda.set_per_process_memory_fraction(share, machine.device)
            found.append({each.encoded.request.id: each.tokens for each in batches.generate(encoded)})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, machine.device)
    same = sum(found[0][i] == found[1][i] for i in found[0])
    figures = (
        f"{same} of {len(found[0])} answers are the same with {OF_NEEDED:.0%} of {needed / 1e6:,.0f} MB: the batch "
    )
    figures += f"has {budget.tokens:,} tokens instead of {n_tokens:,}"
    return hold(same == len(encoded) and budget.tokens < n_tokens, figures)


@finding(limit_s=SET_UP_S + 15)
def cuda_graphs_in_fp32_give_eager_tokens(machine: Machine) -> str:
    """With CUDA graphs, greedy and sampled tokens in fp32 are those of eager steps, also as rows join and leave."""
    engine, shares = _eager(machine, "fp32"), []
    for temperature in (0.0, 1.0):
        requests = _some(machine, temperature=temperature, top_p=0.9)
        expected = {each.encoded.request.id: each.tokens for each in _static(engine, _encoded(engine, requests))}
        found = {each.encoded.request.id: each.tokens for each in _answers(machine, "fp32", requests)}
        shares.append(sum(found[i] == expected[i] for i in expected) / len(requests))
    _by_graphs(machine, "fp32")[1].release()
    return hold(min(shares) == 1.0, f"{shares[0]:.0%} of greedy and {shares[1]:.0%} of sampled answers are equal")


@finding(limit_s=SET_UP_S + 15)
def cuda_graphs_in_bf16_answer_as_fp32(machine: Machine) -> str:
    """By fp32's scores, greedy tokens with CUDA graphs in bf16 are as good as the model's own in bf16."""
    said = _within(machine, lambda engine, encoded: _answers(machine, "bf16", [each.request for each in encoded]))
    _by_graphs(machine, "bf16")[1].release()
    return said


@finding(limit_s=SET_UP_S + 15)
def cuda_graphs_are_faster_and_hold_what_placement_keeps(machine: Machine) -> str:
    """CUDA graphs make static batches 1.3 times as fast and hold 0.5 GB at most; graphs and cache are freed."""
    from slurmgpu.llm.placement.needs import GRAPHS_BYTES, look_at
    from slurmgpu.llm.transformers_engine.cuda_graphs import GraphRunner

    rng, n = np.random.default_rng(0), machine.pick(192, 6)
    texts = _texts(machine, rng, rng.lognormal(3.7, 0.6, n).clip(8, machine.pick(200, 20)).astype(int).tolist())
    lengths = rng.lognormal(3.2, 1.0, n).clip(2, machine.pick(160, 8)).astype(int).tolist()
    (batches, choice), engine = _by_graphs(machine, "bf16"), _eager(machine, "bf16")
    encoded, before = _encoded(engine, _requests(texts, lengths)), _free(machine) if machine.on_gpu else 0

    def rate(generate: Callable[[Sequence[Encoded]], Iterator[Finished]]) -> float:
        return float(sum(lengths) / _seconds(machine, lambda: list(generate(encoded))))

    first, ours, eager = rate(batches.generate), rate(batches.generate), rate(engine._static.generate)
    memory = choice.slots
    if memory is None:
        raise NotHeld(f"the engine gave CUDA graphs up; eager {eager:,.0f} tokens/s")
    foretold = look_at(_options(_model(machine))).with_batch(memory.n_tokens).memory.cache
    figures = (
        f"tokens/s: eager {eager:,.0f}, graphs {ours:,.0f}, {ours / eager:.2f} times as fast, and {first:,.0f} with "
    )
    figures += f"the captures; cache {memory.n_bytes / 1e9:.3f} GB, predicted {foretold / 1e9:.3f}"
    good = abs(memory.n_bytes / foretold - 1) <= WEIGHTS_OFF
    runner, held = memory.runner, 0
    if isinstance(runner, GraphRunner):
        held = runner.held_bytes
        figures += f"; {runner.n_graphs} graphs, {held / 1e9:.2f} GB, captured in {runner.seconds:.1f} s"
    del memory, runner
    choice.release()
    engine._prefill.forget()
    if machine.on_gpu:
        left = before - _free(machine)
        figures += f"; {left / 1e9:.2f} GB are not free again"
        good &= 0 < held <= GRAPHS_BYTES and ours >= GRAPHS_GAIN * eager and left <= GRAPHS_BYTES / 2
    return hold(good, figures)


# Speed


def _by_hand(engine: TransformersEngine, texts: Sequence[str], lengths: Sequence[int], n_rows: int) -> None:
    """Greedy answers by `model.generate`, in batches of prompts sorted by their length."""
    import torch

    model, tokenizer = engine._loaded.model, engine._loaded.tokenizer
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(order), n_rows):
        rows = order[start : start + n_rows]
        batch = tokenizer([texts[i] for i in rows], padding=True, return_tensors="pt").to(model.device)
        batch.pop("token_type_ids", None)
        with torch.inference_mode():
            model.generate(**batch, max_new_tokens=max(lengths[i] for i in rows), do_sample=False, pad_token_id=0)


@finding(limit_s=SET_UP_S + 30)
def generation_is_faster_than_by_hand(machine: Machine) -> str:
    """Answers of 2 to 160 tokens come 10 times as fast as one by one, 1.2 times as fast as the best sorted batches."""
    rng, n = np.random.default_rng(0), machine.pick(192, 6)
    texts = _texts(machine, rng, rng.lognormal(3.7, 0.6, n).clip(8, machine.pick(200, 20)).astype(int).tolist())
    lengths = rng.lognormal(3.2, 1.0, n).clip(2, machine.pick(160, 8)).astype(int).tolist()
    engine = _engine(machine, precision="bf16", batching=machine.pick("continuous", "static"))
    few = machine.pick(4, 2)
    encoded = _encoded(engine, _requests(texts, lengths))
    _by_hand(engine, texts[:2], lengths[:2], 2)
    _static(engine, encoded[:2])
    rates = {"one by one": sum(lengths[:few]) / _seconds(machine, _by_hand, engine, texts[:few], lengths[:few], 1)}
    # The best batch by hand holds all prompts: three batches of a third take three times the steps, at half the rate.
    seconds = _seconds(machine, _by_hand, engine, texts, lengths, n)
    by_hand = rates[f"a batch of {n} by hand"] = sum(lengths) / seconds
    ours = {"static": sum(lengths) / _seconds(machine, _static, engine, encoded)}
    batches, choice = _by_graphs(machine, "bf16")
    list(batches.generate(encoded))  # captures what it needs
    if choice.uses_slots:
        ours["static by graphs"] = sum(lengths) / _seconds(machine, lambda: list(batches.generate(encoded)))
        choice.release()
    # Without flash attention, continuous batching takes ten times as long, and batching = "auto" does not choose it.
    if engine._continuous is not None and engine._continuous._flash is not None:
        _by_continuous(engine, encoded[:8])  # runs its self-check, and captures its graphs
        ours["continuous"] = sum(lengths) / _seconds(machine, _by_continuous, engine, encoded)
        engine._continuous.release()
    weights = sum(each.nbytes for each in engine._loaded.model.parameters())
    bound = sum(lengths) / (max(lengths) * weights / bandwidth(machine))
    rates |= ours
    best = max(ours.values())
    told = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    figures = f"tokens/s: {told}; memory bandwidth allows {bound:,.0f} ({best / bound:.0%}); "
    figures += f"{best / rates['one by one']:.1f} and {best / by_hand:.2f} times as fast"
    good = best >= ONE_BY_ONE * rates["one by one"] and best >= BY_HAND * by_hand
    return hold(good or not machine.on_gpu, figures)


def _seconds(machine: Machine, work: Callable[..., object], *arguments: Any) -> float:
    return seconds_of(lambda: work(*arguments), machine.device)


# Two models on a GPU, several GPUs, variants and other engines


@finding(limit_s=SET_UP_S)
def paths_and_their_scorer_share_a_card_as_placement_foretells(machine: Machine) -> str:
    """A model and a process reward model sample and score paths on one card, in the memory that placement predicts."""
    import torch

    from slurmgpu.llm.placement.needs import look_at, usable
    from slurmgpu.workload import Item, TaskContext
    from slurmgpu.workloads.collect.workload import Collect

    _forget(machine)
    shape, n_words = machine.pick(SHAPE_SMALL, TOY), machine.pick(N_WORDS, N_TOY_WORDS)
    scorer = _make_model(machine.folder / "scorer", machine.device, shape, n_words, "LlamaForTokenClassification")
    workload = Collect(
        model=str(_model(machine)),
        scorer={"model": str(scorer), "step_end": "w2"},
        prompt="{q}",
        step_delimiter=" w3",
        checker="exact",
        paths=machine.pick(16, 2),
        max_tokens=machine.pick(32, 8),
        batch_tokens=machine.pick(16_384, 512),
    )
    foretold = look_at(workload.options).memory.needed_on_each(1, tensor_parallel=False)
    before = _free(machine) if machine.on_gpu else 0
    workload.load(TaskContext(machine.device, min(1, machine.n_gpus), machine.folder))
    texts = _texts(machine, np.random.default_rng(4), [machine.pick(200, 10)] * 4)
    items = [Item(number, {"q": text, "answer": "w1"}) for number, text in enumerate(texts)]
    n_scored = 0
    for row in workload(items):
        if isinstance(row, Exception) or not np.isfinite(row["scores"]).all():
            raise NotHeld(f"a question has no finite scores: {row}")
        n_scored += len(row["scores"])
    figures, good = f"{n_scored} paths are scored", True
    if machine.on_gpu:
        used, total = before - _free(machine), torch.cuda.get_device_properties(machine.device).total_memory
        over, room = used - foretold, total - usable(total)
        figures += f"; {used / 1e9:.2f} GB, predicted {foretold / 1e9:.2f}, {over / 1e9:.2f} more; reserved for that "
        figures += f"{room / 1e9:.2f}"
        good = over <= room
    workload.engine.close()
    _forget(machine)
    return hold(good, figures)


@finding(limit_s=150)
def a_model_that_all_gpus_share_answers_as_on_one(machine: Machine) -> str:
    """A model that is split over GPUs by NCCL (on a CPU, gloo), or spread by layers, answers in fp32 as on one GPU."""
    import slurmgpu
    from slurmgpu.llm.transformers_engine.engine import TransformersEngine
    from slurmgpu.llm.transformers_engine.selfcheck import TOLERANCE
    from slurmgpu.report.report_file import last_report
    from slurmgpu.results import Merged

    if machine.n_gpus == 1:
        raise NotMeasured("there is one GPU")
    # On a CPU, two processes share it.
    shape = machine.pick(_shape(machine), {**TOY, "num_attention_heads": 8})
    n = machine.pick(_n_sharing(machine.n_gpus, shape), 2)
    folder = _model(machine) if machine.on_gpu else _make_model(machine.folder / "shared", "cpu", shape, N_TOY_WORDS)
    _forget(machine)
    requests, path = _some(machine), machine.folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"q": each.prompt.text}) + "\n" for each in requests), encoding="utf-8")
    settings = {"precision": "fp32", "batching": "static", "temperature": 0.0}
    keys = {
        "input": str(path),
        "run_dir": str(machine.folder / "shared-run"),
        "html": False,
        "workload": {"use": "generate"},
        "settings": {
            **settings,
            "model": str(folder),
            "prompt": "{q}",
            "tokens": True,
            "max_tokens": requests[0].sampling.max_tokens,
        },
        "resources": {"executor": "local", "gpus": n, "processes": "per-gpu", "device": machine.pick("auto", "cpu")},
    }
    report = last_report(slurmgpu.submit(keys).run)
    whole = report["complete"] and not report["errors"]
    hold(whole, f"{report['n_rows']} rows; {report['errors'][:1]}", logs_of(Path(report["run_dir"])))
    with Merged(Path(report["run_dir"]) / "merged.h5") as merged:
        found = [merged["tokens"][i].tolist() for i in range(len(requests))]
    reference = _engine_of(machine, folder, **settings)
    expected = {each.encoded.request.id: each for each in _static(reference, _encoded(reference, requests))}
    same = sum(list(expected[i].tokens) == tokens for i, tokens in enumerate(found))
    answers = [replace(expected[i], tokens=tuple(tokens)) for i, tokens in enumerate(found)]
    missed = max(_miss(reference, each, each.tokens) for each in answers)
    figures = f"{n} processes: {same} of {len(found)} answers are equal; tokens miss the best score by {missed:.1e}"
    hold(missed <= TOLERANCE["fp32"], figures)
    if machine.on_gpu:
        place = replace(_place(machine), gpus=n)
        spread = TransformersEngine(_options(folder, **settings), place)
        answers = _static(spread, _encoded(spread, requests))
        spread.close()
        missed = max(_miss(reference, each, each.tokens) for each in answers)
        n_parts = len(set(spread._loaded.model.hf_device_map.values()))
        figures += f"; by {missed:.1e} with its layers on {n_parts} GPUs, in one process"
        # The embedding and the head have no more than a GPU each, so the layers may need fewer than all of eight.
        hold(missed <= TOLERANCE["fp32"] and 1 < n_parts <= n, figures)
    return figures


def _n_sharing(n_gpus: int, shape: Mapping[str, int]) -> int:
    """How many GPUs can share a model of this shape: their number must divide the heads, also those of keys."""
    n_key_heads = shape["num_attention_heads"] // 4
    return max((each for each in (1, 2, 4, 8) if each <= n_gpus and n_key_heads % each == 0), default=0)


@finding(limit_s=SET_UP_S)
def quantised_variants_have_their_size(machine: Machine) -> str:
    """-8bit, -4bit and -fp8 load, answer, and have weights of the size that placement predicts, to 10 %."""
    from slurmgpu.llm.transformers_engine.quantization import package_for

    packages = {variant: package_for(variant, tensor_parallel=False) or "" for variant in ("8bit", "4bit", "fp8")}
    good, figures, n_tried = True, [], 0
    for variant, package in packages.items():
        if importlib.util.find_spec(package) is None:
            figures.append(f"-{variant} needs {package}, which is not installed")
            continue
        n_tried += 1
        try:
            figures.append(f"-{variant} {_quantised(machine, variant)}")
        except Exception as error:  # the others have figures
            if is_broken_cuda(error):
                raise
            good = False
            said = str(error) if isinstance(error, NotHeld) else described(error)
            figures.append(f"-{variant}: {said}".partition("\n")[0])
            logging.getLogger(__name__).warning("-%s", variant, exc_info=True)
        _forget(machine)
    if n_tried == 0:
        raise NotMeasured("; ".join(figures))
    return hold(good, "; ".join(figures))


def _quantised(machine: Machine, variant: str) -> str:
    """The size and the speed of a variant; NotHeld if answers or size are wrong."""
    from slurmgpu.llm.placement.needs import look_at
    from slurmgpu.llm.transformers_engine.engine import TransformersEngine

    options = _options(f"{_model(machine)}-{variant}", batching="static")
    before = _allocated(machine)
    engine = TransformersEngine(options, _place(machine))
    used, foretold = _allocated(machine) - before, look_at(options).memory.weights
    requests = _some(machine, n_tokens=8)
    list(engine.generate(requests[:1]))  # checks its graphs
    outputs: list[Output] = []
    seconds = _seconds(machine, lambda: outputs.extend(engine.generate(requests)))
    if errors := [output.error for output in outputs if output.error]:
        raise NotHeld(f"{len(errors)} errors: {errors[0]}")
    n_tokens = sum(len(output.tokens) for output in outputs)
    engine.close()
    good = n_tokens == sum(each.sampling.max_tokens for each in requests)
    good &= abs(used / foretold - 1) <= VARIANT_OFF or not machine.on_gpu
    return hold(good, f"{used / 1e9:.2f} GB, predicted {foretold / 1e9:.2f}, {n_tokens / seconds:,.0f} tokens/s")


@finding(limit_s=90)
def vllm_answers_as_fp32(machine: Machine) -> str:
    """vLLM's greedy answers in bf16 equal fp32's for at least half of the prompts; its speed is reported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name, as tests/vllm
        raise NotMeasured("vllm is not installed")
    from slurmgpu.llm.engines import open_engine

    requests = _some(machine)
    reference = _engine(machine, precision="fp32", batching="static")
    expected = {output.id: output.tokens.tolist() for output in reference.generate(requests)}
    _forget(machine)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    engine = open_engine(_options(_model(machine), engine="vllm"), _place(machine))
    answers = {output.id: output.tokens.tolist() for output in engine.generate(requests)}
    seconds = _seconds(machine, lambda: list(engine.generate(requests)))
    engine.close()
    same = sum(answers[i] == expected[i] for i in expected)
    rate = sum(map(len, answers.values())) / seconds
    return hold(same >= len(expected) / 2, f"{same} of {len(expected)} answers are equal, {rate:,.0f} tokens/s")


@finding(limit_s=75)
def placement_foretells_the_memory_of_a_large_model(machine: Machine) -> str:
    """8 billion parameters have the predicted size, and the planned batch fits what placement reserves."""
    import torch

    _forget(machine)
    if machine.on_gpu and torch.cuda.get_device_properties(machine.device).total_memory < LARGE_GPU_BYTES:
        raise NotMeasured(f"it needs a GPU of {LARGE_GPU_BYTES / 1e9:.0f} GB")
    shape, n_words = machine.pick(SHAPE_8B, TOY), machine.pick(N_WORDS, N_TOY_WORDS)
    folder = _make_hollow_model(machine.folder / "large", machine.device, shape, n_words)
    _forget(machine)
    return _foretold(machine, folder)


@finding()
def failed_captures_leave_cuda_as_it_was(machine: Machine) -> str:
    """A step that cannot be a CUDA graph raises its own error, frees its memory, and the next capture works."""
    machine.needs_gpu()
    import torch

    from slurmgpu.llm.transformers_engine.cuda_graphs import GraphRunner
    from slurmgpu.llm.transformers_engine.slots import Forward, Frame
    from slurmgpu.util.out_of_memory import free_memory

    device = torch.device(machine.device)
    table, ids = torch.randn(16, 16, device=device), torch.arange(2, device=device)[:, None]
    frame = Frame((2, 1), ids, ids, ids, ids[:, 0], ids[:, 0], torch.zeros(2, 16, device=device), None)

    def step(ids: torch.Tensor, *_: object) -> torch.Tensor:
        return table[ids] * 2

    def waits(*inputs: Any) -> torch.Tensor:
        float(table.sum())
        return step(*inputs)

    def raises(*inputs: Any) -> torch.Tensor:
        held = torch.zeros(machine.pick(BLOCK_BYTES, 8), dtype=torch.uint8, device=device)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{len(held)} bytes are not captured")
        return step(*inputs)

    def is_rejected(*inputs: Any) -> torch.Tensor:
        held = torch.zeros(machine.pick(BLOCK_BYTES, 8), dtype=torch.uint8, device=device)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)  # CUDA then rejects the whole graph
        return step(*inputs) + held[0]

    def run(forward: Forward) -> torch.Tensor:
        runner = GraphRunner(device, 1e-6, 1e-6)
        for _ in range(2):  # a capture, and a replay
            runner.run(frame, forward)
        return frame.logits.clone()

    run(step)
    free_memory()
    before, here, said = _free(machine), torch.cuda.current_stream(device), []
    wrong = [(waits, "synchronises with the GPU"), (raises, "are not captured"), (is_rejected, "capturing")]
    for forward, words in wrong:
        try:
            run(forward)
        except (RuntimeError, ValueError) as error:
            said.append(str(error).partition("\n")[0][:100])
            hold(words in str(error), f"{forward.__name__}: {error}")
        else:
            raise NotHeld(f"{forward.__name__}: was captured")
    found = run(step)
    free_memory()
    lost = before - _free(machine)
    figures = f"{'; '.join(said)}; {lost / 1e6:,.0f} MB are not free again"
    is_same = bool((found == step(ids)[:, -1]).all()) and torch.cuda.current_stream(device) == here
    return hold(is_same and lost < BLOCK_BYTES / 2, figures)


# The last one: on a slow host compiling takes what is left of the time.
@finding(limit_s=120)
def compiled_steps_pass_their_self_check(machine: Machine) -> str:
    """Steps with compile = true are correct in bf16 and faster than graphs of eager steps, or they are not used."""
    machine.needs_compiler()
    from slurmgpu.llm.transformers_engine.engine import TransformersEngine

    _forget(machine)
    shape, n_words = machine.pick(SHAPE_COMPILED, TOY), machine.pick(N_COMPILED, N_TOY_WORDS)
    folder = _make_model(machine.folder / "compiled", machine.device, shape, n_words)
    options = _options(folder, batching="static", compile=True, cuda_graphs=machine.pick("auto", True))
    engine = TransformersEngine(options, _place(machine))
    choice = engine._decodings
    verdict, reason = _check(machine, choice), choice.not_compiled
    engine.close()
    said = reason or ("compiled" if machine.on_gpu else "nothing is compiled on a CPU")
    good = verdict.reason is None and (reason is None or reason.startswith("they are not faster"))
    return hold(good, f"{said}; {verdict.reason or verdict}")
