"""What an attempt used: GPUs through a fake of NVML, host memory and CPU time of real processes."""
# ruff: noqa: N802, N815 - the names are NVML's

import itertools
import json
import os
import subprocess
import sys
import time
import types

import pytest

from slurmgpu.cli.views.report import show_report
from slurmgpu.containers import image_name
from slurmgpu.run.directory import Run
from slurmgpu.run.telemetry_log import energy_of, telemetry_path
from slurmgpu.task import telemetry
from slurmgpu.task.telemetry import Sampler
from slurmgpu.util import env_info
from slurmgpu.util.nvml import open_cards
from slurmgpu.util.process_tree import TreeWatch
from tests.gpu import core
from tests.gpu.findings import Machine, NotHeld
from tests.support import pretend_runs
from tests.support.runs import copy_run, make_project, wait_until

GB = 10**9


class NVMLError(Exception):
    """As the module's own."""


class FakeCard:
    """A GPU of FakeNVML. What is None raises, as what a card does not support does."""

    def __init__(self, uuid, **values):
        self.uuid = uuid
        self.values = {
            "UtilizationRates": 80,
            "MemoryInfo": 60 * GB,
            "Temperature": 61,
            "PowerUsage": 400_000,
            "TotalEnergyConsumption": 5_000_000,
            "TotalEccErrors": 3,
            "CurrentClocksEventReasons": 1,
            **values,
        }
        self.is_mine = values.get("is_mine", True)


class FakeNVML(types.ModuleType):
    """The module pynvml on a machine with some GPUs."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
    nvmlEventTypeXidCriticalError, nvmlMemory_v2 = 8, 0x02000028
    knows_reserved = True
    """Whether the driver has the second version of a card's memory."""

    def __init__(self, cards=(), driver=True):
        super().__init__("pynvml")
        self.cards, self.driver = list(cards), driver
        self.xids, self.watched, self.n_open = [], [], 0
        for what in FakeCard("").values:
            setattr(self, f"nvmlDeviceGet{what}", lambda card, *_, what=what, **how: self._value(card, what, **how))

    def _value(self, card, what, version=None):
        value = card.values[what]
        if value is None:
            raise NVMLError("Not Supported")
        if what == "MemoryInfo":
            if version is None:
                return types.SimpleNamespace(total=80 * GB, used=value + GB, free=79 * GB - value)
            if not self.knows_reserved:
                raise NVMLError("Function Not Found")
            return types.SimpleNamespace(total=80 * GB, used=value, free=79 * GB - value, reserved=GB)
        return types.SimpleNamespace(gpu=value, memory=0) if what == "UtilizationRates" else value

    def nvmlInit(self):
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.n_open += 1

    def nvmlShutdown(self):
        self.n_open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "570.12"

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if not self.cards[index].is_mine:
            raise NVMLError("Insufficient Permissions")  # as behind Slurm's device cgroup
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise NVMLError("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card):
        return self.cards[0]

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetName(self, card):
        return "NVIDIA H100"

    def nvmlEventSetCreate(self):
        return self

    def nvmlEventSetFree(self, events):
        pass

    def nvmlDeviceRegisterEvents(self, card, kinds, events):
        self.watched.append(card.uuid)

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        if not self.xids:
            raise NVMLError("Timeout")
        return types.SimpleNamespace(eventData=self.xids.pop())


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A sampler that is only slow is waited for."""
    monkeypatch.setattr(telemetry, "PATIENCE_S", 120.0)


@pytest.fixture
def nvml(monkeypatch):
    def install(*cards, driver=True):
        fake = FakeNVML(cards, driver)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.fixture
def start():
    """Starts a Python program as the task starts a worker, and ends it and what it left at the end of the test."""
    running = []

    def begin(code):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def lines(path):
    """What is written by now; the last line may be there in part."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def sampled(path, n):
    """Wait until there are n samples."""
    wait_until(lambda: sum("time" in line for line in lines(path)) >= n, f"{n} samples")


# Which GPUs


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (None, ["GPU-aa", "GPU-ab", "GPU-bb"]),
        (["1"], ["GPU-ab"]),
        (["2", "0"], ["GPU-bb", "GPU-aa"]),
        (["GPU-bb"], ["GPU-bb"]),
        (["GPU-b"], ["GPU-bb"]),
    ],
)
def test_the_gpus_of_cuda_visible_devices_are_found_by_number_uuid_or_its_beginning(nvml, ids, found):
    nvml(FakeCard("GPU-aa"), FakeCard("GPU-ab"), FakeCard("GPU-bb"))
    assert [card.uuid for card in open_cards(ids).cards] == found


