"""What any exception says: the class may be a user's, and its `__str__` may raise or return no text."""

from __future__ import annotations

import traceback


def message_of(error: BaseException) -> str:
    """`str(error)`, or a clause that says why there is no such text."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"(no message: its __str__ raises {type(failure).__name__})"


def described(error: BaseException) -> str:
    """The exception's class and its message, such as `KeyError: 'id'`; the class alone if there is no message."""
    return f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")


def trace_of(error: BaseException) -> str:
    """The traceback as Python prints it; without causes and notes if an exception prevents those."""
    try:
        return "".join(traceback.format_exception(error))
    except KeyboardInterrupt:
        raise
    except BaseException:  # Python asks the exception for attributes, which a property may refuse
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{described(error)}\n"
