"""Which records a build has, and which split each is in: repeats joined, limits kept, splits dealt."""

import re
from collections.abc import Sequence

import numpy as np

from pipelines.config import BuildConfig, FilterConfig
from pipelines.records import Record
from pipelines.sources import Origin
from pipelines.sources.files import SAME_SPLIT
from pipelines.spool import Numbers, Spool
from shards.errors import ConfigError
from shards.hashing import mix64_array

_LIMIT = 0x6C696D6974  # a hash of its own, so that the chosen ones do not stand together in the order of the shards
_SPLIT_NAME = re.compile(r"[a-z0-9_]+")


class Splits:
    """Names of the splits by number; what the data say is collected while they are read."""

    def __init__(self, config: BuildConfig, origins: Sequence[Origin]) -> None:
        self._by, self._auto = config.split_by, config.split.by == "auto"
        self._said: dict[int, object] = {}  # split that the first record of a source says, by the source's identity
        self._fractions, self._seed = config.split.fractions, config.split.seed
        self._numbers: dict[str, int] = {}
        if self._by == "source":
            for origin in origins:
                self._numbers.setdefault(str(origin.split), len(self._numbers))

    def of(self, origin: Origin, record: Record) -> int | None:
        """Number of a record's split, None where it says none. By hash, all are 0 until their files are hashed."""
        if self._by == "hash":
            return 0
        if self._by == "source":
            if self._auto and self._said.setdefault(id(origin), record.split) != record.split:
                raise ConfigError(
                    f"{origin.source.location}: holds several splits, such as {self._said[id(origin)]} and {record.split}; keep "
                    f"them apart with split.by=official, or take all of it as {origin.split} with split.by=source"
                )
            return self._numbers[str(origin.split)]
        if record.split is None or record.split == "":
            return None
        name = SAME_SPLIT.get(record.split, record.split) if isinstance(record.split, str) else record.split
        if not isinstance(name, str) or not _SPLIT_NAME.fullmatch(name):
            raise ConfigError(
                f"{origin.source.location}: image {record.image_id!a} has the split {ascii(name)[:60]}, expected a text of "
                "a-z 0-9 _ only; correct the column, or set split.by=hash"
            )
        return self._numbers.setdefault(name, len(self._numbers))

    def deal(self, spool: Spool) -> list[str]:
        """Set the final split of every row; the names in their order: the one to train on first."""
        if self._by == "hash":
            spool.table["split"] = _by_hash(spool, list(self._fractions.values()), self._seed)
            return list(self._fractions)
        if self._by == "source":
            return list(self._numbers)
        if not self._numbers:
            raise ConfigError(
                "split.by=official, but no record says its split; set source.split_field, name the files train and val, or "
                "choose another split.by"
            )
        names = sorted(self._numbers, key=lambda name: (name != "train", name))
        moved = np.array([names.index(name) for name in self._numbers])
        spool.table["split"] = moved[spool.table["split"]]
        return names


def _by_hash(spool: Spool, fractions: Sequence[float], seed: int) -> Numbers:
    """By the bytes of the pictures, so that copies land together; by id where there are none."""
    table = spool.table
    sha256 = np.ascontiguousarray(table["facts"]["sha256"]).view("<u8").reshape(-1, 4)
    ids = np.ascontiguousarray(table["id"]).view("<u8").reshape(-1, 2)
    first = np.where(table["hashed"], sha256[:, 0], ids[:, 0] ^ ids[:, 1])
    share = mix64_array(seed, first).astype(np.float64) / 2.0**64
    return np.minimum(np.searchsorted(np.cumsum(fractions), share, side="right"), len(fractions) - 1)


def join_repeated(spool: Spool, origins: Sequence[Origin], limits: FilterConfig) -> None:
    """One record of a split for each id: rows of one picture are joined; of several pictures the first stays, counted.

    Raises:
        ConfigError: two sources use the same id for different pictures.
    """
    table = spool.table
    order = np.lexsort((np.arange(len(table)), table["id"], table["split"]))  # in another split it is a leak
    ids, splits = table["id"][order], table["split"][order]
    same = (ids[1:] == ids[:-1]) & (splits[1:] == splits[:-1])
    if not same.any():
        return
    keep = np.ones(len(table), bool)
    edges = np.concatenate([[0], np.flatnonzero(~same) + 1, [len(order)]])
    for at in np.flatnonzero(np.diff(edges) > 1):
        run = order[edges[at] : edges[at + 1]]
        keep[run[1:]] = False
        _join_run(spool, run, origins, limits)
    spool.keep(keep)


def _join_run(spool: Spool, run: Numbers, origins: Sequence[Origin], limits: FilterConfig) -> None:
    first = int(run[0])
    home, name = origins[spool.table["source"][first]], spool.record(first)["file_name"]
    joined = [first]
    for number in map(int, run[1:]):
        origin, other = origins[spool.table["source"][number]], spool.record(number)["file_name"]
        if other == name and origin.source.images == home.source.images:
            joined.append(number)
        elif origin is home:
            origin.source.counts["ids_used_twice"] += 1
        else:
            raise ConfigError(
                f"{origin.source.location}: image id {spool.image_id(number)} is {other!a}, in {home.source.location} it is "
                f"{name!a}; if each source numbers its images for itself, give them a name (source.name), which goes in front "
                "of their ids"
            )
    if len(joined) > 1:
        spool.join(np.array(joined), limits)


def keep_within_limits(spool: Spool, origins: Sequence[Origin]) -> None:
    """Of each source at most ``limit`` records, those with the lowest hash of their ids; the others are counted."""
    keep = np.ones(len(spool), bool)
    groups = np.array([origin.group for origin in origins])[spool.table["source"]]
    for group in {o.group for o in origins if o.config.limit}:
        numbers = np.flatnonzero(groups == group)
        ids = np.ascontiguousarray(spool.table["id"][numbers]).view("<u8").reshape(-1, 2)
        members = [o for o in origins if o.group == group]
        limit = members[0].config.limit
        beyond = numbers[np.argsort(mix64_array(_LIMIT, ids[:, 0], ids[:, 1]), kind="stable")[limit:]]
        keep[beyond] = False
        for number, origin in enumerate(origins):
            if left := int((spool.table["source"][beyond] == number).sum()):
                origin.source.counts["beyond_limit"] += left
    if not keep.all():
        spool.keep(keep)