@pytest.mark.parametrize("ids", [["7"], ["GPU-a"], ["GPU-zz"], []])
def test_a_gpu_that_cannot_be_told_is_left_out(nvml, ids):
    fake = nvml(FakeCard("GPU-aa"), FakeCard("GPU-ab"))
    assert open_cards(ids) is None
    assert fake.n_open == 0


def test_behind_a_device_cgroup_the_only_gpu_shown_is_the_tasks_whatever_its_number(nvml):
    nvml(FakeCard("GPU-aa", is_mine=False), FakeCard("GPU-bb"), FakeCard("GPU-cc", is_mine=False))
    assert [card.uuid for card in open_cards(["0"]).cards] == ["GPU-bb"]


def test_of_a_mig_instance_the_memory_is_its_own_and_what_it_does_is_unknown(nvml):
    fake = nvml(FakeCard("GPU-aa", Temperature=70), FakeCard("MIG-aa", MemoryInfo=5 * GB, is_mine=False))
    cards = open_cards(["MIG-aa"])
    reading = cards.cards[0].read()
    assert (reading.memory_used_bytes, reading.temperature_c) == (5 * GB, 70)
    assert (reading.utilisation, reading.power_w, reading.energy_j) == (None, None, None)
    assert fake.watched == ["GPU-aa"]


def test_what_a_card_or_an_old_module_does_not_tell_is_unknown(nvml):
    silent = dict.fromkeys(FakeCard("").values)
    fake = nvml(FakeCard("GPU-aa", **silent))
    del fake.nvmlDeviceGetTotalEnergyConsumption
    reading = open_cards(["0"]).cards[0].read()
    assert {getattr(reading, name) for name in reading.__dataclass_fields__} == {None}


class OldNVML(FakeNVML):
    """The module pynvml of the package nvidia-ml-py3, which knows texts as bytes, and no second versions."""

    nvmlEventSetWait_v2 = property()

    def nvmlEventSetWait(self, events, timeout_ms):
        return super().nvmlEventSetWait_v2(events, timeout_ms)

    def nvmlSystemGetDriverVersion(self):
        return b"570.12"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert isinstance(uuid, bytes)  # ctypes takes no other for a char*
        return super().nvmlDeviceGetHandleByUUID(uuid.decode())

    def nvmlDeviceGetUUID(self, card):
        return card.uuid.encode()

    def nvmlDeviceGetName(self, card):
        return b"NVIDIA H100"


@pytest.mark.parametrize("ids", [None, ["0"], ["GPU-aa"], ["GPU-a"]])
def test_an_old_module_whose_texts_are_bytes_tells_the_same(ids, monkeypatch):
    fake = OldNVML([FakeCard("GPU-aa")])
    fake.xids = [79]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    cards = open_cards(ids)
    assert [(card.uuid, card.name) for card in cards.cards] == [("GPU-aa", "NVIDIA H100")]
    assert (cards.driver, cards.xids(), cards.cards[0].read().temperature_c) == ("570.12", [79], 61)


# Samples and what they add up to


def test_usage_is_made_of_the_samples_since_the_worker_was_ready(nvml, tmp_path):
    first, second = FakeCard("GPU-aa", UtilizationRates=0), FakeCard("GPU-bb", UtilizationRates=0, MemoryInfo=70 * GB)
    fake = nvml(first, second)
    path = tmp_path / "1_0.0.jsonl"
    with Sampler(path, ["0", "1"], 0.01, os.getpid) as sampler:
        sampled(path, 3)
        assert sampler.usage()["gpu_utilisation"] is None  # it is loading
        first.values |= {"UtilizationRates": 90, "Temperature": 75, "CurrentClocksEventReasons": 0x44}
        second.values |= {"UtilizationRates": 70, "TotalEnergyConsumption": 5_600_000, "TotalEccErrors": 4}
        fake.xids = [79, 79]
        sampled(path, len(lines(path)) + 2)  # those that were read before the change are written
        sampler.mark_ready()
        sampled(path, len(lines(path)) + 3)
    usage = sampler.usage()
    n_ready = sum(line.get("ready", False) for line in lines(path))
    assert usage["n_samples"] > usage["n_samples_ready"] == n_ready > 0
    assert usage["gpu_utilisation"] == 80
    assert (usage["gpu_memory_peak_bytes"], usage["gpu_memory_total_bytes"]) == (70 * GB, 80 * GB)
    assert (usage["temperature_max_c"], usage["power_mean_w"], usage["energy_j"]) == (75, 800, 600)
    assert (usage["ecc_errors"], usage["xids"]) == (1, [79])
    assert set(usage["throttled"]) == {"sw_power_cap", "hw_thermal_slowdown"}
    assert 0 < usage["throttled"]["sw_power_cap"] < 1
    assert usage["host_memory_peak_bytes"] > 10**6
    assert fake.n_open == 0

    head, *samples = lines(path)
    assert head["format"] == "slurmgpu telemetry"
    assert [gpu["uuid"] for gpu in head["gpus"]] == ["GPU-aa", "GPU-bb"]
    last = dict(zip(head["gpu_values"], samples[-1]["gpus"][1], strict=True))
    assert (last["utilisation"], last["energy_j"], last["throttle"]) == (70, 5600, 0)
    assert dict(zip(head["host_values"], samples[-1]["host"], strict=True))["n_processes"] >= 1


