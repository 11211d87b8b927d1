"""The engine on a server, with a small one that fails on demand; tests/vllm has two real ones."""

import base64
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from slurmgpu import results
from slurmgpu.errors import ItemError, SlurmGPUError, WorkerBrokenError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import Output, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.interface.exchange import digest_of_request
from slurmgpu.llm.prompts.images import data_url, open_image
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.server_engine import engine as server_engine
from slurmgpu.llm.server_engine import http_client, liveness
from slurmgpu.llm.server_engine import process as server_process
from slurmgpu.llm.settings import engine_options
from slurmgpu.util import sockets
from slurmgpu.util.process_tree import living
from slurmgpu.workload import Share
from slurmgpu.workloads.classify.workload import Classify
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.generate.workload import Generate
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.kept_answers import KeptAnswers
from slurmgpu.workloads.structured import Answers
from tests.support.runs import datasets, report, wait_until
from tests.support.tiny_models import make_unloadable
from tests.support.tiny_vision_models import make_png

SMALL = str(Path(__file__).parents[1] / "support" / "small_server.py")
BY_PORT, BY_SOCKET = ([sys.executable, SMALL, where] for where in ("{port}", "{socket}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_unloadable(tmp_path_factory.mktemp("model")))


@pytest.fixture
def counts(tmp_path, monkeypatch):
    """The lines that the servers of a test have noted."""
    monkeypatch.setenv("COUNTS", str(tmp_path / "counts"))
    return lambda: (tmp_path / "counts").read_text().splitlines()


@pytest.fixture
def opened(folder, monkeypatch):
    """Opens the engine, and closes it at the end."""
    monkeypatch.setenv("MODEL", folder)
    engines = []

    def make(serve=BY_SOCKET, **settings):
        options = engine_options(folder, {"engine": "server", "serve": serve, **settings})
        engines.append(open_engine(options, Place("cpu")))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def asked(*texts, **sampling):
    return [Request(number, Prompt(text), Sampling(**sampling), 2**40 + number) for number, text in enumerate(texts)]


def answers(engine, *texts, **sampling):
    found = {output.id: output for output in engine.generate(asked(*texts, **sampling))}
    assert set(found) == set(range(len(texts)))
    return [found[number] for number in range(len(texts))]


@pytest.mark.parametrize("serve", [BY_PORT, BY_SOCKET])
@pytest.mark.parametrize("chat", [True, False])
def test_a_server_is_started_asked_and_ended(opened, serve, chat):
    engine = opened(serve, chat=chat)
    server = engine._server._process.pid
    first, second, thought = answers(engine, "one", "two words", "thinks", temperature=0.5)
    assert (first.text, first.n_prompt_tokens, first.n_tokens, first.finish_reason) == ("one 0", 1, 2, "stop")
    assert second.text == "two words 1"  # the seed is the request's, in 31 bits
    whole = ("<think>\nhm\n</think>\n\nthinks 2", "")  # from which a completion goes on
    assert (thought.text, thought.reasoning) == (("thinks 2", "hm") if chat else whole)
    [greedy] = answers(engine, "one two three", stop=("two",))
    assert greedy.text == "one "
    engine.close()
    assert not living(server)


@pytest.mark.parametrize(("gpus", "given", "expected"), [(0, None, "0"), (0, "1", "1"), (1, None, None)])
def test_a_server_on_cpus_is_told_to_keep_the_model_in_its_engine(folder, monkeypatch, gpus, given, expected):
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    server = server_process.ServerProcess(BY_SOCKET, folder, gpus)
    try:
        server.start()
        told = Path(f"/proc/{server._process.pid}/environ").read_bytes().decode().split("\0")
    finally:
        server.close()
    assert dict(line.split("=", 1) for line in told if line).get(name) == expected


def test_what_a_server_is_busy_with_is_asked_again_and_what_it_refuses_is_the_items_error(opened, counts):
    engine = opened(concurrency=3)
    found = answers(engine, "busy", "late", "bad", "fails", "fine")
    assert [output.text for output in found] == ["busy", "late", "", "", "fine"]
    assert found[2].error == "the server refuses it: the context has 16 tokens"
    assert found[3].error == "the server failed, with status 500: Internal Server Error"
    lines = counts()
    assert [lines.count(f"asked {text}") for text in ("busy", "late", "bad", "fails")] == [3, 3, 1, 3]


def test_the_ends_and_the_parts_of_answers_are_those_of_all_servers(opened, monkeypatch):
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.01)
    words = ("stop", "stop_sequence", "eos_token", "end_turn", "length", "tool_calls")
    *found, refused, parts, shapes = answers(opened(), *(f"ends by {word}" for word in words), "in parts", "in shapes")
    assert [output.finish_reason for output in found] == ["stop"] * 4 + ["length"]
    assert [output.text for output in found] == [f"ends by {word}" for word in words[:-1]]
    assert refused.error == "the server ended the answer with 'tool_calls'"
    assert parts.text == "in parts"
    assert shapes.error.startswith("the server failed, with status 200: {")


def replies_of(*choices, usage=None):
    """Prompts that the small server answers with these choices."""
    return [json.dumps({"choices": [choice], **({} if usage is None else {"usage": usage})}) for choice in choices]


def test_reasoning_that_is_cut_is_no_answer(opened):
    said = ("<think>\nhm, a", "\n<think>hm</think>\n\nb", "c")
    texts = replies_of(*({"message": {"content": each}, "finish_reason": "length"} for each in said))
    found = [(each.text, each.reasoning, each.finish_reason) for each in answers(opened(), *texts)]
    assert found == [("", "hm, a", "length"), ("b", "hm", "length"), ("c", "", "length")]


def test_refusals_calls_of_tools_and_replies_without_an_answer_are_errors(opened, monkeypatch):
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.01)
    messages = (
        {"content": None, "refusal": "I am sorry."},
        {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"content": "four", "refusal": None, "tool_calls": []},
        {"content": None},
    )
    texts = replies_of(*({"message": each, "finish_reason": "stop"} for each in messages))
    # A piece of a stream, an error with status 200, and a number of tokens that is none.
    texts += replies_of({"delta": {"content": "four"}, "finish_reason": "stop"})
    texts += [json.dumps({"error": {"message": "no"}}), json.dumps({"choices": []})]
    texts += replies_of({"message": {"content": "four"}, "finish_reason": "stop"}, usage={"prompt_tokens": np.inf})
    refused, called, said, empty, *others = answers(opened(), *texts)
    assert refused.error == "the model refuses to answer: I am sorry."
    assert called.error == "the model calls a tool instead of answering"
    assert [(each.text, each.error) for each in (said, empty)] == [("four", None), ("", None)]
    assert all(each.error.startswith("the server failed, with status 200: ") for each in others)


