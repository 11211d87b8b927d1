"""The report as a page: what it says, that it says the same as report.json, and how a browser shows it."""

import copy
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.support.ui import WebDriverWait

import slurmgpu
from slurmgpu import page as pages
from slurmgpu.merge import merge as merging
from slurmgpu.page import facts, page
from slurmgpu.page.clock import make_clock
from slurmgpu.page.pictures import rates
from slurmgpu.page.provenance import provenance_of
from slurmgpu.page.spans import items_of, makers_of, spans_of
from slurmgpu.page.words import moment
from slurmgpu.report.report_file import read_report, report_path
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import PROMISED
from slurmgpu.util import redact
from slurmgpu.util.amounts import duration
from slurmgpu.util.atomic_files import write_json
from tests.support import sample_workloads
from tests.support.browser import browser  # noqa: F401
from tests.support.nightly import by_night
from tests.support.pretend_runs import BEGIN, pretend_run, reported
from tests.support.runs import make_project, report

NASTY = '<script>alert("x")</script><img src=x onerror=alert(1)> \u202eback\x07\x1b[31m'
TOKEN = "hf_" + "a" * 34
SCREENS = [(360, "dark"), (1400, "light")]
OTHER_SCREENS = [(360, "light"), (1400, "dark")]
UNSEEN = """
const seen = (node) => node.getBoundingClientRect().width > 0;
const cut = (text) => {
  const [inner, outer] = [text, text.closest("svg")].map((node) => node.getBoundingClientRect());
  return inner.left < outer.left - 1 || inner.right > outer.right + 1;
};
const narrow = innerWidth < 700 ? [...document.querySelectorAll(".scroll:has(.stacked), pre, #command")] : [];
return [
  ...[...document.querySelectorAll("svg text")].filter((text) => seen(text) && cut(text)),
  ...narrow.filter((box) => box.scrollWidth > box.clientWidth + 1),
].map((node) => node.textContent.slice(0, 40));
"""
"""What an edge cuts off: texts in pictures, and on a phone what one would have to scroll sideways for."""


def test_a_page_gives_the_advice_of_the_report(tmp_path):
    run, value = pretended(tmp_path, n_tasks=2)
    for attempt in value["attempts"]:
        attempt |= {"failure": "workload_error", "message": "KeyError", "submission": 1}
    assert "<p>After fixing the cause, compute the rest with:</p>" in draw(run, value, tmp_path)


def test_a_page_offers_no_resubmission_where_the_same_input_fails_again(tmp_path):
    run, value = pretended(tmp_path, errors=[(3, "input_error: it is a failed row of an earlier run: no")])
    text = draw(run, value, tmp_path)
    assert "The same input fails again: correct it" in text
    assert "resubmit" not in text
    plan = json.loads((run.folder / "run.json").read_text())
    file = {"path": "a.h5", "mtime_ns": PROMISED, "sha256": "", "n_items": plan["n_items"], "source": None}
    plan["input"]["files"] = [{**file, "size_bytes": PROMISED}]
    (run.folder / "run.json").write_text(json.dumps(plan))
    text = draw(Run.open(run.folder), value, tmp_path)
    assert "that this one waited for (--after), recompute those of this one with:" in text
    assert "slurmgpu resubmit" in text
    _, value = pretended(tmp_path / "more", errors=[(3, "input_error: no"), (4, "item_error: no")])
    assert "slurmgpu resubmit" in draw(run, value, tmp_path)


def test_a_page_names_no_run_file_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "workloads.py").write_text(Path(sample_workloads.__file__).read_text())
    tables = {"input": "a.jsonl", "html": False, "workload": {"use": "workloads.py:Rows"}}
    handle = slurmgpu.submit(tables, executor="debug", gpus=0)
    outcome = handle.report()
    assert ("run file", f"none: given by Python in {tmp_path}") in provenance_of(handle.run, outcome)
    outcome["provenance"]["run_file"] = f"{tmp_path}/slurmgpu run"
    assert ("run file", f"none: given by slurmgpu run in {tmp_path}") in provenance_of(handle.run, outcome)


