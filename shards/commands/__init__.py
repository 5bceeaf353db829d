"""The commands of ``python -m shards``: each takes the parsed arguments and returns the exit code."""
