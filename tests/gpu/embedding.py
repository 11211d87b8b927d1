"""Embedding on a GPU: a run over short texts against a loop written by hand, with random weights of MiniLM's shape."""

from __future__ import annotations

import functools
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.findings import Machine, NotMeasured, finding, hold, logs_of, shared

if TYPE_CHECKING:
    from slurmgpu.report.report_file import Report

N_TEXTS, N_TOY = 50_000, 40
COPIES = 6
"""Copies of the texts in a run, so that it takes long against the second over which NVML averages."""
SHORT, LONG, LONG_COPIES = (5, 30), (100, 200), 4
"""The fewest and the most words of a text, and the copies of the long ones.

An H200 computes a short text in 12.6 µs; in that time one Python process cannot read, tokenise, launch and write one.
"""
FIRST_S, SAMPLE_S = 1.0, 0.1
"""Samples in a run's first second also average over the time before it."""
WORDS, TOY_WORDS = 20_000, 200
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
"""all-MiniLM-L6-v2's."""
TOY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SHARD, TOY_SHARD = 16_384, 8
BATCH, TOY_BATCH = 2_048, 8
"""Texts per call: launching a call's kernels takes Python milliseconds, enough for a large card to compute 1,000."""
NEAR = 2e-3
"""How far elements of vectors of length 1 may differ: a run stores them in 16 bits."""
OF_BY_HAND = 1.0
BUSY = 95.0
ROUNDED_S = 0.002
"""How far the times in a record may be rounded."""
N_SHARING = 3
"""Tasks on one GPU: a single task left half of it idle, as its Python also reads, tokenises, launches and writes."""

N_CORES = 8
"""With fewer cores, a host may not prepare texts as fast as a GPU embeds them."""


def prepare(machine: Machine) -> None:
    """Make the files, and import what makes them."""
    _model(machine)
    for length, n_copies in ((SHORT, COPIES), (SHORT, 2 * COPIES), (LONG, LONG_COPIES)):
        _input(machine, length, n_copies)


def _names(machine: Machine) -> list[str]:
    return [f"w{i}" for i in range(machine.pick(WORDS, TOY_WORDS))]


@functools.cache
def _texts(machine: Machine, length: tuple[int, int]) -> list[str]:
    """Texts with a number of words between `length`'s two."""
    rng, names = random.Random(0), _names(machine)
    n_texts = machine.pick(N_TEXTS if length == SHORT else SHARD, N_TOY)
    return [" ".join(rng.choices(names, k=rng.randint(*length))) for _ in range(n_texts)]


@functools.cache
def _input(machine: Machine, length: tuple[int, int], n_copies: int) -> Path:
    """An input file with `n_copies` of the texts."""
    path = machine.folder / f"texts-{length[1]}-{n_copies}.jsonl"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in _texts(machine, length))
    path.write_text(machine.pick(n_copies, 1) * lines, encoding="utf-8")
    return path


