"""Embedding on a GPU: a run of short texts beside a loop by hand, with random weights of MiniLM's shape."""

from __future__ import annotations

import functools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.findings import Machine, NotToBeHad, finding, hold, logs_of

if TYPE_CHECKING:
    from slurmgpu.report.build import Report

N_TEXTS, N_TOY = 100_000, 40
WORDS, TOY_WORDS = 20_000, 200
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
"""all-MiniLM-L6-v2's."""
TOY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
BATCH, TOY_BATCH = 512, 8
NEAR = 2e-3
"""How far numbers of vectors of length 1 may be apart: those of a run are stored in 16 bits."""
OF_BY_HAND = 1.0
BUSY = 95.0


@functools.cache
def _files(machine: Machine) -> tuple[Path, Path, list[str]]:
    """The model's folder, the input, and its texts of 5 to 30 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    rng, n_words = random.Random(0), machine.pick(WORDS, TOY_WORDS)
    names = [f"w{i}" for i in range(n_words)]
    n_texts = machine.pick(N_TEXTS, N_TOY)
    texts = [" ".join(rng.choices(names, k=rng.randint(5, 30))) for _ in range(n_texts)]
    path = machine.folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    model = machine.folder / "model"
    model.mkdir()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made = Tokenizer(models.WordPiece({name: i for i, name in enumerate([*special, *names])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=256, **tokens).save_pretrained(model)
    torch.manual_seed(0)
    shape = machine.pick(SHAPE, TOY)
    BertModel(BertConfig(vocab_size=n_words + 4, max_position_embeddings=512, **shape)).save_pretrained(model)
    return model, path, texts


@dataclass(frozen=True)
class ByHand:
    """Seconds of a loop over the same texts: in all, and of each of its steps; and its vectors."""

    seconds: float
    tokenizing: float
    computing: float
    vectors: Any


@functools.cache
def _by_hand(machine: Machine) -> ByHand:
    """Sorted by length, in batches of the same size, mean pooling, to 16 bits: a step after the other."""
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder, _, texts = _files(machine)
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


@functools.cache
def _run(machine: Machine) -> Report:
    """The report of a run over the texts, by one task with one GPU."""
    import slurmgpu
    from slurmgpu.report.build import last_report

    folder, path, texts = _files(machine)
    # On a CPU in this process, which has imported what takes longest.
    slots = {"executor": "local", "gpus": 1} if machine.on_gpu else {"executor": "debug", "gpus": 0}
    keys = {
        "input": str(path),
        "run_dir": str(machine.folder / "run"),
        "shard_items": machine.pick(8192, 16),
        "html": False,
        "sample_s": 0.5,
        "workload": {"use": "embed", "batch_size": machine.pick(BATCH, TOY_BATCH)},
        "settings": {"model": str(folder), "max_tokens": 256},
        "resources": slots,
    }
    report = last_report(slurmgpu.submit(keys).run)
    whole = report["complete"] and not report["errors"]
    hold(whole, f"{report['n_rows']} of {len(texts)} rows; {report['errors'][:1]}", logs_of(Path(report["run_dir"])))
    return report


def _working_s(report: Report) -> float:
    """The seconds of the task in which it computed shards: what was useful, and slurmgpu's own overhead."""
    return sum(attempt["spent"][name] for attempt in report["attempts"] for name in ("useful", "overhead"))


@finding(limit_s=50)
def a_run_has_the_vectors_of_a_loop(machine: Machine) -> str:
    """The vectors of a run are those of a loop by hand, to 0.002 (the time is that of both)."""
    from slurmgpu.results import Merged

    expected = _by_hand(machine).vectors
    with Merged(Path(_run(machine)["run_dir"]) / "merged.h5") as merged:
        off = float(abs(merged["embedding"][:].astype("float32") - expected.astype("float32")).max())
    return hold(off <= NEAR, f"largest difference {off:.1e} in {len(expected):,} vectors")


@finding()
def a_run_is_as_fast_as_a_loop(machine: Machine) -> str:
    """A run embeds as many texts a second as the loop by hand, without its start and its merge."""
    loop, working = _by_hand(machine), _working_s(_run(machine))
    n = machine.pick(N_TEXTS, N_TOY)
    figures = f"{n / working:,.0f} and {n / loop.seconds:,.0f} texts/s, {loop.seconds / working:.2f} times"
    return hold(loop.seconds >= OF_BY_HAND * working or not machine.on_gpu, figures)


@finding()
def the_gpu_is_busy(machine: Machine) -> str:
    """The GPU is busy for 95 % of the time between loading and the last row."""
    machine.needs_gpu()
    from slurmgpu.run.directory import Run

    [record] = Run.open(Path(_run(machine)["run_dir"])).attempts()
    busy = record["usage"]["gpu_utilisation"]
    if busy is None:
        raise NotToBeHad("telemetry has no utilisation: nvidia-ml-py is missing, or too few samples")
    return hold(busy >= BUSY, f"{busy:.1f} % in {record['usage']['n_samples_ready']} samples")


@finding()
def reading_tokenising_computing_and_writing_overlap(machine: Machine) -> str:
    """A run takes 5 % less than tokenising and then computing by hand, although it also reads and writes."""
    loop, working = _by_hand(machine), _working_s(_run(machine))
    figures = f"{working:.2f} s; by hand {loop.tokenizing:.2f} s of tokenising and {loop.computing:.2f} s of computing"
    return hold(working < 0.95 * (loop.tokenizing + loop.computing) or not machine.on_gpu, figures)
