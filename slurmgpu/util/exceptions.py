"""Messages of any exception: the class may be a user's, and its `__str__` may raise or return no text."""

from __future__ import annotations

import traceback

MOST_SAID, MOST_TRACED = 8_000, 64_000
"""How many characters of a message, and of a traceback with it, are passed on."""


def is_of_network(error: object) -> bool:
    """Whether it is a ConnectionError or a TimeoutError, which may pass on a retry.

    Until Python 3.11 asyncio and concurrent.futures have a TimeoutError of their own.
    """
    own = {("asyncio.exceptions", "TimeoutError"), ("concurrent.futures._base", "TimeoutError")}
    is_own = not own.isdisjoint((each.__module__, each.__name__) for each in type(error).__mro__)
    return isinstance(error, ConnectionError | TimeoutError) or is_own


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
    return shortened(f"{type(error).__name__}: {message_of(error)}".removesuffix(": "), MOST_SAID)


def trace_of(error: BaseException) -> str:
    """The traceback as Python prints it; without causes and notes if an exception prevents those."""
    try:
        return shortened("".join(traceback.format_exception(error)), MOST_TRACED)
    except KeyboardInterrupt:
        raise
    except BaseException:  # Python asks the exception for attributes, which a property may refuse
        frames = "".join(traceback.format_tb(error.__traceback__))
        return shortened(f"Traceback (most recent call last):\n{frames}{described(error)}\n", MOST_TRACED)


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and end if it has more than `most` characters: a message may quote anything."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [… {len(text) - most:,} characters …] {text[-(most // 2) :]}"
