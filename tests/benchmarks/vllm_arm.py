"""The arm of bench_llm that runs in vLLM's own environment: work comes in, and CPU-seconds and answers go out.

    .venv-vllm/bin/python tests/benchmarks/vllm_arm.py MODEL

Each line of the standard input is a JSON list of pieces of work, [prompt, max_tokens, ids]: the prompt's token ids,
and either the length of the greedy answer, or the ids whose log-probabilities are asked for after the prompt. Each line
of the standard output is {"seconds": CPU-seconds of this process, "found": tokens or log-probabilities by prompt}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that this process has all the CPU time
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    """Answer line by line until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own prints
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        seed=0,
        generation_config="vllm",
        enable_prefix_caching=True,
        max_num_batched_tokens=4096,
    )

    def answer(work: list[Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in work]
        sampling = [
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprob_token_ids=ids)
            if ids
            else SamplingParams(max_tokens=length, temperature=0.0, detokenize=False, ignore_eos=True)
            for _, length, ids in work
        ]
        llm.reset_prefix_cache()
        start = time.process_time()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.process_time() - start
        found = [
            [output.outputs[0].logprobs[0][token].logprob for token in ids]
            if ids
            else list(output.outputs[0].token_ids)
            for output, (_, _, ids) in zip(outputs, work, strict=True)
        ]
        return {"seconds": seconds, "found": found}

    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
