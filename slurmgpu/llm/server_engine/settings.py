"""The settings of `engine = "server"`, checked without a server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.llm.interface.engine import EngineOptions

PLACEHOLDERS = ("model", "gpus", "port", "socket")
OWN = ("serve", "url", "concurrency")
OTHERS = (
    "precision",
    "batching",
    "batch_tokens",
    "max_context",
    "cuda_graphs",
    "compile",
    "trust_remote_code",
    "truncation_side",
    "date",
)
"""Settings of engines that load the model and its tokenizer themselves."""
LOCAL = ("revision", "model_files")
"""Settings for a model that is on this cluster."""

_PLACEHOLDER = re.compile(r"\{(\w*)\}")


def check_server(settings: Mapping[str, Any]) -> None:
    """Refuse server settings without `engine = "server"`, and wrong ones with it."""
    if settings.get("engine") != "server":
        if found := [name for name in OWN if name in settings]:
            raise SlurmGPUError(f'{found[0]} is set, which is for engine = "server". Set engine, or remove it.')
        return
    serve, url = settings.get("serve"), settings.get("url")
    if (serve is None) == (url is None):
        raise SlurmGPUError(
            f'engine = "server" needs serve or url, and {"neither is" if serve is None else "both are"} set. Set serve '
            'to the command that starts a server, such as ["vllm", "serve", "{model}", "--port", "{port}"]; or url to '
            "the address of a running server."
        )
    if found := [name for name in (*OTHERS, *(LOCAL if url else ())) if settings.get(name)]:
        raise SlurmGPUError(
            f'{found[0]} is set, but with engine = "server" the server decides that. Remove it'
            f"{', or give it to the command in serve' if serve else ''}."
        )
    if url is not None and not _is_url(url):
        shown = re.sub(r".*@", "...@", url, flags=re.DOTALL)  # neither a password is shown
        shown = re.sub(r"[?#].*", "?...", shown, flags=re.DOTALL)  # nor a key
        raise SlurmGPUError(
            f"url is {shown!r}; expected http://HOST:PORT, https://HOST or unix:/PATH, without a user, a password or "
            "a query, since the plan would show them. Set the server's key in SLURMGPU_SERVER_KEY."
        )
    if serve is not None:
        _check_serve(serve)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError if it is not a valid port number
    except ValueError:
        return False
    return bool(re.match(r"(https?://[^/]|unix:/)", url)) and "@" not in parts.netloc and not re.search(r"[?#]", url)


def _check_serve(serve: Iterable[str]) -> None:
    arguments = [*serve]
    if not arguments or not arguments[0]:
        raise SlurmGPUError("serve is empty; expected a program and its arguments.")
    found = [name for each in arguments for name in _PLACEHOLDER.findall(each)]
    if wrong := [name for name in found if name not in PLACEHOLDERS and name]:
        raise SlurmGPUError(f"serve has {{{wrong[0]}}}.{did_you_mean(wrong[0], PLACEHOLDERS)}")
    if ("port" in found) == ("socket" in found):
        raise SlurmGPUError(
            'serve needs {port} or {socket}, where the server must listen: "--port", "{port}" for most servers, or '
            '"--uds", "{socket}" for vLLM.'
        )


def refuse_beyond(settings: Mapping[str, Any], reasons: Iterable[str]) -> None:
    """Refuse what a workload needs and a server lacks; each of `reasons` says what it is, and what to set."""
    if settings.get("engine") == "server" and (found := next(iter(reasons), None)) is not None:
        raise SlurmGPUError(f'engine = "server": {found}')


def uses_chat(settings: Mapping[str, Any]) -> bool:
    """Whether prompts go to the chat endpoint, where the server applies the template."""
    return bool(settings.get("chat", True))


def describe(options: EngineOptions, gpus: int) -> str:
    """A line for the plan that says which server computes."""
    if options.url:
        return f"{options.model.name} on the server at {options.url}, at most {options.concurrency} requests at a time."
    on = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "CPUs"
    return (
        f"{options.model.name} on a server that each task starts on its {on}: {' '.join(options.serve)}; at most "
        f"{options.concurrency} requests at a time. Whether the model fits is not checked."
    )
