"""What computes on a GPU, on a pretended one: tensors of two devices never meet, and nothing waits that need not."""

import contextlib
import importlib
import math

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from slurmgpu.influence import layered, per_example
from slurmgpu.influence.influences import Checkpoint
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.heads.engine import HeadEngine
from slurmgpu.llm.heads.head import HeadInput, read_head
from slurmgpu.llm.interface import sampling as drawing
from slurmgpu.llm.interface.engine import EngineOptions, Passage, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.settings import engine_options
from slurmgpu.llm.transformers_engine import continuous, graph_check
from slurmgpu.llm.transformers_engine.decoding_choice import DecodingChoice
from slurmgpu.training.loop import Training
from slurmgpu.training.ranks import Place as Rank
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.sync_schedule import SyncSchedule
from slurmgpu.workload import Item, TaskContext
from slurmgpu.workloads.embed.workload import Embed
from tests.gpu import embedding, llm
from tests.gpu.findings import Machine, NotHeld, NotMeasured, findings_of
from tests.gpu.influence import TOY, _graph, _influences
from tests.models.test_embed import save_encoder
from tests.support.influences import Little, examples, influences
from tests.support.pretended_card import Card, on_card
from tests.support.tiny_heads import make_head
from tests.support.tiny_models import make_llama
from tests.support.tiny_vision_models import make_llava, make_png

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["12+5=", "123+45=", "1+1=", "99+1=?100"]


@pytest.fixture
def card(monkeypatch):
    made = Card()
    made.install(monkeypatch)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as a training on a card sets it for its process
    monkeypatch.setattr(drawing, "_kernels", {torch.device("cuda:0"): None})  # there is no NVRTC for it
    with made:
        yield made


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


def test_the_pretended_card_refuses_what_a_card_does(card):
    there, here = torch.arange(6.0, device="cuda").reshape(2, 3), torch.ones(2, 3)
    assert (there.device, (there.T * 2.0).is_cuda, there.cpu().device) == (torch.device("cuda:0"), True, here.device)
    assert on_card(nn.Linear(2, 2).to("cuda").weight)
    assert torch.equal((there + torch.tensor(1.0)).cpu(), here.cumsum(1) + torch.tensor([[0], [3]]))
    for wrong in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: torch.where(there > 1, there, here),
        lambda: here[there[0].long()],
        lambda: there.scatter_(1, torch.zeros(2, 1, dtype=torch.int64), 0.0),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
        lambda: np.asarray(there),
    ):
        with pytest.raises((RuntimeError, TypeError), match=r"device"):
            wrong()


def test_the_pretended_card_counts_waits_and_does_later_what_nobody_waits_for(card):
    there = torch.arange(6.0, device="cuda")
    pinned = torch.empty(6, pin_memory=True)
    pinned.copy_(there, non_blocking=True)
    assert (pinned.sum(), sum(card.waits.values())) == (0, 0)
    assert float(there.sum()) == pinned.sum() == 15
    assert len(there[there > 2]) == len(there.nonzero()) - 2
    there[there > 2] = 0.0  # waits for nothing
    assert card.waits == {"__float__": 1, "mask": 1, "nonzero": 1}
    made = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(made):
        doubled = there.view(2, 3) * 2
        with pytest.raises(RuntimeError, match="capturing: item"):
            there.sum().item()
    there.fill_(1.0)
    made.replay()
    assert doubled.tolist() == [[2.0] * 3] * 2


def engine(folder, device, **settings):
    fixed = {"batching": "static", "precision": "fp32", "batch_tokens": 1024}
    return open_engine(engine_options(str(folder), {**fixed, **settings}), Place(device, gpus=int(device != "cpu")))


def asked(n_tokens, **sampling):
    each = Sampling(max_tokens=n_tokens, **sampling)
    return [Request(i, Prompt(text), each, key=i) for i, text in enumerate(TEXTS * 2)]


def answers(made, requests):
    return {each.id: each.tokens.tolist() for each in made.generate(requests)}


SAMPLED = {"temperature": 0.8, "top_k": 5, "min_p": 0.01}


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_an_engine_on_a_card_has_the_cpus_answers_and_waits_once_for_a_token(card, llama, cuda_graphs):
    def n_ends():
        # Without graphs transformers looks in each step whether there is padding.
        return card.n_ends - (0 if cuda_graphs else card.waits["__bool__"])

    ours, cpus = engine(llama, "cuda:0", cuda_graphs=cuda_graphs), engine(llama, "cpu")
    questions = [Question(i, Prompt(text), ("1", "12", "N")) for i, text in enumerate(TEXTS)]
    expected = {each.id: each.logprobs for each in cpus.score(questions)}
    for each in ours.score(questions):
        assert each.logprobs == pytest.approx(expected[each.id], abs=1e-4)
    n_waits = []
    for sampling in ({}, SAMPLED):
        answers(ours, asked(12, **sampling))  # captures its graphs
        for n_tokens in (4, 12):
            before = n_ends()
            found = answers(ours, asked(n_tokens, **sampling))
            n_waits.append(n_ends() - before)
            assert found == answers(cpus, asked(n_tokens, **sampling))
    assert ours._static._decodings.uses_slots == cuda_graphs
    assert [n_waits[1] - n_waits[0], n_waits[3] - n_waits[2]] == [8, 8]


