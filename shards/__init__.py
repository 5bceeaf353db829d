"""The shard folder on disk: format, index, order and stream. Needs only the standard library and numpy."""
