import functools
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from slurmgpu.code import imported_modules
from tests.cluster.cluster import INHERITED
from tests.cluster.fixture import cluster, memory_limits  # noqa: F401
from tests.support import command_line, fsyncs, process_state
from tests.support.images import apptainer, normal_user  # noqa: F401
from tests.support.reasoners import reasoners  # noqa: F401
from tests.support.runs import make_project
from tests.support.somebody import somebody  # noqa: F401
from tests.support.tiny_models import adder, one_thread  # noqa: F401

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""For the processes that tests start: several tests run at once, and threads that wait for a core keep it busy."""

settings.register_profile("quick", max_examples=25, deadline=None, derandomize="CI" in os.environ)
settings.register_profile("nightly", max_examples=500, deadline=None)
settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="session")
def _signals():
    """Processes get SIGINT and SIGHUP, which children of a background shell or of `nohup` ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def _umask():
    """Files have the modes that most shells give them: who may read or write a run depends on it."""
    os.umask(0o022)


@pytest.fixture(autouse=True, scope="session")
def _fsyncs():
    fsyncs.skip_on_this_disk()


OF_A_USER = {"SLURMGPU_PROFILE", "SLURMGPU_TRUST", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
"""Variables of a user's shell, beside sbatch's, that change what is submitted, or how it is shown."""
OF_A_JOB = (*INHERITED, "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "RANK", "WORLD_SIZE")
"""How the variables begin that Slurm or torchrun sets, where the tests are run in a job."""


@pytest.fixture(autouse=True, scope="session")
def _no_site_file(tmp_path_factory):
    """A developer's own site file, and variables of a shell or a job, change no test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name in OF_A_USER or name.startswith(OF_A_JOB)]:
            patch.delenv(name)
        if not {"http_proxy", "HTTP_PROXY"}.isdisjoint(os.environ):  # which knows no server of a test's
            patch.setenv("no_proxy", ",".join([*os.environ.get("no_proxy", "").split(), "localhost", "127.0.0.1"]))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


TIERS = ("slurm", "containers", "local", "models", "docs", "files", "unit")
"""The folders of the tests, the slowest first, so that none runs alone at the end."""
MODELS = Path(__file__).with_name("models")


def pytest_collection_modifyitems(items):
    """Sort tests by their tiers."""
    order = {name: number for number, name in enumerate(TIERS)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(TIERS)))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Collect no garbage while tests are collected: little of it is, and a fifth of the time went into looking.

    What is imported is excluded from later garbage collections, which would take 0.4 s each.
    """
    gc.disable()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let workers that take the tests that wait collect none with models, when all tests are run.

    Others have run these before such a worker is done; to collect them takes it five seconds of a processor.
    """
    from tests.support.scheduling import waits

    n_workers, all_tests = node.workerinput["workercount"], pytest.Config.ArgsSource.TESTPATHS
    is_spared = node.config.args_source is all_tests and waits(node.gateway.id, n_workers) and n_workers > 1
    node.workerinput["models"] = not is_spared


def pytest_ignore_collect(collection_path, config):
    if collection_path.parent == MODELS and not getattr(config, "workerinput", {"models": True})["models"]:
        return True
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let some workers take the tests that wait, and others the tests that compute."""
    from tests.support.scheduling import Scheduling

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _as_before():
    """A test that leaves its process changed fails, rather than one that comes after it in some order of the tests."""
    before = process_state.read()
    yield
    if changes := process_state.put_back(before):
        pytest.fail("\n".join(["it leaves its process changed:", *changes]), pytrace=False)


@pytest.fixture(autouse=True)
def _no_modules_of_others():
    """Forget what a test has planned: a plan looks whether any module changed that earlier ones imported.

    It also puts the folder of its run file on `sys.path`, where the next test would find this one's modules.
    """
    path = [*sys.path]
    yield
    sys.path[:] = path
    if imported_modules.DIGESTS:
        imported_modules.take_out(imported_modules.DIGESTS)
        imported_modules.DIGESTS.clear()


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")  # a terminal that a test makes can do more than a dumb one


@pytest.fixture(autouse=True, scope="session")
def _no_command_line_left():
    yield
    if command_line.shared.cache_info().currsize:
        command_line.shared().close()


@pytest.fixture(scope="session")
def slurmgpu():
    """The command line as a user types it: `slurmgpu("submit", …)` gives the finished process."""
    return command_line.shared()


@pytest.fixture
def project(tmp_path):
    """Makes a folder with an input, a run file and the tests' workloads: `project(n_items=100, settings={…})`."""
    yield functools.partial(make_project, tmp_path / "project")
    (tmp_path / "project" / "held").unlink(missing_ok=True)  # a test that failed leaves no item waiting
