"""Errors of training. Same rule as everywhere: where, what was found and expected, what to do."""

from typing import Any

from shards.errors import ConfigError, UserError

__all__ = ["CheckpointError", "ConfigError", "NotFiniteError", "ResumeError", "RunError", "TrainError"]


class TrainError(UserError):
    """Base of what goes wrong in a run. Errors ``on_every_rank`` are raised by all together; only rank 0 prints them."""

    def __init__(self, message: str, *, on_every_rank: bool = False, **where: Any) -> None:
        super().__init__(message, **where)
        self.on_every_rank = on_every_rank


class RunError(TrainError):
    """A run folder does not hold what a command needs."""


class CheckpointError(TrainError):
    """A checkpoint could not be written, or is not whole."""


class ResumeError(TrainError):
    """The config forbids this resume. Exit code 2."""

    exit_code = 2


class NotFiniteError(TrainError):
    """Loss, gradient or weights are not finite; nothing was updated."""
