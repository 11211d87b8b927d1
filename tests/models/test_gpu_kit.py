"""The proof on a GPU, on this machine's CPU: every part's code runs, at a toy size, and proves nothing."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slurmgpu.errors import GPUFaultError
from slurmgpu.util.gpus import GPU
from tests.gpu import __main__ as kit
from tests.gpu import findings as kit_findings
from tests.gpu import record
from tests.gpu.findings import HELD, NOT_HELD, NOT_MEASURED, Machine, NotHeld, NotMeasured, findings_of
from tests.gpu.part import run
from tests.gpu.record import Row
from tests.support.runs import wait_until

HOME = Path(__file__).parents[2]
IDLE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_a_run_with_the_faults_of_a_gpu_has_the_bytes_of_one_without_and_on_a_cpu_proves_nothing():
    """The part `core`, by the command."""
    done = run_part("core")
    assert done.returncode == kit.EXIT_NOTHING_PROVEN, done.stdout + done.stderr
    assert "9 ran, 0 did not hold, 4 not measured" in done.stdout
    for said in ("batches of 2 (expected 2)", "item 19 alone", "item 27 alone", "died by SIGKILL", "38 good rows"):
        assert said in done.stdout
    assert "nothing was proven: there is no GPU" in done.stdout


def test_the_part_training_runs_on_a_cpu(tmp_path):
    """In a process that the command would start, since it forks; this one has imported PyTorch."""
    names = [each.name for each in findings_of(importlib.import_module("tests.gpu.training"))]
    command = [sys.executable, "-m", "tests.gpu.part", "training", str(tmp_path), "0"]
    environ, said = {**os.environ, **IDLE}, " ".join(names)
    told = subprocess.run(command, input=said, cwd=HOME, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    ends = [line for line in map(json.loads, told.stdout.splitlines()) if "end" in line]
    ran = [line["end"] for line in ends if line["verdict"] == HELD]
    assert ran == [name for name in names if name != "kernels_fill_the_time_of_steps"], told.stdout
    assert len(ran) == 11


@pytest.mark.parametrize(("part", "n_held"), [("llm", 15), ("influence", 10), ("embedding", 5)])
@pytest.mark.usefixtures("one_thread")
def test_a_part_runs_on_a_cpu(part, n_held, tmp_path):
    """In this process, which has imported PyTorch and transformers."""
    machine = Machine("cpu", 0, tmp_path)
    found = [run(each, machine)[0] for each in findings_of(importlib.import_module(f"tests.gpu.{part}"))]
    assert [line for line in found if line["verdict"] == NOT_HELD] == []
    n_held += part == "llm" and any(map(find_spec, ("torchao", "bitsandbytes")))  # which variants need
    assert sum(line["verdict"] == HELD for line in found) == n_held


def run_part(part):
    command = [sys.executable, "-m", "tests.gpu", part]
    return subprocess.run(command, cwd=HOME, env={**os.environ, **IDLE}, capture_output=True, text=True, timeout=800)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """`written(text)`: a part `tests.gpu.failing` with this text, as a module, with the text `here` if it is given.

    The part's own process finds it in a package that begins in a folder of the test's.
    """

    def write(text, here=None):
        package = tmp_path / "tests" / "gpu"
        package.mkdir(parents=True)
        for name in ("__init__.py", "findings.py", "part.py"):
            (package / name).write_text((HOME / "tests" / "gpu" / name).read_text())
        (package / "failing.py").write_text(text)
        module = ModuleType("tests.gpu.failing")
        exec(here or text, module.__dict__)
        monkeypatch.setattr(kit, "HOME", tmp_path)
        return module

    return write


def test_a_finding_that_fails_hangs_or_ends_its_process_costs_its_row(written, monkeypatch):
    """The findings after it have their rows; `tests.gpu.failing` is a part that this test writes."""
    module = written(FAILING)
    monkeypatch.setitem(sys.modules, "tests.gpu.failing", module)
    rows = list(kit.run_part("failing", findings_of(module), 0, 1200))
    assert [row.verdict for row in rows] == [
        HELD,
        NOT_HELD,
        NOT_MEASURED,
        NOT_HELD,
        NOT_HELD,
        NOT_HELD,
        NOT_HELD,
        HELD,
    ]
    assert [row.figures for row in rows[1:3]] == ["1 is less than 2", "no such thing"]
    assert rows[1].trace == "something was logged"
    assert rows[3].figures.startswith("ZeroDivisionError: division by zero")
    assert "raises" in rows[3].trace
    assert "its process ended with SIGKILL" in rows[4].figures
    assert "it was stopped after" in rows[5].figures
    assert "CUDA error" in rows[6].figures
    assert rows[7].claim == "The last one is told as well"


FAILING = '''
import logging, os, signal, time
from tests.gpu.findings import NotHeld, NotMeasured, finding, hold

@finding()
def holds(machine):
    """It holds."""
    return hold(True, "2 is more than 1")

@finding()
def holds_not(machine):
    """It does not hold."""
    logging.getLogger("slurmgpu").warning("something was logged")
    return hold(False, "1 is less than 2")

@finding()
def lacks(machine):
    """It lacks something."""
    raise NotMeasured("no such thing")

@finding()
def raises(machine):
    """It raises."""
    return 1 / 0

@finding()
def dies(machine):
    """It dies."""
    os.kill(os.getpid(), signal.SIGKILL)

@finding(limit_s=0.2)
def hangs(machine):
    """It hangs."""
    time.sleep(1000)

@finding()
def breaks(machine):
    """It breaks CUDA."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@finding()