def test_an_answer_that_a_stop_text_cut_has_ended_by_it(opened):
    """Of a server that ignores `stop`."""
    texts = replies_of(*({"message": {"content": each}, "finish_reason": "length"} for each in ("a. b", "a b")))
    found = answers(opened(), *texts, stop=(".",))
    assert [(each.text, each.finish_reason) for each in found] == [("a", "stop"), ("a b", "length")]


def test_an_answer_has_as_many_tokens_as_log_probabilities(opened):
    """Of several answers in one row, n_tokens says where the log-probabilities of each end."""
    ends = ({"content": []}, {"content": [{"logprob": -0.5}] * 2})
    choices = [{"message": {"content": "a" * len(each["content"])}, "logprobs": each} for each in ends]
    texts = replies_of(*({**each, "finish_reason": "stop"} for each in choices), usage={"completion_tokens": 3})
    found = answers(opened(), *texts, logprobs=True)
    assert [(each.logprobs.tolist(), each.n_tokens, each.error) for each in found] == [
        ([], 0, None),
        ([-0.5, -0.5], 2, None),
    ]


def test_an_answer_that_the_connection_loses_is_asked_for_again_of_the_same_server(opened, counts):
    found = answers(opened(), "drops", *"abcdefgh")
    assert [output.text for output in found] == ["drops", *"abcdefgh"]
    assert counts().count("started") == 1


def test_items_that_end_the_server_fail_alone(opened, counts, monkeypatch):
    monkeypatch.setenv("TAKES_S", "0.02")
    texts = [f"number {number}" for number in range(30)]
    texts[7] = texts[21] = "deadly"
    found = answers(opened(concurrency=8), *texts)
    for number, output in enumerate(found):
        if number in (7, 21):
            assert "ended with exit code 3" in output.error or "does not answer" in output.error
            assert output.error.endswith("in each of 3 tries to compute this item")
        else:
            assert (output.text, output.error) == (texts[number], None)
    assert counts().count("started") <= 7


