"""One of several processes that share a model: `torchrun -m tests.support.llm_ranks FOLDER`.

Reads cases.json, a list of [name, model, options, sampling, n_requests]; writes what this rank got as rank<R>.json.
"""

import json
import os
import sys
from pathlib import Path

import torch

from slurmgpu.llm.engine import EngineOptions, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.models import find_model


def compute(case, place):
    """The answers and scores of one case, as JSON."""
    _, model, options, sampling, n_requests = case
    engine = open_engine(EngineOptions(find_model(model), **options), place)
    prompts = [Prompt("12+3=?"[: number % 6] + f"{number}+{number}=") for number in range(n_requests)]
    requests = [
        Request(number, prompt, Sampling(max_tokens=4 + number % 9, **sampling), 1000 + number)
        for number, prompt in enumerate(prompts)
    ]
    outputs = {
        output.id: [output.tokens.tolist(), output.finish_reason, output.error] for output in engine.generate(requests)
    }
    questions = [Question(number, prompt, ("1", "23", "ab")) for number, prompt in enumerate(prompts)]
    scores = {each.id: each.logprobs.tolist() for each in engine.score(questions)}
    held = [each.to_local() if hasattr(each, "to_local") else each for each in engine._loaded.model.parameters()]
    given_up = engine._continuous is not None and engine._continuous._given_up
    engine.close()
    return {
        "outputs": [outputs[number] for number in range(n_requests)],
        "scores": [scores[number] for number in range(n_requests)],
        "n_parameters": sum(each.numel() for each in held),
        "kv_bytes": engine._loaded.kv_bytes,
        "given_up": given_up,
    }


def main(folder):
    """Compute all cases as one rank of the group that torchrun has made."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place("cpu", 1, rank, world_size)
    cases = json.loads((folder / "cases.json").read_text())
    found = {case[0]: compute(case, place) for case in cases}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
