"""Events of a task, and the time that is waited for them."""

import queue

from slurmgpu.task.worker_process import next_event


def test_an_event_that_is_there_is_taken_and_none_is_waited_for_without_time():
    events = queue.SimpleQueue()
    assert next_event(events, 0.0) is None
    assert next_event(events, -1.0) is None
    events.put({"event": "first"})
    events.put({"event": "second"})
    assert [next_event(events, 0.0), next_event(events, 5.0), next_event(events, 0.001)] == [
        {"event": "first"},
        {"event": "second"},
        None,
    ]


def test_no_wait_at_a_new_queue_is_without_end():
    for _ in range(200_000):  # Python 3.10's own `get(timeout=0.0)` hangs once in 35,000 where others take its time
        assert next_event(queue.SimpleQueue(), 0.0) is None