@pytest.mark.parametrize(
    ("n_files", "named"), [(2, "0.txt, {folder}/1.txt"), (40, "0.txt, 38 others, {folder}/39.txt")]
)
def test_a_page_names_the_files_of_the_input(tmp_path, monkeypatch, n_files, named):
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / f"{number}.txt" for number in range(n_files)]
    for file in files:
        file.write_text("a\n")
    (tmp_path / "workloads.py").write_text(Path(sample_workloads.__file__).read_text())
    tables = {"input": [str(file) for file in files], "html": False, "workload": {"use": "workloads.py:Rows"}}
    handle = slurmgpu.submit(tables, executor="debug", gpus=0)
    said = dict(provenance_of(handle.run, handle.report()))["input"]
    digest = handle.run.plan.input_digest
    assert said == f"{n_files} items, digest {digest}: {tmp_path}/{named.format(folder=tmp_path)}"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, slurmgpu):
    """A real run on this machine in which items fail in several ways, a worker dies, and a shard is missing."""
    folder = make_project(
        tmp_path_factory.mktemp("pages") / "project",
        n_items=60,
        settings={"faults": {"17": "segfault", "42": "exception", "43": "exception", "50": "item_error"}},
        html=True,
        lease_s=60.0,
    )
    slurmgpu("submit", "--executor", "local", "--gpus", "0", "--tasks", "2", cwd=folder, expect=0)
    run = Run.open(folder / "run")
    run.shard_path(3).unlink()
    run.merged.unlink()  # which has the rows of the shard, too
    merging.merge(run)
    return folder


def page_of(folder):
    return (folder / "run" / "report.html").read_text()


def draw(run, value, folder):
    pages.write_page(run, value, folder / "page.html")
    return (folder / "page.html").read_text()


def pretended(folder, now_s=2000, errors=(), **what):
    run = pretend_run(folder / "judge", now_s, **what)
    return run, reported(run, errors=list(errors))


def numbers(text):
    return dict(re.findall(r'data-key="([^"]+)" value="([^"]*)"', text))


def in_report(value, key):
    """What stands in report.json under a key of the page."""
    name, _, rest = key.partition(".")
    if rest == "length":
        return len(value[name])
    if rest == "sum":
        return sum(value[name].values())
    return value[name][rest] if rest else value[name]


def test_the_numbers_on_the_page_are_those_of_report_json(faulty):
    found, value = numbers(page_of(faulty)), report(faulty)
    found.pop("wall_s")
    assert {"n_items", "n_rows", "n_errors", "n_missing_items", "attempts.length", "ledger.useful"} <= found.keys()
    assert {key: float(text) for key, text in found.items()} == {key: in_report(value, key) for key in found}


def test_who_has_only_the_page_finds_why_an_item_failed(faulty):
    text = html.unescape(page_of(faulty))
    assert "item 17" in text
    assert "the worker died by SIGSEGV" in text
    assert "Fatal Python error: Segmentation fault" in text, "the log of the worker that died of it"
    row = re.search(r'<tr id="i42">(.*)', text)[1]
    assert "cannot do item 42" in row
    assert 'href="#item-' in row
    assert 'raise ValueError(f"cannot do item {item.index}")' in text, "the traceback, from the log"
    assert text.index("slurmgpu resubmit") < text.index("What failed")


def test_a_message_of_several_lines_is_shown_as_code(tmp_path):
    """Of a command it is the end of what it wrote to stderr, such as a traceback."""
    lines = 'item_error: exit code 1\n  File "score.py", line 3\nKeyError: 0'
    run, value = pretended(tmp_path, errors=[(3, lines), (5, "item_error: too long")])
    draw(run, value, tmp_path)
    text = html.unescape((tmp_path / "page.html").read_text())
    assert '<pre class="message" tabindex="0">exit code 1\n  File "score.py", line 3\nKeyError: 0</pre>' in text
    assert '<p class="message">too long</p>' in text


def section(text, heading):
    return html.unescape(text).partition(f"<h2>{heading}</h2>")[2].partition("</section>")[0]


