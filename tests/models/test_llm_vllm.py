"""What the engine asks of vLLM, and what it keeps on a node, without vLLM: tests/vllm runs the real one."""

import errno
import os
import signal
import socket
import subprocess
import sys
import types
from multiprocessing import shared_memory

import pytest

pytest.importorskip("transformers")

from slurmgpu.errors import SlurmGPUError, WorkerBrokenError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Place
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.vllm_engine import node as vllm_node
from slurmgpu.llm.vllm_engine.engine import VllmEngine
from slurmgpu.llm.vllm_engine.node import NodePlace, start_with_port
from slurmgpu.llm.vllm_engine.start import llm_arguments
from slurmgpu.util.shared_memory import FOLDER
from slurmgpu.workloads.judge.workload import Judge
from tests.support.tiny_models import make_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def environ(monkeypatch, tmp_path):
    """What an engine sets in the environment is taken back, and its places are in a folder of the test's own."""
    monkeypatch.setattr(os, "environ", dict(os.environ, SLURM_JOB_ID="7"))
    monkeypatch.setattr(vllm_node.tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("suffix", "quantization"), [("", None), ("-fp8", "fp8"), ("-8bit", "int8_per_channel_weight_only")]
)
def test_model_precision_and_variant_reach_it(llama, suffix, quantization):
    options = EngineOptions(find_model(f"{llama}{suffix}"), engine="vllm", precision="bf16", max_context=1024)
    expected = {"model": str(llama), "tensor_parallel_size": 4, "dtype": "bfloat16", "quantization": quantization}
    expected |= {"seed": 0, "max_model_len": 1024, "enable_prefix_caching": True, "trust_remote_code": False}
    found = llm_arguments(options, Place("cuda:0", 4))
    assert expected.items() <= found.items()
    assert "kv_cache_memory_bytes" not in found


@pytest.mark.parametrize("cuda_graphs", ["auto", True, False])
def test_without_cuda_graphs_it_computes_eagerly(llama, cuda_graphs):
    options = EngineOptions(find_model(str(llama)), engine="vllm", cuda_graphs=cuda_graphs)
    assert llm_arguments(options, Place("cuda:0", 1)).get("enforce_eager", False) == (cuda_graphs is False)


def test_on_cpus_its_cache_has_the_size_that_was_planned_and_not_most_of_the_memory(llama):
    options = EngineOptions(find_model(str(llama)), engine="vllm", precision="fp32")
    assert llm_arguments(options, Place("cpu"))["kv_cache_memory_bytes"] == 64 << 20
    # Two layers of two key-value heads of 16 numbers, in fp32: 512 bytes a token.
    larger = EngineOptions(find_model(str(llama)), engine="vllm", precision="fp32", batch_tokens=1 << 20)
    found = llm_arguments(larger, Place("cpu"))
    assert (found["kv_cache_memory_bytes"], found["tensor_parallel_size"]) == (512 << 20, 1)


@pytest.mark.parametrize(
    ("suffix", "place", "reason"),
    [
        ("-4bit", Place("cuda:0", 1), "vLLM cannot quantise to 4bit"),
        ("", Place("cuda:0", 1, 0, 2), 'Set .* processes = "one"'),
    ],
)
def test_what_it_cannot_do_is_a_sentence(llama, suffix, place, reason):
    with pytest.raises(SlurmGPUError, match=reason):
        open_engine(EngineOptions(find_model(f"{llama}{suffix}"), engine="vllm"), place)


@pytest.mark.parametrize("name", ["temperature", "retry_temperature"])
def test_a_temperature_that_vllm_would_change_is_refused_at_planning(name):
    said = f"{name} is 0.005; expected 0, or 0.01 to 2, for vLLM."
    with pytest.raises(SlurmGPUError, match=f"^{said}$"):
        Judge(model="any", engine="vllm", method="parse", **{name: 0.005})
    Judge(model="any", method="parse", **{name: 0.005})


def test_an_image_without_it_is_told_which_has_it(llama, monkeypatch, environ):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SlurmGPUError, match="slurmgpu image build --vllm"):
        open_engine(EngineOptions(find_model(str(llama)), engine="vllm"), Place("cuda:0", 1))


