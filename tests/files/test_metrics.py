"""The text file for Prometheus says what the status says, and both of Prometheus' own parsers read it."""

import json
import os
import re
import stat

import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest

from slurmgpu.report.metrics import metrics_of, metrics_text, write_metrics
from slurmgpu.report.status import read_status
from tests.docs.test_docs import DOCS
from tests.support.pretend_runs import BEGIN, pretend_run

PARSERS = {
    "prometheus": prometheus_client.parser.text_string_to_metric_families,
    "openmetrics": prometheus_client.openmetrics.parser.text_string_to_metric_families,
}


def read(text, parser):
    """The values by metric and its own labels, and the labels that all have."""
    families = list(PARSERS[parser](text))
    assert {family.type for family in families} == {"gauge"}
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.timestamp is None for sample in samples)  # node_exporter refuses them
    values = {}
    for sample in samples:
        own = [value for key, value in sample.labels.items() if key not in ("run", "run_dir")]
        values[(sample.name.removeprefix("slurmgpu_run_"), *own)] = sample.value
    runs = {(sample.labels["run"], sample.labels["run_dir"]) for sample in samples}
    return values, runs


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("name", ["judge", 'a "b" \\n c\\\nd\u2028é'])
def test_the_metrics_are_the_status_whatever_the_run_is_called(tmp_path, parser, name):
    run = pretend_run(tmp_path / name, 400, n_tasks=60, n_shards=600, faulty=True)
    queue = [{"job_id": "4711_[60-69]", "state": "PENDING", "reason": "Resources", "start": None, "n_tasks": 10}]
    status = read_status(run, queue, now=BEGIN + 400)
    values, runs = read(metrics_text(status), parser)
    assert runs == {(name, str(run.folder))}
    for metric, key in {
        "items": "n_items",
        "items_done": "n_items_done",
        "items_failed": "n_errors",
        "shards": "n_shards",
        "shards_done": "n_shards_done",
        "shards_claimed": "n_shards_claimed",
    }.items():
        assert values[metric,] == status[key]
    assert {key[1] for key, value in values.items() if key[0] == "state" and value} == {status["state"]}
    states = [attempt["state"] for attempt in status["attempts"]]
    assert values["attempts", "running"] == states.count("running")
    failures = {key[1]: value for key, value in values.items() if key[0] == "attempts_failed"}
    assert failures == status["failures"] != {}
    deaths = {key[1]: value for key, value in values.items() if key[0] == "worker_deaths"}
    assert deaths == status["worker_deaths"] != {}
    assert values["attempts_silent",] == sum(attempt["silent"] for attempt in status["attempts"]) > 0
    assert values["tasks_pending",] == 10
    assert values["updated_timestamp_seconds",] == BEGIN + 400


@pytest.mark.parametrize("parser", PARSERS)
def test_what_is_not_known_is_left_out_and_what_is_known_is_there(tmp_path, parser):
    run = pretend_run(tmp_path / "run", 400, n_tasks=4)
    status = {**read_status(run), "pace": {"items_per_s": None, "left_s": None}, "gpu_hours": None}
    status["attempts"] = [{**attempt, "gpu": None} for attempt in status["attempts"]]
    values, _ = read(metrics_text(status), parser)
    known = {"gpu_seconds", "gpu_utilisation_ratio", "items_per_second", "left_seconds"}
    assert not {key[0] for key in values} & {*known, "tasks_pending"}
    status |= {"pace": {"items_per_s": 2.5, "left_s": 90.0}, "gpu_hours": 0.75}
    for attempt, used in zip(status["attempts"], (100, 50, None), strict=False):
        attempt["gpu"] = {"utilisation": used}
    values, _ = read(metrics_text(status), parser)
    assert [values[name,] for name in sorted(known)] == [2700.0, 0.75, 2.5, 90.0]


NOT_BASE_UNITS = {
    *("milliseconds", "minutes", "hours", "days", "weeks", "percent", "kelvin", "fahrenheit", "celsius"),
    *("kilobytes", "megabytes", "gigabytes", "bits", "kilowatts", "milliwatts", "watts", "kilojoules"),
}
NOT_OF_GAUGES = ("_total", "_count", "_sum", "_bucket", "_info")


def test_names_and_helps_keep_to_the_rules_of_promtool_check_metrics(tmp_path):
    """https://github.com/prometheus/client_golang/blob/main/prometheus/testutil/promlint/validations."""
    run = pretend_run(tmp_path / "run", 400, n_tasks=4)
    for name, (text, _) in metrics_of(read_status(run)).items():
        assert re.fullmatch(r"[a-z][a-z_]*", name), name
        assert not {*name.split("_")} & NOT_BASE_UNITS, name
        assert not name.endswith(NOT_OF_GAUGES), name
        assert "gauge" not in name
        assert text.endswith(".")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_file_is_replaced_whole_and_others_may_read_it(tmp_path, umask):
    run = pretend_run(tmp_path / "run", 400, n_tasks=4)
    path = tmp_path / "textfiles" / "run.prom"
    path.parent.mkdir()
    path.write_text("old")
    before = os.umask(umask)
    try:
        write_metrics(read_status(run), path)
    finally:
        os.umask(before)
    assert path.read_text().endswith("\n# EOF\n")
    assert path.stat().st_mode & stat.S_IROTH
    assert list(path.parent.iterdir()) == [path]


def test_status_writes_the_file_and_prints_what_it_always_does(tmp_path, slurmgpu):
    run = pretend_run(tmp_path / "run", 400, n_tasks=4, executor="local")
    done = slurmgpu("status", run.folder, "--json", "--metrics", tmp_path / "run.prom", expect=0)
    values, _ = read((tmp_path / "run.prom").read_text(), "openmetrics")
    status = json.loads(done.stdout)
    assert values["items_done",] == status["n_items_done"]
    assert values["gpu_seconds",] == pytest.approx(3600 * status["gpu_hours"])
    done = slurmgpu("status", run.folder, "--metrics", tmp_path / "no" / "run.prom", expect=2)
    assert f"there is no folder {tmp_path / 'no'}." in done.stderr
    assert "--metrics / is a folder." in slurmgpu("status", run.folder, "--metrics", "/", expect=2).stderr
    done = slurmgpu("status", run.folder, "--metrics", tmp_path / "run.txt", expect=0)
    assert done.stderr.startswith(f"{tmp_path / 'run.txt'} does not end in .prom")
    assert (tmp_path / "run.txt").read_text().endswith("# EOF\n")


def test_the_docs_list_every_metric(tmp_path):
    metrics = metrics_of(read_status(pretend_run(tmp_path / "run", 300), now=BEGIN + 300))
    text = (DOCS / "how-to" / "notify.md").read_text()
    assert re.findall(r"^\| `slurmgpu_run_(\w+)(?:\{\w+\})?` \|", text, re.M) == list(metrics)
