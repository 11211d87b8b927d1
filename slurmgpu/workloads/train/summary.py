"""The summary of a train run: its configurations ranked by their metric, and the best one."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmgpu.training.settings import goal_of
from slurmgpu.util.amounts import count_of
from slurmgpu.util.json_values import json_value

if TYPE_CHECKING:
    from slurmgpu.results import Merged

KEYS = (
    *("n_trained", "n_failed", "n_stopped_early", "metric", "goal", "best_score", "best_configuration"),
    *("best_weights", "wall_s", "gpu_energy_j", "best_settings"),
    *("evaluation_of_best_weights", "evaluation_of_last_weights", "ranking", "hint"),
)
"""The keys that a summary may have."""

READ = ("config", "metric", "score", "best", "final", "weights", "wall_s", "ended", "best_step", "energy_j", "index")
"""The columns that the summary reads."""

N_RANKED = 20
MOST_COLUMNS = 6
"""Names of settings in the ranking."""


def summarize(merged: Merged) -> dict[str, Any]:
    """The number of configurations, the best one, and the best twenty with the settings in which they differ."""
    good = [number for number, failed in enumerate(merged.failed.tolist()) if not failed]
    counts: dict[str, Any] = {"n_trained": len(good), "n_failed": len(merged) - len(good)}
    found, hints = _of_trained(merged, good) if good else ({}, [])
    if counts["n_failed"]:
        again = f"`slurmgpu resubmit --failed {shlex.quote(str(merged.path.parent))}`"
        hints.insert(0, f"After fixing the cause, train the failed configurations with {again}.")
    return {**counts, **found, **({"hint": " ".join(hints)} if hints else {})}


def _of_trained(merged: Merged, good: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    values = {name: merged[name][:] for name in READ}
    [(metric, n_ranked)] = Counter(str(values["metric"][number]) for number in good).most_common(1)
    of_metric = [number for number in good if values["metric"][number] == metric]
    goal = goal_of(metric, values["config"][of_metric[0]].get("goal"))
    ranked = sorted(of_metric, key=lambda number: _rank(float(values["score"][number]), goal))
    configurations = [values["config"][number] for number in good]
    names = differing(configurations)
    columns = telling(configurations, names)
    energy_j = sum(float(values["energy_j"][number]) for number in good)
    summary = {
        "n_stopped_early": sum(values["ended"][number] == "early" for number in good),
        "metric": metric,
        "goal": goal,
        **_best(values, ranked[0], names),
        "wall_s": float(sum(float(values["wall_s"][number]) for number in good)),
        **({} if math.isnan(energy_j) else {"gpu_energy_j": energy_j}),
    }
    if len(good) > 1:
        summary["ranking"] = {
            str(values["index"][number]): _line(values, number, metric, columns) for number in ranked[:N_RANKED]
        }
    hints = []
    if n_others := len(good) - n_ranked:
        hints.append(f"Not ranked, since the metric is not {metric}: {count_of(n_others, 'configuration')}.")
    if len(columns) < len(names):
        hints.append(f"The configurations differ in {len(names)} settings; the column config has all of them.")
    return summary, hints


def _best(values: Mapping[str, Any], best: int, names: Sequence[str]) -> dict[str, Any]:
    config, weights = values["config"][best], str(values["weights"][best])
    shown = {name: _cell(config[name]) for name in names or config if name in config}
    return {
        "best_score": json_value(float(values["score"][best])),
        "best_configuration": int(values["index"][best]),
        "best_weights": weights,
        **({"best_settings": shown} if shown else {}),
        **({"evaluation_of_best_weights": values["best"][best]} if weights.endswith("best.pt") else {}),
        "evaluation_of_last_weights": values["final"][best],
    }


def differing(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values differ between configurations, in the order of their appearance."""
    names = dict.fromkeys(name for config in configurations for name in config)
    missing = object()
    texts = {
        name: {json.dumps(config[name]) if name in config else missing for config in configurations} for name in names
    }
    return [name for name in names if len(texts[name]) > 1]


def telling(configurations: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """At most `MOST_COLUMNS` names that distinguish the configurations, the most common names first."""
    common = [name for name in names if 2 * sum(name in each for each in configurations) > len(configurations)]
    others = [name for name in names if name not in common]

    def n_apart(some: Sequence[str]) -> int:
        return len({json.dumps([each.get(name, [name]) for name in some]) for each in configurations})

    needed = [] if n_apart(common) == n_apart(names) else others
    return [*common, *needed][:MOST_COLUMNS]


def _rank(score: float, goal: str) -> float:
    if math.isnan(score):
        return math.inf
    return score if goal == "min" else -score


def _line(values: Mapping[str, Any], number: int, metric: str, names: Sequence[str]) -> dict[str, Any]:
    config = values["config"][number]
    about = {name: _cell(config.get(name)) for name in names if name != metric}
    score, step = json_value(float(values["score"][number])), int(values["best_step"][number])
    return {metric: score, **about, "at_step": step, "wall_s": float(values["wall_s"][number])}


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False)
