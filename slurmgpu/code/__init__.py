"""The user's code, frozen at submission: code that is edited before a task starts, or while it runs, loses nothing.

`tracer` finds the files that a workload imports, runs and reads; it locates modules by `locator`, and reads them by
`imports_in_source`, `files_in_source` and `names_in_shell`. `capture` makes a snapshot of them, which `snapshots` keeps
in the run directory, and `former` compares with that of an earlier submission. Tasks import from it by `importer`, and
`present_files` watches the files that are read from disk all the same. `functions` pickles functions that tasks cannot
import. docs/reference/files.md says what is in a snapshot.

May import: run, shards, containers, util.
"""