def test_likelihoods_and_heads_on_a_card_are_the_cpus(card, llama, tmp_path):
    def likelihoods(device):
        passages = [Passage(i, Prompt(text)) for i, text in enumerate(TEXTS * 2)]
        return {each.id: each.logprobs for each in engine(llama, device).likelihoods(passages)}

    def scores(device):
        options = EngineOptions(find_model(str(make_head(tmp_path / device[:4]))), precision="fp32", batch_tokens=32)
        made = HeadEngine(options, Place(device, gpus=int(device != "cpu")), read_head(options.model, steps=False))
        return {each.id: each.logits for each in made.score([HeadInput(i, Prompt(t)) for i, t in enumerate(TEXTS * 2)])}

    for found in (likelihoods, scores):
        ours, cpus = found("cuda:0"), found("cpu")
        assert ours.keys() == cpus.keys() == {*range(8)}
        for number, values in cpus.items():
            assert values.size
            assert ours[number] == pytest.approx(values, abs=1e-4)


def test_a_model_of_images_on_a_card_has_the_cpus_answers_and_scores(card, tmp_path):
    prompts = [Prompt(text, images=(make_png(number),)) for number, text in enumerate(("What?", "Why is it?"))]
    requests = [Request(number, prompt, Sampling(max_tokens=6)) for number, prompt in enumerate(prompts)]
    questions = [Question(number, prompt, ("yes", "no")) for number, prompt in enumerate(prompts)]
    folder = make_llava(tmp_path)
    ours, cpus = (engine(folder, device, images="image") for device in ("cuda:0", "cpu"))
    assert answers(ours, requests) == answers(cpus, requests)
    expected = {each.id: each.logprobs for each in cpus.score(questions)}
    for each in ours.score(questions):
        assert each.logprobs == pytest.approx(expected[each.id], abs=1e-4)


@pytest.fixture
def _small_caches(monkeypatch):
    """Those of continuous batches, which else take the memory that the card says it has."""
    kept, few = continuous.settings, {"num_blocks": 64, "max_batch_tokens": 256}
    monkeypatch.setattr(continuous, "settings", lambda *given, **more: {**kept(*given, **more), **few})


@pytest.mark.usefixtures("_small_caches")
def test_continuous_batches_on_a_card_have_the_cpus_answers(card, llama):
    ours, cpus = engine(llama, "cuda:0", batching="continuous"), engine(llama, "cpu")
    for sampling in ({}, SAMPLED):
        assert answers(ours, asked(8, **sampling)) == answers(cpus, asked(8, **sampling))
    assert not ours._continuous.given_up
    ours.close()


def test_embeddings_are_begun_without_a_wait(card, tmp_path):
    items = [Item(i, {"text": text}) for i, text in enumerate(["a cat", "the dog sat on the mat", "a mat"])]
    found = {}
    for device in ("cpu", "cuda:0"):
        workload = Embed(model=save_encoder(tmp_path / device, "bert"))
        workload.load(TaskContext(device, int(device != "cpu"), tmp_path))
        card.waits.clear()
        begun = workload.prepare(items)
        assert not card.waits
        found[device] = [row["embedding"] for row in workload(items, begun)]
        assert card.waits == ({"event": 1} if device != "cpu" else {})
    assert np.array_equal(found["cpu"], found["cuda:0"])


