"""Steps in memory that stays where it is give today's tokens, and whatever is wrong with them costs none.

There is no GPU: what a graph would replay is called again in its place, in the same memory. `GraphRunner` itself runs
on stand-ins of `torch.cuda`.
"""

import contextlib
import gc
import itertools
import logging
import math
import os
import random
import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.batching import MOST_ROWS, Load, n_that_fit
from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Question, Request, Sampling, Structure
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.settings import engine_options
from slurmgpu.llm.transformers_engine import (
    caches,
    compiled_step,
    continuous,
    cuda_graphs,
    decoding_choice,
    graph_check,
    selfcheck,
    slots,
    static,
)
from slurmgpu.llm.transformers_engine.graph_marks import ENDED, Marks
from slurmgpu.llm.transformers_engine.prefill import Prefilled
from slurmgpu.llm.transformers_engine.rows import Chosen
from slurmgpu.llm.transformers_engine.selfcheck import miss, spacing
from slurmgpu.llm.transformers_engine.slots import SlotRows, Slots, column_size, row_size, tokens_of
from tests.support.eager_runner import EagerRunner
from tests.support.nightly import by_night
from tests.support.tiny_models import CHARACTERS, SPECIAL, _save, _sizes, make_gpt_oss, make_llama, make_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

BEGINNING = "the same long beginning of some of these prompts: "


def make(model, config, **sizes):
    """A tiny model of any kind, by the names of its classes."""
    import transformers

    def write(folder):
        torch.manual_seed(0)
        return _save(getattr(transformers, model)(getattr(transformers, config)(**sizes)), folder, None)

    return write


