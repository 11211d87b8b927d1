"""sweep.json: the runs of a sweep."""

import threading

from slurmgpu.run import sweep_file


def test_of_two_processes_that_record_at_once_neither_loses_the_others_runs(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    write = sweep_file.write_json
    other = threading.Thread(target=sweep_file.record_runs, args=(tmp_path, {"second": {"x": 2}}))

    def write_while_another_records(path, value):
        monkeypatch.setattr(sweep_file, "write_json", write)
        other.start()
        other.join(0.3)
        write(path, value)

    monkeypatch.setattr(sweep_file, "write_json", write_while_another_records)
    sweep_file.record_runs(tmp_path, {"first": {"x": 1}})
    other.join()
    assert [run.name for run in sweep_file.runs_of_sweep(tmp_path)] == ["first", "second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second", "sweep.json"]