@functools.cache
def _model(machine: Machine) -> Path:
    """The folder of a model with random weights, and a tokenizer that knows the words of the texts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    model, names = machine.folder / "model", _names(machine)
    model.mkdir(exist_ok=True)  # a finding before may have failed in making it
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made = Tokenizer(models.WordPiece({name: i for i, name in enumerate([*special, *names])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=256, **tokens).save_pretrained(model)
    torch.manual_seed(0)
    shape = machine.pick(SHAPE, TOY)
    BertModel(BertConfig(vocab_size=len(names) + 4, max_position_embeddings=512, **shape)).save_pretrained(model)
    return model


@dataclass(frozen=True)
class ByHand:
    """The vectors of a loop over the same texts, and its seconds: in all, tokenising and computing."""

    seconds: float
    tokenizing: float
    computing: float
    vectors: Any


@functools.cache
def _by_hand(machine: Machine) -> ByHand:
    """A loop over texts sorted by length, in batches of the same size, with mean pooling, into 16 bits."""
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder, texts = _model(machine), _texts(machine, SHORT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(machine.device)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    vectors = np.empty((len(texts), model.config.hidden_size), np.float16)

    def embed(rows: list[int]) -> tuple[float, float]:
        began = time.perf_counter()
        batch = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=256, return_tensors="pt")
        between = time.perf_counter()
        with torch.inference_mode():
            batch = batch.to(machine.device)
            tokens = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            means = torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1))
            vectors[rows] = means.half().cpu().numpy()
        return between - began, time.perf_counter() - between

    size = machine.pick(BATCH, TOY_BATCH)
    embed(order[:size])
    began = time.perf_counter()
    parts = [embed(order[start : start + size]) for start in range(0, len(order), size)]
    tokenizing, computing = (sum(each) for each in zip(*parts, strict=True))
    return ByHand(time.perf_counter() - began, tokenizing, computing, vectors)


@shared
def _run(machine: Machine, n_tasks: int, length: tuple[int, int]) -> Report:
    """The report of a run over copies of the texts, with `n_tasks` tasks on the same GPU."""
    import slurmgpu
    from slurmgpu.report.report_file import last_report
    from slurmgpu.util.gpus import visible_ids
    from slurmgpu.util.process_wide import environment

    # On a CPU the run stays in this process, which has done the slow imports already.
    shared = {"executor": "local", "gpus": n_tasks, "array": True}
    slots = shared if machine.on_gpu else {"executor": "debug", "gpus": 0}
    # Several tasks start at different times, so they need more work to overlap.
    n_copies = LONG_COPIES if length == LONG else COPIES if n_tasks == 1 else 2 * COPIES
    keys = {
        "input": str(_input(machine, length, n_copies)),
        "run_dir": str(machine.folder / f"run-{n_tasks}-{length[1]}"),
        "shard_items": machine.pick(SHARD, TOY_SHARD),
        "html": False,
        "sample_s": SAMPLE_S,
        "workload": {"use": "embed", "batch_size": machine.pick(BATCH, TOY_BATCH)},
        "settings": {"model": str(_model(machine)), "max_tokens": 256},
        "resources": slots,
    }
    same = ",".join([(visible_ids() or ["0"])[0]] * n_tasks)
    with environment({"CUDA_VISIBLE_DEVICES": same} if machine.on_gpu else {}):
        report = last_report(slurmgpu.submit(keys).run)
    whole = report["complete"] and not report["errors"]
    hold(whole, f"{report['n_rows']} rows; {report['errors'][:1]}", logs_of(Path(report["run_dir"])))
    return report


@dataclass(frozen=True)
class Work:
    """The time when all tasks had shards (`first` to `last`, seconds since the epoch), and the texts embedded then.

    `spent` says how the first task spent its time.
    """

    attempt: str
    first: float
    last: float
    n_texts: int
    spent: str

    @property
    def rate(self) -> float:
        """Texts per second, including all costs of a shard, without the task's start and the merge."""
        return self.n_texts / max(self.last - self.first, ROUNDED_S)


def _work(machine: Machine, n_tasks: int = 1, length: tuple[int, int] = SHORT) -> Work:
    from slurmgpu.run.directory import Run

    report = _run(machine, n_tasks, length)
    records = Run.open(Path(report["run_dir"])).attempts()
    shards = [(record["published"], record["attempt"]) for record in records if record["published"]]
    hold(len(shards) == n_tasks or not machine.on_gpu, f"{len(shards)} of {n_tasks} tasks published shards")
    first = max(min(started for _, started, *_ in published) for published, _ in shards)
    last = min(max(started + seconds for _, started, seconds, *_ in published) for published, _ in shards)
    size = machine.pick(SHARD, TOY_SHARD)
    n_texts = sum(
        min(size, report["n_rows"] - shard * size)
        for published, _ in shards
        for shard, started, seconds, *_ in published
        if started >= first and started + seconds <= last + ROUNDED_S
    )
    spent = report["attempts"][0]["spent"]
    words = ", ".join(f"{seconds:.2f} s {kind}" for kind, seconds in spent.items() if seconds)
    return Work(shards[0][1], first, last, n_texts, words)


@finding(limit_s=90)
def a_run_has_the_vectors_of_a_loop(machine: Machine) -> str:
    """The vectors of a run equal those of a loop written by hand, to 0.002 (the time includes both)."""
    from slurmgpu.results import Merged

    # Printed after each step, so that the log of a stopped part shows which step took the time.
    began = time.perf_counter()
    for step in (_model, _by_hand, _work):
        step(machine)
        print(f"{step.__name__.strip('_')}: done after {time.perf_counter() - began:.1f} s", flush=True)
    expected = _by_hand(machine).vectors
    offs, n = list[float](), len(expected)
    with Merged(Path(_run(machine, 1, SHORT)["run_dir"]) / "merged.h5") as merged:
        vectors = merged["embedding"]
        for first in range(0, len(vectors), n):
            offs.append(float(abs(vectors[first : first + n] - expected.astype("float32")).max()))
        n_vectors = len(vectors)
    return hold(all(off <= NEAR for off in offs), f"largest difference {max(offs):.1e} in {n_vectors:,} vectors")