def test_what_a_class_means_is_true_on_one_machine_and_who_cancelled_is_not_told_that_it_is_no_use(tmp_path):
    run, value = pretended(tmp_path)
    text = section(
        draw(run, {**value, "failures": dict.fromkeys(("cancelled", "lost", "preempted"), 1)}, tmp_path), "What failed"
    )
    assert "nothing is wrong: resubmit continues the run when you want" in text
    assert "does not help" not in text
    assert "Slurm does not know" not in text
    assert "ended from outside before its walltime" in text


def test_the_page_has_one_total_of_gpu_hours_and_cuts_times_as_the_terminal_does(tmp_path):
    run, value = pretended(tmp_path, 30.7, n_tasks=1)
    ledger = value["ledger"]
    value["gpu_hours"] = round(ledger["allocated"], 2)
    found = re.findall(r'data-key="ledger.allocated" value="([^"]*)">([^<]*)<', draw(run, value, tmp_path))
    assert len(found) == 2
    assert len(set(found)) == 1
    assert [duration(seconds) for seconds in (0.3, 9.96, 30.99, 3599.9, 7199.0)] == [
        "0.3 s", "9.9 s", "30 s", "59 min 59 s", "1 h 59 min",
    ]  # fmt: skip


def test_a_missing_shard_is_there_with_its_items(faulty):
    assert "shard 3<td>items 24..31" in section(page_of(faulty), "Missing")


def test_missing_shards_that_lie_side_by_side_are_one_row_and_a_damaged_one_has_its_reason(tmp_path):
    run, value = pretended(tmp_path, 10)
    holes = [{"shard": n, "start": 16 * n, "stop": 16 * n + 16, "damaged": None} for n in (4, 5, 6, 7, 9, 20, 21)]
    holes[2]["damaged"] = "a byte"
    text = draw(run, {**value, "missing": holes}, tmp_path)
    rows = re.findall(r'<tr><th scope="row">(.*?)<td>(.*?)<td class="w">(.*)', section(text, "Missing"))
    assert rows == [
        ("shards 4..5", "items 64..95", "–"),
        ("shard 6", "items 96..111", "damaged: a byte"),
        ("shard 7", "items 112..127", "–"),
        ("shard 9", "items 144..159", "–"),
        ("shards 20..21", "items 320..351", "–"),
    ]
    assert "1 shard was damaged on disk" in section(text, "What failed")


def test_a_missing_shard_that_an_attempt_had_in_hand_says_which(tmp_path):
    run, value = pretended(tmp_path, 300, n_tasks=2, n_shards=12)
    write_json(report_path(run), value)
    shard = value["attempts"][0]["shard"]
    [why] = re.findall(rf'<tr><th scope="row">shard {shard}<td>.*?<td class="w">(.*)', draw(run, value, tmp_path))
    assert why.startswith("attempt 4711_0.0 was computing it")


def test_attempts_are_in_the_order_of_the_tasks_and_their_numbers_to_the_right(tmp_path):
    run, value = pretended(tmp_path, n_tasks=12)
    value["attempts"].sort(key=lambda attempt: attempt["attempt"])
    for attempt in value["attempts"]:
        attempt |= {"failure": "crash", "message": "gone"}
    value["failures"] = {"crash": 12}
    zone = moment(value["written"]).rpartition(" ")[2]
    text = draw(run, value, tmp_path)
    rows = re.findall(r'<tr><th scope="row">(4711_\d+)\.0(.*)', section(text, "Attempts"))
    assert [name for name, _ in rows] == [f"4711_{number}" for number in range(12)]
    columns = re.findall(r'<th scope="col">([^<\n]+)', section(text, "Attempts"))
    numbers = {columns[int(n) - 1] for n in re.findall(r"\.attempts [^{]*nth-child\((\d+)\) { text-align: right", text)}
    assert set(columns) - numbers == {"attempt", "node", f"started, {zone}", "end"}
    assert "<dt>GPUs</dt><dd>12 × NVIDIA H100 80GB HBM3</dd>" in text
    assert "A rehearsal" not in text
    assert "4711_0.0, 4711_1.0, 4711_2.0, 4711_3.0" in section(text, "What failed")


