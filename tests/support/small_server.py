"""A server with the endpoints that language models have, whose answers are the prompts: `python small_server.py PORT`.

PORT may be the path of a unix socket. What a prompt says happens: "busy" is answered with 429 at first, "late" with
503, "fails" with 500, "bad" with 400 always, "drops" once without an answer, and "deadly", or what the variable DEADLY
says, ends the server; "mortal" ends the first one. The finish reason of "ends by WORD" is WORD, the content of "in
parts" and "in shapes" is a list, and the answer to "{…}" is that JSON. The file COUNTS, if that
variable names one, gets a line for each start and each request, and servers whose number is in ENDS, as "1 3", end when
they start. While there is a file UNHEALTHY, /health answers with 502; a number in the file AWAY is how many requests of
all kinds are answered so, as by a proxy.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import time
from collections import Counter
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

seen = Counter()


def note(line):
    if path := os.environ.get("COUNTS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def n_started():
    return Path(os.environ["COUNTS"]).read_text().splitlines().count("started")


def text_of(content):
    """A message's text, with the digest of each image's URL in its place."""
    if isinstance(content, str):
        return content
    return " ".join(
        part["text"] if part["type"] == "text" else sha256(part["image_url"]["url"].encode()).hexdigest()
        for part in content
    )


def is_away():
    file = Path(os.environ.get("AWAY", "/none"))
    seen["while away"] += file.exists()
    return file.exists() and seen["while away"] <= int(file.read_text())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if is_away():
            self.answer(502, "Bad Gateway")
        elif self.path == "/health" and "NO_HEALTH" in os.environ:
            self.answer(404, {"detail": "Not Found"})
        elif self.path == "/health" and Path(os.environ.get("UNHEALTHY", "/none")).exists():
            self.answer(502, "Bad Gateway")
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "small"}]})
        else:
            self.answer(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_chat = self.path == "/v1/chat/completions"
        text = text_of(body["messages"][-1]["content"]) if is_chat else body["prompt"]
        seen[text] += 1
        note(f"asked {text}")
        if is_away():
            self.answer(502, "Bad Gateway")
        elif body["model"] not in ("small", os.environ.get("MODEL")):
            self.answer(404, {"error": {"message": f"The model {body['model']} does not exist."}})
        elif os.environ.get("DEADLY", "deadly") in text or ("mortal" in text and n_started() == 1):
            os._exit(3)
        elif "drops" in text and seen[text] == 1:
            self.close_connection = True
        elif "busy" in text and seen[text] < 3:
            self.answer(429, {"error": {"message": "too many"}}, {"Retry-After": "0.01"})
        elif "late" in text and seen[text] < 3:
            self.answer(503, "not yet", {"Retry-After": "0.01"})
        elif "fails" in text:
            self.answer(500, {"error": {"message": "Internal Server Error"}}, {"Retry-After": "0.01"})
        elif "bad" in text:
            self.answer(400, {"error": {"message": "the context has 16 tokens"}})
        else:
            time.sleep(float(os.environ.get("TAKES_S", "0")))
            self.answer(200, json.loads(text) if text[0] == "{" else self.completion(body, text, is_chat))

    def completion(self, body, text, is_chat):
        said = f"{text} {body.get('seed', '')}".strip()
        if "thinks" in text:
            said = f"<think>\nhm\n</think>\n\n{said}"
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(said.split())}
        if "in parts" in text or "in shapes" in text:
            more = [{"type": "image_url"}] if "in shapes" in text else []
            said = [*({"type": "text", "text": each} for each in said.partition(" ")), *more]
        choice = {"index": 0, "finish_reason": text.partition("ends by ")[2] or "stop"}
        choice |= {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
        if body.get("logprobs") and "TELLS" in os.environ:
            choice["logprobs"] = {"content": [{"logprob": -0.5}]} if is_chat else {"token_logprobs": [-0.5]}
        return {"choices": [choice], "usage": usage}

    def answer(self, status, body, headers=None):
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def address_string(self):
        return "client"  # of a unix socket there is none

    def log_message(self, *args):
        pass


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class PortServer(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    where = sys.argv[1]
    note("started")
    if (ends := os.environ.get("ENDS")) and str(n_started()) in ends.split():  # as one whose port is taken
        sys.exit(1)
    server = PortServer(("127.0.0.1", int(where)), Handler) if where.isdecimal() else UnixServer(where, Handler)
    server.serve_forever()