WORDS = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = _sizes(num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2, sliding_window=None)
OTHER = {"n_layer": 2, "n_head": 4, "initializer_range": 0.2, **WORDS}
MAKERS = {
    "llama": make_llama,
    "qwen3": make_qwen3,
    "mixtral": make("MixtralForCausalLM", "MixtralConfig", **EXPERTS),  # experts
    "gpt2": make("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_positions=512, **OTHER),  # learned positions
    "bloom": make("BloomForCausalLM", "BloomConfig", hidden_size=64, **OTHER),  # ALiBi
    "gpt_oss": make_gpt_oss,
}


@pytest.fixture(autouse=True)
def _own_marks(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


SHORT = {"N_STEPS": 2, "N_ROUNDS": 2, "N_TIMED": 1}
N_MORE = 2 * SHORT["N_STEPS"] + SHORT["N_ROUNDS"] * SHORT["N_TIMED"]
"""The steps of a size in a check of these tests."""


@pytest.fixture(autouse=True)
def _short_checks(monkeypatch):
    """Nearly every engine here begins with a check, and its steps were a third of the time."""
    for name, n in {**SHORT, "N_MORE": N_MORE}.items():
        monkeypatch.setattr(graph_check, name, n)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, root = {}, tmp_path_factory.mktemp("models")

    def get(kind="llama"):
        if kind not in made:
            made[kind] = MAKERS[kind](root / kind)
        return made[kind]

    return get


def engine(folder, **options):
    notes = {}
    settings = {"precision": "fp32", "batch_tokens": 2500, **options}
    made = open_engine(EngineOptions(find_model(str(folder)), **settings), Place("cpu", note=notes.__setitem__))
    made.notes = notes
    return made


def in_slots(folder, make_runner=EagerRunner, **options):
    """An engine with batches in slots, which needs not be faster than today's here."""
    made = engine(folder, **{"cuda_graphs": True} | options)
    made.verdict = made._decodings.use(lambda _: make_runner())
    return made


def requests(n=24, seed=0, **sampling):
    """Requests of all lengths, of which some begin alike and some have the same prompt."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices(CHARACTERS, k=rng.randint(3, 60))) for _ in range(n)]
    texts[: n // 5] = [BEGINNING + text for text in texts[: n // 5]]
    texts[-1] = texts[-2]
    keys = enumerate(texts)
    return [
        Request(i, Prompt(text), Sampling(**{"max_tokens": rng.randint(1, 50), **sampling}), key=i) for i, text in keys
    ]


class Answer(tuple):
    """Equal to another one whose log-probabilities are the same but for rounding."""

    __hash__ = None

    def __new__(cls, tokens, finish_reason, logprobs):
        made = super().__new__(cls, (tokens, finish_reason))
        made.logprobs = logprobs
        return made

    def __eq__(self, other):
        return tuple(self) == tuple(other) and self.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def answers(engine, asked):
    found = {}
    for output in engine.generate(asked):
        assert output.id not in found
        assert output.error is None
        logprobs = () if output.logprobs is None else output.logprobs.tolist()
        found[output.id] = Answer(output.tokens.tolist(), output.finish_reason, logprobs)
    assert sorted(found) == [each.id for each in asked]
    return found


WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "logprobs": True},
    "stopped": {"temperature": 1.0, "stop": ("a", "9")},
    "structured": {"temperature": 1.0, "structure": Structure("regex", "[0-9]{2,30}[a-z]")},
}


# The same tokens


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("llama", way) for way in WAYS),
        *((kind, "sampled") for kind in ("mixtral", "bloom")),
        *map(by_night, ("qwen3", "gpt2", "qwen3", "mixtral", "gpt2", "bloom"), ("sampled",) * 2 + ("greedy",) * 4),
    ],
)
def test_tokens_are_those_of_a_cache_that_grows(folder, kind, way):
    asked = requests(**WAYS[way])
    ours = in_slots(folder(kind))
    assert ours.verdict.reason is None
    assert answers(ours, asked) == answers(engine(folder(kind)), asked)
    assert ours._decodings.uses_slots
    assert ours.notes == {"cuda_graphs": 1}


@pytest.mark.parametrize("batch_tokens", [300, pytest.param(1000, marks=pytest.mark.nightly), 30_000])
def test_tokens_do_not_depend_on_the_size_of_the_slots(folder, batch_tokens):
    """The smallest have no room for the longest request, which is computed as today; no batch outgrows its slots."""
    asked = requests(temperature=1.0)
    ours = in_slots(folder(), batch_tokens=batch_tokens)
    assert answers(ours, asked) == answers(engine(folder()), asked)
    sizes = [rows * columns for rows, columns in ours._decodings.slots._frames]
    assert max(sizes) <= batch_tokens
    assert len({columns for _, columns in ours._decodings.slots._frames}) > 1


def test_a_row_that_has_ended_moves_on_no_further_than_it_may(folder):
    """It waits for others to end; its columns would else outgrow the slots, and its positions the model."""
    ours = in_slots(folder(), batch_tokens=64 * 96)
    asked = [Request(i, Prompt("1" * 40), Sampling(max_tokens=2 if i < 7 else 50)) for i in range(64)]
    assert answers(ours, asked) == answers(engine(folder(), batch_tokens=64 * 96), asked)
    assert {columns for rows, columns in ours._decodings.slots._frames if rows == 64} == {64, 96}


def test_answers_that_are_asked_for_before_others_are_taken_have_rows_of_their_own(folder):
    ours, asked = in_slots(folder()), requests(12, temperature=1.0)
    first = ours.generate(asked)
    found = {output.id: output.tokens.tolist() for output in itertools.islice(first, 2)}
    expected = answers(engine(folder()), asked)
    assert answers(ours, asked) == expected
    found |= {output.id: output.tokens.tolist() for output in first}
    assert found == {number: answer[0] for number, answer in expected.items()}
    assert ours._decodings.uses_slots


def test_no_load_is_planned_for_which_the_slots_have_no_room(folder):
    """The budget of a batch that goes on may grow."""
    ours = engine(folder())
    rows = SlotRows(Slots(ours._prefill.read([(5, 6)], 9), 800, EagerRunner()), ours._prefill, 2048)
    assert rows.size(Load(8, 60, 36)) == 8 * 96
    assert n_that_fit(Load(7, 60, 60), [(60, 60)], 2000, rows.size)[0] == 0
    assert n_that_fit(Load(3, 60, 60), [(60, 60)], 2000, rows.size)[0] == 1


def test_what_a_row_leaves_behind_reaches_no_other(folder):
    """Also not as 0 times a number that is none."""
    ours = engine(folder())
    read = lambda n_rows, length: ours._prefill.read([(3,) * length] * n_rows, 99)  # noqa: E731
    with torch.inference_mode():
        memory = Slots(read(1, 5), 4 * 128, EagerRunner())
        for flat in itertools.chain(memory._mask[None], *memory._flat):
            flat.fill_(float("nan") if flat.is_floating_point() else 1)
        rows = SlotRows(memory, ours._prefill, 2048)
        rows.join(read(3, 20), [60] * 3)
        for _ in range(50):
            assert rows.step(torch.tensor([5, 6, 7])).isfinite().all()
        assert rows._n_columns == 96
        for layer in memory.frame(4, 96).cache.layers:
            layer.keys[1].fill_(float("inf"))
            layer.values[1].fill_(float("nan"))
        assert rows.keep([0, 2]) == [0, 2]
        rows.join(read(1, 60), [10])
        for _ in range(10):
            assert rows.step(torch.tensor([5, 6, 7])).isfinite().all()


def test_sizes_hold_what_they_must_and_not_much_more():
    for n in range(1, MOST_ROWS + 1):
        assert n <= row_size(n) <= max(2 * n, n + 1)
    for n in range(1, 9000):
        assert n <= column_size(n) <= max(64, 1.5 * n + 1)
        assert column_size(n) % 32 == 0
    assert [column_size(n) for n in (1, 64, 65, 96, 97, 129, 193)] == [64, 64, 96, 96, 128, 192, 256]
    assert [column_size(n) for n in (257, 513, 1025, 2049)] == [320, 640, 1152, 2304]
    assert tokens_of(Load(5, 60, 40)) == 6 * 128


@pytest.mark.parametrize("budget", [8192, 18_728, 65_536])
def test_a_batch_in_slots_has_nearly_as_many_rows_as_one_that_grows(budget):
    """By their sizes alone, slots would lose in rows what a step gains: what they round up is room for others."""
    shares = []
    for columns in (2**power // 4 for power in range(8, 14)):
        for length in (columns - columns // 7, columns, columns + 1):
            lengths = [(length // 2, length - length // 2)] * MOST_ROWS
            ours, theirs = (n_that_fit(Load(), lengths, budget, *size)[0] for size in ([tokens_of], []))
            shares.append(ours / theirs)
    assert min(shares) > 0.6
    assert sum(shares) / len(shares) > 0.84


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_a_step_neither_reads_a_value_nor_copies_from_the_host(kind, attention):
    """A graph cannot: on the device `meta` there are no values, and all tensors of each operation must be there."""
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class OnDevice(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            tensors = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)]
            assert {each.device.type for each in tensors} == {"meta"}, function
            return found

    config = getattr(transformers, f"{kind}Config")(**(EXPERTS if kind == "Mixtral" else _sizes()), dtype="bfloat16")
    config._attn_implementation = attention
    with torch.device("meta"), torch.inference_mode():
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config).eval().bfloat16()
        like = SimpleNamespace(keys=torch.zeros(1, 2, 1, 16).bfloat16(), values=torch.zeros(1, 2, 1, 16).bfloat16())
        cache = SimpleNamespace(layers=[like] * 2)
        memory = Slots(Prefilled(cache, torch.zeros(1, 1), torch.zeros(1, 9).bfloat16()), 4 * 64, EagerRunner())
        frame = memory.frame(4, 64)
        inputs = {"input_ids": frame.ids, "attention_mask": frame.mask, "position_ids": frame.positions}
        inputs[caches.keyword_of(model)] = frame.cache
        with OnDevice():
            logits = model(**inputs, use_cache=True, logits_to_keep=1).logits
    assert logits.shape == (4, 1, WORDS["vocab_size"])


# The self-check


class Wrong(EagerRunner):
    """A runner that does something wrong from its `at`-th call on."""

    def __init__(self, at, wrong):
        self.calls, self.at, self.wrong = itertools.count(1), at, wrong

    def run(self, frame, forward):
        frame.compute(forward)
        if next(self.calls) >= self.at:
            self.wrong(frame)


def one_wrong_logit(frame):
    frame.logits[0, 7] += 0.5


def fail(frame):
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def lose_memory(frame):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("at", "wrong", "reason"),
    [
        (1, fail, "SlotsError: RuntimeError: operation not permitted when stream is capturing"),
        (3, fail, "SlotsError: RuntimeError: operation not permitted when stream is capturing"),
        (N_MORE + 2, lose_memory, "SlotsError: OutOfMemoryError: CUDA out of memory"),
        (3, one_wrong_logit, "with 1 rows scores are off by "),
        (N_MORE + 2, one_wrong_logit, "rows scores are off by "),
        (5, lambda frame: frame.logits.fill_(float("nan")), "scores are off by inf of their range"),
    ],
)
def test_steps_that_are_wrong_or_fail_are_refused_and_hold_no_memory(folder, caplog, monkeypatch, at, wrong, reason):
    held = []
    make_slots = Slots.__init__
    monkeypatch.setattr(
        Slots, "__init__", lambda self, *args: held.append(weakref.ref(self)) or make_slots(self, *args)
    )
    ours = in_slots(folder(), lambda: Wrong(at, wrong))
    assert reason in ours.verdict.reason
    assert f"no CUDA graphs, computing tokens eagerly: {ours.verdict.reason}" in caplog.text
    assert ours.notes == {"cuda_graphs": 0}
    gc.collect()
    assert [each() for each in held] == [None]
    assert answers(ours, requests(8)) == answers(engine(folder()), requests(8))
    assert len(held) == 1


def test_a_replay_is_held_to_what_a_call_gives_in_the_same_memory(folder):
    """In bf16 rounding makes up for more between other kernels, and for nothing between the same ones."""

    def slightly_wrong(frame):
        wanted = frame.logits[0].float()
        frame.logits[0, wanted.argmin()] += 0.004 * (wanted.max() - wanted.mean())

    verdict = in_slots(folder(), lambda: Wrong(4, slightly_wrong), precision="bf16").verdict
    assert "of their range from the same step when it is called" in verdict.reason
    assert in_slots(folder(), precision="bf16").verdict.reason is None


def test_a_model_that_gives_other_scores_each_time_is_held_to_that(folder, monkeypatch):
    """Such as one whose kernels add in any order: a replay may be off as two calls are, but not by much more."""
    ours, drawn = engine(folder(), precision="bf16", cuda_graphs=True), torch.Generator().manual_seed(0)
    real = ours._prefill.forward

    def forward(*args, **more):
        logits = real(*args, **more)
        return logits * (1 + 0.01 * torch.rand(logits.shape, generator=drawn))

    monkeypatch.setattr(ours._prefill, "forward", forward)
    verdict = ours._decodings.use(lambda _: EagerRunner())
    assert verdict.reason is None
    assert max(each.flipped for each in verdict.trials) > graph_check.REPLAYED
    reason = ours._decodings.use(lambda _: Wrong(4, one_wrong_logit)).reason
    assert "the same step when it is called" in reason


class Flips(EagerRunner):
    """A runner whose rows get other scores now and then: every third call, one row in two.

    The score nearest to zero is moved by a share of the greatest: bf16 has the bits to move it by that much and no
    more, whatever noise the kernels of this CPU have.
    """

    def __init__(self, off):
        self.off, self.calls = off, itertools.count()

    def run(self, frame, forward):
        frame.compute(forward)
        call = next(self.calls)
        if call % 3 == 0:
            sizes = frame.logits.abs()
            for row in range(call % 2, len(sizes), 2):
                frame.logits[row, sizes[row].argmin()] += self.off * sizes[row].max()


def test_a_replay_that_differs_now_and_then_is_done_again(folder):
    """As an H200 adds some sums in another order once in ten steps: rows that have agreed once are the same steps."""
    ours = engine(folder(), precision="bf16", cuda_graphs=True)
    verdict = ours._decodings.use(lambda _: Flips(0.003))
    assert verdict.reason is None
    assert max(each.replayed for each in verdict.trials) <= graph_check.REPLAYED
    assert max(each.flipped for each in verdict.trials) > graph_check.REPLAYED
    assert "the same step when it is called once" in ours._decodings.use(lambda _: Flips(5.0)).reason


@pytest.mark.parametrize("least_rows", [0, 2])
def test_a_replay_that_writes_nothing_is_refused(folder, least_rows):
    """As a graph whose addresses were given to others: always, or that of one row after one of more."""

    class Dead(EagerRunner):
        sizes = []

        def run(self, frame, forward):
            self.sizes.append(frame.size[0])
            if least_rows <= max(self.sizes) and frame.size[0] == min(self.sizes) and len(self.sizes) > 1:
                return
            frame.compute(forward)

    assert "the same step when it is called" in in_slots(folder(), Dead).verdict.reason


def test_scores_far_from_zero_are_rounded_coarsely():
    """As those of GPT-2 in bf16, whose neighbouring numbers are 0.5 apart at -100."""
    scores = torch.tensor([[-128.0, -120.0, -torch.inf], [0.0, 1.0, -1.0]])
    assert spacing(scores.bfloat16()) == 1 / 4  # 1, which is 2**-7 of 128, in a range of 4
    assert spacing(scores) == 2.0**-16 / 4


def test_slots_are_held_to_the_noise_between_batches_of_the_same_rows(folder, monkeypatch):
    """A model that rounds coarsely, in another way for each number of rows and columns; then one that does not."""
    ours = engine(folder(), precision="bf16", cuda_graphs=True)
    real = ours._prefill.forward

    def forward(ids, mask, positions, cache, *args, **more):
        logits = real(ids, mask, positions, cache, *args, **more)
        drawn = torch.Generator().manual_seed(9999 * len(ids) + cache.layers[0].keys.shape[2])
        return logits * (1 + 0.08 * torch.rand(logits.shape, generator=drawn))

    monkeypatch.setattr(ours._prefill, "forward", forward)
    verdict = ours._decodings.use(lambda _: EagerRunner())
    assert verdict.reason is None
    assert max(each.off for each in verdict.trials) > 0.05
    assert all(0.05 < each.bound <= 0.2 for each in verdict.trials)
    monkeypatch.setattr(graph_check._Halves, "miss", lambda *_: 0.0)
    reason = ours._decodings.use(lambda _: EagerRunner()).reason
    assert "of their range from rows in a cache that grows, and rounding explains at most 0.01" in reason
    assert [selfcheck.bound_of(noise, 0.01) for noise in (0.0, 0.02, torch.inf)] == [0.01, 0.05, 0.2]


def test_a_graph_is_tried_once_more_after_larger_ones(folder):
    """What it reads may have been replaced for them."""

    class Stale(EagerRunner):
        sizes = []

        def run(self, frame, forward):
            frame.compute(forward)
            self.sizes.append(frame.size)
            if frame.size[0] == 1 < max(self.sizes)[0]:
                frame.logits[0, 7] += 0.5

    assert in_slots(folder(), Stale).verdict.reason.startswith("with 1 rows scores are off by ")
    assert max(Stale.sizes)[0] == 32


def test_steps_that_take_longer_are_refused_unless_they_are_asked_for(folder, monkeypatch):
    """By a clock of the test's: a step of the growing cache takes a second, one in slots two; then the other way."""
    now = [0.0]
    seconds = {"GrowingRows": 0.1, "SlotRows": 0.2}
    for kind in (graph_check.GrowingRows, SlotRows):

        def step(self, latest, kind=kind, real=kind.step):
            now[0] += seconds[kind.__name__]
            return real(self, latest)

        monkeypatch.setattr(kind, "step", step)
    monkeypatch.setattr(decoding_choice.DecodingChoice, "_clock", lambda self: now[0])
    monkeypatch.setattr(decoding_choice.graph_check, "SIZES", ((1, 40),))
    ours = engine(folder())
    verdict = ours._decodings.use(lambda _: EagerRunner())
    assert verdict.reason.startswith("they are not faster: 1 x 40 tokens: off by ")
    assert verdict.gain == pytest.approx(0.5)
    assert ours.notes == {"cuda_graphs": 0}
    assert in_slots(folder()).verdict.gain == pytest.approx(0.5)  # by cuda_graphs = true
    seconds |= {"SlotRows": 0.05}
    assert in_slots(folder(), cuda_graphs="auto").verdict.reason is None
    now[0], seconds["SlotRows"] = 0.0, 10.0
    assert in_slots(folder()).verdict.reason == "the self-check took longer than 30 s"


def test_the_check_fits_small_batches_and_short_contexts(folder):
    assert in_slots(folder(), batch_tokens=100).verdict.trials[0].longest == 25
    assert in_slots(folder(), batch_tokens=40).verdict.reason == "batches of 40 tokens are too small"
    assert {each.longest for each in in_slots(folder(), max_context=N_MORE + 9).verdict.trials} == {9}
    large = in_slots(folder(), batch_tokens=30_000)
    assert [(each.n_rows, each.longest) for each in large.verdict.trials] == [
        *((1, 40), (32, 60), (4, 1500)),
        (1, 40),  # again, after larger ones
    ]


def test_a_model_with_other_layers_is_refused_by_the_check_as_well(folder):
    assert "SlotsError" in in_slots(folder("gpt_oss")).verdict.reason


def test_scores_that_differ_are_measured_by_their_range():
    wanted = torch.tensor([[0.0, 1.0, 2.0, 1.0], [0.0, 10.0, 0.0, 10.0]])
    assert miss(wanted, wanted) == 0
    assert miss(wanted, wanted + torch.tensor([[0.1, 0, 0, 0]])) == pytest.approx(0.1)
    without = torch.tensor([[-torch.inf, 1.0, 2.0, 0.0]])
    assert miss(without, without) == 0
    assert miss(without, without + 0.5) == 0.5
    assert miss(without, without.nan_to_num()) == torch.inf
    assert miss(wanted, wanted * torch.nan) == torch.inf
    many = wanted.repeat(50, 1)
    many[77, 2] += 0.1
    assert miss(wanted.repeat(50, 1), many) == pytest.approx(0.02)


# What goes wrong later


LATER = [(1, lose_memory), (20, fail), (50, fail)]


@pytest.mark.parametrize(
    ("at", "wrong"),
    [(1, fail), (30, lose_memory), *(pytest.param(*each, marks=pytest.mark.nightly) for each in LATER)],
)
def test_steps_that_fail_later_cost_no_answer(folder, caplog, wrong, at):
    runners = []

    def make_runner():
        runners.append(Wrong(at if runners else math.inf, wrong))
        return runners[-1]

    ours, asked = in_slots(folder(), make_runner), requests(temperature=1.0)
    assert answers(ours, asked) == answers(engine(folder()), asked)
    assert "CUDA graphs failed, computing tokens eagerly from now on: " in caplog.text
    assert "out of memory with a batch" not in caplog.text  # the batch had its memory without the slots
    assert ours.notes == {"cuda_graphs": 0}
    assert ours._decodings.slots is None
    assert len(runners) == 2  # the check's and one


@pytest.mark.parametrize("place", ["Slots.__init__", "Prefill._read"])
def test_memory_that_runs_out_beside_the_slots_costs_them_first(folder, caplog, monkeypatch, place):
    ours, asked = in_slots(folder()), requests(temperature=1.0)
    name, _, method = place.partition(".")
    kind = {"Slots": Slots, "Prefill": type(ours._prefill)}[name]
    real, calls = getattr(kind, method), itertools.count(1)

    def work(self, *args):
        if next(calls) == 1:
            lose_memory(None)
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kind, method, work)
        found = answers(ours, asked)
    assert found == answers(engine(folder()), asked)
    assert "CUDA graphs failed, computing tokens eagerly from now on: out of memory" in caplog.text
    assert ours._static._budget.tokens == 2500


def test_a_load_beyond_the_slots_has_their_memory(folder):
    ours = in_slots(folder(), batch_tokens=300)
    answers(ours, requests(3, max_tokens=5))
    memory = weakref.ref(ours._decodings.slots)
    found = answers(ours, [Request(0, Prompt("1" * 290), Sampling(max_tokens=50))])
    assert memory() is None
    assert len(found[0][0]) > 0
    assert ours._decodings.uses_slots


def test_scores_have_the_memory_of_the_slots(folder):
    ours = in_slots(folder())
    expected = answers(ours, requests(8))
    memory = weakref.ref(ours._decodings.slots)
    list(ours.score([Question(0, Prompt("1+1"), ("a", "bc"))]))
    assert memory() is None
    assert answers(ours, requests(8)) == expected
    ours.close()
    assert ours._decodings.slots is None


# A process that ended


def test_a_process_that_ended_in_the_check_is_remembered_by_the_next(folder, caplog):
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            in_slots(folder(), lambda: Wrong(2, lambda frame: os._exit(7)))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ours = in_slots(folder())
    assert ours.verdict.reason == ENDED
    assert answers(ours, requests(8)) == answers(engine(folder()), requests(8))


def test_a_mark_holds_while_its_process_has_ended_and_for_an_hour(tmp_path, monkeypatch):
    marks = Marks("model", "versions")
    assert marks.found() is None
    with marks.trying():
        assert marks.found() is None  # this process lives
    assert marks.found() is None
    marks.leave("they broke CUDA's context")
    assert marks.found() == "they broke CUDA's context"
    assert Marks("another model", "versions").found() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert Marks("model", "versions").found() is None
    monkeypatch.delenv("SLURM_JOB_ID")
    [path] = tmp_path.glob("slurmgpu-graphs-*/*")
    os.utime(path, (path.stat().st_mtime - 3700,) * 2)
    assert marks.found() is None
    assert not path.exists()


def test_a_folder_that_others_may_write_is_not_trusted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    marks = Marks("model")
    marks.leave("something")
    [folder] = tmp_path.iterdir()
    folder.chmod(0o777)
    assert marks.found() is None
    with marks.trying():
        pass
    assert "is not a folder that only you may write" in caplog.text


@pytest.fixture
def broken(monkeypatch):
    """Has something as soon as CUDA is broken, when it neither waits for its work nor frees memory."""
    found = []

    def use_cuda(*_):
        if found:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 0.0

    monkeypatch.setattr(decoding_choice.DecodingChoice, "_clock", use_cuda)
    for module in (decoding_choice, static):
        monkeypatch.setattr(module, "free_memory", use_cuda)
    return found


@pytest.mark.parametrize("is_in_check", [True, False])
def test_broken_cuda_ends_the_worker_and_the_next_does_without(folder, broken, is_in_check):
    """An error that stays is raised, for the worker to be started again, which finds the mark."""
    runners = []

    def make_runner():
        runners.append(Wrong(5 if is_in_check or runners else -1, lambda frame: (broken.append(1), fail(frame))))
        return runners[-1]

    with pytest.raises(RuntimeError, match="CUDA error: an illegal memory access"):
        answers(in_slots(folder(), make_runner), requests(8))
    broken.clear()
    ours = in_slots(folder())
    assert "they broke CUDA's context: " in ours.verdict.reason
    assert "RuntimeError: operation not permitted" in ours.verdict.reason
    assert answers(ours, requests(8)) == answers(engine(folder()), requests(8))


def test_a_fault_of_a_replay_that_shows_only_later_is_remembered_as_well(folder, monkeypatch, broken):
    """A replay does not wait for the GPU: what reads its scores gets the error."""
    ours, real, calls = in_slots(folder()), Chosen.read, itertools.count(1)
    happens = [lambda: None]

    def read(self):
        if next(calls) == 5:
            happens[0]()
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return real(self)

    monkeypatch.setattr(Chosen, "read", read)
    with pytest.raises(RuntimeError, match="CUDA error"):
        answers(ours, requests(8))
    assert in_slots(folder()).verdict.reason is None  # the error was of the items, and CUDA is well
    calls, happens[0] = itertools.count(1), lambda: broken.append(1)
    with pytest.raises(RuntimeError, match="CUDA error"):
        answers(in_slots(folder()), requests(8))
    broken.clear()
    reason = "they broke CUDA's context: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert in_slots(folder()).verdict.reason == reason


@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        ({}, "rssrsrsrr"),
        ({"structure": Structure("regex", "[0-9]{9}")}, "rsrsrsrsr"),
    ],
    ids=["free", "structured"],
)
def test_a_step_begins_before_the_tokens_of_the_last_are_known(folder, monkeypatch, sampling, steps):
    ours, done = in_slots(folder()), []
    step, read = SlotRows.step, Chosen.read
    monkeypatch.setattr(SlotRows, "step", lambda *given: done.append("s") or step(*given))
    monkeypatch.setattr(Chosen, "read", lambda *given: done.append("r") or read(*given))
    [answer] = ours.generate(requests(2, max_tokens=5, **sampling)[:1])
    assert len(answer.tokens) == 5
    assert "".join(done) == steps