def test_the_picture_of_the_throughput_says_the_same_as_the_ledger(tmp_path):
    run, value = pretended(tmp_path, 3000, n_tasks=4, n_shards=8, n_concurrent=2)
    again = copy.deepcopy(value["attempts"][0])
    again |= {"attempt": "4720_0.0", "submission": 2, "started": BEGIN + 3000, "ended": BEGIN + 3500}
    again["n_items"] = 2 * 16 + 3
    again["shards"] = [[shard, BEGIN + 3000 + 60 * n, 60.0, True] for n, shard in enumerate((2, 5))]
    again["shards"] += [[6, BEGIN + 3200, 60.0, True, 1]]  # its three failed items, by resubmit --failed
    hole = {"shard": 3, "start": 48, "stop": 64, "damaged": "a byte"}
    value |= {"attempts": [again, *value["attempts"]], "missing": [hole]}
    spans = spans_of(value)
    clock = make_clock(BEGIN, [(span.start, span.stop) for span in spans])
    sizes = {shard: stop - start for shard in range(8) for start, stop in [run.plan.bounds(shard)]}
    edges, found = rates(spans, clock, items_of(value, sizes.__getitem__))
    items = {kind: round((rate * np.diff(edges)).sum()) for kind, rate in found.items()}
    assert items == {"useful": run.plan.n_items - 16 + 3, "repeated": 32, "lost": 16}
    makers = makers_of(spans)
    assert (makers[2], makers[5]) == ("4720_0.0", "4720_0.0")
    assert makers.keys() == set(range(8)) - {3}


@pytest.mark.parametrize(
    ("what", "changed", "said"),
    [
        ({"n_tasks": 24}, {}, "24 × NVIDIA H100 80GB HBM3"),
        ({"n_tasks": 24, "n_concurrent": 8, "n_gpus": 2}, {}, "16 × NVIDIA H100 80GB HBM3"),
        ({"n_tasks": 8}, {"gpus": ["0"], "device": "cpu"}, "8 allocated, but none used: device cpu"),
        ({"n_tasks": 8}, {"gpus": ["0"]}, "8"),
        ({"n_tasks": 2, "n_gpus": 0}, {}, "none"),
    ],
)
def test_the_page_says_how_many_gpus_there_were_and_which(tmp_path, what, changed, said):
    run, value = pretended(tmp_path, 500, **what)
    for attempt in value["attempts"]:
        attempt["gpus"] = changed.get("gpus", attempt["gpus"])
    for line in value["submissions"]:
        line["device"] = changed.get("device", "auto")
    assert ("GPUs", said) in provenance_of(run, value)


def test_the_page_of_a_rehearsal_says_so(tmp_path):
    run, value = pretended(tmp_path)
    value["submissions"][0]["inject"] = ["timeout", "damage@0"]
    assert "A rehearsal: faults were injected on purpose: timeout, damage@0." in draw(run, value, tmp_path)


def test_report_html_writes_the_page_and_says_how_large_it_is(faulty, slurmgpu, tmp_path):
    done = slurmgpu("report", "run", "--html", tmp_path / "x.html", "--task", "local1_1", cwd=faulty, expect=3)
    assert not done.stdout
    assert f"{tmp_path / 'x.html'}: " in done.stderr
    assert "local1_1" in (tmp_path / "x.html").read_text()
    for argv, words in (
        (("--html", tmp_path / "none" / "x.html"), "does not exist"),
        (("--html", tmp_path), "not a regular file"),
        (("--html", tmp_path / "y.html", "--task", "local1_7"), "has no task"),
        (("--task", "local1_1"), "--html FILE"),
    ):
        refused = slurmgpu("report", "run", *argv, cwd=faulty, expect=2)
        assert words in refused.stderr, refused.stderr


