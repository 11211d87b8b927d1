"""The arm of bench_llm that computes in vLLM's own environment, and counts all of its processes.

    .venv-vllm/bin/python -m tests.benchmarks.engine_arm {vllm,server,LLM} MODEL

The first two are engines of slurmgpu; LLM is `vllm.LLM` as it comes, whose engine is a process of its own. Each line of
the standard input is a JSON list of [prompt, max_tokens], the prompt's text and the length of its greedy answer. Each
line of the standard output is {"seconds": CPU-seconds of this process and those below it, "wall": seconds of the clock,
"found": texts}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}

CACHE_BYTES = 1 << 30
SERVE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--uds", "{socket}"]
SERVE += ["--dtype", "float32", "--enforce-eager", "--generation-config", "vllm", "--disable-log-stats"]
SERVE += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--uvicorn-log-level", "error"]

Work = Sequence[tuple[str, int]]


def cpu_seconds() -> float:
    """The CPU-seconds of this process and of all below it, living and ended."""
    from slurmgpu.util.process_tree import TreeWatch

    tree = TreeWatch().read(os.getpid())
    assert tree is not None  # this process lives
    return tree.cpu_s


def open_own(name: str, folder: str) -> tuple[Callable[[Work], list[str]], Callable[[], None]]:
    """What answers by an engine of slurmgpu, and what closes it."""
    from slurmgpu.llm.engines import open_engine
    from slurmgpu.llm.interface.engine import Place, Prompt, Request, Sampling
    from slurmgpu.llm.settings import engine_options

    own = {"serve": SERVE} if name == "server" else {"precision": "fp32"}
    engine = open_engine(engine_options(folder, {"engine": name, "chat": False, **own}), Place("cpu"))

    def answer(work: Work) -> list[str]:
        requests = [Request(i, Prompt(text), Sampling(max_tokens=length)) for i, (text, length) in enumerate(work)]
        found = {output.id: output for output in engine.generate(requests)}
        errors = [each.error for each in found.values() if each.error]
        if errors:
            raise RuntimeError(errors[0])
        return [found[i].text for i in range(len(requests))]

    return answer, engine.close


def open_theirs(folder: str) -> tuple[Callable[[Work], list[str]], Callable[[], None]]:
    """What answers by `vllm.LLM`, and what closes it."""
    from vllm import LLM, SamplingParams

    cache = {"kv_cache_memory_bytes": CACHE_BYTES, "enable_prefix_caching": True}
    llm = LLM(model=folder, dtype="float32", enforce_eager=True, seed=0, generation_config="vllm", **cache)

    def answer(work: Work) -> list[str]:
        sampling = [SamplingParams(max_tokens=length, temperature=0.0) for _, length in work]
        outputs = llm.generate([text for text, _ in work], sampling, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    return answer, llm.llm_engine.engine_core.shutdown


def main() -> None:
    """Answer line by line until the standard input ends."""
    name, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own prints
    answer, close = open_theirs(folder) if name == "LLM" else open_own(name, folder)
    try:
        for line in sys.stdin:
            work = json.loads(line)
            used, start = cpu_seconds(), time.monotonic()
            found = answer(work)
            wall, seconds = time.monotonic() - start, cpu_seconds() - used
            told = {"seconds": seconds, "wall": wall, "found": [text.strip() for text in found]}
            print(json.dumps(told), file=answers, flush=True)
    finally:
        close()


if __name__ == "__main__":
    main()