# When graphs are tried


CARD = SimpleNamespace(type="cuda")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": SimpleNamespace(type="cpu")}, "the model is on the CPU"),
        ({"switch": object()}, "its adapters change from item to item"),
        ({"kind": "gpt_oss"}, "its cache has layers other than full attention: GrowingSlidingLayer"),
        ({"hf_device_map": {"a": 0, "b": 1}}, "its layers are on 2 devices"),
        ({"is_loaded_in_8bit": True}, "8-bit weights of bitsandbytes synchronise with the GPU in each layer"),
        (
            {"attention": "flash_attention_2"},
            "its attention (flash_attention_2) does not support padding to a fixed size",
        ),
        ({"world_size": 2}, "it is split over 2 processes"),
        ({"has_other": True}, "another model on the same GPU needs the memory that graphs keep"),
        ({}, None),
    ],
)
def test_a_model_is_tried_if_all_of_its_cache_is_full_attention_on_one_gpu(folder, changes, reason):
    model = engine(folder(changes.pop("kind", "llama")))._loaded.model
    place = Place("cuda:0", gpus=1, world_size=changes.pop("world_size", 1))
    loaded = SimpleNamespace(model=model, device=changes.pop("device", CARD), switch=changes.pop("switch", None))
    model.config._attn_implementation = changes.pop("attention", model.config._attn_implementation)
    has_other = changes.pop("has_other", False)
    for name, value in changes.items():
        setattr(model, name, value)
    assert cuda_graphs.obstacle_to(loaded, place, has_other=has_other) == reason


