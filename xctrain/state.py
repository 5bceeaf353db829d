"""How far a run has come."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TrainState:
    """Progress, in two numbers that only ``advance`` and ``skip`` move."""

    step: int = 0  # updates made
    samples_consumed: int = 0  # n, position in the data; ahead of step * global_batch by what was skipped

    def advance(self, global_batch: int) -> "TrainState":
        """After an update from one global batch."""
        return replace(self, step=self.step + 1, samples_consumed=self.samples_consumed + global_batch)

    def skip(self, global_batch: int) -> "TrainState":
        """After a global batch that made no update, for a stated reason."""
        return replace(self, samples_consumed=self.samples_consumed + global_batch)


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every ``every`` steps happens after ``step``."""
    return every is not None and step > 0 and step % every == 0