def test_a_torchvision_that_does_not_match_is_named_as_the_cause(llama, monkeypatch, environ):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    module = types.ModuleType("vllm")
    module.__getattr__ = broken
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(SlurmGPUError, match=r"cannot be imported here \(operator torchvision::nms does not exist"):
        open_engine(EngineOptions(find_model(str(llama)), engine="vllm"), Place("cpu"))


# What it keeps on a node


def test_engines_of_a_node_have_caches_and_ports_of_their_own_and_the_next_one_finds_the_cache(environ):
    first, second = NodePlace(), NodePlace()
    ports = {place.port(start) for place in (first, second) for start in range(3)}
    assert len(ports) == 6
    assert first.cache != second.cache
    found = first.cache
    first.close()
    third = NodePlace()
    assert third.cache == found
    os.environ["SLURM_JOB_ID"] = "8"  # of a job with a /tmp of its own, where all are the first
    assert third.port(0) not in ports
    for place in (second, third):
        place.close()


def test_a_port_that_another_process_has_is_left_out(environ):
    place = NodePlace()
    with socket.socket() as other:
        other.bind(("", place.port(0)))
        assert place.port(0) == other.getsockname()[1] + 1
    place.close()


def test_an_engine_whose_port_is_taken_while_it_starts_is_started_on_another(environ):
    place, tried, others = NodePlace(), [], []

    def make():
        tried.append(int(os.environ["VLLM_PORT"]))
        if len(tried) == 1:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        if len(tried) == 2:  # in a process of the engine: here nothing says why
            others.append(socket.socket())
            others[0].bind(("", tried[1]))
            raise RuntimeError("WorkerProc initialization failed")
        return "engine"

    assert start_with_port(make, place) == "engine"
    assert len(set(tried)) == 3
    others[0].close()
    place.close()


def test_an_engine_that_fails_for_another_reason_is_not_started_again(environ):
    place, tried = NodePlace(), []

    def make():
        tried.append(1)
        raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        start_with_port(make, place)
    assert len(tried) == 1
    place.close()


KILLED = """
import multiprocessing, os, signal, sys, tempfile
from multiprocessing import shared_memory
from slurmgpu.llm.vllm_engine.node import NodePlace

tempfile.tempdir = sys.argv[1]
place = NodePlace()
with place.recording():
    found = shared_memory.SharedMemory(create=True, size=4096)
    lock = multiprocessing.get_context("spawn").Lock()
os.write(1, f"{found.name} sem.{lock._semlock.name[1:]}".encode())
os.kill(0, signal.SIGKILL)
"""


def test_what_a_killed_engine_left_in_shared_memory_is_removed_by_the_next_and_nothing_else(environ, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert done.returncode == -signal.SIGKILL
    left = [FOLDER / name for name in done.stdout.split()]
    assert [path.exists() for path in left] == [True, True]
    others = shared_memory.SharedMemory(create=True, size=4096)
    place = NodePlace()
    assert not any(path.exists() for path in left)
    with place.recording():
        own = shared_memory.SharedMemory(create=True, size=4096)
    place.close()  # of an engine that has ended, and did not remove it
    assert not (FOLDER / own.name).exists()
    assert (FOLDER / others.name).exists()
    others.close()
    others.unlink()
    own.close()
    shared_memory.resource_tracker.unregister(own._name, "shared_memory")


@pytest.mark.parametrize("place", ["writable", "file", "link"])
def test_a_folder_that_others_may_write_is_not_used(environ, tmp_path, place):
    folder = tmp_path / f"slurmgpu-vllm-{os.getuid()}"
    if place == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    elif place == "file":
        folder.touch()
    else:
        folder.symlink_to("nowhere")
    with pytest.raises(SlurmGPUError, match=r"is not a folder that only you may write\. Remove it, or set TMPDIR"):
        NodePlace()


@pytest.mark.parametrize(("is_kept", "expected"), [(True, WorkerBrokenError), (False, ValueError)])
def test_a_step_that_fails_ends_the_worker_and_what_is_refused_does_not(is_kept, expected):
    """After a failed step vLLM keeps the requests, by which tests/vllm/test_vllm_engine.py knows it."""

    class Failing:
        llm_engine = types.SimpleNamespace(has_unfinished_requests=lambda: is_kept)

        def generate(self, inputs, sampling, use_tqdm):
            raise ValueError("it cannot")

    engine = VllmEngine.__new__(VllmEngine)
    engine._llm = Failing()
    with pytest.raises(expected, match="it cannot"):
        engine._generate([], [])
