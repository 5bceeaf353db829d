"""Errors of the build that a user can cause."""

from shards.errors import UserError


class BuildError(UserError):
    """Base of what goes wrong while a build runs."""


class RejectShareError(BuildError):
    """More records were rejected than ``build.max_reject_share`` allows; nothing was published."""


class InterruptedBuildError(BuildError):
    """A signal ended the build. Finished shards are kept, so the same command goes on from there."""

    exit_code = 75


class DownloadError(BuildError):
    """A file could not be fetched, or is not the one that was asked for. What came of it is kept."""