def test_the_uuids_that_the_worker_reports_replace_a_wrong_guess(nvml, tmp_path):
    fake = nvml(FakeCard("GPU-aa", MemoryInfo=79 * GB), FakeCard("GPU-bb"), FakeCard("GPU-cc"))
    path = tmp_path / "1_0.0.jsonl"
    with Sampler(path, ["0"], 0.01, lambda: None) as sampler:
        sampled(path, 1)
        sampler.use_gpus(["GPU-bb"])
        wait_until(lambda: len([line for line in lines(path) if "format" in line]) == 2, "the other GPU's samples")
        sampler.use_gpus(["GPU-unknown"])  # as if NVML had another name for it
        sampled(path, len(lines(path)) + 3)
    heads = [line["gpus"][0]["uuid"] for line in lines(path) if "format" in line]
    assert heads == ["GPU-aa", "GPU-bb"]
    assert sampler.usage()["gpu_memory_peak_bytes"] == 60 * GB
    assert lines(path)[-1]["gpus"]
    assert fake.n_open == 0


def test_a_new_worker_is_not_at_work_before_it_is_ready(nvml, tmp_path):
    nvml(FakeCard("GPU-aa"))
    root = [os.getpid()]
    path = tmp_path / "1_0.0.jsonl"
    with Sampler(path, ["0"], 0.01, lambda: root[0]) as sampler:
        sampler.mark_ready()
        wait_until(lambda: lines(path) and lines(path)[-1].get("ready"), "a sample at work")
        root[0] = os.getppid()
        wait_until(lambda: not lines(path)[-1]["ready"], "a sample of the new worker")
        before = sampler.usage()["n_samples_ready"]
        sampled(path, len(lines(path)) + 3)
        assert sampler.usage()["n_samples_ready"] == before


@pytest.mark.parametrize("what", ["no module", "no driver", "no GPU", "a run on CPUs"])
def test_without_nvml_the_host_is_sampled_all_the_same(what, nvml, monkeypatch, tmp_path):
    nvml(*([FakeCard("GPU-aa")] if what == "a run on CPUs" else []), driver=what != "no driver")
    if what == "no module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    path = tmp_path / "1_0.0.jsonl"
    with Sampler(path, [] if what == "a run on CPUs" else ["0"], 0.01, os.getpid) as sampler:
        sampled(path, 2)
    usage = sampler.usage()
    known = {name for name, value in usage.items() if value not in (None, [])}
    assert known == {"n_samples", "n_samples_ready", "host_memory_peak_bytes"}
    assert lines(path)[0]["gpus"] == []


def test_a_sampler_that_cannot_write_goes_on(tmp_path):
    with Sampler(tmp_path / "missing" / "1_0.0.jsonl", [], 0.01, os.getpid) as sampler:
        wait_until(lambda: sampler.usage()["n_samples"] > 2, "samples")
    assert sampler.usage()["host_memory_peak_bytes"] > 0


def test_with_an_interval_of_0_nothing_is_sampled(tmp_path):
    with Sampler(tmp_path / "1_0.0.jsonl", None, 0, os.getpid) as sampler:
        sampler.mark_ready()
    assert not any(tmp_path.iterdir())
    assert sampler.usage()["n_samples"] == 0


# Process trees