def test_a_server_that_is_killed_is_started_again_and_nothing_is_lost(opened, counts, monkeypatch):
    monkeypatch.setenv("TAKES_S", "0.05")
    engine = opened(BY_PORT, concurrency=4)
    killed = engine._server._process.pid
    texts = [f"number {number}" for number in range(20)]
    found = {}
    for output in engine.generate(asked(*texts)):
        found[output.id] = output.text
        if len(found) == 5:
            os.kill(killed, signal.SIGKILL)
    assert [found[number] for number in range(20)] == texts
    assert counts().count("started") == 2


def test_a_server_that_ends_whatever_it_is_asked_ends_the_worker(opened):
    engine = opened(concurrency=1)
    with pytest.raises(WorkerBrokenError, match="7 times without an answer in between"):
        list(engine.generate(asked(*["deadly"] * 9)))


def test_a_server_that_does_not_start_is_started_again_and_then_a_sentence(opened, counts, monkeypatch):
    monkeypatch.setenv("ENDS", "1")
    assert answers(opened(), "one")[0].text == "one"
    assert counts().count("started") == 2
    with pytest.raises(SlurmGPUError, match=r"ended with exit code 3.*started 3 times, and completed no prompt"):
        opened([sys.executable, "-c", "import sys; sys.exit(3)", "{port}"])
    with pytest.raises(SlurmGPUError, match="serve begins with 'no-such-server', and there is no such program here"):
        opened(["no-such-server", "{port}"])


def test_a_server_that_its_first_prompt_ends_is_started_again_and_then_a_sentence(opened, counts, monkeypatch):
    engine = opened()
    monkeypatch.setenv("DEADLY", "1")  # the text of the first prompt, for servers that start from here on
    said = r"ended with exit code 3; .*started 3 times, and completed no prompt"
    with pytest.raises(SlurmGPUError, match=said):
        opened()
    assert counts().count("started") == 1 + 3
    with pytest.raises(WorkerBrokenError, match=said):  # the items are left to another worker
        answers(engine, "deadly")


def test_a_server_that_is_stopped_does_not_answer_and_one_that_computes_has_time(opened, monkeypatch):
    monkeypatch.setattr(http_client, "GET_S", 0.1)
    monkeypatch.setenv("TAKES_S", "0.3")
    engine = opened(BY_PORT)
    assert answers(engine, "one")[0].text == "one"
    os.kill(engine._server._process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(server_process.ServerEndedError, match=r"has not answered for 0\.3 s"):
            engine._server.settle(engine._client, 0.3)
        there = engine_options("small", {"engine": "server", "url": engine._client.url})
        with pytest.raises(SlurmGPUError, match=r"the server there cannot be used: .* does not answer: timed out"):
            open_engine(there, Place("cpu"))
    finally:
        os.kill(engine._server._process.pid, signal.SIGCONT)


def test_a_server_that_is_stopped_while_it_is_asked_is_started_again(opened, counts, monkeypatch):
    monkeypatch.setattr(http_client, "GET_S", 0.1)
    monkeypatch.setattr(http_client, "LOOK_S", 0.1)
    monkeypatch.setattr(server_engine, "MOST_SILENCE_S", 1.0)
    monkeypatch.setattr(server_process, "GRACE_S", 0.1)
    engine = opened(BY_PORT)
    os.kill(engine._server._process.pid, signal.SIGSTOP)
    assert [each.text for each in answers(engine, "one", "two")] == ["one", "two"]
    assert counts().count("started") == 2


def test_a_server_without_an_answer_is_there_while_it_uses_cpu_time(monkeypatch):
    now, used = [0.0], [1.0]
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nobody = http_client.Client(f"http://127.0.0.1:{server_process.free_port()}")
    seen = liveness.Liveness(nobody, 120.0, lambda: used[0])
    for now[0] in (100.0, 200.0, 300.0):
        used[0] += 0.5
        seen.look()
    now[0] = 400.0
    seen.look()  # 100 seconds without any
    now[0] = 421.0
    with pytest.raises(ConnectionError, match="has not answered for 121 s"):
        seen.look()
    seen.begin()
    seen.look()


def test_a_port_on_which_another_process_listens_is_not_given_the_items(opened, monkeypatch):
    """A server that does not listen at all, while somebody's is healthy on the port."""
    other = subprocess.Popen([sys.executable, SMALL, str(port := server_process.free_port())])

    def is_there():
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_there, "the other server")
    monkeypatch.setattr(server_process, "free_port", lambda: port)
    with pytest.raises(SlurmGPUError, match=f"another process has taken port {port}"):
        opened([sys.executable, "-c", "import time; time.sleep(60)", "{port}"])
    other.kill()
    other.wait()


