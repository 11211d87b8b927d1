"""The files with a counter: what they hold, and which process counts."""

import errno
import queue
import threading

import pytest

from slurmgpu.run.counters import counting, decode, encode


def test_a_value_that_gets_shorter_leaves_nothing_of_the_longer_one(tmp_path):
    path = tmp_path / "counter"
    path.write_bytes(encode({"doing": "merging for long"}))
    with path.open("r+b") as file:
        file.write(encode({"doing": "it"}))
    assert decode(path.read_bytes()) == {"doing": "it"}


@pytest.mark.parametrize("content", [b"", b'{"doing": ', b"[1]", b"3", b"[" * 200_000])
def test_what_is_no_value_is_none(content):
    assert decode(content) is None


def test_a_process_counts_on_after_an_error_and_only_as_long_as_it_should():
    counted, name = queue.Queue(), "a counter of this test"

    def count():
        counted.put(None)
        raise OSError(errno.EIO, "as on a network file system")

    with counting(count, 0.001, name):
        for _ in range(3):
            counted.get(timeout=60)
    assert name not in [thread.name for thread in threading.enumerate()]