FAMILY = """
import subprocess, sys
grandchild = "import sys; held = b'x' * 100_000_000; print(len(held), flush=True); sys.stdin.read()"
subprocess.Popen([sys.executable, "-c", grandchild], stdin=subprocess.PIPE, start_new_session=True).wait()
"""


def test_a_tree_holds_descendants_with_sessions_of_their_own(start):
    worker = start(FAMILY)
    assert worker.stdout.readline() == "100000000\n"
    tree = TreeWatch().read(worker.pid)
    assert tree.n_processes == 2
    assert tree.rss_bytes > 100_000_000 + 2 * 4_000_000


ORPHAN = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
sys.stdout.close()
time.sleep(600)
"""


def test_a_tree_holds_the_orphans_of_its_session_and_outlives_its_first_process(start):
    worker = start(ORPHAN)
    orphan = int(worker.stdout.readline())
    try:
        watch = TreeWatch()
        wait_until(lambda: watch.read(worker.pid).n_processes == 2, "the end of the process between them")
        worker.kill()
        worker.wait()
        assert watch.read(worker.pid).n_processes == 1
    finally:
        os.kill(orphan, 9)
    wait_until(lambda: watch.read(worker.pid) is None, "the end of the last one")


BUSY = """
import time
while True: pass
"""


def test_cpu_time_is_that_of_the_worker_at_work(start, tmp_path, monkeypatch):
    worker, path, step_s = start(BUSY), tmp_path / "1_0.0.jsonl", 0.02
    moments = itertools.count(0.0, step_s)  # from one sample to the next it is one step, however long that takes
    clock = types.SimpleNamespace(monotonic=lambda: next(moments), time=time.time)
    monkeypatch.setattr(telemetry, "time", clock)

    def cpu_seconds():
        return [line["host"][1] for line in lines(path) if line.get("ready")]

    with Sampler(path, [], step_s, lambda: worker.pid) as sampler:
        sampler.mark_ready()
        wait_until(lambda: cpu_seconds() and cpu_seconds()[-1] - cpu_seconds()[0] > 0.5, "CPU time")
    first, *_, last = cpu_seconds()
    wall_s = (len(cpu_seconds()) - 1) * step_s
    assert sampler.usage()["cpu_cores"] == pytest.approx((last - first) / wall_s, abs=0.01)


def test_a_process_that_comes_later_is_seen_among_those_of_others(start):
    worker = start("import sys, subprocess\nprint(flush=True)\nsys.stdin.read()")
    worker.stdout.readline()
    watch = TreeWatch()
    assert watch.read(os.getpid()).n_processes >= 2
    other = start("import sys\nprint(flush=True)\nsys.stdin.read()")
    other.stdout.readline()
    before = watch.read(worker.pid).n_processes
    assert before == watch.read(worker.pid).n_processes == 1


# Surroundings


def test_surroundings_are_told_without_importing_what_they_tell_of():
    code = (
        "import sys, json\nfrom slurmgpu.util import env_info\nfound = env_info.describe()\n"
        "json.dump([found, sorted({name.split('.')[0] for name in sys.modules})], sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, modules = json.loads(done.stdout)
    assert not {"numpy", "h5py", "torch", "importlib.metadata"} & set(modules)
    import h5py
    import numpy

    import slurmgpu

    assert found["packages"]["numpy"] == numpy.__version__
    assert found["packages"]["h5py"] == h5py.__version__
    assert found["packages"]["slurmgpu"] == slurmgpu.__version__
    assert found["executable"] == sys.executable
    assert found["image"] is None


def test_the_image_is_named_by_its_runtime(monkeypatch):
    monkeypatch.setenv("SINGULARITY_NAME", "judge.sif")
    assert image_name() == "judge.sif"


@pytest.mark.parametrize(
    ("entry", "version"),
    [("numpy-1.24.2-py3.11.egg-info", "1.24.2"), ("Flash_Attn-2.5.dist-info", None), ("numpy-2.0.dist-info", "2.0")],
)
def test_versions_are_read_off_the_names_of_metadata_folders(entry, version, monkeypatch, tmp_path):
    (tmp_path / entry).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    assert env_info.installed(["numpy", "flash-attn"]) == ({"numpy": version} if version else {"flash-attn": "2.5"})


# The report


@pytest.fixture(scope="module")
def folder(tmp_path_factory, slurmgpu):
    """A run that is over."""
    folder = make_project(tmp_path_factory.mktemp("telemetry") / "project", 4)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    return folder


@pytest.fixture
def run(folder, tmp_path):
    copy_run(folder / "run", tmp_path / "run")
    return Run.open(tmp_path / "run")


def reported(run, **changes):
    [path] = run.tasks.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return pretend_runs.reported(run)


USED = {
    "n_samples_ready": 3,
    "gpu_utilisation": 3.4,
    "gpu_memory_peak_bytes": 60 * GB,
    "host_memory_peak_bytes": 2 * GB,
}


IDLE = {"usage": USED}
NOT_IDLE = [
    {"usage": {**USED, "gpu_utilisation": 12.0}},
    {"usage": {**USED, "n_samples_ready": 2}},
    {"usage": {**USED, "gpu_utilisation": None}},
    {"usage": {}},
    {"usage": USED, "device": "cpu"},
    {"usage": USED, "n_gpus": 0},
]


def test_an_attempt_whose_gpu_had_hardly_anything_to_do_is_flagged(run, capsys):
    for changes in [IDLE, *NOT_IDLE]:
        report = reported(run, **{"n_gpus": 1, "device": "auto", **changes})
        show_report(report)
        said = "was used 3 % on average. A larger batch_size" in capsys.readouterr().out
        assert said == report["attempts"][0]["idle_gpu"] == (changes is IDLE), changes


def test_the_report_shows_what_attempts_used_where_it_is_known(run, capsys):
    show_report(reported(run, usage=USED))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    [head] = [line for line in lines if line[:2] == ["attempt", "node"]]
    [row] = [line for line in lines if line[:1] == ["debug1_0.0"]]
    assert head[-7:] == ["GPU", "%", "GPU", "GB", "host", "GB", "end"]
    assert row[-5:-2] == ["3", "60.0", "2.0"]
    show_report(reported(run, usage={}))
    assert "host GB" not in capsys.readouterr().out


def test_the_energy_of_an_attempt_is_that_of_all_its_nodes(run, nvml):
    first, second = FakeCard("GPU-aa"), FakeCard("GPU-bb")
    nvml(first, second)
    [record] = run.attempts()
    path = telemetry_path(run.folder, record["attempt"], 1)
    with Sampler(path, None, 60, lambda: None):
        sampled(path, 1)
        first.values["TotalEnergyConsumption"] += 30_000
        second.values["TotalEnergyConsumption"] += 500
    with path.open("a") as file:
        file.write("[1\n{}\n{")  # damaged, and not a sample, and not whole
    for n_nodes, energy_j in ((1, 12.5), (2, 43.0)):
        report = reported(run, n_gpus=2, n_nodes=n_nodes, device="auto", usage={**USED, "energy_j": 12.5})
        assert report["attempts"][0]["usage"]["energy_j"] == energy_j
        assert report["ledger"]["energy_kwh"] == round(energy_j / 3.6e6, 6)
    path.write_text("")
    assert energy_of(path) is None


def test_an_older_driver_counts_what_it_reserves_as_used(nvml):
    fake = nvml(FakeCard("GPU-aa", MemoryInfo=7 * GB))
    cards = open_cards(None)
    assert [card.read().memory_used_bytes for card in cards.cards] == [7 * GB]
    fake.knows_reserved = False
    assert [card.read().memory_used_bytes for card in cards.cards] == [8 * GB]


def test_the_proof_on_a_gpu_compares_nvml_with_nvidia_smi_and_knows_what_tells_xids(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # a machine may have set it
    machine, cards = Machine("cuda:0", 1, tmp_path), [FakeCard("GPU-1"), FakeCard("GPU-2", Temperature=None)]
    monkeypatch.setitem(sys.modules, "pynvml", fake := FakeNVML(cards))
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ncat $0.csv\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    used = 60 * GB // 2**20
    rows = [f"GPU-1, 76294, {used}, 61, 400.00, 570.12", f"GPU-2, 76294, {used}, [N/A], [N/A], 570.12"]
    (tmp_path / "nvidia-smi.csv").write_text("\n".join(rows))
    assert "61 and 61 °C" in core.nvml_says_what_nvidia_smi_says.function(machine)
    (tmp_path / "nvidia-smi.csv").write_text("\n".join(rows).replace(", 400.00", ", 100.00"))
    with pytest.raises(NotHeld, match=r"400\.0 and 100\.00 W"):
        core.nvml_says_what_nvidia_smi_says.function(machine)
    assert core._tells_xids()
    monkeypatch.setattr(fake, "nvmlDeviceRegisterEvents", None)
    assert not core._tells_xids()
    assert fake.n_open == 0