class Digits:
    """Keeps, in `ends`, how often the card had been waited for when each step began."""

    def __init__(self, card):
        self.card, self.ends = card, []

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def data(self, split):
        draw = torch.Generator().manual_seed(len(split))
        rows = torch.randn(24, 4, generator=draw), torch.randint(3, (24,), generator=draw)
        return None if split == "test" else TensorDataset(*rows)

    def loss(self, model, batch):
        self.ends.append(self.card.n_ends)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"right": (model(batch[0]).argmax(1) == batch[1]).float()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_training_on_a_card_waits_for_no_step_and_goes_on(card, tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(SyncSchedule, "due", lambda *_, **__: False)  # else the first steps look how long they take
    settings = TrainingSettings(epochs=3, batch_size=4, seed=0, optimizer=optimizer, lr=0.01)
    curves = []
    for device in ("cpu", "cuda:0"):
        folder = tmp_path / device
        folder.mkdir()
        torch.manual_seed(0)
        first = Training(user := Digits(card), settings, Rank(device), folder).run()
        again = Training(Digits(card), settings, Rank(device), folder).run()
        assert (again.resumed, again.final) == (1, first.final)
        curves.append(first.curve)
        # One batch to begin with, then six steps and six batches of validation in each epoch; one step ends warming up.
        assert [len({*user.ends[start : start + 6]}) for start in (13, 25)] == [1, 1]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.parametrize("normalize", ["none", "cosine"])
def test_influences_on_a_card_are_the_cpus_and_wait_for_no_gradient(card, normalize):
    train, tests = _graph(TOY)
    found = []
    for device in ("cpu", "cuda:0"):
        made = _influences(TOY, train, device, "fp32", top_k=0, full="float64", normalize=normalize)
        made.of(tests[:1])
        card.waits.clear()
        found.append(made.of(tests).full)
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert card.waits["nonzero"] == 2


@pytest.mark.parametrize("of_module", [per_example.of_module, layered.of_module])
def test_influences_of_a_module_of_ones_own_are_the_cpus(card, of_module):
    train, tests = examples(8), examples(3, seed=1)
    found = []
    for device in ("cpu", "cuda:0"):
        module, there = Little().to(device), train.to(device)
        model = of_module(module, there[0] if of_module is per_example.of_module else there)
        found.append(influences(there, [Checkpoint(model, 1.0)]).of(tests).full)
    assert found[1] == pytest.approx(found[0], rel=1e-9)


NOT_HERE = {
    "the_usable_share_can_be_allocated",  # ends where memory does
    "a_kill_changes_little_without_deterministic_kernels",  # these three start processes
    "a_kill_changes_no_bit_of_deterministic_kernels",
    "a_group_of_all_gpus_sums_and_trains",
    "bf16_and_compilation_are_faster",  # these three compile for a real card
    "kernels_fill_the_time_of_steps",
    "compiled_steps_pass_their_self_check",
    "quantised_variants_have_their_size",  # these two have code of their own for CUDA
    "vllm_answers_as_fp32",
    "a_graph_is_trained_and_traced_as_by_the_cpu",  # a task asks the driver for its GPUs
}


MEASURED = {
    "the_sampler_is_cheap_and_the_cpus",  # these ten are about time, this one also about kernels
    "cuda_graphs_are_faster_and_hold_what_placement_keeps",
    "generation_is_faster_than_by_hand",
    "a_hundred_tests_on_a_part_of_fb15k237",
    "a_thousand_tests_on_fb15k237",
    "a_thousand_tests_on_fb15k237_in_tf32",
    "a_thousand_normalised_tests_on_fb15k237",
    "fused_optimizers_step_as_the_others_do",
    "the_loop_costs_little_over_a_bare_one",
    "checkpoints_cost_little",
    "the_batch_that_fits_is_found",  # these two are about memory, which the card always has
    "a_batch_that_is_out_of_memory_is_halved",
    "tf32_is_within_its_bound",  # in these two the CPU multiplies in fp32
    "fp16_trains_as_the_cpu_does_in_fp32",
}
"""The claims that need not hold on a pretended card."""


class ToyMachine(Machine):
    """A machine with a GPU, on which all has the size for a CPU."""

    def pick(self, gpu, cpu):
        return gpu if isinstance(gpu, str) else cpu


@pytest.mark.parametrize("part", ["llm", "influence", "training"])
@pytest.mark.usefixtures("_small_caches")
def test_the_proofs_code_for_a_gpu_runs(part, card, tmp_path, monkeypatch):
    """A run on a CPU does not come to it. What is measured need not hold, all else must."""
    # Else how busy this machine is decides on graphs.
    monkeypatch.setattr(graph_check.Verdict, "gain", 2.0)
    monkeypatch.setitem(DecodingChoice._check.__kwdefaults__, "limit_s", math.inf)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):  # a PyTorch for CPUs has neither
        monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
    for name, toy in (("SHAPE_1B", llm.TOY), ("SHAPE_8B", llm.TOY), ("N_WORDS", llm.N_TOY_WORDS)):
        monkeypatch.setattr(llm, name, toy)
    machine = ToyMachine("cuda:0", 1, tmp_path)
    for each in findings_of(importlib.import_module(f"tests.gpu.{part}")):
        if each.name not in NOT_HERE:
            with contextlib.suppress(NotMeasured, *([NotHeld] if each.name in MEASURED else [])):
                each.function(machine)
    llm._forget(machine)


def test_what_a_call_of_embed_waits_for_is_timed_on_a_card(card, tmp_path):
    """The part `embedding` itself starts tasks, which are processes of their own."""
    said = embedding._preparing(ToyMachine("cuda:0", 1, tmp_path))
    assert all(step in said for step in ("tokenising", "of which in Python", "launching kernels"))
