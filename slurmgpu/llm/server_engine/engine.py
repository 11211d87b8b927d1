"""The engine on a server: one that the task starts (vLLM, SGLang, llama.cpp …), or one that is already running.

It uses the part of OpenAI's protocol that these servers share, /v1/chat/completions or /v1/completions.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import ItemError, SlurmGPUError, WorkerBrokenError
from slurmgpu.llm.interface.engine import (
    EngineOptions,
    FinishReason,
    Likelihood,
    Output,
    Passage,
    Place,
    Prompt,
    Question,
    Request,
    Sampling,
    Scores,
)
from slurmgpu.llm.prompts.images import check_pillow, data_url, place_of_images
from slurmgpu.llm.prompts.vocabulary import THINK, THOUGHT
from slurmgpu.llm.server_engine import response_format
from slurmgpu.llm.server_engine.http_client import Client, Reply
from slurmgpu.llm.server_engine.liveness import Liveness
from slurmgpu.llm.server_engine.process import ServerEndedError, ServerProcess, is_healthy

log = logging.getLogger(__name__)

KEY_VARIABLE = "SLURMGPU_SERVER_KEY"
"""The environment variable with the key of a running server."""
BUSY = {429, 503}
REFUSALS = {400, 413, 422}
"""HTTP statuses for a wrong request: its item fails."""
FORBIDDEN = {401, 403, 404, 405}
"""HTTP statuses for wrong settings: the run fails."""
N_TRIES = 3
"""How often a request is sent if the server answers with another status, or ends."""
N_STARTS = 3
"""How often a server is started if it ends before it has completed a prompt."""
MOST_ENDS = 2 * N_TRIES
"""How often it may end without an answer in between: each of two items in a row may crash it."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
MOST_SILENCE_S = 120.0
"""How long the task's own server may show no sign of life, or not answer after it has lost a connection, before it is
restarted."""
MOST_WAIT_S = 1800.0
"""How long a server may be busy, or one that is not the task's own away or silent, before that is an error."""
FINISHED: Mapping[str, FinishReason] = {
    "stop": "stop",
    "stop_sequence": "stop",  # in TGI, if a text of `stop` ended the answer
    "eos_token": "stop",
    "end_turn": "stop",
    "length": "length",
}
"""Why an answer ended, by the servers' words for it."""
SEED_BITS = 31
"""Servers keep seeds in signed 32-bit integers, or larger ones."""