def test_a_running_server_is_asked_by_its_url_with_the_key_and_the_one_models_name(opened, monkeypatch, folder):
    monkeypatch.setenv("NO_HEALTH", "1")
    monkeypatch.setenv("SLURMGPU_SERVER_KEY", "key of a file with line breaks\r\n")
    engine = opened(BY_PORT)
    settings = {"engine": "server", "url": f"{engine._client.url}/v1"}
    other = open_engine(engine_options("some name", settings), Place("cpu"))
    assert answers(other, "one")[0].text == "one"
    other.close()
    engine._server.check()
    nowhere = engine_options("small", {"engine": "server", "url": "http://127.0.0.1:9"})
    with pytest.raises(SlurmGPUError, match=r"the server there cannot be used: .*127.0.0.1:9 does not answer"):
        open_engine(nowhere, Place("cpu"))


def test_a_web_page_at_the_url_is_no_server():
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Log in</html>")

        def do_POST(self):
            self.do_GET()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as portal:
        threading.Thread(target=portal.serve_forever).start()
        there = engine_options("small", {"engine": "server", "url": f"http://127.0.0.1:{portal.server_port}"})
        try:
            with pytest.raises(SlurmGPUError, match="does not complete a prompt: status 200, <html>Log in</html>"):
                open_engine(there, Place("cpu"))
        finally:
            portal.shutdown()


def test_a_running_server_that_goes_away_is_waited_for(opened, monkeypatch):
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.05)
    monkeypatch.setenv("TAKES_S", "0.05")
    port = server_process.free_port()
    servers = [subprocess.Popen([sys.executable, SMALL, str(port)])]
    options = engine_options("small", {"engine": "server", "url": f"http://127.0.0.1:{port}", "concurrency": 2})

    def is_open():
        try:
            return open_engine(options, Place("cpu"))
        except SlurmGPUError:
            return None

    wait_until(lambda: servers.append(is_open()) or servers[-1], "the server")
    engine = servers[-1]
    found = {}
    for output in engine.generate(asked(*map(str, range(12)))):
        found[output.id] = output.text
        if len(found) == 3:
            servers[0].kill()
            servers[0].wait()
            restart = threading.Timer(0.3, lambda: servers.append(subprocess.Popen([sys.executable, SMALL, str(port)])))
            restart.start()
    restart.join()
    assert [found[number] for number in range(12)] == list(map(str, range(12)))
    servers[-1].kill()
    servers[-1].wait()


def test_a_running_server_that_does_not_come_back_or_stays_unhealthy_ends_the_worker(opened, monkeypatch, tmp_path):
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.01)
    monkeypatch.setattr(server_engine, "MOST_WAIT_S", 0.05)
    monkeypatch.setenv("UNHEALTHY", str(tmp_path / "unhealthy"))
    server = opened(BY_PORT)
    settings = {"engine": "server", "url": server._client.url}
    engine = open_engine(engine_options("small", settings), Place("cpu"))
    (tmp_path / "unhealthy").touch()
    with pytest.raises(WorkerBrokenError, match=r"http://127.* is not healthy, for more than 0\.05 s"):
        answers(engine, "drops")
    server.close()
    with pytest.raises(WorkerBrokenError, match=r"http://127.* does not answer: .*, for more than 0\.05 s"):
        answers(engine, "one")


@pytest.mark.parametrize("is_own", [True, False])
def test_a_server_that_a_proxy_says_is_away_is_waited_for(opened, counts, monkeypatch, tmp_path, is_own):
    monkeypatch.setattr(server_engine, "PAUSE_S", 0.01)
    monkeypatch.setattr(server_process, "POLL_S", 0.01)
    monkeypatch.setenv("AWAY", str(tmp_path / "away"))
    server = opened(BY_PORT, concurrency=2)
    settings = {"engine": "server", "url": server._client.url, "concurrency": 2}
    engine = server if is_own else open_engine(engine_options("small", settings), Place("cpu"))
    (tmp_path / "away").write_text("6")  # as many as two items are asked for where each has three tries
    assert [output.text for output in answers(engine, *"abcdefgh")] == [*"abcdefgh"]
    assert counts().count("started") == 1


