"""The user's code, frozen at submission: edits before a task starts, or while it runs, do not affect what tasks import.

`tracer` finds the files that a workload imports, runs and reads. `kept_files` are those that a snapshot has;
`user_code` adds modules to them, with `locator` and `imports_in_source`. `read_files` are those that stay on disk;
`named_files` finds them by `files_in_source`, `shell_scripts` by `names_in_shell`. `source_facts` parses each content
of a file once. `capture` makes a snapshot of all, `snapshots` keeps it in the run directory, and `former` compares it
with the snapshot of an earlier submission. Tasks import from it through `importer`; `present_files` watches the files
that are still read from disk. `functions` pickles functions that tasks cannot import. docs/reference/files.md says what
is in a snapshot.

May import: run, shards, containers, util.
"""