@pytest.mark.parametrize(
    ("cuda_graphs", "level", "said"),
    [
        ("auto", logging.INFO, "no CUDA graphs: the model is on the CPU"),
        (True, logging.WARNING, "no CUDA graphs: the model is on the CPU"),
        (False, logging.INFO, "no CUDA graphs: cuda_graphs = false"),
    ],
)
def test_on_a_cpu_they_are_off_with_a_line_in_the_log(folder, caplog, cuda_graphs, level, said):
    caplog.set_level(logging.INFO)
    ours = engine(folder(), cuda_graphs=cuda_graphs)
    for _ in range(2):
        answers(ours, requests(5))
    assert [(each.levelno, each.getMessage()) for each in caplog.records if "CUDA graphs" in each.getMessage()] == [
        (level, said)
    ]
    assert ours.notes == {}
    assert not ours._decodings.uses_slots


def test_on_a_gpu_they_are_tried_before_the_first_static_batch(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(decoding_choice, "obstacle_to", lambda *_, **__: None)
    monkeypatch.setattr(decoding_choice, "GraphRunner", lambda *_: tried.append(1) or EagerRunner())
    ours = engine(folder(), cuda_graphs=True)
    list(ours.score([Question(0, Prompt("1+1"), ("a", "bc"))]))
    assert tried == []
    asked = requests(8)
    assert answers(ours, asked) == answers(engine(folder(), cuda_graphs=False), asked)
    assert tried == [1, 1]  # by the check, and for the batches
    assert answers(ours, asked) == answers(ours, asked)
    assert tried == [1, 1]
    tried.clear()
    answers(engine(folder(), cuda_graphs=True, batching="continuous"), asked)
    assert tried == []


def test_the_setting_is_checked_and_reaches_continuous_batching(folder):
    assert engine_options(str(folder()), {}).cuda_graphs == "auto"
    assert engine_options(str(folder()), {"cuda_graphs": False}).cuda_graphs is False
    with pytest.raises(SlurmGPUError, match="cuda_graphs is 'yes'; expected true, false or \"auto\""):
        engine_options(str(folder()), {"cuda_graphs": "yes"})
    with pytest.raises(SlurmGPUError, match="cuda_graphs"):
        engine_options("name", {"engine": "server", "url": "http://host:1", "cuda_graphs": True})
    model = SimpleNamespace(device=CARD, is_loaded_in_8bit=False)
    wanted = [
        continuous.settings(continuous.Needs(), 9, SimpleNamespace(model=model, context=99), flash=True, graphs=graphs)
        for graphs in (True, False)
    ]
    assert ["use_cuda_graph" in each for each in wanted] == [False, True]


# The runner, on stand-ins of torch.cuda


class Stream:
    device = SimpleNamespace(index=3)

    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        DONE.append(f"{self.name} waits for {other.name}")


class Graph:
    """Replays what was done while it was captured; `wrong` changes what that gives."""

    wrong = staticmethod(lambda: None)
    begin = staticmethod(lambda: None)

    def replay(self):
        DONE.append("replay")
        self.work()
        self.wrong()


DONE = []


@pytest.fixture
def cuda(monkeypatch):
    """`torch.cuda` as far as the runner uses it: it records calls, and a capture the work."""
    DONE.clear()
    here = [Stream("main")]
    free, reserved = [80e9], [1e9]
    found = SimpleNamespace(free=free, n_bytes=1e6, work=None, here=here, sync=[0], end=lambda: None)

    @contextlib.contextmanager
    def stream(other):
        before, here[0] = here[0], other
        try:
            yield
        finally:
            here[0] = before

    @contextlib.contextmanager
    def graph(made, *, pool, stream, capture_error_mode):
        DONE.append(f"capture in {pool}, {capture_error_mode}")
        made.work = found.work
        made.begin()
        assert stream.name == "side"
        assert found.sync == [0]
        before, here[0] = here[0], stream
        try:
            yield
        finally:
            found.end()  # as in PyTorch, nothing else is done where this fails
            here[0] = before
        free[0] -= found.n_bytes
        reserved[0] += found.n_bytes

    pools = itertools.count()
    stands = {
        "Stream": lambda device: Stream("side"),
        "current_stream": lambda device: here[0],
        "stream": stream,
        "set_stream": lambda other: here.__setitem__(0, other),
        "get_sync_debug_mode": lambda: found.sync[0],
        "set_sync_debug_mode": lambda mode: found.sync.__setitem__(0, mode),
        "synchronize": lambda device: DONE.append("synchronize"),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (free[0], 80e9),
        "memory_reserved": lambda device: reserved[0],
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: f"pool {next(pools)}",
    }
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    return found


def frame_of(n_rows):
    frame = SimpleNamespace(size=(n_rows, 64), logits=torch.zeros(n_rows, 5))
    frame.compute = lambda forward: forward()
    return frame


def test_a_graph_is_captured_after_warm_up_on_its_own_stream_and_then_only_replayed(cuda):
    runner, frame, ran = cuda_graphs.GraphRunner(CARD, 1e-4, 2e-3), frame_of(2), []

    def work():
        ran.append(1)
        frame.logits.copy_(torch.arange(10.0).view(2, 5))

    cuda.work = work
    runner.run(frame, work)
    assert DONE == [
        "side waits for main",
        "main waits for side",
        "synchronize",
        "capture in pool 0, thread_local",
        "replay",
    ]
    # Warm-up, capture, a call to compare with, and the stand-in's replay.
    assert len(ran) == cuda_graphs.N_WARM_UPS + 1 + 1 + 1
    frame.logits.zero_()
    runner.run(frame, lambda: pytest.fail("it is replayed"))
    assert frame.logits[1, 4] == 9
    frame = frame_of(4)
    cuda.work = lambda: frame.logits.fill_(1.0)
    runner.run(frame, cuda.work)
    assert runner.n_graphs == 2
    assert runner.held_bytes == 2e6


def test_memory_that_another_process_takes_meanwhile_is_not_that_of_the_graphs(cuda):
    """Else graphs would be freed, or given up, because a neighbour on the GPU loads a model."""
    runner, frame = cuda_graphs.GraphRunner(CARD, 1e-4, 2e-3), frame_of(2)

    def work():
        frame.logits.fill_(1.0)

    cuda.work, cuda.end = work, lambda: cuda.free.__setitem__(0, cuda.free[0] - 5e9)
    runner.run(frame, work)
    assert runner.held_bytes == cuda.n_bytes + cuda_graphs.DRIVER_BYTES


def test_a_graph_that_gives_something_else_is_not_used(cuda, monkeypatch):
    runner, frame = cuda_graphs.GraphRunner(CARD, 1e-4, 2e-3), frame_of(2)
    cuda.work = lambda: frame.logits.copy_(torch.arange(10.0).view(2, 5))
    monkeypatch.setattr(Graph, "wrong", staticmethod(lambda: frame.logits[1, 2].add_(0.1)))
    with pytest.raises(
        ArithmeticError, match=r"the graph of 2 rows is off by 0\.05 of the range of scores, at most by 0\.05"
    ):
        runner.run(frame, cuda.work)
    assert runner.n_graphs == 0
    with pytest.raises(ArithmeticError):
        cuda_graphs.GraphRunner(CARD, 1e-3, 0.2).run(frame, cuda.work)


def test_a_graph_that_is_far_off_now_and_then_is_not_used(cuda, monkeypatch):
    """However often it is right: no rounding makes up for that."""
    frame, replays = frame_of(2), itertools.count()
    cuda.work = lambda: frame.logits.copy_(torch.arange(10.0).view(2, 5))
    monkeypatch.setattr(Graph, "wrong", staticmethod(lambda: next(replays) or frame.logits[1, 2].add_(9.0)))
    with pytest.raises(ArithmeticError, match=r"is off by 0 of the range of scores, at most by 4\.5; eager"):
        cuda_graphs.GraphRunner(CARD, 1e-3, 0.2).run(frame, cuda.work)


def refuse_capture():
    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class Pool:
    """An allocator's pool for captures, as PyTorch of a version leaves it: `n_used` is how many graphs hold it."""

    def __init__(self, version, monkeypatch):
        self.version, self.is_recording, self.n_used = version, False, 0
        monkeypatch.setattr(torch, "__version__", f"{version}.0")
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        for name in ("begin", "ended", "pool", "reset"):
            monkeypatch.setattr(Graph, name, getattr(self, f"of_{name}"), raising=False)

    def end(self, index, pool):
        assert (index, pool) == (3, "pool 0")
        if not self.is_recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_recording = False

    def release(self, index, pool):
        assert (index, pool) == (3, "pool 0")
        assert self.n_used > 0, "uc >= 0 INTERNAL ASSERT FAILED"
        self.n_used -= 1

    def of_begin(self):
        self.is_recording, self.has_ended = True, False
        self.n_used += 1

    def of_ended(self, is_rejected):
        if is_rejected and self.version >= "2.13":
            self.is_recording = False
        if is_rejected:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.is_recording, self.has_ended = False, True

    def of_pool(self):
        if not self.has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

    def of_reset(self):
        if self.has_ended or self.version >= "2.14":
            self.n_used -= 1


@pytest.mark.parametrize("version", ["2.11", "2.13", "2.14"])
@pytest.mark.parametrize("is_rejected", [True, False])
def test_a_capture_that_fails_leaves_cuda_as_it_was_and_says_why(cuda, monkeypatch, version, is_rejected):
    """As PyTorch does it: where CUDA rejects the graph, the stream stays, and in some versions the allocator's pool."""
    runner, frame, pool = cuda_graphs.GraphRunner(CARD, 1e-4, 2e-3), frame_of(2), Pool(version, monkeypatch)
    n_kept, runs = len(cuda_graphs._failed), itertools.count(1)

    def work():
        if next(runs) > cuda_graphs.N_WARM_UPS:
            raise ValueError("the model's own error")

    cuda.end = lambda: pool.of_ended(is_rejected)
    with pytest.raises(ValueError, match="the model's own error"):
        runner.run(frame, work)
    assert cuda.here[0].name == "main"
    assert (pool.is_recording, pool.n_used, runner.n_graphs) == (False, 0, 0)
    # The allocator for the host's memory still asks the graph of a capture that never ended.
    assert len(cuda_graphs._failed) - n_kept == (is_rejected and version < "2.13")
    cuda.end = lambda: pool.of_ended(True)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        runner.run(frame, lambda: None)
    assert cuda.here[0].name == "main"
    assert (pool.is_recording, pool.n_used) == (False, 0)


def test_an_allocator_that_cannot_be_tidied_up_hides_no_error(cuda, monkeypatch, caplog):
    pool = Pool("2.11", monkeypatch)
    cuda.end = lambda: pool.of_ended(True)

    def end(index, pool):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        cuda_graphs.GraphRunner(CARD, 1e-4, 2e-3).run(frame_of(2), lambda: None)
    assert "after a failed capture: CUDA error: unspecified launch failure" in caplog.text


def test_a_model_that_waits_for_the_gpu_is_never_captured(cuda):
    """`set_sync_debug_mode` has it raise in the warm-up; the log says where it waits."""

    def work():
        if cuda.sync == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")

    cuda.end = refuse_capture
    with pytest.raises(RuntimeError, match=r"the model synchronises with the GPU in work \(.*, line \d+\): called a"):
        cuda_graphs.GraphRunner(CARD, 1e-4, 2e-3).run(frame_of(2), work)
    assert cuda.sync == [0]
    assert cuda.here[0].name == "main"
    assert not any(each.startswith("capture") for each in DONE)


def test_graphs_that_hold_more_than_placement_keeps_are_freed(cuda, monkeypatch):
    runner = cuda_graphs.GraphRunner(CARD, 1e-4, 2e-3)
    cuda.n_bytes = cuda_graphs.GRAPHS_BYTES / 2 + 1
    first = None
    for n_rows in (1, 2, 4):
        frame = frame_of(n_rows)
        cuda.work = lambda frame=frame: frame.logits.fill_(1)
        for _ in range(1 + cuda_graphs.LEAST_REPLAYS):
            runner.run(frame, cuda.work)
        first = first or weakref.ref(runner._graphs[1, 64])
    assert [*runner._graphs] == [(4, 64)]
    assert first() is None
    assert "capture in pool 1, thread_local" in DONE
    assert runner.held_bytes < cuda_graphs.GRAPHS_BYTES
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 1)
    frame = frame_of(8)
    cuda.work = lambda: frame.logits.fill_(1)
    runner.run(frame, cuda.work)
    assert [*runner._graphs] == [(8, 64)]
    with pytest.raises(RuntimeError, match=r"1 CUDA graphs hold \d+ MB, and were replayed only 0 times before others"):
        runner.run(frame_of(1), lambda: None)


