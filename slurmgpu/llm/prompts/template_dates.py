"""The date that chat templates write into prompts: the run's, so that every task and every attempt has the same.

Templates such as Llama 3's and gpt-oss's take it from transformers' function `strftime_now`, which reads the clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models.source import ModelSource, named_in
from slurmgpu.util.shared_files import read_given

FUNCTION = "strftime_now"

FILES = ("tokenizer_config.json", "chat_template*", "*processor_config.json")
"""Files of a model that may have its chat template."""

DIRECTIVES = "aAbBcdDeFgGhHIjklmMpPrRSTuUVwWxXyYzZ"
"""The directives of a format that are filled in, each also with glibc's `-`, as in `%-d`."""


def check_date(date: str) -> None:
    """Refuse a text that is not a day."""
    try:
        _midnight(date)
    except ValueError as error:
        raise SlurmGPUError(f"date is {date!r}; expected a day such as '2026-11-29'.") from error


def today() -> str:
    """The date by this machine's clock."""
    return datetime.now().date().isoformat()


def asks_for_date(source: ModelSource, chat_options: Mapping[str, Any]) -> bool:
    """Whether a model's chat template, or one in the options, writes the date into prompts."""
    files = (path for path in named_in(source.folder, FILES) if path.is_file())
    return FUNCTION in str(chat_options.get("chat_template")) or any(
        FUNCTION.encode() in read_given(path) for path in files
    )


def with_date(template: str, date: str) -> str:
    """The chat template with this date, at midnight, instead of the clock's."""
    at = _midnight(date)
    filters = [
        f"|replace({json.dumps(each)}, {json.dumps(at.strftime(each))})"
        for letter in DIRECTIVES
        for each in (f"%{letter}", f"%-{letter}")
    ]
    # The newline is trimmed, as transformers sets Jinja's trim_blocks.
    return f"{{%- macro {FUNCTION}(format) -%}}{{{{ format{''.join(filters)} }}}}{{%- endmacro %}}\n{template}"


def _midnight(date: str) -> datetime:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ValueError(date)
    return datetime.strptime(date, "%Y-%m-%d")
