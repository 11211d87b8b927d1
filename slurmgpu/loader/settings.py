"""The settings of a workload: check them against its class by name, and read texts from files."""

from __future__ import annotations

import inspect
import io
import typing
from collections.abc import Collection, Mapping
from typing import Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.loader.members import is_collection_of, read_member
from slurmgpu.loader.names import title_of
from slurmgpu.util.regular_files import open_given
from slurmgpu.util.users import expanded

FILE = "file:"
MOST_CHARACTERS = 1 << 24
"""The longest text of a file that a setting names; of a longer one, no more than this is read."""

OF_RUN_FILE = ("gpus_per_task",)
ELSEWHERE = {
    "precision": "dtype torch_dtype",
    "max_tokens": "max_new_tokens max_completion_tokens max_seq_length max_length",
    "max_context": "max_model_len max_seq_length max_seq_len max_length",
    "n": "num_return_sequences num_samples n_samples",
    "stop": "stop_strings stop_sequences stop_words",
    "schema": "guided_json json_schema response_format",
    "choices": "guided_choice",
    "regex": "guided_regex",
    "grammar": "guided_grammar",
    "model": "model_name model_name_or_path pretrained_model_name_or_path model_id model_path",
    "system": "system_prompt system_message",
    "chat_options": "chat_template_kwargs",
    "adapter": "lora lora_path peft peft_model",
    "batch_tokens": "max_num_batched_tokens",
    "url": "base_url api_base",
    "gpus_per_task": "tensor_parallel_size tensor_parallel tp_size tp",
}
"""The names of settings, and of keys of the run file, in transformers, vLLM and alike."""


class UnknownSettingError(SlurmGPUError):
    """A workload has no such setting; `name` is its name, or ours for what other programs call so."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def settings_hints(cls: type) -> dict[str, Any]:
    """The annotations of a class's settings by name, including those of a `**settings: Unpack[TypedDict]`.

    Raises NameError or TypeError for annotations that exist for type checkers only.
    """
    takes = inspect.getattr_static(cls, "__init__")  # its own, or one that it inherits
    hints = typing.get_type_hints(cls if takes is object.__init__ else takes)
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            [table] = typing.get_args(hints.pop(parameter.name, None)) or (None,)
            # Not typing.is_typeddict, which does not know the tables of typing_extensions.
            hints |= typing.get_type_hints(table) if isinstance(table, type) and issubclass(table, dict) else {}
    return hints


def names_of_settings(cls: type) -> dict[str, inspect.Parameter] | None:
    """The settings of a class as parameters, by name; None if it takes any setting."""
    parameters = {parameter.name: parameter for parameter in inspect.signature(cls).parameters.values()}
    known = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    if len(known) < len(parameters):
        unpacked = settings_hints(cls).keys() - known.keys() - {"return"}
        if not unpacked:
            return None
        known |= {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in unpacked}
    return known


def check_names(full_name: str, cls: type, settings: Mapping[str, Any]) -> None:
    """Raise UnknownSettingError for an unknown setting, SlurmGPUError for a missing required one."""
    if (known := names_of_settings(cls)) is None:
        return
    for name in settings:
        if name not in known:
            ours = in_our_words(name, ELSEWHERE, {*known, *OF_RUN_FILE})
            hint = f" Here it is called {ours!r}." if ours else did_you_mean(name, known) or " It takes none."
            raise UnknownSettingError(f"{title_of(full_name)} has no setting {name!r}.{hint}", ours or name)
    missing = [
        name
        for name, p in known.items()
        if p.default is p.empty and name not in settings and p.kind is not p.VAR_POSITIONAL
    ]
    if missing:
        raise SlurmGPUError(
            f"{title_of(full_name)} needs the setting {missing[0]!r}: set it in [settings], or with --set."
        )


def in_our_words(name: str, elsewhere: Mapping[str, str], known: Collection[str]) -> str | None:
    """The known name of what other programs call `name`; None if there is none.

    `elsewhere` has names of ours, each with the words of other programs, separated by blanks.
    """
    return next((ours for ours, words in elsewhere.items() if ours in known and name in words.split()), None)


def texts_of_files(full_name: str, cls: type, settings: Mapping[str, Any]) -> dict[str, str]:
    """For each setting in the class's `texts` with a value like `file:PATH`, the content of that file.

    The plan keeps the text, so a later change of the file changes no row. SlurmGPUError if the file cannot be read.
    """
    expected = "a list of names of settings, as an attribute of the class"
    found = {}
    texts: Collection[str] = read_member(cls, full_name, "texts", expected, is_collection_of(str)) or ()
    for name in texts:
        value = settings.get(name)
        if isinstance(value, str) and value.startswith(FILE):
            path = expanded(value.removeprefix(FILE))
            try:
                with io.TextIOWrapper(open_given(path), encoding="utf-8-sig") as file:
                    text = file.read(MOST_CHARACTERS + 1)
                if len(text) > MOST_CHARACTERS:
                    raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters, which the plan would keep")
                found[name] = text.removesuffix("\n")
            except (OSError, ValueError) as error:
                found_there = getattr(error, "strerror", None) or error
                raise SlurmGPUError(
                    f"{name} is {value!r}, but {path.absolute()} cannot be read: {found_there}. "
                    f"Expected a text, or {FILE!r} and a path relative to the run file."
                ) from error
    return found
