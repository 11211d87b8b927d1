"""`python -m tests.chaos [--write]`: runs on pretended nodes until a thousand faults have happened; a table of them."""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks.__main__ import machine
from tests.pretend_nfs.nodes import missing

from .disturbances import COSTLY, HARMLESS
from .trial import SETTINGS, Outcome, Setting, Trial

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "chaos.md"
MOST_AGAIN = 0.02


def tried(seed: int) -> tuple[Outcome, bool]:
    """The trial of a seed, and whether things were done to it after which items must be computed again."""
    drawn = random.Random(seed)
    settings = [setting for setting in SETTINGS.values() if setting.rates]
    setting = settings[seed % len(settings)]
    is_costly = seed % 2 == 1
    kinds = COSTLY if is_costly else HARMLESS
    first = kinds[seed // 2 % len(kinds)]
    chosen = {first, *drawn.sample(kinds, 2), *drawn.sample(HARMLESS, 1)}
    disturbances = [(drawn.uniform(0.05, 0.7), act) for act in sorted(chosen, key=lambda act: act.kind)]
    return _go(setting, seed, disturbances, n_late=drawn.choice((0, 1))), is_costly


def _go(setting: Setting, seed: int, disturbances: list, n_late: int) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="slurmgpu-chaos-"))
    try:
        with Trial(folder / "nfs", setting, seed) as trial:
            outcome = trial.go(disturbances, n_late)
            if outcome.is_right and trial.datasets() != undisturbed():
                outcome.misreported.append("datasets differ from those of an undisturbed run")
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_undisturbed: list[dict[str, bytes]] = []


def undisturbed() -> dict[str, bytes]:
    """The datasets of a run to which nothing happened."""
    if not _undisturbed:
        folder = Path(tempfile.mkdtemp(prefix="slurmgpu-chaos-"))
        with Trial(folder / "nfs", SETTINGS["no caches"], 0, n_nodes=1) as trial:
            outcome = trial.go()
            assert outcome.is_right, outcome
            _undisturbed.append(trial.datasets())
        shutil.rmtree(folder, ignore_errors=True)
    return _undisturbed[0]


def main() -> int:
    """Try until there were as many faults as asked for; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Runs with faults of every kind.")
    parser.add_argument("--faults", type=int, default=1000, help="as many at least, of at least twelve kinds (1000)")
    parser.add_argument("--minutes", type=float, default=60, help="begin no trial after so many (60)")
    parser.add_argument("--seed", type=int, default=1, help="the first trial's; each has the next one (1)")
    parser.add_argument("--trials", type=int, default=30, help="as many at least (30)")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time (2)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    begun = time.monotonic()
    undisturbed()
    done: list[tuple[Outcome, bool]] = []
    seeds = itertools.count(arguments.seed)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        while len(done) < arguments.trials or sum(outcome.faults.total() for outcome, _ in done) < arguments.faults:
            if time.monotonic() - begun > 60 * arguments.minutes:
                break
            n_next = min(arguments.jobs, max(1, arguments.trials - len(done)))
            for outcome, is_costly in pool.map(tried, itertools.islice(seeds, n_next)):
                done.append((outcome, is_costly))
                _tell(outcome)
    text, is_right = table(done, time.monotonic() - begun)
    print(text)
    if arguments.write:
        shown = " ".join(["python -m tests.chaos", *(arg for arg in sys.argv[1:] if arg != "--write")])
        facts = "".join(f"- {fact}\n" for fact in machine())
        RESULTS.write_text(f"# chaos\n\n`{shown}`\n\n{text}\n\nMeasured {time.strftime('%F')} on:\n\n{facts}")
    return 0 if is_right else 1


def _tell(outcome: Outcome) -> None:
    """A line for a trial, and one for each thing that is wrong with it."""
    again = f"{outcome.computed_again:.1%} computed again, {outcome.n_rounds} resubmissions"
    print(f"seed {outcome.seed}, {outcome.setting}: {outcome.faults.total()} faults, {again}, {outcome.seconds:.0f} s")
    for name in ("lost", "doubled", "misreported", "failed_tasks", "failed_commands"):
        for sentence in getattr(outcome, name):
            print(f"  {name.replace('_', ' ')}: {sentence}")
    sys.stdout.flush()


def table(done: list[tuple[Outcome, bool]], seconds: float) -> tuple[str, bool]:
    """What is written down of all trials, and whether nothing is wrong."""
    outcomes = [outcome for outcome, _ in done]
    kinds = sum((outcome.faults for outcome in outcomes), Counter())
    lines = ["| fault | times |", "| --- | ---: |"]
    lines += sorted(f"| {_in_words(kind)} | {count:,} |" for kind, count in kinds.items())
    lines += [f"| **{len(kinds)} kinds** | **{kinds.total():,}** |", ""]
    heads = ("n", "lost", "doubled", "misreported", "tasks ended", "commands typed again", "computed again")
    lines += [f"| trials | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    groups = {
        "without kills, stops and damage": [outcome for outcome, is_costly in done if not is_costly],
        "with them": [outcome for outcome, is_costly in done if is_costly],
    }
    for name, group in groups.items():
        counts = [sum(bool(getattr(o, what)) for o in group) for what in ("lost", "doubled", "misreported")]
        counts += [sum(len(getattr(o, what)) for o in group) for what in ("failed_tasks", "failed_commands")]
        again = sum(o.computed_again for o in group) / max(1, len(group))
        lines.append(f"| {name} | {len(group)} | {' | '.join(map(str, counts))} | {again:.1%} |")
    free = groups["without kills, stops and damage"]
    again = sum(o.computed_again for o in free) / max(1, len(free))
    wrong = [f"seed {o.seed}: {why}" for o in outcomes for why in (*o.lost, *o.doubled, *o.misreported)]
    if again > MOST_AGAIN:
        wrong.append(f"{again:.1%} were computed again without kills, more than {MOST_AGAIN:.0%}")
    if wrong:
        lines += ["", "What is wrong:", "", *(f"- {sentence}" for sentence in wrong)]
    lines += [
        "",
        f"{len(done)} trials took {seconds / 60:.0f} minutes, seeds {outcomes[0].seed} to {outcomes[-1].seed}.",
    ]
    return "\n".join(lines), not wrong


def _in_words(kind: str) -> str:
    words = {"lost": "a reply is lost", "slow": "an answer comes late"}
    return kind if ":" in kind or kind.startswith("a node") else f"file system: {words.get(kind, kind)}"


if __name__ == "__main__":
    sys.exit(main())