class OnStandIns(cuda_graphs.GraphRunner):
    """The runner itself, whose graphs replay what was captured in them."""

    def _record(self, graph, work):
        super()._record(graph, work)
        graph.work = work


def test_the_runner_of_graphs_serves_an_engine(folder, cuda):
    made = []
    ours = in_slots(folder(), lambda: made.append(OnStandIns(CARD, 1e-4, 2e-3)) or made[-1])
    asked = requests(temperature=1.0)
    assert answers(ours, asked) == answers(engine(folder()), asked)
    assert ours._decodings.uses_slots
    assert [runner is ours._decodings.slots.runner for runner in made] == [False, True]
    assert 3 < made[1].n_graphs <= len(ours._decodings.slots._frames)
    assert DONE.count("replay") > 5 * sum(runner.n_graphs for runner in made)


# Compiled steps


def compiled_engine(folder, backend, **options):
    made = engine(folder, compile=True, **{"cuda_graphs": True} | options)
    runners = []
    make = lambda compiled: runners.append(OnStandIns(CARD, 1e-4, 2e-3, compiled)) or runners[-1]  # noqa: E731
    made.verdict = made._decodings.use(make, backend)
    made.compiled = [runner._compiled for runner in runners]
    return made


@pytest.fixture
def _anew():
    torch._dynamo.reset()


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("backend", ["eager", by_night("aot_eager")])
def test_a_step_is_compiled_as_a_whole_for_all_sizes_at_once_and_gives_the_same_tokens(folder, cuda, caplog, backend):
    """Once for one row, and once for all others; traced by torch.compile, and computed by PyTorch's own kernels."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    caplog.set_level(logging.INFO)
    ours, asked = compiled_engine(folder(), counter), requests(temperature=1.0)
    assert ours.verdict.reason is None
    assert answers(ours, asked) == answers(engine(folder()), asked)
    assert len(ours._decodings.slots._frames) > 4
    assert counter.frame_count <= 2
    assert ours.compiled[0] is None
    assert ours.compiled[1].reason is None
    assert ours._decodings.slots.runner._compiled is ours.compiled[1]
    assert ours.notes == {"cuda_graphs": 1, "compiled": 1}
    assert "compiling steps: 1 x 40 tokens" in caplog.text


def backend_that(wrong):
    """A backend of torch.compile whose code does something wrong."""

    def compile_wrongly(graph, inputs):
        def run(*args):
            found = graph(*args)
            return wrong(found)

        return run

    return compile_wrongly


def no_compiler(found):
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (no_compiler, "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."),
        (lambda found: (found[0] + torch.arange(found[0].shape[-1]) % 2, *found[1:]), "with 1 rows scores are off by "),
    ],
)
@pytest.mark.usefixtures("_anew")
def test_steps_that_cannot_be_compiled_or_are_wrong_then_are_graphs_of_plain_ones(folder, cuda, caplog, wrong, reason):
    ours, asked = compiled_engine(folder(), backend_that(wrong)), requests(8)
    assert ours.verdict.reason is None
    assert f"not compiling steps for CUDA graphs: {reason}" in caplog.text
    assert answers(ours, asked) == answers(engine(folder()), asked)
    assert ours._decodings.slots.runner._compiled is None
    assert ours.notes == {"cuda_graphs": 1, "compiled": 0}


class Timed:
    """Steps in slots, which take as many seconds of the test's clock as they are told to."""

    def __init__(self, compiled, seconds, now):
        self.compiled, self.seconds, self.now = compiled, seconds, now

    def run(self, frame, forward):
        frame.compute(forward)
        self.now[0] += self.seconds[self.compiled is not None]


