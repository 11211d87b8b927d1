"""The engine on a server, with two real ones: `vllm serve` and `transformers serve`; in `make test-vllm`."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import Place, Prompt, Request, Sampling
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.server_engine.engine import KEY_VARIABLE
from slurmgpu.llm.settings import engine_options
from slurmgpu.util.process_tree import living
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.generate.workload import Generate
from tests.support.engines import load_on_cpu
from tests.support.tiny_models import sum_steps
from tests.support.tiny_vision_models import make_llava, make_png
from tests.vllm.test_vllm_engine import by_id, requests_of, sums, texts

# As `vllm serve` does, which looks for a distribution of the name vllm: that of the build for CPUs is another one.
VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--uds", "{socket}"]
VLLM += ["--dtype", "float32", "--enforce-eager"]
VLLM += ["--generation-config", "vllm", "--max-model-len", "1024", "--disable-log-stats"]
TRANSFORMERS = ["transformers", "serve", "{model}", "--port", "{port}", "--device", "cpu", "--dtype", "float32"]


def open_server(folder, serve, **settings):
    return open_engine(engine_options(str(folder), {"engine": "server", "serve": serve, **settings}), Place("cpu"))


@pytest.fixture(scope="module")
def vllm_server(wide_adder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        opened = open_server(wide_adder, VLLM, chat=False)
        yield opened
        opened.close()


def server_of(engine):
    return engine._server._process.pid


@pytest.mark.parametrize("sampling", [{}, {"stop": ("a", "3")}, {"logprobs": True}])
def test_answers_of_vllm_serve_are_those_of_the_engine_in_this_process(vllm_server, reference, sampling):
    asked = requests_of([*texts(8), *(f"{a}+{b}=" for a, b in sums(8))], **sampling)
    expected = by_id(reference.generate(asked))
    found = by_id(vllm_server.generate(asked))
    assert set(found) == set(expected)
    for number, output in found.items():
        wanted = expected[number]
        assert (output.text, output.finish_reason, output.error) == (wanted.text, wanted.finish_reason, None)
        assert output.n_prompt_tokens == wanted.n_prompt_tokens
        if not sampling:
            assert output.n_tokens == wanted.n_tokens
        if "logprobs" in sampling:
            assert output.logprobs[: len(wanted.logprobs)] == pytest.approx(wanted.logprobs, abs=1e-4)


def test_on_cpus_the_engine_of_vllm_serve_has_the_model_itself(vllm_server):
    # In a process of its own, whose name is VLLM::Worker, the engine would wait for it in a busy loop.
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in living(server_of(vllm_server))]
    assert [name for name in names if name.startswith("VLLM::")] == ["VLLM::EngineCor"]  # 15 characters of it


def test_samples_depend_on_their_keys_alone_and_a_wrong_request_is_its_own_error(vllm_server):
    asked = requests_of(texts(10, seed=2), temperature=1.3, top_p=0.95, top_k=20, min_p=0.01)
    together = {number: output.text for number, output in by_id(vllm_server.generate(asked)).items()}
    reverse = {number: output.text for number, output in by_id(vllm_server.generate(asked[::-1])).items()}
    assert together == reverse
    assert len(set(together.values())) > 5
    found = by_id(vllm_server.generate([asked[0], Request(99, Prompt("1" * 2000), Sampling(max_tokens=8))]))
    assert found[0].text == together[0]
    assert found[99].error.startswith("the server refuses it: ")
    assert "1024" in found[99].error


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choices": ["12", "345"]}, "12|345"),
        ({"regex": "[0-9]{3}a"}, "[0-9]{3}a"),
        ({"schema": {"type": "integer", "minimum": 100, "maximum": 999}}, "[0-9]{3}"),
    ],
)
def test_vllm_serve_keeps_answers_to_a_form(vllm_server, form, pattern):
    asked = requests_of([*texts(6, seed=3), "12+3="], structure=structure_of(**form), max_tokens=16)
    for output in vllm_server.generate(asked):
        assert (output.error, output.finish_reason) == (None, "stop")
        assert re.fullmatch(pattern, output.text), output.text


def test_a_server_that_is_killed_is_started_again_and_no_answer_is_lost(vllm_server):
    asked = requests_of([f"{a}+{b}=" for a, b in sums(40)], max_tokens=40)
    before = server_of(vllm_server)
    found = {}
    for output in vllm_server.generate(asked):
        found[output.id] = output
        if len(found) == 5:
            os.killpg(before, signal.SIGKILL)
    assert server_of(vllm_server) != before
    assert {number: output.text for number, output in found.items()} == {
        number: sum_steps(a, b) for number, (a, b) in enumerate(sums(40))
    }


def test_collect_goes_on_from_steps_by_texts(monkeypatch, vllm_server, wide_adder):
    from slurmgpu.workloads import language_model

    settings = {"prompt": "{question}=", "temperature": 1.6, "max_tokens": 40, "paths": 3, "rollouts": 2}
    workload = Collect(model=str(wide_adder), engine="server", serve=VLLM, chat=False, **settings)
    monkeypatch.setattr(language_model, "open_engine", lambda options, place: vllm_server)
    load_on_cpu(workload)
    items = [Item(n, {"question": f"{a}+{b}", "answer": a + b}, 5) for n, (a, b) in enumerate(sums(3))]
    rows = workload(items)
    assert not any(isinstance(row, ItemError) for row in rows)
    assert all(row["n_rollouts"] > 0 and row["n_tokens"] > 0 for row in rows)
    assert [workload([items[1]])[0]] == [rows[1]]


def test_a_running_server_is_used_by_its_url_and_outlives_the_engine(monkeypatch, vllm_server):
    server = vllm_server._server
    monkeypatch.setenv(KEY_VARIABLE, server._key)
    settings = {"engine": "server", "url": vllm_server._client.url, "chat": False}
    # The name is another one than the server's, which has one model only.
    other = open_engine(engine_options("adder", settings), Place("cpu"))
    [output] = other.generate(requests_of(["12+34="], max_tokens=40))
    assert output.text == sum_steps(12, 34)
    other.close()
    server.check()
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(SlurmGPUError, match="does not complete a prompt: status 401"):
        open_engine(engine_options("adder", settings), Place("cpu"))


def test_transformers_serve_answers_about_images_as_the_engine_in_this_process(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = make_llava(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')
    prompts = [Prompt("What?", images=tuple(make_png(10 * n + part) for part in range(1 + n % 2))) for n in range(4)]
    asked = [Request(number, prompt, Sampling(max_tokens=6)) for number, prompt in enumerate(prompts)]
    asked.append(Request(4, Prompt("What?", images=(str(tmp_path / "nowhere.png"),)), Sampling()))
    options = engine_options(str(folder), {"images": "image", "precision": "fp32"})
    expected = by_id(open_engine(options, Place("cpu")).generate(asked))
    server = open_server(folder, TRANSFORMERS, images="image")
    found = by_id(server.generate(asked))
    server.close()
    for number, output in found.items():
        wanted = expected[number]
        assert (output.text, output.n_prompt_tokens, output.error) == (
            wanted.text,
            wanted.n_prompt_tokens,
            wanted.error,
        )
    assert len({found[number].text for number in range(4)}) == 4
    assert "nowhere.png cannot be read: No such file" in found[4].error


def test_transformers_serve_answers_chats_and_ends_with_the_task(monkeypatch, wide_adder):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = [{"question": f"{a}+{b}"} for a, b in sums(6)]
    settings = {"prompt": "{question}=", "max_tokens": 40, "engine": "server", "serve": TRANSFORMERS, "concurrency": 2}
    workload = Generate(model=str(wide_adder), **settings)
    [line] = workload.place(Share(0)).lines
    assert "on a server that each task starts on its CPUs: transformers serve" in line
    load_on_cpu(workload)
    first = server_of(workload.engine)

    def kill():
        time.sleep(0.5)
        os.killpg(first, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    rows = workload([Item(number, each, 1) for number, each in enumerate(data)])
    killer.join()
    assert [row["text"] for row in rows] == [sum_steps(a, b) for a, b in sums(6)]
    assert all(row["n_tokens"] >= len(row["text"]) and row["n_prompt_tokens"] == 7 for row in rows)
    again = workload([Item(0, data[0], 1)])  # if the rows were done before, the server is gone now
    assert again[0]["text"] == rows[0]["text"]
    last = server_of(workload.engine)
    assert last != first
    workload.engine.close()
    assert not living(last)