class ServerEngine:
    """A model on a server, with at most `concurrency` requests at a time."""

    def __init__(self, options: EngineOptions, place: Place) -> None:
        if place.world_size > 1:
            raise SlurmGPUError(
                'engine = "server" starts one server for each task, not a process for each of its '
                f'{place.world_size} GPUs. Set [resources] processes = "one".'
            )
        if options.images:
            check_pillow()
        self._options = options
        self._name = options.model.name if options.url else str(options.model.folder)
        self._server = None if options.url else ServerProcess(options.serve, self._name, place.gpus)
        if self._server is not None:
            # Also when the worker has no more work: the guard would kill it, and its shared memory stay on the node.
            self._end_server = weakref.finalize(self, self._server.close)
        self._client = Client(options.url, os.environ.get(KEY_VARIABLE) if options.url else None)
        self._liveness = Liveness(self._client, MOST_WAIT_S, None)
        self._n_ends = 0  # since the last answer
        try:
            if self._server is None:
                self._find()
            else:
                self._start(self._server)
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, in the order in which they finish."""
        losses = Counter[int]()
        todo = list(requests)
        while todo:
            # A request may crash the server: after two crashes a request is sent alone, so that others survive it.
            together = [each for each in todo if losses[each.id] < N_TRIES - 1]
            asked = together or todo[:1]
            lost: dict[int, str] = {}
            done: set[int] = set()
            for request, found in self._ask_all(asked):
                if isinstance(found, Output):
                    done.add(request.id)
                    yield found
                else:
                    lost[request.id] = found
            for request in asked:
                if request.id in lost:
                    losses[request.id] += 1
                    if losses[request.id] >= N_TRIES:
                        done.add(request.id)
                        said = f"{lost[request.id]}, in each of {N_TRIES} tries to compute this item"
                        yield Output(request.id, finish_reason="error", error=said)
            todo = [each for each in todo if each.id not in done]
            if lost:
                self._recover(next(iter(lost.values())))

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Not supported: planning refuses workloads that need scores."""
        raise SlurmGPUError('engine = "server" cannot score given answers.')

    def likelihoods(self, passages: Sequence[Passage]) -> Iterator[Likelihood]:
        """Not supported: planning refuses workloads that need likelihoods."""
        raise SlurmGPUError('engine = "server" does not return the probabilities of a text\'s tokens.')

    def close(self) -> None:
        """End the server, if it is the task's."""
        if self._server is not None:
            self._server = None
            self._end_server()

    def _probe(self) -> None:
        """Let the server generate a token; ConnectionError if it loses the request."""
        probe = Request(0, Prompt("1"), Sampling(max_tokens=1))
        found = self._client.post(*self._body(probe), self._liveness.look)
        if found.status == 404 and (served := self._served()) != self._name:
            self._name = served
            found = self._client.post(*self._body(probe), self._liveness.look)
        if found.status != 200 or self._parsed(probe, found) is None:
            raise SlurmGPUError(
                f"The server at {self._client.url} does not complete a prompt: status {found.status}, {found.message}"
            )

    def _find(self) -> None:
        """Let the running server generate a token; SlurmGPUError if it does not."""
        try:
            if is_healthy(self._client):
                self._probe()
                return
            said = "it is not healthy"
        except ConnectionError as error:
            said = str(error)
        raise SlurmGPUError(f"url is {self._client.url}, and the server there cannot be used: {said}.")

    def _start(self, server: ServerProcess) -> None:
        """Start the task's own server, and let it generate a token; SlurmGPUError if it does not."""
        for n_left in reversed(range(N_STARTS)):
            try:
                self._client = server.start()
                self._liveness = Liveness(self._client, MOST_SILENCE_S, server.cpu_s)
                self._probe_started(server)
                return
            except ServerEndedError as error:
                if not n_left:
                    raise SlurmGPUError(
                        f"{error}. It was started {N_STARTS} times, and completed no prompt. Try the command in serve "
                        f"in a shell."
                    ) from error
                log.warning("%s; starting it again", error)

    def _probe_started(self, server: ServerProcess) -> None:
        """Like `_probe`; ServerEndedError if the server ends, such as out of memory, or loses the request."""
        try:
            self._probe()
        except ConnectionError as error:
            server.settle(self._client, MOST_SILENCE_S)
            raise ServerEndedError(f"the server lost its first prompt: {error}") from error

    def _served(self) -> str:
        """The model's name on the server."""
        body = self._client.get("/v1/models").body
        names = [str(each.get("id")) for each in body.get("data", [])] if isinstance(body, dict) else []
        if self._name in names or len(names) != 1:
            raise SlurmGPUError(
                f"The server at {self._client.url} has no model {self._name!r}; it has {', '.join(names) or 'none'}."
            )
        return names[0]

    def _recover(self, said: str) -> None:
        """Restart the task's server, or wait until a running one is back; WorkerBrokenError if that fails."""
        if self._server is None:
            self._wait_until_back(said)
        else:
            self._restart(self._server)

    def _restart(self, server: ServerProcess) -> None:
        """Restart the server if it has ended, or does not answer."""
        try:
            server.settle(self._client, MOST_SILENCE_S)
            return  # it has only dropped a connection
        except ServerEndedError as error:
            said = str(error)
        self._n_ends += 1
        if self._n_ends > MOST_ENDS:
            raise WorkerBrokenError(f"{said}, {self._n_ends} times without an answer in between")
        log.warning("%s; starting it again", said)
        try:
            self._start(server)
        except SlurmGPUError as error:  # not the items' fault: another worker computes them
            raise WorkerBrokenError(str(error)) from error

    def _wait_until_back(self, said: str) -> None:
        log.warning("%s; waiting for it", said)
        deadline = time.monotonic() + MOST_WAIT_S
        pause_s = PAUSE_S
        while True:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                if is_healthy(self._client):
                    return
                said = f"{self._client.url} is not healthy"
            except ConnectionError as error:
                said = str(error)
            if time.monotonic() > deadline:
                raise WorkerBrokenError(f"{said}, for more than {MOST_WAIT_S:g} s")

    def _ask_all(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Output | str]]:
        """Outputs of requests, or why the connection was lost; after a loss nothing more is sent."""
        pending = iter(requests)
        lock, stop = threading.Lock(), threading.Event()
        answers: queue.Queue[tuple[Request, Output | str] | BaseException | None] = queue.Queue()

        def work() -> None:
            while True:
                with lock:
                    request = None if stop.is_set() else next(pending, None)
                if request is None:
                    answers.put(None)
                    return
                try:
                    answers.put((request, self._complete(request, stop)))
                except ConnectionError as error:
                    stop.set()
                    answers.put((request, str(error)))
                except BaseException as error:  # raised in the thread that takes the answers
                    stop.set()
                    answers.put(error)
                    return

        n_left = min(self._options.concurrency, len(requests))
        for _ in range(n_left):
            threading.Thread(target=work, daemon=True).start()
        try:
            while n_left:
                found = answers.get()
                if found is None:
                    n_left -= 1
                elif isinstance(found, BaseException):
                    raise found
                else:
                    self._n_ends = 0 if isinstance(found[1], Output) else self._n_ends
                    yield found
        finally:
            stop.set()

    def _complete(self, request: Request, stop: threading.Event) -> Output:
        """The output of one request; ConnectionError if the server loses it, is not healthy, or is gone."""
        try:
            path, body = self._body(request)
        except ItemError as error:  # an image that cannot be read
            return Output(request.id, finish_reason="error", error=str(error))
        pause_s, waited_s, n_failures = PAUSE_S, 0.0, 0
        while True:
            self._liveness.begin()
            reply = self._client.post(path, body, self._liveness.look)
            self._liveness.begin()
            if reply.status == 200 and (found := self._parsed(request, reply)) is not None:
                return found
            if reply.status in FORBIDDEN:
                raise SlurmGPUError(f"{self._client.url} answers with status {reply.status}: {reply.message}")
            if reply.status in REFUSALS:
                return Output(request.id, finish_reason="error", error=f"the server refuses it: {reply.message}")
            is_busy, waits_long = reply.status in BUSY, waited_s > MOST_WAIT_S
            n_failures += 0 if is_busy else 1
            # A proxy answers 502 or 504 if its server is away, or 503, which may also mean busy.
            if (waits_long or not is_busy) and not is_healthy(self._client):
                raise ConnectionError(f"{self._client.url} is not healthy; it answered with status {reply.status}")
            if waits_long or n_failures == N_TRIES:
                said = f"the server failed, with status {reply.status}: {reply.message}"
                return Output(request.id, finish_reason="error", error=said)
            wait_s = min(reply.retry_after or pause_s, LONGEST_PAUSE_S)
            if stop.wait(wait_s):
                raise ConnectionError("the server was lost while it was busy")
            waited_s += wait_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _body(self, request: Request) -> tuple[str, dict[str, Any]]:
        """The path of a request, and its JSON."""
        sampling, prompt = request.sampling, request.prompt
        body: dict[str, Any] = {"model": self._name, "max_tokens": sampling.max_tokens}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "stream": False}
        if sampling.temperature > 0:
            body["seed"] = request.key % (1 << SEED_BITS)
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.structure is not None:
            body |= response_format.asked(sampling.structure)
        # Not all servers accept these.
        body |= {name: value for name, value in {"top_k": sampling.top_k, "min_p": sampling.min_p}.items() if value}
        if self._options.chat is False:
            body["prompt"] = prompt.plain + prompt.answer + prompt.so_far
            return "/v1/completions", body | ({"logprobs": 1} if sampling.logprobs else {})
        body["messages"] = _with_images(prompt, [{**turn} for turn in prompt.turns])
        if self._options.chat_options:
            body["chat_template_kwargs"] = dict(self._options.chat_options)
        return "/v1/chat/completions", body | ({"logprobs": True} if sampling.logprobs else {})

    def _parsed(self, request: Request, reply: Reply) -> Output | None:
        """The output in an answer; None if the answer has none."""
        try:
            choice, usage = reply.body["choices"][0], reply.body.get("usage") or {}
            message = choice.get("message") or {"content": choice["text"]}
            text = _text(message.get("content"))
            reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
            told = choice.get("finish_reason")
            n_prompt, n_said = (int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion"))
            logprobs = _logprobs(choice) if request.sampling.logprobs else None
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
            return None
        if not text and (said := _no_answer(message)) is not None:
            return Output(request.id, finish_reason="error", error=said)
        reason = FINISHED.get(told) if isinstance(told, str) else None
        if reason is None:
            return Output(request.id, finish_reason="error", error=f"the server ended the answer with {told!r}")
        if request.sampling.logprobs and logprobs is None:
            said = "the server returned no log-probabilities; set logprobs = false, or use another server"
            return Output(request.id, finish_reason="error", error=said)
        # A completion continues from all of its text, including reasoning.
        if "message" in choice and not reasoning and (THOUGHT in text or text.lstrip().startswith(THINK)):
            reasoning, _, text = text.partition(THOUGHT)
            reasoning, text = reasoning.strip().removeprefix(THINK).strip(), text.lstrip("\n")
        whole = text, reasoning
        for each in request.sampling.stop:
            text, reasoning = text.split(each)[0], reasoning.split(each)[0]
        reason = reason if (text, reasoning) == whole else "stop"
        structure = request.sampling.structure
        if structure is not None and reason == "stop" and (ignored := response_format.problem(structure, text)):
            return Output(request.id, finish_reason="error", error=ignored)
        return Output(
            request.id,
            text,
            reasoning,
            logprobs=logprobs,
            n_prompt_tokens=n_prompt,
            finish_reason=reason,
            count=n_said if logprobs is None else len(logprobs),
        )


def _with_images(prompt: Prompt, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the prompt's images before the text of a user turn; ItemError if there is none."""
    if prompt.images:
        turn = messages[place_of_images([message["role"] for message in messages], behind_examples=not prompt.messages)]
        images = [{"type": "image_url", "image_url": {"url": data_url(source)}} for source in prompt.images]
        turn["content"] = [*images, {"type": "text", "text": turn["content"]}]
    return messages


def _text(content: Any) -> str:
    """The text of a message, which may come in parts; KeyError or TypeError for a part that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)


def _no_answer(message: Any) -> str | None:
    """Why a message without text has none, if it says so."""
    if message.get("refusal"):
        return f"the model refuses to answer: {message['refusal']}"
    return "the model calls a tool instead of answering" if message.get("tool_calls") else None


def _logprobs(choice: Any) -> npt.NDArray[np.float32] | None:
    """The log-probability of each token: `content` of a chat, `token_logprobs` of a completion."""
    found = choice.get("logprobs") or {}
    if found.get("content") is not None:
        return np.array([each["logprob"] for each in found["content"]], np.float32)
    told = found.get("token_logprobs")
    return None if told is None else np.array(told, np.float32)