@pytest.mark.parametrize("key", ["SECRET\nx", "SECRET\x00x", "SECRET\u20acx"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key):
    with pytest.raises(SlurmGPUError, match="a character at position 7 that an HTTP header cannot hold") as found:
        http_client.Client("http://a", key)
    assert "SECRET" not in str(found.value)


def test_images_go_as_data_urls_and_a_bad_one_is_its_items_error(opened, tmp_path):
    plain, exif = make_png(1, format="JPEG"), Image.Exif()
    exif[0x0112] = 6
    turned = make_png(2, exif=exif)
    engine = opened(images="image")
    sources = [(plain,), (turned, plain), (str(tmp_path / "nowhere.png"),), (plain[:300],)]
    requests = [Request(n, Prompt("What?", images=images), Sampling(), n) for n, images in enumerate(sources)]
    turns = [("user", "What?"), ("assistant", "A."), ("user", "Why?")]
    chat = Prompt(messages=tuple({"role": role, "content": text} for role, text in turns), images=(plain,))
    requests.append(Request(4, chat, Sampling()))
    found = {output.id: output for output in engine.generate(requests)}
    as_it_is = f"data:image/jpeg;base64,{base64.b64encode(plain).decode()}"
    upright = data_url(turned)
    assert open_image(base64.b64decode(upright.removeprefix("data:image/png;base64,"))).size == (20, 30)
    digests = [sha256(each.encode()).hexdigest() for each in (as_it_is, upright)]
    assert found[0].text == f"{digests[0]} What?"
    assert found[1].text == f"{digests[1]} {digests[0]} What?"
    assert found[2].error.endswith("nowhere.png cannot be read: No such file or directory")
    assert "of 300 bytes cannot be read" in found[3].error
    assert found[4].text == "Why?"  # the image is in the first turn, of which the small server says nothing
    assert server_engine._with_images(chat, [*map(dict, chat.messages)])[0]["content"] == [
        {"type": "image_url", "image_url": {"url": as_it_is}},
        {"type": "text", "text": "What?"},
    ]


def test_log_probabilities_are_given_where_the_server_tells_them(opened, monkeypatch):
    [output] = answers(opened(), "one", logprobs=True)
    assert output.error == "the server returned no log-probabilities; set logprobs = false, or use another server"
    monkeypatch.setenv("TELLS", "1")
    for chat in (True, False):
        [output] = answers(opened(chat=chat), "one", logprobs=True)
        assert output.logprobs.tolist() == [-0.5]


def test_the_server_ends_with_its_worker_however_that_ends(tmp_path, folder):
    code = f"""
import os, signal
from slurmgpu.llm.interface.engine import Place
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.settings import engine_options
engine = open_engine(engine_options({folder!r}, {{"engine": "server", "serve": {BY_SOCKET!r}}}), Place("cpu"))
os.write(1, f"{{engine._server._process.pid}} {{engine._server._folder}}".encode())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "MODEL": folder}
    )
    pid, place = done.stdout.split()
    wait_until(lambda: not living(int(pid)) and not Path(place).exists(), "the end of the server")


WITH_SHARED_MEMORY = """
import runpy, sys
from multiprocessing.shared_memory import SharedMemory
kept = SharedMemory(create=True, size=4096)
kept.buf[0] = 1
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_worker_that_has_no_more_work_leaves_nothing_of_its_server(tmp_path, folder):
    code = f"""
from pathlib import Path
from slurmgpu.workload import TaskContext
from slurmgpu.workloads.generate import Generate
serve = {[sys.executable, "-c", WITH_SHARED_MEMORY, SMALL, "{socket}"]!r}
workload = Generate(model={folder!r}, prompt="{{text}}", engine="server", serve=serve)
workload.load(TaskContext("cpu", 0, Path({str(tmp_path)!r})))
server = workload.engine._server
print(server._process.pid, server._folder, *server._shared)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "MODEL": folder}
    )
    pid, place, *shared = done.stdout.split()
    assert (len(shared), living(int(pid)), Path(place).exists(), done.stderr.count("Traceback")) == (1, set(), False, 0)
    assert not (Path("/dev/shm") / shared[0]).exists()


def test_a_fork_of_the_worker_ends_no_server(opened):
    engine = opened()
    if (fork := os.fork()) == 0:
        engine.close()  # as Python does at the end of a fork that leaves by sys.exit
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    engine._server.check()
    assert answers(engine, "one")[0].text == "one"


def test_a_long_path_for_temporary_files_has_no_sockets(tmp_path, monkeypatch, opened):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(sockets.tempfile, "tempdir", str(long))
    assert answers(opened(), "one")[0].text == "one"
    monkeypatch.setattr(sockets.tempfile, "tempdir", "/short")
    assert sockets.socket_folder() == "/short"


def test_vllms_sockets_are_in_the_folder_that_goes_with_the_server(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(sockets.tempfile, "tempdir", "/tmp/" + "x" * 50)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    server = opened()._server
    environ = Path(f"/proc/{server._process.pid}/environ").read_bytes().split(b"\0")
    assert f"VLLM_RPC_BASE_PATH={server._folder}".encode() in environ
    assert len(f"{server._folder}/00000000-0000-0000-0000-000000000000") <= sockets.MOST_BYTES


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "needs serve or url, and neither is set"),
        ({"serve": BY_PORT, "url": "http://a"}, "both are set"),
        ({"url": "localhost:8000"}, "url is 'localhost:8000'; expected http://HOST:PORT"),
        ({"url": "http://host:abc"}, "url is 'http://host:abc'; expected http://HOST:PORT"),
        ({"url": "http://host:70000"}, "url is 'http://host:70000'; expected http://HOST:PORT"),
        ({"url": "http://user:password@host"}, r"^url is '\.\.\.@host'; .*without a user, a password"),
        ({"url": "http://user:pass/word@host"}, r"^url is '\.\.\.@host'; .*without a user, a password"),
        ({"url": "https://host/v1?key=secret"}, "^url is 'https://host/v1?...'; .*the plan would show"),
        ({"url": "https://host#secret"}, "^url is 'https://host?...'; .*SLURMGPU_SERVER_KEY"),
        ({"serve": []}, "serve is empty"),
        ({"serve": ["a", "{model}"]}, "serve needs {port} or {socket}"),
        ({"serve": ["a", "{port}", "{socket}"]}, "serve needs {port} or {socket}"),
        ({"serve": ["a", "{port}", "{modle}"]}, "serve has {modle}. Did you mean 'model'?"),
        ({"serve": BY_PORT, "precision": "fp32"}, "precision is set, but .* the server decides that"),
        ({"url": "http://a", "revision": "main"}, "revision is set"),
        ({"url": "http://a", "truncation_side": "left"}, "truncation_side is set"),
        ({"serve": BY_PORT, "concurrency": 0}, "concurrency is 0; expected at least 1"),
        ({"engine": "vllm", "serve": BY_PORT}, 'serve is set, which is for engine = "server"'),
    ],
)
def test_a_wrong_setting_is_a_sentence(folder, settings, said):
    with pytest.raises(SlurmGPUError, match=said.replace("{", r"\{").replace("?", r"\?")):
        Generate(**{"model": folder, "prompt": "{text}", "engine": "server", **settings})


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (Generate, {"tokens": True}, "it does not report token counts. Remove tokens."),
        (Generate, {"prompt": None, "messages": "chat", "chat": False}, "Remove chat = false"),
        (Generate, {"prompt": None, "messages": "chat", "last": "continue"}, 'Set last = "drop"'),
        (Classify, {"labels": ["a", "b"]}, 'Set method = "parse"'),
        (Judge, {"prompt": None, "rubric": "yes-no", "method": "score"}, 'Set method = "parse"'),
        (Collect, {}, "it cannot continue from given steps. Set chat = false, or .* rollouts = 0"),
        (Collect, {"tree": [2, 2]}, "it cannot continue from given steps"),
    ],
)
def test_what_a_server_cannot_give_is_refused_at_planning(folder, make, settings, said):
    settings = {"prompt": "{text}", **settings}
    given = {name: value for name, value in settings.items() if value is not None}
    with pytest.raises(SlurmGPUError, match=f'engine = "server": .*{said}'):
        make(model=folder, engine="server", serve=BY_PORT, **given)
    assert make(model=folder, **given)


def test_examples_are_turns_of_a_chat_or_in_the_text_and_a_grammar_is_refused(opened, folder):
    prompt = Prompt("Q3", system="S", shots=(("Q1", " A1"), ("Q2", " A2")), between="|")
    _, text = opened(chat=False)._body(Request(0, prompt, Sampling()))
    assert text["prompt"] == "S\n\nQ1 A1|Q2 A2|Q3"
    _, chat = opened(chat=True)._body(Request(0, prompt, Sampling()))
    turns = [(turn["role"][0], turn["content"]) for turn in chat["messages"]]
    assert turns == [("s", "S"), ("u", "Q1"), ("a", " A1"), ("u", "Q2"), ("a", " A2"), ("u", "Q3")]
    with pytest.raises(
        SlurmGPUError, match="grammar is set, and engine = 'server' does not support it; expected engine = 'tr"
    ):
        Generate(model=folder, prompt="{text}", engine="server", serve=BY_PORT, grammar="a").place(Share(0))


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ({"choices": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}),
        # An expression that Python would match for ever.
        ({"regex": "([a-z]+,? ?)+s"}, {"structured_outputs": {"regex": "([a-z]+,? ?)+s"}}),
    ],
)
def test_a_server_is_asked_for_a_form_and_one_that_ignores_it_is_seen(opened, form, asked):
    sampling = Sampling(structure=structure_of(**form))
    engine = opened()
    assert asked.items() <= engine._body(Request(0, Prompt("a"), sampling))[1].items()
    good, bad = Request(0, Prompt("yes"), sampling), Request(1, Prompt("maybe" * 9), sampling)
    found = {each.id: each for each in engine.generate([good, bad])}
    assert (found[0].text, found[0].error) == ("yes", None)
    kind = next(iter(form))
    assert found[1].error == f"the answer is {'maybe' * 9!r}, which {kind} does not allow: the server ignores {kind}"


def test_a_schema_goes_as_the_response_format_and_answers_of_other_types_are_errors(opened, folder):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    structure = structure_of(schema=schema)
    _, body = opened()._body(Request(0, Prompt("a"), Sampling(structure=structure)))
    told = body["response_format"]["json_schema"]
    assert (body["response_format"]["type"], told["strict"]) == ("json_schema", True)
    assert told["schema"]["properties"] == schema["properties"]
    assert "x-guidance" not in told["schema"]
    answers = Answers(structure, 1, 16)
    assert answers.values([Output(0, text='{"age": 5.0}')]) == {"age": 5}
    for wrong, said in (('{"age": "5"}', "is '5'; expected a value of type integer"), ("5 years", "is not JSON of")):
        with pytest.raises(ItemError, match=said):
            answers.values([Output(0, text=wrong)])


def test_what_it_can_give_is_planned_with_a_line_and_one_process(folder, tmp_path):
    workload = Generate(model=folder, prompt="{text}", engine="server", serve=["vllm", "serve", "{model}", "{socket}"])
    [line] = workload.place(Share(2)).lines
    assert line.startswith(f"{folder} on a server that each task starts on its 2 GPUs: vllm serve {{model}} {{socket}}")
    with pytest.raises(SlurmGPUError, match="one server for each task"):
        workload.place(Share(2, processes="per-gpu"))
    assert set(workload.frozen_settings) == {"model_files"}
    remote = Generate(model="any", prompt="{text}", engine="server", url="http://host:1")
    assert (remote.frozen_settings, remote.paths) == ({}, [])
    assert "any on the server at http://host:1" in remote.place(Share(0)).lines[0]
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    file = Generate(model=str(tmp_path / "model.gguf"), prompt="{text}", engine="server", serve=BY_PORT)
    assert (list(file.frozen_settings["model_files"]), file.paths) == (["model.gguf"], [tmp_path / "model.gguf"])


def test_no_scores_are_given(opened):
    with pytest.raises(SlurmGPUError, match="cannot score"):
        list(opened().score([Question(0, Prompt("a"), ("b", "c"))]))


# A run


def test_a_run_on_a_server_whose_worker_is_killed_has_all_rows(project, slurmgpu, folder, monkeypatch):
    settings = {"model": folder, "engine": "server", "serve": BY_SOCKET, "prompt": "{text}", "temperature": 1.0, "n": 2}
    folders = []
    for deadly in (True, False):
        items = [{"text": f"number {number}"} for number in range(24)]
        where = project(items=items, batch_size=4, settings=settings)
        text = (where / "slurmgpu.toml").read_text().replace("workloads.py:Rows", "generate")
        (where / "slurmgpu.toml").write_text(text)
        how = ("local", "--tasks", 2, "--inject", "kill@1") if deadly else ("debug",)
        slurmgpu("submit", "--gpus", "0", "--executor", *how, cwd=where, expect=0, MODEL=folder)
        folders.append(datasets(where))
        assert report(where)["summary"]["n_answers"] == 48
        (where / "run").rename(where / f"run-{deadly}")
    assert folders[0] == folders[1]
    assert json.loads((where / "run-True" / "report.json").read_text())["n_missing_items"] == 0


def test_answers_that_came_before_a_server_broke_for_good_are_kept_for_the_next_worker(
    project, slurmgpu, folder, counts
):
    settings = {"model": folder, "engine": "server", "serve": BY_SOCKET, "concurrency": 1, "prompt": "{text}"}
    settings |= {"temperature": 1.0, "n": 2}
    texts = [*(f"number {number} of twelve" for number in range(12)), "mortal"]  # the shortest is the last one
    where = project(items=[{"text": text} for text in texts], batch_size=16, shard_items=16, settings=settings)
    text = (where / "slurmgpu.toml").read_text().replace("workloads.py:Rows", "generate")
    (where / "slurmgpu.toml").write_text(text)
    # The first worker's server ends in the middle of its call, and cannot be started again.
    server = {"MODEL": folder, "ENDS": "2 3 4", "COUNTS": os.environ["COUNTS"]}
    slurmgpu("submit", "--gpus", "0", "--executor", "local", "--tasks", 1, cwd=where, expect=0, **server)
    lines = Counter(counts())
    assert lines["started"] == 5
    assert [lines[f"asked {text}"] for text in texts] == [2] * 12 + [1 + 2]
    with results.open(where / "run" / "merged.h5") as merged:
        said = [[one.rpartition(" ") for one in each] for each in merged["text"][:]]
    assert [[one[0] for one in each] for each in said] == [[text, text] for text in texts]
    assert len({one[2] for each in said for one in each}) == 2 * len(texts)  # the seeds, which are the samples' own
    assert not (where / "run" / "parts").exists()  # the merge removes them


def test_kept_answers_are_the_same_after_a_file_and_a_damaged_file_is_none(tmp_path):
    path = tmp_path / "parts" / "1_0.0.answers"
    requests = asked("one", "two", "three", temperature=0.5)
    made = [
        Output(each.id, each.prompt.text, "hm", logprobs=np.array([-0.1], np.float32), count=7) for each in requests
    ]

    def breaks(some):
        yield from made[:2]
        raise WorkerBrokenError("the server ended")

    with pytest.raises(WorkerBrokenError, match="the server ended"):
        list(KeptAnswers(path).each(requests, breaks))
    others = [dataclasses.replace(each, id=9 - each.id) for each in requests[::-1]]  # another batch of the same
    left = []
    found = [*KeptAnswers(path).each(others, lambda some: left.extend(some) or [dataclasses.replace(made[2], id=7)])]
    assert left == [others[0]]
    assert [(each.id, each.text, each.reasoning, each.n_tokens) for each in found] == [
        *((8, "two", "hm", 7), (9, "one", "hm", 7)),
        (7, "three", "hm", 7),
    ]
    assert all(each.logprobs == made[0].logprobs and each.logprobs.dtype == np.float32 for each in found)
    other_seed = [dataclasses.replace(requests[0], key=1)]
    assert [*KeptAnswers(path).each(other_seed, lambda some: made[:1])] == made[:1]
    for damaged in (path.read_bytes()[:-5], b"[1, 2]"):
        path.write_bytes(damaged)
        assert [*KeptAnswers(path).each(requests, lambda some: made)] == made
    path.unlink()
    path.mkdir()  # nothing can be kept there, and the error is still the server's
    with pytest.raises(WorkerBrokenError, match="the server ended"):
        list(KeptAnswers(path).each(requests, breaks))


def test_an_error_of_an_engine_that_then_broke_is_not_kept(tmp_path):
    """It may be the server's last word: the next worker asks again."""
    path = tmp_path / "1_0.0.answers"
    requests = asked("one", "two")
    failed, made = Output(0, "", error="the server failed, with status 500"), Output(1, "two")

    def breaks(some):
        yield from (failed, made)
        raise WorkerBrokenError("the server ended")

    with pytest.raises(WorkerBrokenError):
        list(KeptAnswers(path).each(requests, breaks))
    again = Output(0, "one")
    assert [each.text for each in KeptAnswers(path).each(requests, lambda some: [again])] == ["two", "one"]


def test_requests_are_told_apart_by_the_bytes_of_their_images():
    same, other = (
        dataclasses.replace(asked("one")[0], prompt=Prompt("one", images=(image,))) for image in (b"1" * 99, b"2" * 99)
    )
    assert digest_of_request(same) == digest_of_request(dataclasses.replace(same)) != digest_of_request(other)
