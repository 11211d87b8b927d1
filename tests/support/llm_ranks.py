"""Two processes that share a model: `python -m tests.support.llm_ranks FOLDER`.

Each reads cases.json, a list of [name, model, options, sampling, n_requests]; rank R writes rank<R>.json.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface import sampling
from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.transformers_engine import engine as engine_module
from slurmgpu.llm.transformers_engine.prefill import Prefill
from tests.support.forks import fork_ranks

WORLD_SIZE = 2
CARD = torch.device("cuda", 0)


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
    given_up = engine._continuous is not None and engine._continuous.given_up
    engine.close()
    return {
        "outputs": [outputs[number] for number in range(n_requests)],
        "scores": [scores[number] for number in range(n_requests)],
        "n_parameters": sum(each.numel() for each in held),
        "kv_bytes": engine._loaded.kv_bytes,
        "given_up": given_up,
    }


def checked(case, place):
    """How this rank computes; only on rank 1, the checks at load find more than rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "_is_rounding", lambda self, off: place.rank != 1)
        # There are no kernels for a CPU.
        patch.setattr(sampling, "_kernels", {})
        patch.setattr(sampling, "_checked", lambda make, device: None if place.rank == 1 else "kernels")
        patch.setattr(engine_module, "prepare_kernels", lambda _, *agree: sampling.prepare_kernels(CARD, *agree))
        engine = open_engine(EngineOptions(find_model(case[1]), **case[2]), place)
        kernels = sampling._kernels[CARD]
    prefill = engine._prefill
    engine.close()
    return {
        "pads": prefill.takes_padding,
        "packs": prefill.packs((1, 2)),
        "leaves out": prefill._last_layer is not None,
        "draws by kernels": kernels is not None,
    }


def main(folder):
    """Compute all cases on both ranks."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it keeps its port
    fork_ranks(WORLD_SIZE, compute_all, folder, store.port)


def compute_all(folder, port, rank):
    """Compute all cases as one rank of a group, as torchrun would start it."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in told.items()})
    torch.set_num_threads(1)
    place = Place("cpu", 1, rank, WORLD_SIZE)
    cases = json.loads((folder / "cases.json").read_text())
    found = {case[0]: compute(case, place) for case in cases}
    found["rank 1 off"] = checked(cases[0], place)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
