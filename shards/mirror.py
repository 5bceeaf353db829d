"""A shard folder at ``s3://``, ``gs://`` or ``https://``: what is asked for is fetched, and nothing stays here."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shards import ustar
from shards.errors import ConfigError, DamagedSampleError, FormatError, UnknownKeyError, counted
from shards.find import possible_keys
from shards.index import REBUILD
from shards.manifest import NAME, Manifest, ShardEntry
from shards.reader import MismatchError, SampleMeta, checked_sample, parse_meta
from shards.remote import Remote
from shards.sample import Sample
from shards.verify import Finding, verify_all, verify_keys, verify_manifest, verify_shard


class RemoteShards:
    """A dataset at an address.

    Raises:
        ConfigError: there is none. FormatError: its manifest is damaged. RemoteError: the store does not answer.
    """

    def __init__(self, location: str) -> None:
        self.remote = Remote(location)
        try:
            self._raw = self.remote.read(NAME)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.remote}: has no {NAME}, so it is no shard folder, or its build has not ended; check the address"
            ) from None
        self.manifest = Manifest.parse(self._raw, f"{self.remote}/{NAME}")

    def verify(self) -> list[Finding]:
        """What ``shards.verify`` finds; needs room for one shard, and then for the sample lists of all."""
        return verify_all(self)

    def verify_manifest(self) -> list[Finding]:
        names = [name for name in self.remote.list() if name.endswith(".tar") and "/" not in name]
        with tempfile.TemporaryDirectory(prefix="xctrain-") as nothing:
            return verify_manifest(self.manifest, self._raw, names, Path(nothing))

    def verify_shard(self, entry: ShardEntry) -> list[Finding]:
        with self._fetched(entry.name, entry.idx_name, entry.meta_name) as folder:
            return verify_shard(folder, entry)

    def verify_keys(self) -> list[Finding]:
        with self._fetched(*(entry.meta_name for entry in self.manifest.shards)) as folder:
            return verify_keys(folder, self.manifest)

    @contextmanager
    def _fetched(self, *names: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="xctrain-") as temporary:
            for name in names:
                with suppress(FileNotFoundError):  # which is what verify then finds
                    self.remote.fetch(name, Path(temporary) / name)
            yield Path(temporary)

    def find(self, key: str) -> tuple[ShardEntry, int, SampleMeta, Sample]:
        """A sample by its key: shard, number in it, line of the sample list, checked content.

        Raises:
            UnknownKeyError: there is no such key. FormatError: a list or the sample is damaged.
        """
        for entry in self.manifest.shards:
            raw = self.remote.read(entry.meta_name)
            if (found := hashlib.sha256(raw).hexdigest()) != entry.meta_sha256:
                raise FormatError(
                    f"{self.remote}/{entry.meta_name}: sha256 is {found}, the manifest says {entry.meta_sha256}; {REBUILD}"
                )
            for name in possible_keys(key):
                at = raw.find(b'{"key":"%s",' % name.encode("utf-8", "replace"))
                if at >= 0:  # lines have one width, so the place tells the number
                    meta = parse_meta(raw[at : raw.index(b"\n", at)])
                    return entry, at * entry.num_samples // len(raw), meta, self._read(entry, meta)
        number = counted(sum(self.manifest.splits.values()), "sample")
        raise UnknownKeyError(
            f"{self.remote}: {key} is neither key nor image id of its {number}; by file name a local folder is searched",
            key=key,
        )

    def _read(self, entry: ShardEntry, meta: SampleMeta) -> Sample:
        start, stop = meta.span
        if not entry.foreign:
            start, stop = start - ustar.BLOCK, ustar.padded(stop)
        try:
            return checked_sample(meta, self.remote.read(entry.name, start, stop), start, entry.foreign)
        except MismatchError as error:
            raise DamagedSampleError(
                f"{self.remote}/{entry.name}: {meta.key}: {error}; {REBUILD}", key=meta.key
            ) from None