def test_compiled_steps_that_are_not_faster_are_not_used(folder, monkeypatch):
    now = [0.0]
    real = graph_check.GrowingRows.step
    slow = lambda self, latest: now.__setitem__(0, now[0] + 0.3) or real(self, latest)  # noqa: E731
    monkeypatch.setattr(graph_check.GrowingRows, "step", slow)
    monkeypatch.setattr(decoding_choice.DecodingChoice, "_clock", lambda self: now[0])
    monkeypatch.setattr(graph_check, "SIZES", ((1, 40),))
    for plain, compiled in ((0.1, 0.2), (0.2, 0.1)):
        ours = engine(folder(), compile=True)
        times = (plain, compiled)
        verdict = ours._decodings.use(lambda made, times=times: Timed(made, times, now), "eager")
        assert verdict.slots_s == pytest.approx(0.1)
        assert ours.notes == {"cuda_graphs": 1, "compiled": int(compiled < plain)}


@pytest.mark.usefixtures("_anew")
def test_compiling_ends_after_its_time_and_fails_for_one_size_alone(folder, monkeypatch, caplog):
    ours = engine(folder())
    forward = ours._prefill.forward
    with torch.inference_mode():
        read = ours._prefill.read([(5, 6, 7)] * 4, 99)
        memory = Slots(read, 4 * 64, EagerRunner())
        SlotRows(memory, ours._prefill, 2048).join(read, [9] * 4)
        frame = memory.frame(4, 64)
        frame.compute(forward)
        expected = frame.logits.clone()
        made = compiled_step.Compiled(forward, 1e-4, "eager")
        assert made.instead_of(forward, frame, expected + 1) is forward
        assert made.reason.startswith("with 4 rows scores are off by ")
        assert made.instead_of(forward, frame, expected) is forward
        made = compiled_step.Compiled(forward, 1e-4, "eager")
        assert made.instead_of(forward, frame, expected) is made._function
        monkeypatch.setattr(compiled_step, "LIMIT_S", made.seconds)
        assert made.instead_of(forward, frame, expected) is made._function
        assert made.instead_of(forward, frame, expected) is forward
    assert "not compiling further step sizes: compiling has taken" in caplog.text


