"""How far a run has come: what ``position.json`` holds. The same on every rank at every step."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shards.order import OrderSettings
from xctrain.errors import CheckpointError

VERSION = 1  # of position.json; a golden file of each past version stays readable
_DIGEST_MODULUS = 2**64


@dataclass(frozen=True)
class Segment:
    """A stretch of the run in which the data's identity and the global batch did not change."""

    first_n: int
    first_step: int
    first_epoch: int
    num_samples: int  # N, in the split
    global_batch: int  # B
    manifest_id: str
    split: str
    seed: int
    fragment: int
    window: int
    lanes: int
    order_version: int = OrderSettings.VERSION

    @property
    def order_settings(self) -> OrderSettings:
        """What ``shards.order.Order`` needs beside the shard sizes."""
        return OrderSettings(seed=self.seed, fragment=self.fragment, window=self.window, lanes=self.lanes)


@dataclass(frozen=True)
class Masked:
    """A slot that was consumed without loss, and why."""

    n: int
    key: str
    reason: str


@dataclass(frozen=True)
class TrainState:
    """Progress. Only ``advance`` and ``skip`` move it."""

    step: int = 0  # updates made
    samples_consumed: int = 0  # n, position in the data
    digest: int = 0  # sum over trained slots of slot_digest(n, key), modulo 2**64
    masked: tuple[Masked, ...] = ()
    segments: tuple[Segment, ...] = ()
    keys_from: int | None = None  # position from which every trained key is logged
    skips_in_a_row: int = 0

    def advance(self, samples: int, digest: int, masked: Iterable[Masked] = ()) -> "TrainState":
        """After an update from one global batch of ``samples`` slots."""
        return replace(
            self,
            step=self.step + 1,
            samples_consumed=self.samples_consumed + samples,
            digest=(self.digest + digest) % _DIGEST_MODULUS,
            masked=(*self.masked, *masked),
            skips_in_a_row=0,
        )

    def skip(self, samples: int, masked: Iterable[Masked]) -> "TrainState":
        """After a global batch that made no update; each of its slots is in ``masked``."""
        return replace(
            self,
            samples_consumed=self.samples_consumed + samples,
            masked=(*self.masked, *masked),
            skips_in_a_row=self.skips_in_a_row + 1,
        )

    @property
    def epoch(self) -> int:
        """Epoch of the next sample."""
        if not self.segments:
            return 0
        segment = self.segments[-1]
        return self.samples_consumed // segment.num_samples

    def to_json(self) -> dict[str, Any]:
        """As plain values, for ``position.json``."""
        return {"version": VERSION, **asdict(self), "digest": f"{self.digest:016x}"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainState":
        """Read back what ``to_json`` gave.

        Raises:
            CheckpointError: of a version that this release does not know.
        """
        if values.get("version") != VERSION:
            raise CheckpointError(
                f"position.json: version is {values.get('version')!r}, this release reads {VERSION}; "
                "continue with the release that wrote it"
            )
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["digest"] = int(values["digest"], 16)
        known["masked"] = tuple(Masked(**entry) for entry in values["masked"])
        known["segments"] = tuple(Segment(**entry) for entry in values["segments"])
        return cls(**known)


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every ``every`` steps happens after ``step``."""
    return every is not None and step > 0 and step % every == 0
