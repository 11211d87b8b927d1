"""Language models on one CPU thread: generation and scores, by ratios to what transformers and lm-eval take.

    python -m tests.benchmarks.bench_llm [--quick]

vLLM takes part from an environment of its own: that of `make test-vllm`, or the one whose Python SLURMGPU_VLLM_PYTHON
names. The model is a random Llama of 38 million parameters in fp32, whose answers have the lengths that each request
asks for: it never ends one by itself. All arms of a comparison give the same tokens, or the same log-probabilities,
which is checked. Times are CPU-seconds of the process that computes, and for a server those of the clock as well; arms
take turns, in an order that turns round each time, and the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.transformers_engine.engine import TransformersEngine
from tests.benchmarks import judge, print_table

N_WORDS = 8192
N_ROWS = 16
LABELS = ("w11", "w222", "w3333", "w4444")
RUBRIC_TOKENS = 300
N_ROUNDS = 2
N_LABEL_ROUNDS = 8
"""More, as the best of two varies by more than the target leaves beside vLLM."""
N_SERVER_ROUNDS = 5
"""More, as it is the clock that counts."""
LM_EVAL = "0.4.13"

VLLM = "vLLM"
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"

Arms = Mapping[str, Callable[[], Any]]


class Arm:
    """A process that answers one call after the other, in lines of JSON."""

    def __init__(self, *command: str | Path) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds, self.wall = 0.0, 0.0
        """The CPU-seconds of the last call; the clock's, if the process tells them."""

    def ask(self, work: Any) -> Any:
        """What it found for a piece of work."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(work), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an arm ended with exit code {self._process.wait()}; its errors are above")
        answer = json.loads(line)
        self.seconds, self.wall = answer["seconds"], answer.get("wall", 0.0)
        return answer["found"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Vllm(Arm):
    """vLLM in a process of its own."""

    def __init__(self, python: Path, folder: Path) -> None:
        super().__init__(python, Path(__file__).with_name("vllm_arm.py"), folder)

    def tokens(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Greedy tokens of each prompt."""
        pairs = zip(prompts, lengths, strict=True)
        found: list[list[int]] = self.ask([[prompt, length, None] for prompt, length in pairs])
        return found

    def scores(self, prompts: Sequence[list[int]], choices: Sequence[int]) -> Any:
        """Log-probabilities of tokens after each prompt: (prompt, choice)."""
        return np.array(self.ask([[prompt, 1, list(choices)] for prompt in prompts]))


def vllm_python() -> Path:
    """The Python of the environment with vLLM, which may not be there."""
    return Path(os.environ.get("SLURMGPU_VLLM_PYTHON", VLLM_PYTHON))