def test_compiled_code_that_another_user_may_have_left_on_the_node_is_not_imported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folder = tmp_path / f"slurmgpu-inductor-{os.getuid()}"
    assert compiled_step.Compiled(lambda frame: frame, 1e-4, "eager").reason is None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    why = "users other than its owner may write it (mode 0777)"
    reason = f"another user may write {folder}, the folder for compiled code: {why}"
    assert compiled_step.Compiled(lambda frame: frame, 1e-4, "eager").reason == reason
    assert f"steps are not compiled: {reason}" in caplog.text
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/code")
    reason = "/dev/null/code, the folder for compiled code, cannot be made: Not a directory"
    assert compiled_step.Compiled(lambda frame: frame, 1e-4, "eager").reason == reason


def test_compiling_goes_with_graphs_alone(folder):
    assert engine_options(str(folder()), {"compile": True}).compile
    with pytest.raises(SlurmGPUError, match="compile is true, which only compiles steps for CUDA graphs"):
        engine_options(str(folder()), {"compile": True, "cuda_graphs": False})


# Memory


def test_the_read_share_keeps_prompts_within_the_memory_beside_the_slots(folder, monkeypatch):
    """Prompts are read in groups, which until they are copied need no more than a quarter of the slots again."""
    ours, sizes = in_slots(folder()), []
    read = type(ours._prefill).read
    monkeypatch.setattr(
        type(ours._prefill),
        "read",
        lambda self, prompts, *more: sizes.append(len(prompts) * len(prompts[0])) or read(self, prompts, *more),
    )
    answers(ours, requests())
    assert max(sizes) <= slots.READ_SHARE * 2500
