"""What a test may change in its process for the tests after it: variables, the folder, signals, settings of PyTorch."""

import logging
import os
import signal
import sys

from tests.support.command_line import own_umask

SIGNALS = {*range(1, 32)} - {signal.SIGALRM, signal.SIGCHLD}
"""Not those of pytest-timeout and of PyTorch, which sets its own once, for processes that read batches."""


NOT_OF_TESTS = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Variables of pytest, and those that the first import of scikit-learn sets, in whichever test that is."""


def _variables():
    return {name: value for name, value in os.environ.items() if name not in NOT_OF_TESTS}


def _put_variables(before):
    for name in _variables().keys() - before:
        del os.environ[name]
    os.environ.update(before)


def _put_handlers(before):
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _logging():
    """The level, and what writes the log beside pytest, which adds its own for each step of a test."""
    own = [handler for handler in logging.root.handlers if not type(handler).__module__.startswith("_pytest.")]
    return {"level": logging.root.level, "handlers": own}


def _put_logging(before):
    for handler in _logging()["handlers"]:
        if handler not in before["handlers"]:
            logging.root.removeHandler(handler)
    logging.root.setLevel(before["level"])


KINDS = {
    "variable": (_variables, _put_variables),
    "folder": (os.getcwd, os.chdir),
    "umask": (own_umask, os.umask),
    "handler of signal": (lambda: {number: signal.getsignal(number) for number in SIGNALS}, _put_handlers),
    "excepthook": (lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    "log": (_logging, _put_logging),
}


def _kinds_of_torch():
    torch = sys.modules.get("torch")
    if not hasattr(torch, "set_float32_matmul_precision"):  # not imported, or a test's stand-in
        return {}
    return {
        "torch's dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "torch's gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "torch's threads": (torch.get_num_threads, torch.set_num_threads),
        "torch's determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        "torch's products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    }


def read():
    """The state of this process, by kind."""
    return {kind: get() for kind, (get, _) in {**KINDS, **_kinds_of_torch()}.items()}


def put_back(before):
    """Put the state back; what had changed, a line each."""
    changes = []
    kinds = {**KINDS, **_kinds_of_torch()}
    for kind, was in before.items():
        get, put = kinds[kind]
        try:
            found = get()
        except FileNotFoundError:  # the folder is gone
            found = None
        if found != was:
            changes += _changes(kind, was, found)
            put(was)
    return changes


def _changes(kind, was, found):
    if not isinstance(was, dict):
        return [f"{kind}: {was!r}, now {found!r}"]
    names = sorted(name for name in was.keys() | found.keys() if was.get(name) != found.get(name))
    return [f"{kind} {name}: {was.get(name)!r}, now {found.get(name)!r}" for name in names]
