"""Run directories with published shards and no running task, for tests that read from them."""

from slurmgpu.errors import ItemError
from slurmgpu.inputs import scan
from slurmgpu.run.revisions import publish_rows
from slurmgpu.shards.columns import columns_from_json, columns_to_json, convert_row
from tests.support.runs import planned_run


def published_run(folder, columns, rows, shards=None, shard_items=5, input_file=None, **values):
    """A run of these rows, of which only `shards` are published.

    A text or an ItemError in place of a row is the item's error.
    """
    index = folder.parent / f"{folder.name}.idx"
    plan = {"n_items": len(rows), "shard_items": shard_items, "columns": columns_to_json(columns)}
    if input_file is not None:
        plan["input"] = scan([input_file], index, stride=shard_items).to_json()
    run = planned_run(
        folder, **{**plan, "html": False, "name": folder.name, "search_path": str(folder.parent), **values}
    )
    if input_file is not None:
        index.rename(run.index)
    for shard in range(run.plan.n_shards) if shards is None else shards:
        publish(run, shard, rows[slice(*run.plan.bounds(shard))])
    return run


def publish(run, shard, rows, revision=0):
    columns = columns_from_json(run.plan.columns)
    stored = [_stored(columns, row) for row in rows]
    return publish_rows(run, shard, revision, columns, stored, {}, {})


def _stored(columns, row):
    if isinstance(row, ItemError):
        return row
    return ItemError(row) if isinstance(row, str) else convert_row(columns, row)
