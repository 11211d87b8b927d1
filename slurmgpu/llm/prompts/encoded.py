"""Requests as tokens: with the tokens of the prompt, with those of the answer, and why there are none."""

from __future__ import annotations

from dataclasses import dataclass

from slurmgpu.llm.interface.engine import NOTHING_GENERATED, FinishReason, Output, Request


class PromptError(Exception):
    """A prompt that the model cannot take; the message is the request's error."""

    def output(self, request: Request) -> Output:
        """The output for the request."""
        return Output(request.id, finish_reason="error", error=str(self))


class FullContextError(PromptError):
    """A prompt that leaves no room for an answer with `fit`; the answer is empty."""

    def output(self, request: Request) -> Output:
        """An empty answer."""
        return Output(request.id, generated=request.prompt.generated or NOTHING_GENERATED, finish_reason="length")


@dataclass(frozen=True)
class Encoded:
    """A request with the tokens of its prompt; the last `n_begun` belong to the answer so far.

    `n_truncated` is the number of truncated prompt tokens.
    """

    request: Request
    tokens: tuple[int, ...]
    n_begun: int = 0
    n_truncated: int = 0


@dataclass(frozen=True)
class Finished:
    """The tokens generated for a request, perhaps with some after a stop text.

    `logprobs` are the model's own, one for each token, or None.
    """

    encoded: Encoded
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None
    error: str | None = None
