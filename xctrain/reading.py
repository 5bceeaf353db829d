"""What a rank trains from: folders here, or addresses, of which one process a node fetches what its ranks need."""

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shards.joined import SampleReader, join
from shards.reader import SplitReader
from xctrain.config import Config
from xctrain.data import Data
from xctrain.errors import ConfigError

if TYPE_CHECKING:
    from shards.cache import CacheFolder
    from shards.fetch import Fetcher
    from shards.stream import Stream
    from xctrain.ranks import Ranks


@dataclass(frozen=True)
class Reading:
    """What a rank trains from. ``fetcher``: on one rank of a node; the fetching ends with it."""

    reader: SampleReader
    cache: "CacheFolder | None" = None
    local_rank: int = 0
    fetcher: "Fetcher | None" = None

    def delivered(self, n: int) -> None:
        """Note that this rank has every sample below position ``n``, so that fragments can be dropped."""
        if self.cache is not None:
            self.cache.report(1 + self.local_rank, n)


def begin_reading(config: Config, ranks: "Ranks", data: Data, stream: "Stream", start: int) -> Reading:
    """Have the node fetch what its ranks train on from position ``start``; of folders here, nothing is fetched.

    Called by every rank, and over on all of them before any reads.

    Raises:
        ConfigError: lanes and nodes do not fit, the budget or the disk is too small, or another run has the cache.
        RemoteError: the store refuses, or sends whole files only.
    """
    if not any(d.reader.cache for d in data.datasets):
        return Reading(data.reader)
    from shards.cache import CacheFolder
    from shards.fetch import Fetcher, Job, list_bytes, plan_fetching
    from shards.schedule import Node, require_lanes

    size, first = ranks.local_world_size, ranks.rank - ranks.local_rank
    if ranks.world_size % size or first % size:
        raise ConfigError(
            f"{ranks.world_size} processes, {size} of them on this node: nodes that read shards at an address have equally "
            "many; start as many on each"
        )
    nodes, order = ranks.world_size // size, config.order
    require_lanes(order.lanes, stream.global_batch, nodes, ranks.world_size)
    readers = tuple(_own_cache(config, d.reader) for d in data.datasets)
    max_bytes, timeout_s = round(config.data.cache_gb * 1e9), config.data.read_timeout_s
    planned = plan_fetching(readers, stream, order.fragment, nodes, max_bytes, timeout_s)
    caches = [reader.cache for reader in readers if reader.cache]
    for cache in caches:
        cache.planned = planned
    folder = CacheFolder(config.data.cache_dir)
    reader = join(readers)
    if ranks.local_rank:
        return Reading(reader, folder, ranks.local_rank)
    lock = folder.take()
    max_bytes -= list_bytes(readers)
    _require_room(folder, min(max_bytes, sum(s.num_bytes for r in readers if r.cache for s in r.shards)))
    for cache, split in ((r.cache, r) for r in readers if r.cache):
        cache.try_range(split.shards)
    folder.begin([start] * size)
    node = Node(range(first, first + size), ranks.world_size)
    job = Job(
        readers,
        stream,
        node,
        folder,
        order.fragment,
        start,
        max_bytes,
        config.data.requests,
        config.data.read_timeout_s,
    )
    return Reading(reader, folder, 0, Fetcher(job, lock))


def _own_cache(config: Config, reader: SplitReader) -> SplitReader:
    """The same split, for reading along the plan; what is read beside it goes on as before."""
    if reader.cache is None:
        return reader
    from shards.cache import NodeCache

    data = config.data
    return SplitReader(
        NodeCache(reader.cache.location, data.cache_dir, reader.manifest, data.read_timeout_s), reader.split
    )


def _require_room(folder: "CacheFolder", num_bytes: int) -> None:
    held = sum(path.stat().st_size for path in folder.fragments.iterdir())
    if (free := shutil.disk_usage(folder.root).free + held) < num_bytes:
        raise ConfigError(
            f"data.cache_dir is {folder.root}: its disk has {free / 1e9:.1f} GB left, the shards would take "
            f"{num_bytes / 1e9:.1f}; make room, choose another, or set data.cache_gb lower",
            path=folder.root,
        )
