"""Compute a shard's rows in batches and narrow failures down to items; knows no claims, files or processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slurmgpu.errors import Interrupted, ItemError, WorkerBrokenError
from slurmgpu.inputs.fields import check_kept, kept_values
from slurmgpu.inputs.keys import name_by
from slurmgpu.loader.adapted import Adapted
from slurmgpu.loader.names import title_of
from slurmgpu.run.crash_history import History
from slurmgpu.run.failures import LOADING, POLICIES, class_and_message
from slurmgpu.shards.columns import Column
from slurmgpu.util.broken_process import is_used_up
from slurmgpu.util.chance import CHANCE
from slurmgpu.util.exceptions import described, message_of, trace_of
from slurmgpu.util.out_of_memory import free_memory
from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.call_failures import INTERRUPTED, NOT_ASKED, Failure, attempt
from slurmgpu.worker.computed_shard import Computed, common_failure
from slurmgpu.worker.first_calls import FirstCalls
from slurmgpu.worker.item_copies import own_copies
from slurmgpu.worker.preparer import Preparer
from slurmgpu.worker.returned_rows import RowConverter, as_list
from slurmgpu.worker.taken_shard import TakenIn
from slurmgpu.workload import Item

log = logging.getLogger(__name__)

PAUSE_S, PAUSE_GROWTH = 2.0, 4.0
"""The wait before items are retried, in seconds, and the factor for each further wait."""
LONGEST_PAUSE_S = 300.0
"""The longest such wait, even if the workload asks for more, because the task holds a GPU meanwhile."""
_PENDING = Failure("item_error", "not computed")


class _SampledError(Exception):
    """Enough items of this shard failed in the same way; another shard will show whether all do."""


@dataclass
class _Shard:
    """A shard while it is computed: its rows so far, and calls that are postponed to its end.

    `alone` are the failures of calls of one item.
    """

    taken_in: TakenIn
    done: Computed
    n_tries_left: int
    put_off: list[tuple[list[int], bool]] = field(default_factory=list)
    alone: dict[int, Mapping[str, Any] | Failure] = field(default_factory=dict)

    def called(self, index: int) -> str:
        """The words for an item in the log: its index, and its name if it has one."""
        names = self.taken_in.names
        return f"item {index}" + (f" ({names[index]})" if index in names else "")


@dataclass
class Computer:
    """Computes shards with one loaded workload.

    `on_batch(indices, isolated, ahead)` is called before each call of the workload, to record what was in flight if the
    worker dies: these items, and the first item that is prepared `ahead` meanwhile, if any. Ranks of a group
    `agree(failure)` on how each call ended, so that all continue in the same way; ranks without `keeps_rows` only take
    part in the calls. The workload writes its notes on a shard into `noted`. Errors name the line in the user's code,
    which is in `folder`.

    Failures that may pass are retried up to `retries` times, at the shard's end: rank 0 sends the others what to retry
    with `share(value)`, and `pause(seconds, n_items)` is False if the task has to end before these seconds have passed.
    Rows get the fields `kept` of their items, by column; the log names an item by its field `key`. If `items_are_rows`
    of an earlier run, failed ones fail again, because their values are blanks.

    As long as all calls fail in the same way, and the worker `doubts()` that the workload works, a failed call is not
    halved, which could take hours for a program that loads a model. Instead its items are computed alone, in random
    order, until one ends differently. Once `is_enough(n_failed)`, the rest of the shard is left, and the computed items
    are a sample. Until an item is computed, `tell(text)` shows in `slurmgpu status` how all calls fail; an empty text
    ends that.

    If the workload prepares its items, `following()` is the first batch of the next shard, and `meanwhile()` is called
    before each call, after the preparation of the next call's items has begun.
    """

    workload: Adapted
    name: str
    columns: Mapping[str, Column]
    batch_size: int
    on_batch: Callable[[list[int], bool, int | None], None] = lambda indices, isolated, ahead: None
    agree: Callable[[Failure | None], Failure | None] = lambda failure: failure
    keeps_rows: bool = True
    noted: dict[str, float] = field(default_factory=dict)
    folder: str = ""
    retries: int = 0
    pause: Callable[[float, int], bool] = lambda seconds, n_items: True
    share: Callable[[Any], Any] = lambda value: value
    kept: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    items_are_rows: bool = False
    following: Callable[[], Sequence[Item]] = tuple
    meanwhile: Callable[[], None] = lambda: None
    doubts: Callable[[], bool] = lambda: False
    is_enough: Callable[[int], bool] = lambda n_failed: False
    tell: Callable[[str], None] = lambda text: None
    _ways_logged: dict[tuple[str, ...], int] = field(default_factory=dict)
    _has_computed: bool = False
    _first_calls: FirstCalls = field(init=False)
    _preparer: Preparer | None = field(init=False)
    _converter: RowConverter = field(init=False)

    def __post_init__(self) -> None:
        title = title_of(self.name, "workload")
        self._converter = RowConverter(title, self.columns, self.workload.explain_misfit)
        prepare = self.workload.prepare
        self._preparer = None if prepare is None else Preparer(prepare)
        self._first_calls = FirstCalls(self.doubts, self.tell)

    def close(self) -> None:
        """End the thread that prepares items, if there is one."""
        if self._preparer is not None:
            self._preparer.close()

    def take_in(self, items: Sequence[Item | tuple[int, ItemError]]) -> TakenIn:
        """The items of a whole shard for `compute`; an unreadable item comes as (index, ItemError)."""
        found = TakenIn()
        good = []
        for item in items:
            if not isinstance(item, Item):
                found.rows[item[0]] = Failure("input_error", message_of(item[1]))
                continue
            found.rows[item.index] = _PENDING  # keeps the order of the shard
            if self.key is not None and (name := name_by(self.key, item.data)) is not None:
                found.names[item.index] = name
            try:
                if self.kept and self.keeps_rows:  # before the workload may change the item
                    found.kept[item.index] = kept_values(self.kept, item.data)
                if self.kept:
                    check_kept(self.kept, item.data)
                if self.items_are_rows and (error := item.data.get("error")):
                    found.rows[item.index] = Failure("input_error", f"it is a failed row of an earlier run: {error}")
                else:
                    good.append(item)
            except ItemError as error:
                found.rows[item.index] = Failure("item_error", message_of(error))
        if (key := self.workload.sort_key) is not None:
            good = self._sorted(good, key, found)
        found.batches = [good[cut : cut + self.batch_size] for cut in range(0, len(good), self.batch_size)]
        return found

    def _sorted(self, items: list[Item], key: Callable[[Item], Any], found: TakenIn) -> list[Item]:
        """The items sorted by the workload's `sort_key`; items for which it raises become failures in `found`."""
        values, failure = self._attempt(lambda: [key(item) for item in items], len(items))
        if failure is not None:  # called again, for one item after the other
            items, values = self._keyed(items, key, found)
        try:
            # Items with equal values keep their order. In tuples, equal values such as None need no order.
            order = sorted(range(len(items)), key=[*zip(values, strict=True)].__getitem__)
        except Exception as error:  # values of a user's class, or of several types
            said = f"the values of sort_key cannot be compared: {described(error)}"
            raise WorkerFailedError("workload_error", said, trace_of(error)) from error
        return [items[place] for place in order]

    def _keyed(self, items: Sequence[Item], key: Callable[[Item], Any], found: TakenIn) -> tuple[list[Item], list[Any]]:
        """The items for which the workload's `sort_key` raises nothing, and its values for these."""
        good, values = [], []
        for item in items:
            value, failure = self._attempt(partial(key, item), 1)
            failure = NOT_ASKED if failure == INTERRUPTED else failure
            self._end_if_used_up(failure)
            if failure is None:
                good.append(item)
                values.append(value)
            elif self._ends_task(failure.kind):
                raise WorkerFailedError(failure.kind, f"item {item.index}: {failure.message}", failure.trace)
            else:
                found.rows[item.index] = failure
        return good, values

    def compute(self, taken_in: TakenIn, history: History) -> Computed:
        """Rows for the items of a shard.

        Raises Interrupted if the workload left an item for later, or if the task ends before failed items can be
        retried; WorkerFailedError if a resumable workload could not save its progress. Then the shard has no rows yet.
        """
        shard = _Shard(taken_in, Computed(taken_in.rows), self.retries)
        done = shard.done
        self.noted.clear()
        for index, row in taken_in.rows.items():
            if row is not _PENDING and isinstance(row, Failure):
                self._log(shard, index, row)
        try:
            self._compute_all(taken_in.batches, history, shard)
        except _SampledError:
            return Computed(shard.alone, is_sample=True)
        for index, kept in taken_in.kept.items():
            if isinstance(done.rows[index], Failure):
                done.kept[index] = self._stored(kept)
        done.noted = dict(self.noted)
        return done

    def _compute_all(self, batches: list[list[Item]], history: History, shard: _Shard) -> None:
        """Compute the batches; forgets the items of each that will not be computed again."""
        is_isolated = [history.isolates(item.index for item in batch) for batch in batches]
        for number, batch in enumerate(batches):
            n_put_off = len(shard.put_off)
            if is_isolated[number]:
                shard.done.isolated += 1
                self._compute_alone(batch, history, shard)
            else:
                is_last = number + 1 == len(batches)
                following = None if is_last else () if is_isolated[number + 1] else batches[number + 1]
                self._compute_batch(batch, following, shard)
            if self.keeps_rows and len(shard.put_off) == n_put_off:  # other ranks learn later what is postponed
                batches[number] = []
        self._try_again(batches, shard)

    def _stored(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        """The stored values of kept fields, without those that a column cannot hold."""
        stored = {}
        for name, value in kept.items():
            with contextlib.suppress(ValueError):
                stored[name] = self.columns[name].convert(value)
        return stored

    def _try_again(self, batches: Sequence[Sequence[Item]], shard: _Shard) -> None:
        """Call the workload again for what was postponed, until nothing is left, or no try."""
        pause_s = PAUSE_S
        while shard.n_tries_left:
            again = self.share(shard.put_off)
            shard.put_off = []
            if not again:
                return
            shard.n_tries_left -= 1
            indices = [index for batch, _ in again for index in batch]
            wanted_s = min(self._wanted_pause_s(indices, shard) or pause_s, LONGEST_PAUSE_S)
            goes_on = self.keeps_rows and self.pause(wanted_s, len(indices))
            if not self.share(goes_on):
                raise Interrupted
            pause_s *= PAUSE_GROWTH
            items = {item.index: item for batch in batches for item in batch}
            for called, isolated in again:
                self._call_narrowing([items[index] for index in called], shard, isolated=isolated)

    def _wanted_pause_s(self, indices: Sequence[int], shard: _Shard) -> float:
        """The longest pause that the workload asked for; 0 if it asked for none."""
        rows = (shard.done.rows[index] for index in indices)
        return max(row.retry_after or 0.0 for row in rows if isinstance(row, Failure))

    def _compute_alone(self, batch: Sequence[Item], history: History, shard: _Shard) -> None:
        for item in batch:
            if item.index in history.quarantined:
                deadly = shard.done.rows[item.index] = Failure(*class_and_message(history.quarantined[item.index]))
                self._log(shard, item.index, deadly)
            else:
                self._call_narrowing([item], shard, isolated=True)

    def _compute_batch(self, batch: Sequence[Item], following: Sequence[Item] | None, shard: _Shard) -> None:
        """Compute one batch, before the `following` one, in pieces of `oom_batch` after memory was short.

        `following` is None for the last batch of a shard: then the first batch of the next shard comes.
        """
        start = 0
        while start < len(batch):
            size = shard.done.oom_batch or len(batch)
            piece, rest = batch[start : start + size], batch[start + size :]
            self._call_narrowing(piece, shard, ahead=self._ahead_of(rest or following, shard))
            start += size

    def _ahead_of(self, following: Sequence[Item] | None, shard: _Shard) -> Sequence[Item]:
        """The items to prepare during a call; those of another shard begin with a whole batch."""
        if self._preparer is None:
            return ()
        return self.following() if following is None else following[: shard.done.oom_batch or None]

    def _call_narrowing(
        self, items: Sequence[Item], shard: _Shard, *, isolated: bool = False, ahead: Sequence[Item] = ()
    ) -> None:
        """Compute the items of one call while the next, `ahead`, are prepared; if it fails, in halves, recursively.

        A call that is `isolated` is one of one item.
        """
        if self._preparer is not None:
            self._preparer.keep(items)  # first: if another preparation ends the process, these items are not to blame
        self.on_batch([item.index for item in items], isolated, ahead[0].index if ahead else None)
        failure = self._call(items, ahead, shard)
        all_fail = self._first_calls.note(failure or self._common_failure(items, shard))
        if failure is None:
            self._put_rows_off(items, shard, isolated=isolated)
            return
        if failure.retry_after is not None and shard.n_tries_left:
            shard.done.rows.update({item.index: failure for item in items})
            self._put_items_off(items, failure, shard, isolated=isolated)
            return
        if len(items) == 1:
            self._log(shard, items[0].index, failure)
            shard.done.rows[items[0].index] = shard.alone[items[0].index] = failure
            if all_fail and self.is_enough(len(shard.alone)):
                raise _SampledError
            return
        if all_fail:
            items = self._compute_while_alike(items, failure, shard)
        half = (len(items) + 1) // 2
        if logged := POLICIES[failure.kind].logged:
            free_memory()
            shard.done.oom_batch = min(shard.done.oom_batch or half, half)
            first, last = min(item.index for item in items), max(item.index for item in items)
            log.warning("%s of %d, items %d..%d; continuing with %d", logged, len(items), first, last, half)
        for part in filter(None, (items[:half], items[half:])):
            self._call_narrowing(part, shard)

    def _compute_while_alike(self, items: Sequence[Item], failure: Failure, shard: _Shard) -> list[Item]:
        """Compute items of a failed call alone, in random order, until one fails in another way or has a row.

        Returns the items that are left.
        """
        first, last = min(item.index for item in items), max(item.index for item in items)
        log.warning(
            "items %d..%d: %s; computing each alone, until one ends differently", first, last, failure.first_line
        )
        left = {item.index: item for item in items}
        for item in CHANCE.sample(items, len(items)):
            del left[item.index]
            self._call_narrowing([item], shard)
            if not self._first_calls.fail_alike(failure):
                break
        return list(left.values())

    def _common_failure(self, items: Sequence[Item], shard: _Shard) -> Failure | None:
        """The failure of all rows of a call, if there is no good row yet."""
        if self._first_calls.has_row or not self.keeps_rows:
            return None
        return common_failure([Computed({item.index: shard.done.rows[item.index] for item in items})])

    def _put_items_off(self, items: Sequence[Item], failure: Failure, shard: _Shard, *, isolated: bool) -> None:
        """Postpone these items, which failed in one call, to be computed again in one call."""
        indices = [item.index for item in items]
        shard.put_off.append((indices, isolated))
        if self.keeps_rows:
            said = failure.first_line
            log.warning("items %d..%d are put off to the end of the shard: %s", min(indices), max(indices), said)

    def _put_rows_off(self, items: Sequence[Item], shard: _Shard, *, isolated: bool) -> None:
        """Postpone the items of a call for which the workload returned an error that may pass."""
        if not self.keeps_rows:
            return
        rows = shard.done.rows
        failures = [(item, row) for item in items if isinstance(row := rows[item.index], Failure)]
        failed = [(item, row) for item, row in failures if row.retry_after is not None]
        if failed and shard.n_tries_left:
            self._put_items_off([item for item, _ in failed], failed[0][1], shard, isolated=isolated)
        elif failed:
            for item, row in failed:
                self._log(shard, item.index, row)

    def _call(self, items: Sequence[Item], ahead: Sequence[Item], shard: _Shard) -> Failure | None:
        """Call the workload and keep its rows; the failure of the whole call, if any."""
        given, own_failure = self._attempt(lambda: self._arguments(items, ahead), len(items))
        returned: Any = []
        if own_failure is None:
            if self._preparer is not None:
                self.meanwhile()
            returned, own_failure = self._attempt(lambda: self._returned(given), len(items))
        self._end_if_used_up(own_failure)
        self._has_computed |= own_failure is None
        failure = self.agree(own_failure)
        if failure == INTERRUPTED:
            if self._preparer is not None:
                self._preparer.drop()
            raise Interrupted
        if failure is not None and self._ends_task(failure.kind):
            raise WorkerFailedError(failure.kind, f"{shard.called(items[0].index)}: {failure.message}", failure.trace)
        if failure is None and self.keeps_rows:
            self._keep(items, returned, shard)
        return failure

    def _arguments(self, items: Sequence[Item], ahead: Sequence[Item]) -> tuple[Any, ...]:
        """The arguments of the workload's call; begins to prepare the items `ahead`.

        Each call gets its own copies, because a call may change its items, and fail, and be repeated.
        """
        if self._preparer is None:
            return (own_copies(items),)
        made = self._preparer.take(items)
        if ahead:
            self._preparer.begin(ahead)
        return made

    def _returned(self, given: tuple[Any, ...]) -> Any:
        return as_list(self.workload.call(*given), are_kept=self.keeps_rows)

    def _attempt(self, function: Callable[[], Any], n_items: int) -> tuple[Any, Failure | None]:
        return attempt(function, n_items, folder=self.folder, resumes=self.workload.resumes)

    def _end_if_used_up(self, failure: Failure | None) -> None:
        """Raise WorkerBrokenError if the process could open no more files or threads, and still cannot.

        If anything was computed before, that used them up, not the current items.
        """
        if failure is not None and failure.is_of_process and is_used_up():
            raise WorkerBrokenError(failure.message, blames_items=not self._has_computed)

    def _ends_task(self, kind: str) -> bool:
        """Whether an item's failure is no item's fault, so that the shard is left to another task."""
        policy = POLICIES[kind]
        return policy.node_at_fault or policy.rest == LOADING or policy.ends_task

    def _keep(self, items: Sequence[Item], returned: Any, shard: _Shard) -> None:
        rows = shard.done.rows
        if (failure := self._converter.wrong_number(returned, len(items))) is not None:
            # Not narrowed: a single item would get the one row that was meant for all.
            self._log(shard, items[0].index, failure)
            rows.update({item.index: failure for item in items})
            return
        kept = [shard.taken_in.kept[item.index] for item in items] if self.kept else None
        indices = [item.index for item in items]
        if (converted := self._converter.at_once(returned, kept)) is not None:
            rows.update(zip(indices, converted, strict=True))
            return
        for index, row in zip(indices, self._converter.one_by_one(returned, kept), strict=True):
            rows[index] = row
            if isinstance(row, Failure) and row.retry_after is None:
                self._log(shard, index, row)

    def _log(self, shard: _Shard, index: int, failure: Failure) -> None:
        """Log each failed item; the traceback only once per place that raised."""
        if not self.keeps_rows:
            return
        first = self._ways_logged.setdefault(failure.way, index) if failure.trace and failure.way else None
        told = "" if first in (None, index) else f" [traceback: item {first}]"
        said = failure.first_line
        log.warning("%s: %s: %s%s", shard.called(index), failure.kind, said, told)
        if first == index:
            log.warning("%s", failure.trace)