def open_vllm(folder: Path) -> Vllm | None:
    """vLLM, or None, with a line that says so, where no environment has it."""
    python = vllm_python()
    if not python.exists():
        print(f"{VLLM} is left out: there is no {python}; make test-vllm installs it, or set SLURMGPU_VLLM_PYTHON")
        return None
    return Vllm(python, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer items and one round")
    quick = parser.parse_args(argv).quick
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, 1 thread")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(make_model(Path(folder), n_layers=2 if quick else 10), n_rounds=1 if quick else N_ROUNDS)
        n_items = 16 if quick else 64
        met = [bench.server(n_items), bench.generation(n_items), bench.judging(n_items), bench.overhead()]
        met += bench.classification(n_items)
        bench.close()
    return 0 if all(met) else 1


class Bench:
    """One model, and the ways to use it."""

    def __init__(self, folder: Path, n_rounds: int) -> None:
        self.folder = folder
        self.options = EngineOptions(find_model(str(folder)), precision="fp32", batching="static")
        self.engine = TransformersEngine(self.options, Place("cpu"))
        loaded = self.engine._loaded
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.n_rounds = n_rounds
        self.vllm = open_vllm(folder)
        self.arms: dict[str, Arm] = {} if self.vllm is None else {VLLM: self.vllm}

    def close(self) -> None:
        """End vLLM's process."""
        if self.vllm is not None:
            self.vllm.close()

    def generation(self, n_items: int) -> bool:
        """Answers of very different length."""
        from transformers import pipeline

        rng = np.random.default_rng(0)
        prompts = [words(rng, n) for n in rng.lognormal(3.7, 0.6, n_items).clip(8, 200).astype(int)]
        lengths = rng.lognormal(3.2, 1.0, n_items).clip(2, 160).astype(int).tolist()
        whole = pipeline("text-generation", model=self.model, tokenizer=self.tokenizer, batch_size=N_ROWS)

        def by_pipeline() -> list[list[int]]:
            found = []
            for start in range(0, n_items, N_ROWS):
                # A batch ends with its longest answer, as it would if the model ended answers by itself.
                some, limits = prompts[start : start + N_ROWS], lengths[start : start + N_ROWS]
                limit = {"max_new_tokens": max(limits), "do_sample": False, "return_tensors": True}
                answers = whole(some, **limit)
                for [answer], prompt, length in zip(answers, some, limits, strict=True):
                    ids = answer["generated_token_ids"]
                    found.append(ids[len(ids) - max(limits) :][:length] if len(prompt) else [])
            return found

        seconds = self.measure(
            {
                "slurmgpu": lambda: self.ours(prompts, lengths),
                "model.generate, one by one": lambda: self.batches(prompts, lengths, 1),
                f"pipeline(batch_size={N_ROWS})": by_pipeline,
                **self.vllm_arm(lambda vllm: vllm.tokens(self.ids(prompts), lengths)),
            }
        )
        n_tokens = sum(lengths)
        show(f"generation: {n_items} prompts, {n_tokens} tokens, 2 to 160 an answer", seconds, n_tokens)
        ours, one_by_one, by_pipe, *_ = seconds.values()
        return all(
            [
                at_least("faster than one by one", one_by_one / ours, 3.9),
                at_least("faster than pipeline", by_pipe / ours, 1.5),
                beside_vllm(seconds, 0.75),
            ]
        )

    def judging(self, n_items: int) -> bool:
        """Short verdicts under one rubric."""
        rng = np.random.default_rng(1)
        rubric = words(rng, RUBRIC_TOKENS)
        prompts = [f"{rubric} {words(rng, int(n))}" for n in rng.integers(20, 60, n_items)]
        lengths = [12] * n_items
        seconds = self.measure(
            {
                "slurmgpu": lambda: self.ours(prompts, lengths),
                f"model.generate, sorted batches of {N_ROWS}": lambda: self.batches(prompts, lengths, N_ROWS),
                **self.vllm_arm(lambda vllm: vllm.tokens(self.ids(prompts), lengths)),
            }
        )
        show(
            f"judging: {n_items} prompts under a rubric of {RUBRIC_TOKENS} tokens, 12 tokens each",
            seconds,
            12 * n_items,
        )
        ours, batches, *_ = seconds.values()
        return all([at_least("faster than sorted batches", batches / ours, 3.0), beside_vllm(seconds, 1.0)])

    def overhead(self) -> bool:
        """The same batch, through the engine and by hand: nothing to sort, to share or to drop."""
        rng = np.random.default_rng(2)
        prompts, lengths = [words(rng, 48) for _ in range(N_ROWS)], [32] * N_ROWS
        seconds = self.measure(
            {
                "slurmgpu": lambda: self.ours(prompts, lengths),
                "model.generate": lambda: self.batches(prompts, lengths, N_ROWS),
            }
        )
        show(f"overhead: one batch of {N_ROWS} prompts of 48 tokens, 32 tokens each", seconds, 32 * N_ROWS)
        ours, bare = seconds.values()
        return judge("more than bare model.generate", 100 * (ours / bare - 1), 2.0, " %")

    def classification(self, n_items: int) -> list[bool]:
        """Log-probabilities of four labels."""
        if importlib.util.find_spec("lm_eval") is None:
            print(f"classification is left out: pip install lm-eval=={LM_EVAL}")
            return []
        rng = np.random.default_rng(3)
        rubric = words(rng, RUBRIC_TOKENS)
        lengths = rng.lognormal(3.7, 0.6, n_items).clip(8, 200).astype(int)
        alone = [words(rng, int(n)) for n in lengths]
        shared = [f"{rubric} {words(rng, int(n))}" for n in rng.integers(20, 60, n_items)]
        n_rounds = N_LABEL_ROUNDS if self.n_rounds > 1 else 1
        return [
            self.labels("without a shared beginning", alone, 1.5, n_rounds),
            self.labels(f"under a rubric of {RUBRIC_TOKENS} tokens", shared, 7.0, self.n_rounds),
        ]

    def server(self, n_items: int) -> bool:
        """The same vLLM in three ways: a server that is asked over HTTP, in the process that asks, and as it comes.

        What counts is the clock, README.md says why; CPU time tells what it is made of.
        """
        if self.vllm is None:
            return True
        rng = np.random.default_rng(4)
        prompts = [words(rng, n) for n in rng.lognormal(3.7, 0.6, n_items).clip(8, 200).astype(int)]
        lengths = rng.lognormal(3.2, 1.0, n_items).clip(2, 160).astype(int).tolist()
        work = [[prompt, length] for prompt, length in zip(prompts, lengths, strict=True)]
        names = {'engine = "server"': "server", 'engine = "vllm"': "vllm", "vllm.LLM, two processes": "LLM"}
        arms = {
            shown: Arm(vllm_python(), "-m", "tests.benchmarks.engine_arm", name, self.folder)
            for shown, name in names.items()
        }
        try:
            wall, cpu = turns_of(arms, work, N_SERVER_ROUNDS if self.n_rounds > 1 else 1)
        finally:
            for arm in arms.values():
                arm.close()
        n_tokens, [ours, theirs, _] = sum(lengths), arms
        print(f"\nserver: {n_items} prompts, {n_tokens} tokens, all processes")
        ratios = {name: (wall[name] / wall[theirs], cpu[name] / cpu[theirs]) for name in arms}
        rows = [
            (name, f"{wall[name]:.2f}", f"{longer:.2f}", f"{cpu[name]:.2f}", f"{more:.2f}")
            for name, (longer, more) in ratios.items()
        ]
        print_table(("arm", "seconds", "ratio", "CPU-seconds", "ratio"), rows)
        return all(
            [
                judge(f"longer than {theirs}", 100 * (ratios[ours][0] - 1), 10.0, " %"),
                judge(f"more CPU time than {theirs}", 100 * (ratios[ours][1] - 1), 25.0, " %"),
            ]
        )

    def labels(self, name: str, prompts: Sequence[str], target: float, n_rounds: int) -> bool:
        """One comparison with lm-eval."""
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        harness = HFLM(
            pretrained=self.model, tokenizer=self.tokenizer, batch_size=N_ROWS, max_length=2048, prefix_token_id=0
        )
        pairs = [(prompt, f" {label}") for prompt in prompts for label in LABELS]
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]

        def by_harness() -> Any:
            found = harness.loglikelihood(asked, disable_tqdm=True)
            return np.array([logprob for logprob, _ in found]).reshape(len(prompts), -1)

        first_tokens = [ids[0] for ids in self.ids(LABELS)]
        seconds = self.measure(
            {
                "slurmgpu": lambda: self.scores(prompts),
                f"lm-eval {LM_EVAL}": by_harness,
                **self.vllm_arm(lambda vllm: vllm.scores(self.ids(prompts), first_tokens)),
            },
            n_rounds,
        )
        show(f"classification: {len(prompts)} prompts {name}, {len(LABELS)} labels", seconds, len(prompts))
        ours, theirs, *_ = seconds.values()
        return all([at_least("faster than lm-eval", theirs / ours, target), beside_vllm(seconds, 1.1)])

    def vllm_arm(self, arm: Callable[[Vllm], Any]) -> Arms:
        """The arm of vLLM; none where there is no vLLM."""
        vllm = self.vllm
        return {} if vllm is None else {VLLM: lambda: arm(vllm)}

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        found: list[list[int]] = self.tokenizer(list(texts))["input_ids"]
        return found

    def measure(self, arms: Arms, n_rounds: int | None = None) -> dict[str, float]:
        """CPU-seconds of each arm, the best of some rounds; all must give what the first one does."""
        best = dict.fromkeys(arms, float("inf"))
        for number in range(n_rounds or self.n_rounds):
            found = {}
            for name, arm in [*arms.items()][:: -1 if number % 2 else 1]:
                self.engine._prefill.forget()
                start = time.process_time()
                found[name] = arm()
                seconds = time.process_time() - start
                if name in self.arms:
                    seconds = self.arms[name].seconds
                best[name] = min(best[name], seconds)
            for name in arms:
                check_equal(name, found[name], found[next(iter(arms))])
        return best

    def ours(self, prompts: Sequence[str], lengths: Sequence[int]) -> list[list[int]]:
        """Greedy tokens by the engine."""
        pairs = zip(prompts, lengths, strict=True)
        requests = [Request(i, Prompt(text), Sampling(max_tokens=length)) for i, (text, length) in enumerate(pairs)]
        found = {output.id: output.tokens.tolist() for output in self.engine.generate(requests)}
        return [found[i] for i in range(len(prompts))]

    def batches(self, prompts: Sequence[str], lengths: Sequence[int], n_rows: int) -> list[list[int]]:
        """Greedy tokens by `model.generate`, in batches of prompts sorted by their length."""
        import torch

        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].split()))
        found: dict[int, list[int]] = {}
        for start in range(0, len(order), n_rows):
            rows = order[start : start + n_rows]
            batch = self.tokenizer([prompts[i] for i in rows], padding=True, return_tensors="pt")
            limit = max(lengths[i] for i in rows)
            with torch.inference_mode():
                made = self.model.generate(**batch, max_new_tokens=limit, do_sample=False, pad_token_id=0)
            answers = made[:, batch["input_ids"].shape[1] :].tolist()
            found |= {i: answer[: lengths[i]] for i, answer in zip(rows, answers, strict=True)}
        return [found[i] for i in range(len(prompts))]

    def scores(self, prompts: Sequence[str]) -> Any:
        """Log-probabilities of the labels by the engine."""
        labels = tuple(f" {label}" for label in LABELS)
        questions = [Question(i, Prompt(text), labels) for i, text in enumerate(prompts)]
        found = {scores.id: scores.logprobs for scores in self.engine.score(questions)}
        return np.stack([found[i] for i in range(len(prompts))])