def comes_last(machine):
    """The last one is told as well."""
    return ""
'''


def test_a_part_prepares_before_its_turn_and_a_process_that_waits_for_nobody_ends(written):
    """What fails as it is prepared is told with the findings that need it."""
    prepares = """
    def prepare(machine):
        (machine.folder / "prepared").touch()
        raise ValueError("no such library")
    """
    module = written(FAILING + textwrap.dedent(prepares))
    with kit.process_of("failing", 0) as process:
        prepared = process.log.with_name("work") / "prepared"
        wait_until(prepared.exists, "it is prepared")
        [row] = kit.run_part("failing", [module.holds], 0, 1200, process)
        assert row.verdict == HELD
        assert "ValueError: no such library" in process.log.read_text()
    with kit.process_of("failing", 0) as process:
        process.popen.stdin.close()
        assert process.popen.wait(timeout=60) == 0
        assert process.popen.stdout.read() == b""
    assert not process.log.exists()


def test_the_record_of_a_gpu_has_a_row_for_each_finding(tmp_path):
    results = tmp_path / "results"
    gpu = GPU("NVIDIA H100 80GB HBM3", 85 * 10**9, cuda="13.0", driver="580.1")
    rows = [Row("core", "It holds", HELD, "1 | 2", 1.0), Row("llm", "It is fast", NOT_HELD, "slow", 2.0)]
    path = record.write(results, [gpu], rows, [])
    assert path == results / "NVIDIA-H100-80GB-HBM3.md"
    text = path.read_text()
    assert "- 1 × NVIDIA H100 80GB HBM3, 85.0 GB, driver 580.1, for CUDA 13.0" in text
    assert "- 1 held, 1 did not hold, 0 not measured\n" in text
    assert "| It holds | held | 1 \\| 2 |" in text
    assert "| It is fast | did not hold | slow |" in text
    others = [replace(gpu, name="NVIDIA L4", memory_bytes=24 * 10**9), gpu]
    text = record.write(results, [gpu, *others], rows[:1], ["It holds", "It is fast", "It is small"]).read_text()
    assert "- 2 × NVIDIA H100 80GB HBM3, 85.0 GB, 1 × NVIDIA L4, 24.0 GB, driver 580.1, for CUDA 13.0" in text
    assert "- 1 held, 0 did not hold, 0 not measured, 2 not tried\n" in text
    assert [*results.iterdir()] == [path]


def test_a_record_keeps_what_was_measured_before_with_the_same_versions(tmp_path):
    gpu, claims = GPU("A GPU", 85 * 10**9, cuda="13.0", driver="580.1"), {"It holds", "It's fast"}
    before = [("core", "It holds", "1 | 2"), ("llm", "It's fast", ""), ("llm", "It was asked", "")]
    record.write(tmp_path, [gpu], [Row(part, claim, NOT_HELD, figures, 1.0) for part, claim, figures in before], claims)
    again = [Row("llm", "It's fast", HELD, "fast", 3.0), Row("core", "It holds", NOT_MEASURED, "no time", 0.0)]
    text = record.write(tmp_path, [gpu], again, claims).read_text()
    assert "- 1 held, 1 did not hold, 0 not measured" in text
    assert "| It holds | did not hold | 1 \\| 2 |" in text
    assert "| It's fast | held | fast |" in text
    assert "It was asked" not in text
    newer = record.write(tmp_path, [replace(gpu, driver="590.2")], again[:1], claims)
    assert "It holds" not in newer.read_text()


def test_a_finding_that_the_parts_time_cuts_short_is_not_measured(written):
    """A finding that exceeds its own limit did not hold, such as `hangs` above."""
    module = written(FAILING, here=FAILING.replace("limit_s=0.2", "limit_s=20.0"))
    [hanging, last] = kit.run_part("failing", [module.hangs, module.comes_last], 1, 3.0)
    assert (hanging.verdict, last.verdict) == (NOT_MEASURED, NOT_MEASURED)
    assert hanging.figures == "it was stopped after 3 s (it may take 20 s), because the part's time is used up"
    assert last.figures == "the part's 3 s are used up"


def test_a_card_that_this_pytorch_has_no_code_for_costs_a_part_one_failure(written):
    """Else each finding would start another process, for minutes, to fail alike."""
    text = textwrap.dedent(
        """
        from tests.gpu.findings import finding

        @finding()
        def multiplies(machine):
            "It multiplies."
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

        @finding()
        def adds(machine):
            "It adds."
            return "3"
        """
    )
    [failed, left] = kit.run_part("failing", findings_of(written(text)), 1, 1200)
    assert failed.verdict == NOT_HELD
    assert "no kernel image is available" in failed.figures
    assert (left.claim, left.verdict) == ("It adds", NOT_MEASURED)
    assert left.figures == "this PyTorch has no code for the GPU"


def show_a_gpu(monkeypatch):
    monkeypatch.setattr(kit.gpus, "count", lambda: 1)
    monkeypatch.setattr(kit.gpus, "probe", lambda n: [GPU("A GPU", 85 * 10**9, cuda="13.0", driver="580.1")])


def test_gpus_that_cannot_be_used_end_the_proof_at_once(monkeypatch, capsys):
    """The toys of a CPU would take minutes, and say nothing about it."""

    def probe(n):
        raise GPUFaultError("cuInit failed with code 803: system has unsupported display driver")

    monkeypatch.setattr(kit.gpus, "count", lambda: 1)
    monkeypatch.setattr(kit.gpus, "probe", probe)
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    assert kit.main() == kit.EXIT_NOTHING_PROVEN
    assert "nothing was proven: the GPUs of this machine cannot be used: cuInit failed" in capsys.readouterr().out


def test_a_repository_that_cannot_be_written_costs_the_proof_no_row(tmp_path, monkeypatch, capsys):
    def rows(part, findings, n_gpus, limit_s, process):
        return (Row(part, claim, HELD, "1", 1.0) for claim in ("It holds", "It is fast"))

    results = tmp_path / "results"
    results.write_text("no folder, as for a file system that is read-only")
    monkeypatch.setattr(kit, "RESULTS", results)
    monkeypatch.setattr(kit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kit, "run_part", rows)
    monkeypatch.setattr(kit, "process_of", lambda part, n_gpus: contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "core"])
    show_a_gpu(monkeypatch)
    assert kit.main() == kit.EXIT_HELD
    [written] = tmp_path.glob("slurmgpu-gpu-record-*/A-GPU.md")
    assert "| It is fast | held | 1 |" in written.read_text()
    said = capsys.readouterr().out
    assert said.count("results'; the record is written to ") == 1
    assert f"written: {written}" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_proof_that_is_stopped_leaves_no_process(tmp_path, number):
    """As Slurm and `timeout` stop it; the parts have sessions of their own."""
    command = [sys.executable, "-m", "tests.gpu", "influence", "embedding"]
    environ = {**os.environ, **IDLE, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=HOME, env=environ, stdout=subprocess.PIPE, text=True) as proof:
        assert proof.stdout.readline()
        assert "== influence" in proof.stdout.readline()
        children = Path(f"/proc/{proof.pid}/task/{proof.pid}/children").read_text().split()
        assert len(children) == 2
        proof.send_signal(number)
        assert proof.wait(timeout=60) == 128 + number
    assert [pid for pid in children if Path("/proc", pid).exists()] == []
    assert [*tmp_path.iterdir()] == []


def test_who_stops_a_part_has_a_record_of_what_it_found_before(tmp_path, monkeypatch):
    def rows(part, findings, n_gpus, limit_s, process):
        yield Row(part, "It holds", HELD, "1", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(kit, "RESULTS", tmp_path)
    show_a_gpu(monkeypatch)
    monkeypatch.setattr(kit, "run_part", rows)
    monkeypatch.setattr(kit, "process_of", lambda part, n_gpus: contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "core"])
    with pytest.raises(KeyboardInterrupt):
        kit.main()
    assert "| It holds | held | 1 |" in (tmp_path / "A-GPU.md").read_text()


def test_a_variant_that_fails_costs_the_others_no_figures(tmp_path, monkeypatch):
    llm = importlib.import_module("tests.gpu.llm")

    def quantised(machine, variant):
        if variant == "4bit":
            raise ValueError("it has\nno kernel")
        return "1 GB"

    monkeypatch.setattr(llm, "_quantised", quantised)
    monkeypatch.setattr(llm.importlib.util, "find_spec", lambda name: name)
    line, is_broken = run(llm.quantised_variants_have_their_size, Machine("cpu", 0, tmp_path))
    assert (line["verdict"], is_broken) == (NOT_HELD, False)
    assert line["figures"] == "-8bit 1 GB; -4bit: ValueError: it has; -fp8 1 GB"


def test_what_compiles_for_a_gpu_is_not_measured_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(kit_findings.shutil, "which", lambda name: None)
    Machine("cpu", 0, tmp_path).needs_compiler()  # a CPU's toy compiles nothing
    with pytest.raises(NotMeasured, match="there is no C compiler"):
        Machine("cuda:0", 1, tmp_path).needs_compiler()
    monkeypatch.setattr(kit_findings.shutil, "which", lambda name: name)
    monkeypatch.setattr(kit_findings.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(NotMeasured, match=r"there is no .*/Python\.h"):
        Machine("cuda:0", 1, tmp_path).needs_compiler()
    (tmp_path / "Python.h").touch()
    Machine("cuda:0", 1, tmp_path).needs_compiler()


def test_a_small_card_or_host_that_cannot_hold_a_claim_is_not_measured(tmp_path, monkeypatch):
    """With enough memory and cores, the same does not hold."""

    @kit_findings.finding()
    def fills(machine):
        """It fits."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    machine, there = Machine("cuda:0", 1, tmp_path), [4e9, 1e9]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (there[0], 80e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: there[1])
    line, is_broken = run(fills, machine)
    assert (line["verdict"], is_broken) == (NOT_MEASURED, False)
    assert "it needs 20 GB, and 5.0 are not used by others: OutOfMemoryError: CUDA out" in line["figures"]
    there[1] = 30e9
    assert run(fills, machine)[0]["verdict"] == NOT_HELD
    monkeypatch.setattr(kit_findings.os, "sched_getaffinity", lambda pid: range(4))
    with pytest.raises(NotMeasured, match="90 %; it needs 8 cores, and has 4"):
        machine.hold_with_cores(False, "90 %", 8)
    assert machine.hold_with_cores(True, "95 %", 8) == "95 %"
    with pytest.raises(NotHeld):
        machine.hold_with_cores(False, "90 %", 4)


def test_numbers_that_nvidia_smi_does_not_know_are_not_compared():
    core = importlib.import_module("tests.gpu.core")
    assert core._agree("[N/A]", [0, 0], 0)
    assert core._agree("35.20", [15.0, 60.0], 1.0)  # the card has just woken up
    assert not core._agree("35.20", [15.0, 20.0], 10.0)


def test_what_findings_share_fails_alike_in_each_of_them(tmp_path):
    """Else the second one finds the folder that the first has left, and says only that it exists."""
    calls = []

    @kit_findings.shared
    def trial(machine, *, n):
        calls.append(n)
        raise NotHeld("1 row is missing")

    machine = Machine("cpu", 0, tmp_path)
    for n in (1, 1, 2):
        with pytest.raises(NotHeld, match="1 row is missing"):
            trial(machine, n=n)
    assert calls == [1, 2]
    llm = importlib.import_module("tests.gpu.llm")
    for _ in range(2):
        llm._make_config(tmp_path / "model", llm.TOY, llm.N_TOY_WORDS)


def test_a_step_on_a_gpu_is_timed_by_the_gpu(monkeypatch):
    """The calls that start its work return several steps earlier."""
    from tests.benchmarks import train_arms

    class Event:
        made, ended = 0, []

        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            Event.made += 1
            self.at_ms = 200.0 * Event.made

        def synchronize(self):
            Event.ended.append(self)

        def elapsed_time(self, later):
            assert Event.ended == [later]  # else CUDA raises an error
            return later.at_ms - self.at_ms

    class OnCard(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    net, inputs = train_arms.Net(), torch.zeros(2, 3).as_subclass(OnCard)
    for _ in range(9):
        net.loss(torch.nn.Identity(), (inputs, torch.zeros(2, dtype=torch.long)))
    assert net.step_s()[0] == pytest.approx(0.2)


def test_as_many_gpus_share_a_model_as_divide_its_heads():
    """A small card's model has four heads of keys: eight cards of 16 GB could not split it."""
    llm = importlib.import_module("tests.gpu.llm")
    assert [llm._n_sharing(n, llm.SHAPE_1B) for n in (2, 3, 7, 8, 16)] == [2, 2, 4, 8, 8]
    assert [llm._n_sharing(n, llm.SHAPE_SMALL) for n in (2, 8)] == [2, 4]


def test_findings_are_chosen_by_part_and_by_name():
    wanted = ["llm.scores_are_those_of_the_model_alone", "core.two_runs_share_a_gpu", "llm.vllm_answers_as_fp32"]
    chosen = kit.choose(wanted)
    names = {part: [each.name for each in findings] for part, findings in chosen.items()}
    assert names == {
        "llm": ["scores_are_those_of_the_model_alone", "vllm_answers_as_fp32"],
        "core": ["two_runs_share_a_gpu"],
    }
    assert len(kit.choose(["llm.scores_are_those_of_the_model_alone", "llm"])["llm"]) == len(kit.choose(["llm"])["llm"])
    with pytest.raises(ValueError, match="there is no part 'gpu': choose from core, influence"):
        kit.choose(["gpu"])
    with pytest.raises(ValueError, match="core has no finding 'speed': choose from nvml_says"):
        kit.choose(["core.speed"])


def test_a_part_that_is_asked_for_alone_has_the_time_of_all():
    all_s = sum(kit.PARTS.values())
    assert all_s == 480
    assert kit.ends_of(kit.PARTS) == {"core": 85, "influence": 105, "training": 200, "embedding": 305, "llm": 480}
    assert kit.ends_of(["embedding"]) == {"embedding": all_s}
    assert kit.ends_of(["core", "embedding"]) == pytest.approx({"core": all_s * 85 / 190, "embedding": all_s})


def test_a_part_has_the_time_that_those_before_it_left(tmp_path, monkeypatch, capsys):
    limits = []

    def rows(part, findings, n_gpus, limit_s, process):
        limits.append(limit_s)
        return iter([Row(part, "It holds", HELD, "1", 1.0)])

    monkeypatch.setattr(kit, "RESULTS", tmp_path)
    monkeypatch.setattr(kit, "HOME", tmp_path)
    show_a_gpu(monkeypatch)
    monkeypatch.setattr(kit, "run_part", rows)
    monkeypatch.setattr(kit, "process_of", lambda part, n_gpus: contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    assert kit.main() == kit.EXIT_HELD
    assert limits[-1] > kit.PARTS["llm"] + 100
    assert "At most 8 minutes." in capsys.readouterr().out


def test_beside_a_gpu_tokenizers_have_the_cores_that_a_users_run_has(monkeypatch):
    """On one core they take longer for a short text than the GPU, which then waits."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert "TOKENIZERS_PARALLELISM" not in kit.environ_of(1)
    assert kit.environ_of(0)["TOKENIZERS_PARALLELISM"] == "false"


def test_every_finding_says_what_must_hold():
    for part in kit.PARTS:
        findings = findings_of(importlib.import_module(f"tests.gpu.{part}"))
        assert findings
        for each in findings:
            assert each.claim, each.name
            assert each.limit_s <= kit.ends_of([part])[part]
