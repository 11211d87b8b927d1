"""The setting `scorer` of other workloads: a model with a trained head that scores their texts or steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_type_hints

from typing_extensions import Required

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.llm.heads.head import Activation
from slurmgpu.llm.settings import PromptedModelSettings
from slurmgpu.workloads.score.outputs import PathScore
from slurmgpu.workloads.score.workload import Score

ScoreT = TypeVar("ScoreT", bound=Score)

INPUTS = ("prompt", "messages", "pair")
"""The settings of `score` that say what the model sees; a scorer without any of them gets its workload's."""


class ScorerSettings(PromptedModelSettings, total=False):
    """The settings of `score` that a scorer takes; docs/reference/language-models.md describes each."""

    model: Required[str]
    prompt: str
    messages: str
    system: str
    answer: str
    pair: list[str]
    steps: str
    step_delimiter: str
    step_end: str
    choices: list[str]
    path_by: PathScore
    positive: str
    activation: Activation
    labels: list[str]
    cut: bool


def scorer_table(scorer: str | ScorerSettings) -> dict[str, Any]:
    """The setting as a table; SlurmGPUError if it has no model, or a setting that scorers do not take."""
    table = {"model": scorer} if isinstance(scorer, str) else dict(scorer)
    known = get_type_hints(ScorerSettings)
    for name in table:
        if name not in known:
            raise SlurmGPUError(f"scorer has no setting {name!r}.{did_you_mean(name, known)}")
    if "model" not in table:
        raise SlurmGPUError('scorer has no model; expected a name or a folder, or a table with it: {model = "…"}.')
    return table


def open_scorer(scorer: str | ScorerSettings, defaults: Mapping[str, Any], kind: type[ScoreT]) -> ScoreT:
    """A scorer as an instance of `kind`, a class of `score`; `defaults` fill settings that the scorer lacks."""
    try:
        found = kind(**cast(Any, {**defaults, **scorer_table(scorer)}))
    except SlurmGPUError as error:
        raise SlurmGPUError(f"scorer: {error}") from error
    if "score" not in found.columns:
        raise SlurmGPUError(
            f"scorer: the model has a score for each of {', '.join(found.labels)}; set positive to one of them: "
            f'scorer = {{model = "…", positive = "{found.labels[-1]}"}}.'
        )
    return found