def turns_of(arms: Mapping[str, Arm], work: Any, n_rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the clock and CPU-seconds of each arm, the best of some rounds after one; all must give the same."""
    wall, cpu = dict.fromkeys(arms, float("inf")), dict.fromkeys(arms, float("inf"))
    for number in range(1 + n_rounds):
        expected = None
        for name, arm in [*arms.items()][:: 1 if number % 2 else -1]:
            found = arm.ask(work)
            expected = found if expected is None else expected
            check_equal(name, found, expected)
            if number:  # the first answers fill caches
                wall[name], cpu[name] = min(wall[name], arm.wall), min(cpu[name], arm.seconds)
    return wall, cpu


def make_model(folder: Path, n_layers: int) -> Path:
    """A random Llama whose tokens are words, and which knows no end."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, **{f"w{i}": i for i in range(1, N_WORDS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=N_WORDS,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def words(rng: np.random.Generator, n_words: int) -> str:
    """A text of so many tokens."""
    return " ".join(f"w{i}" for i in rng.integers(1, N_WORDS, n_words))


def check_equal(name: str, found: Any, expected: Any) -> None:
    """Raise unless tokens are equal but for near ties (1 answer in 50), or log-probabilities to 1e-4."""
    if isinstance(found, np.ndarray):
        np.testing.assert_allclose(found, expected, atol=1e-4)
        return
    n_differ = sum(one != other for one, other in zip(found, expected, strict=True))
    if n_differ > len(found) / 50:
        raise AssertionError(f"{name}: {n_differ} of {len(found)} answers differ from slurmgpu's")


def at_least(what: str, found: float, limit: float) -> bool:
    """Whether a ratio reaches its target; says so."""
    met = found >= limit
    print(f"{what}: {found:.3g}x, target at least {limit:g}x: {'met' if met else 'NOT MET'}", flush=True)
    return met


def beside_vllm(seconds: Mapping[str, float], limit: float) -> bool:
    """Whether the speed relative to vLLM's reaches its target; says so. Met where there is no vLLM."""
    return VLLM not in seconds or at_least("as fast as vLLM", seconds[VLLM] / seconds["slurmgpu"], limit)


def show(title: str, seconds: Mapping[str, float], n_units: int) -> None:
    """A table of one comparison."""
    ours = next(iter(seconds.values()))
    print(f"\n{title}")
    rows = [(name, f"{s:.2f}", f"{n_units / s:.1f}", f"{s / ours:.2f}") for name, s in seconds.items()]
    print_table(("arm", "CPU-seconds", "a second", "ratio"), rows)


if __name__ == "__main__":
    sys.exit(main())