def test_without_its_packages_there_is_no_page_and_a_sentence_says_why(faulty, monkeypatch, caplog, tmp_path):
    run = Run.open(faulty / "run")
    monkeypatch.setattr(pages, "NEEDED", ("matplotlib", "no_such_package"))
    monkeypatch.setattr(pages, "page_path", lambda run: tmp_path / "report.html")
    caplog.set_level("INFO")
    merging.merge(run)
    assert "report.html is not written without no_such_package" in caplog.text
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_drawn_costs_a_warning_and_not_the_merge(faulty, monkeypatch, caplog, tmp_path):
    run = Run.open(faulty / "run")
    former = tmp_path / "report.html"
    former.write_text("of an earlier merge")
    monkeypatch.setattr(pages, "page_path", lambda run: former)
    monkeypatch.setattr(pages, "write_page", lambda *given: 1 / 0)
    assert merging.merge(run)["n_rows"] == 52
    assert "report.html cannot be drawn" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert not former.exists()


def test_the_page_of_an_earlier_merge_is_there_until_the_next_one_is(faulty, monkeypatch, caplog, tmp_path):
    run, former = Run.open(faulty / "run"), tmp_path / "report.html"
    former.write_text("of an earlier merge")
    monkeypatch.setattr(pages, "page_path", lambda run: former)
    monkeypatch.setattr(pages, "write_page", lambda run, report, path: path.write_text(f"{path.read_text()}, and more"))
    merging.merge(run)
    assert former.read_text() == "of an earlier merge, and more"


@pytest.mark.parametrize("needed", [pages.NEEDED, ("no_such_package",)])
def test_what_stands_where_the_page_belongs_costs_a_warning_and_not_the_merge(
    faulty, monkeypatch, caplog, tmp_path, needed
):
    (tmp_path / "report.html").mkdir()
    monkeypatch.setattr(pages, "NEEDED", needed)
    monkeypatch.setattr(pages, "page_path", lambda run: tmp_path / "report.html")
    assert merging.merge(Run.open(faulty / "run"))["n_rows"] == 52
    assert "report.html is from an earlier merge and cannot be removed: Is a directory" in caplog.text


def test_html_false_leaves_the_page_out(project, slurmgpu):
    folder = project(n_items=8, html=False)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    assert not (folder / "run" / "report.html").exists()