@finding()
def a_run_is_as_fast_as_a_loop(machine: Machine) -> str:
    """A run, without its start and merge, embeds as many texts per second as the loop written by hand."""
    loop, work = _by_hand(machine), _work(machine)
    rate = len(loop.vectors) / loop.seconds
    figures = f"{work.rate:,.0f} and {rate:,.0f} texts/s, {work.rate / rate:.2f} times; the task spent {work.spent}"
    return hold(work.rate >= OF_BY_HAND * rate or not machine.on_gpu, figures)


@finding(limit_s=90)
def tasks_that_share_the_gpu_fill_it(machine: Machine) -> str:
    """Three tasks on one GPU keep it busy 95 % of the time, and embed more texts per second than one."""
    n_sharing = machine.pick(N_SHARING, 1)
    shared, alone = (_work(machine, n_tasks).rate for n_tasks in (n_sharing, 1))
    figures = f"{shared:,.0f} and {alone:,.0f} texts/s, {shared / alone:.2f} times"
    if not machine.on_gpu:
        return figures
    mean, share = _busy(machine, n_sharing)
    figures += f"; {share}; with one task {_busy(machine)[1]}"
    return machine.hold_with_cores(mean >= BUSY and shared > alone, figures, N_CORES)


@finding(limit_s=90)
def the_gpu_is_busy(machine: Machine) -> str:
    """With texts of 100 to 200 words, one task keeps the GPU busy 95 % of the time, from first claim to last row."""
    rate = _work(machine, length=LONG).rate
    figures = f"{rate:,.0f} texts/s"
    if not machine.on_gpu:
        return figures
    mean, share = _busy(machine, length=LONG)
    return machine.hold_with_cores(mean >= BUSY, f"{figures}; {share}", N_CORES)


def _busy(machine: Machine, n_tasks: int = 1, length: tuple[int, int] = SHORT) -> tuple[float, str]:
    """The mean utilisation in percent while all tasks have shards, and a text that says so."""
    from slurmgpu.run.telemetry_log import some_samples, telemetry_path

    work, run_dir = _work(machine, n_tasks, length), Path(_run(machine, n_tasks, length)["run_dir"])
    samples = some_samples(telemetry_path(run_dir, work.attempt), 100_000, set())
    first = work.first + FIRST_S
    busy = [each.utilisation for each in samples if first <= each.time <= work.last and each.utilisation is not None]
    if not busy:
        raise NotMeasured("telemetry has no utilisation: nvidia-ml-py is missing, or the run was too short")
    mean = sum(busy) / len(busy)
    return mean, f"{mean:.1f} % in {len(busy)} samples of {work.last - first:.1f} s"


@finding()
def reading_tokenising_computing_and_writing_overlap(machine: Machine) -> str:
    """A run takes 5 % less time per text than tokenising, then computing by hand, although it also reads and writes."""
    loop, took = _by_hand(machine), 1e6 / _work(machine).rate
    tokenizing, computing = (1e6 * seconds / len(loop.vectors) for seconds in (loop.tokenizing, loop.computing))
    figures = f"{took:.1f} µs per text; by hand {tokenizing:.1f} tokenising and {computing:.1f} computing"
    figures += f"; {_preparing(machine)}"
    return hold(took < 0.95 * (tokenizing + computing) or not machine.on_gpu, figures)


def _preparing(machine: Machine) -> str:
    """The time of each step before a call's kernels run; an idle GPU waits for one of these."""
    from slurmgpu.workload import TaskContext
    from slurmgpu.workloads.embed.workload import Embed

    folder, texts = _model(machine), _texts(machine, SHORT)
    size = machine.pick(BATCH, TOY_BATCH)
    batches = [texts[start : start + size] for start in range(0, machine.pick(16_384, N_TOY), size)]
    workload = Embed(model=str(folder), max_tokens=256)
    workload.load(TaskContext(machine.device, min(1, machine.n_gpus), machine.folder))
    workload._tokens.of(batches[0])
    wall, own = time.perf_counter(), time.thread_time()
    tokens = [workload._tokens.of(batch) for batch in batches]
    seconds = {"tokenising": time.perf_counter() - wall, "of which in Python": time.thread_time() - own}
    if machine.on_gpu:
        workload._begun(tokens[0])()
        wall = time.perf_counter()
        begun = [workload._begun(batch) for batch in tokens]
        seconds["launching kernels"] = time.perf_counter() - wall
        for wait in begun:
            wait()
    each = 1e6 / sum(map(len, batches))
    return f"a run's on {os.cpu_count()} cores: " + ", ".join(f"{s * each:.1f} {name}" for name, s in seconds.items())
