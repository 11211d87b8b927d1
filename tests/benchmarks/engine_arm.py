"""The arm of bench_llm that runs an engine of slurmgpu in vLLM's own environment, and counts all of its processes.

    .venv-vllm/bin/python -m tests.benchmarks.engine_arm {vllm,server} MODEL

Each line of the standard input is a JSON list of [prompt, max_tokens], the prompt's text and the length of its greedy
answer. Each line of the standard output is {"seconds": CPU-seconds of this process and those below it, "found": texts}.
"""

from __future__ import annotations

import json
import os
import sys

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


def cpu_seconds() -> float:
    """The CPU-seconds of this process and of all below it, living and ended."""
    from slurmgpu.util.process_tree import TreeWatch

    tree = TreeWatch().read(os.getpid())
    assert tree is not None  # this process lives
    return tree.cpu_s


def main() -> None:
    """Answer line by line until the standard input ends."""
    name, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own prints
    from slurmgpu.llm.engines import open_engine
    from slurmgpu.llm.interface.engine import Place, Prompt, Request, Sampling
    from slurmgpu.llm.settings import engine_options

    own = {"serve": SERVE} if name == "server" else {"precision": "fp32"}
    engine = open_engine(engine_options(folder, {"engine": name, "chat": False, **own}), Place("cpu"))
    try:
        for line in sys.stdin:
            requests = [
                Request(i, Prompt(text), Sampling(max_tokens=length))
                for i, (text, length) in enumerate(json.loads(line))
            ]
            start = cpu_seconds()
            found = {output.id: output for output in engine.generate(requests)}
            seconds = cpu_seconds() - start
            errors = [each.error for each in found.values() if each.error]
            if errors:
                raise RuntimeError(errors[0])
            texts = [found[i].text.strip() for i in range(len(requests))]
            print(json.dumps({"seconds": seconds, "found": texts}), file=answers, flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
