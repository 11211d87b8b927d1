"""Clocks of tests."""


class Clock:
    """Time that passes when a test says so; called as `time.monotonic`, in whose place it may stand."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now

    def go(self, seconds):
        self.now += seconds
