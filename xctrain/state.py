"""How far a run has come: what ``position.json`` holds. The same on every rank at every step."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from shards.order import Ints, OrderSettings
from xctrain.errors import CheckpointError

VERSION = 1  # of position.json; a golden file of each past version stays readable
_DIGEST_MODULUS = 2**64


@dataclass(frozen=True)
class Source:
    """A dataset that a segment reads, as the order needs it."""

    name: str
    manifest_id: str
    num_samples: int  # in the split, without those left out
    repeat: int = 1  # times each sample comes in an epoch
    quarantine_id: str | None = None
    left_out: tuple[int, ...] = ()  # numbers of the split's samples that never come, rising


@dataclass(frozen=True)
class Segment:
    """A stretch of the run in which the data's identity and the global batch did not change.

    It may lie ahead: other data begin where the epoch that is under way ends.
    """

    first_n: int
    first_step: int
    first_epoch: int
    num_samples: int  # N, positions an epoch: samples of the split, times repeats
    global_batch: int  # B
    manifest_id: str  # of the dataset, or of all datasets of a mix
    split: str
    seed: int
    fragment: int
    window: int
    lanes: int
    order_version: int = OrderSettings.VERSION
    # What is as here is left out of position.json, so that runs of one whole dataset keep the file that they had.
    quarantine_id: str | None = None  # of the samples that are left out
    base_n: int = 0  # where epoch base_epoch begins
    base_epoch: int = 0
    batches_from: int | None = None  # position from which batches of B are counted, unless first_n
    sources: tuple[Source, ...] = ()  # unless one whole dataset

    @property
    def order_settings(self) -> OrderSettings:
        """What ``shards.order.Order`` needs beside the shard sizes."""
        return OrderSettings(seed=self.seed, fragment=self.fragment, window=self.window, lanes=self.lanes)

    @property
    def parts(self) -> tuple[Source, ...]:
        """The datasets, one at least."""
        return self.sources or (Source("", self.manifest_id, self.num_samples),)

    @property
    def first_batch_n(self) -> int:
        """Position at which batches of B are counted from."""
        return self.first_n if self.batches_from is None else self.batches_from

    def epoch_at(self, n: int) -> int:
        """The epoch that position ``n`` belongs to."""
        return self.base_epoch + (n - self.base_n) // self.num_samples

    def epoch_start(self, n: int) -> int:
        """The first position from ``n`` on at which an epoch begins."""
        return n + (self.base_n - n) % self.num_samples

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        values = asdict(self)
        new = [f.name for f in fields(self) if f.default is not MISSING and f.name != "order_version"]
        return {name: value for name, value in values.items() if name not in new or value != _DEFAULTS[name]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Segment":
        """Read back what ``to_json`` gave."""
        sources = tuple(Source(**{**s, "left_out": tuple(s["left_out"])}) for s in values.get("sources", ()))
        return cls(**{**values, "sources": sources})


_DEFAULTS = {field.name: field.default for field in fields(Segment)}


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
        return self.segment_at(self.samples_consumed).epoch_at(self.samples_consumed) if self.segments else 0

    def segment_at(self, n: int) -> Segment:
        """The segment that position ``n`` belongs to."""
        return next((s for s in reversed(self.segments) if s.first_n <= n), self.segments[0])

    @property
    def epochs_done(self) -> float:
        """Epochs up to the position, with the share of the one that is under way."""
        segment = self.segment_at(self.samples_consumed)
        return segment.base_epoch + (self.samples_consumed - segment.base_n) / segment.num_samples

    def spans(self) -> Iterator[tuple[Segment, int, int]]:
        """Each segment that was reached, with the positions [first, last) that were consumed in it."""
        ends = [*(s.first_n for s in self.segments[1:]), self.samples_consumed]
        for segment, end in zip(self.segments, ends, strict=True):
            last = min(end, self.samples_consumed)
            if segment.first_n <= last:
                yield segment, segment.first_n, last

    def split(self, ns: Ints) -> Iterator[tuple[Segment, Ints]]:
        """Positions, rising, by the segment that they belong to."""
        bounds = [*(s.first_n for s in self.segments[1:]), None]
        for segment, stop in zip(self.segments, bounds, strict=True):
            first = 0 if segment is self.segments[0] else segment.first_n
            inside = ns[(ns >= first) & (ns < stop)] if stop is not None else ns[ns >= first]
            if len(inside):
                yield segment, inside

    def to_json(self) -> dict[str, Any]:
        """As plain values, for ``position.json``."""
        segments = [segment.to_json() for segment in self.segments]
        return {"version": VERSION, **asdict(self), "segments": segments, "digest": f"{self.digest:016x}"}

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
        known["segments"] = tuple(Segment.from_json(entry) for entry in values["segments"])
        return cls(**known)


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every ``every`` steps happens after ``step``."""
    return every is not None and step > 0 and step % every == 0
