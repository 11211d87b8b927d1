"""Exit codes of commands; docs/reference/cli.md has the list."""

EXIT_COMPLETE, EXIT_FAILED, EXIT_BAD_USAGE, EXIT_INCOMPLETE = 0, 1, 2, 3