def test_a_matplotlib_that_the_shell_configures_wrongly_draws_all_the_same(faulty, tmp_path):
    code = (
        "import sys; from pathlib import Path; from slurmgpu import page; from slurmgpu.run.directory import Run;"
        "from slurmgpu.report.report_file import last_report; run = Run.open(Path(sys.argv[1]));"
        "print(page.write_page(run, last_report(run), Path(sys.argv[2])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, faulty / "run", tmp_path / "x.html"],
        env={"PATH": "/usr/bin:/bin", "MPLBACKEND": "Qt4Agg", "HOME": "/proc"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000
    assert not done.stderr


def test_a_thousand_tasks_are_less_than_two_megabytes(tmp_path):
    errors = [(index, f"item_error: no field 'answer' in item {index}") for index in range(0, 30_000, 3)]
    run, value = pretended(tmp_path, 3000, errors, n_tasks=1000, n_shards=8_000, sample_s=120.0, faulty=True)
    assert pages.write_page(run, value, tmp_path / "page.html") < 2_000_000
    text = (tmp_path / "page.html").read_text()
    assert "10,000" in text
    assert "4711_999" in text


def test_what_users_and_items_write_is_text_and_nothing_else(tmp_path):
    run, value = pretended(tmp_path, errors=[(3, f"item_error: {NASTY}")], settings={"prompt": NASTY}, faulty=True)
    value["attempts"][0] |= {"node": NASTY, "failure": "crash", "message": NASTY, "traceback": NASTY}
    value["summary"] = {NASTY: 1, "table": {NASTY: {"a": NASTY}}, "worst": [{"item": 3, NASTY: {"b": [NASTY]}}, 4]}
    text = draw(run, value, tmp_path)
    assert text.count("<script>") == 1, "the page's own"
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert not {"\u202e", "\x07", "\x1b"} & set(text)


def test_no_secret_is_on_the_page(tmp_path):
    settings = {"api_key": "abcdefgh", "nested": {"hf_token": "zyxwvuts"}, "max_tokens": 512, "model": "llama"}
    message = f"item_error: 401 for https://ada:hunter22@host/x with Bearer {'b' * 30} and HF_TOKEN={TOKEN}"
    run, value = pretended(tmp_path, errors=[(3, message)], settings=settings)
    value["submissions"][0]["slurm"] = {"export": f"ALL,HF_TOKEN={TOKEN}", "time": "04:00:00"}
    text = draw(run, value, tmp_path)
    for secret in ("abcdefgh", "zyxwvuts", TOKEN, "hunter22", "b" * 30):
        assert secret not in text
    for kept in ("512", "llama", "ALL,HF_TOKEN", "04:00:00", "401 for https://"):
        assert kept in text


def test_the_message_of_a_reason_is_made_plain_once_however_many_items_have_it(tmp_path, monkeypatch):
    _, value = pretended(tmp_path, errors=[(index, f"item_error: no {index}") for index in range(50)])
    n_cut = []
    monkeypatch.setattr(facts, "cut", lambda text, most: n_cut.append(text) or text)
    [reason], of_item = facts.item_reasons(value)
    assert (reason.first, reason.n, reason.message, len(of_item)) == (0, 50, "no 0", 50)
    assert n_cut == ["no 0"]


def test_a_command_on_the_page_is_the_one_to_type_whatever_its_folder_looks_like(tmp_path):
    folder = tmp_path / "sk-learn-experiments-2024" / "it's <b>token=bpe-large</b>"
    folder.mkdir(parents=True)
    run, value = pretended(folder, errors=[(3, "item_error: no")])
    text = draw(run, value, tmp_path)
    command = re.sub(r"<[^>]*>", "", re.search(r'<code id="command">(.*?)</code>', text, re.DOTALL)[1])
    assert html.unescape(command) == f"slurmgpu resubmit {run.typed} --failed"
    shown = [html.unescape(found) for found in re.findall(r"slurmgpu (?:logs|show) (.*?) --", text)]
    assert set(shown) == {run.typed}


@pytest.mark.parametrize(
    "text",
    [
        "a budget of 4096 tokens",
        "auth failed",
        "the key error",
        "KeyError: 'answer'",
        "author: ada",
        "pad_token_id=50256x",
    ],
)
def test_ordinary_words_are_not_taken_for_secrets(text):
    assert redact.hide_in(text) == text


def test_a_long_text_of_short_words_with_dashes_is_searched_for_secrets_in_one_pass():
    text = "ha-" * 1_000_000
    assert redact.hide_in(text) == text
    assert redact.hide_in(f"{text}api_key=abcdefgh") == f"{text}api_key={redact.HIDDEN}"


def test_damage_costs_a_row_and_not_the_page(tmp_path):
    run, _ = pretended(tmp_path, faulty=True)
    names = sorted(path.stem for path in run.tasks.iterdir())
    (run.tasks / f"{names[0]}.json").write_text('{"started": "x"')
    (run.folder / "telemetry" / f"{names[1]}.jsonl").write_bytes(b"\xff\x00{]\n" * 50)
    (run.folder / "telemetry" / f"{names[2]}.jsonl").unlink()
    value = reported(run, errors=[])
    value["attempts"][3]["phases"] = [["x", None]]
    text = draw(run, value, tmp_path)
    assert f"tasks/{names[0]}.json cannot be read" in text
    assert all(name in text for name in names)
    assert "<h2>Timeline</h2>" in text
    assert "GPU utilisation" in text


def test_a_page_without_logs_or_with_damaged_telemetry_says_so_in_a_sentence(tmp_path, caplog):
    run, value = pretended(tmp_path, faulty=True)
    text = draw(run, value, tmp_path)
    assert "No lines of logs are shown" not in text
    assert "cannot be read as a whole" not in text
    with open(run.folder / "telemetry" / "4711_1.0.jsonl", "a") as file:
        file.write('{"time": 17')  # is still being written
    with open(run.folder / "telemetry" / "4711_2.0.jsonl", "a") as file:
        file.write('{"time": "x", "ready": 1, "gpus": [[1]]}\n' * 400)
    shutil.rmtree(run.logs)
    text = draw(run, value, tmp_path)
    assert "No lines of logs are shown, because logs/ in the run directory cannot be read: No such file" in text
    assert re.search(r"1 file of telemetry/ cannot be read as a whole; .*: 4711_2.0.jsonl", text)
    assert not caplog.records


@pytest.mark.parametrize("what", [{"n_tasks": 1, "n_shards": 1}, {"n_tasks": 3, "n_gpus": 0, "sample_s": 0}])
def test_small_runs_and_runs_without_gpus_have_a_page(tmp_path, what):
    run, value = pretended(tmp_path, 10, **what)
    assert "incomplete" in draw(run, value, tmp_path)


def test_a_run_of_which_nothing_is_there_has_a_page(tmp_path):
    run, _ = pretended(tmp_path, 0)
    for path in run.tasks.iterdir():
        path.unlink()
    text = draw(run, reported(run, errors=[]), tmp_path)
    assert "<h2>Missing</h2>" in text


@pytest.mark.parametrize("screens", [pytest.param(SCREENS, id="two"), by_night(OTHER_SCREENS)])
def test_browsers_show_it_at_any_width_in_the_light_and_in_the_dark(browser, faulty, tmp_path, screens):  # noqa: F811
    errors = [(index, f"item_error: KeyError: 'answer_{index}' (judge.py, line 31)") for index in (17, 900)]
    run, value = pretended(tmp_path, 1500, errors, n_tasks=24, faulty=True, load_s=62.0)
    summary = {
        "accuracy": 0.71,
        "by_label": {"hate": {"precision": 0.9, "recall": 0.8}, "ok": {"precision": 1.0, "recall": 0.5}},
    }
    draw(run, {**value, "summary": summary}, tmp_path)
    for path in (faulty / "run" / "report.html", tmp_path / "page.html"):
        for width, scheme in screens:
            browser.open(path, width, scheme)
            where = f"{path.name} at {width}, {scheme}"
            assert browser.complaints() == [], where
            assert browser.requests() == [], where
            assert browser.overflow() == [False, []], where
            assert browser.driver.execute_script(UNSEEN) == [], where
            assert browser.faint() == [], where
    expected = read_report(Run.open(faulty / "run"))
    browser.open(faulty / "run" / "report.html")
    shown = browser.figures()
    shown.pop("wall_s")
    assert {key: float(text) for key, text in shown.items()} == {key: in_report(expected, key) for key in shown}
    text = browser.text()
    assert "cannot do item 42" in text
    assert json.loads(json.dumps(expected["resubmit"])) in text


def test_a_long_excerpt_is_shown_at_its_mark_and_no_line_is_cut_in_two(browser, tmp_path, monkeypatch):  # noqa: F811
    def fill(run, items, attempts, holes):
        attempts[0].excerpt = ["\n".join(f"line {n}" for n in range(90)), "the mark", "behind\n" * 90]
        return ""

    monkeypatch.setattr(page, "add_excerpts", fill)
    run, value = pretended(tmp_path, 1500, n_tasks=8, faulty=True)
    draw(run, value, tmp_path)
    browser.open(tmp_path / "page.html")
    seen = """
        const box = document.querySelector("pre:has(mark)");
        const mark = box.firstElementChild.getBoundingClientRect(), edge = box.getBoundingClientRect();
        return [mark.top > edge.top && mark.bottom < edge.bottom, box.scrollTop % 18, box.clientHeight % 18];
    """
    WebDriverWait(browser.driver, 120).until(lambda driver: driver.execute_script(seen) == [True, 0, 0])
    tall = "return [...document.querySelectorAll('.tall')].map((box) => box.ariaLabel)"
    assert browser.driver.execute_script(tall) == [], "eight attempts need no scroll bar"


def test_one_tasks_lines_can_be_chosen_in_the_browser(browser, tmp_path):  # noqa: F811
    run, value = pretended(tmp_path, 1500, n_tasks=8)
    draw(run, value, tmp_path)
    browser.open(tmp_path / "page.html")
    visible = "return [...document.querySelectorAll('svg .task.shown')].map((one) => one.classList[1])"
    assert set(browser.driver.execute_script(visible)) == {"t-0"}
    browser.driver.execute_script(
        "const all = document.getElementById('task'); all.value = 't-3'; all.dispatchEvent(new Event('change'));"
    )
    assert set(browser.driver.execute_script(visible)) == {"t-3"}
