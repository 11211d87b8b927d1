"""Fake engines that record their requests, and engines whose work is recorded."""

from slurmgpu.llm.interface.engine import Output


class Says:
    """An engine that always gives the same answer, and records its requests; `n_truncated` is per request."""

    def __init__(self, answer, n_truncated=lambda request: 0):
        self.answer, self.n_truncated, self.asked = answer, n_truncated, []

    def generate(self, requests):
        self.asked += requests
        for request in requests:
            yield Output(request.id, self.answer, n_truncated=self.n_truncated(request))


def with_seen_shapes(engine, monkeypatch):
    """The shapes of the ids that a transformers engine reads from now on."""
    forward, seen = engine._prefill.forward, []

    def watched(ids, *rest, **more):
        seen.append(tuple(ids.shape))
        return forward(ids, *rest, **more)

    monkeypatch.setattr(engine._prefill, "forward", watched)
    return seen
