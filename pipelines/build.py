"""Records to a shard folder: ``plan``, then ``build_shard`` for each slice, in any order, then ``publish``."""

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipelines import report
from pipelines.coco import Split, read_splits
from pipelines.config import BuildConfig, FilterConfig
from pipelines.errors import BuildError, RejectShareError
from pipelines.filters import Reason, Rejection
from pipelines.images import Images, open_images
from pipelines.measure import Picture, measure
from pipelines.plan import FileHashes, Slice, cut, list_files
from pipelines.progress import Progress, progress_bar
from pipelines.state import SETTINGS, State, read_checked, shard_files, write_checked, write_result
from pipelines.workers import Workers
from shards.atomic import write_file, written_aside
from shards.errors import ConfigError, counted, describe
from shards.manifest import NAME as MANIFEST
from shards.manifest import Manifest, ShardEntry
from shards.sample import Sample, canonical_json
from shards.writer import ShardWriter

HASH_CHUNK = 256  # files hashed in one request
PROGRESS_EVERY = 32  # records


@dataclass(frozen=True)
class Summary:
    """What a build came to. ``unchanged``: the folder held just this already, nothing was written."""

    out: Path
    manifest_id: str
    splits: Mapping[str, int]
    rejected: Mapping[str, int]
    unchanged: bool
    stale: Sequence[str] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            **vars(self),
            "out": str(self.out),
            "splits": dict(self.splits),
            "rejected": dict(self.rejected),
            "stale": list(self.stale),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Summary":
        """The summary that ``to_json`` gave."""
        return Summary(**{**values, "out": Path(values["out"])})

    def __str__(self) -> str:
        kept = ", ".join(f"{split} {count}" for split, count in self.splits.items())
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.rejected.items()))
        lines = [
            f"{self.out}: {sum(self.splits.values())} kept ({kept}), {sum(self.rejected.values())} rejected"
            + (f" ({reasons})" if reasons else "")
            + (", nothing has changed" if self.unchanged else ""),
            f"manifest_id {self.manifest_id}",
        ]
        if self.stale:
            lines.append(f"no longer part of it: {', '.join(self.stale)}; build.overwrite=true removes them")
        return "\n".join(lines)


class Build:
    """One build, as a context manager: holds the folder and the build processes. Checks all input before it writes.

    Raises:
        ConfigError: the source or the folder is not what the config says; nothing was written.
    """

    def __init__(self, config: BuildConfig) -> None:
        self.config = config
        try:
            self._read_input()
        except OSError as error:  # what no rule of ours has a better word for, such as missing rights
            raise ConfigError(describe(error), path=error.filename) from None
        self.slices: list[Slice] = []
        self._held = ExitStack()
        self.workers: Workers

    def _read_input(self) -> None:
        config = self.config
        self.splits: tuple[Split, ...] = read_splits(config)
        self.listings = [list_files(split) for split in self.splits]
        self.state = State(config.out)
        self.settings = {
            **config.written_settings,
            "sources": {s.name: str(s.annotations.resolve()) for s in self.splits},
        }
        self.state.check(self.settings, config.build.overwrite)

    @property
    def num_records(self) -> int:
        return sum(len(split.records) for split in self.splits)

    def __enter__(self) -> Self:
        with ExitStack() as held:
            lock = held.enter_context(self.state.locked())
            self.workers = Workers(self.config.build.num_processes, lock)
            held.callback(self.state.sweep)
            held.callback(self.workers.close)
            if not self.state.published:  # else the folder is still what those settings made of it
                self.state.write(SETTINGS, self.settings)
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def plan(self, progress: Progress = lambda count: None) -> list[str]:
        """Names of the shards that have to be built; the others are finished. Counts their records as progress."""
        path = self.state.folder / "files.json"
        known = read_checked(path) or {}
        hashes = FileHashes(known)
        per_split = [hashes.of(listing, self._hash_files) for listing in self.listings]
        if (remembered := hashes.remembered(self.listings)) != known:
            write_checked(path, remembered)
        self.slices = cut(self.config, self.splits, per_split)
        images = {split.name: str(split.images.resolve()) for split in self.splits}
        todo = []
        for piece in self.slices:
            if self.state.finished(piece):
                progress(len(piece.records))
                continue
            target = self.state.target
            order = {
                **vars(piece),
                "limits": self.config.filters.model_dump(mode="json"),
                "images": images[piece.split],
                "folder": str(target),
                "result": str(self.state.results(target) / f"{piece.name}.json"),
            }
            self.state.write(f"slices/{piece.name}.json", order)
            todo.append(piece.name)
        return todo

    def _hash_files(self, split: Split, names: Sequence[str]) -> list[str | Rejection]:
        chunks = [names[i : i + HASH_CHUNK] for i in range(0, len(names), HASH_CHUNK)]
        requests = [{"images": str(split.images.resolve()), "names": chunk} for chunk in chunks]
        with (
            progress_bar(len(names), f"hash {split.name}") as progress,
            ThreadPoolExecutor(self.config.build.num_processes) as threads,
        ):
            replies = threads.map(lambda request: self.workers.call("hash", request, progress), requests)
            return [Rejection(Reason(r[0]), r[1]) if isinstance(r, list) else r for reply in replies for r in reply]

    def build_shard(self, name: str, progress: Progress = lambda count: None) -> dict[str, int]:
        """Build one planned shard in a build process; for threads. Counts of what became of its records."""
        path = self.state.slices / f"{name}.json"
        counts: dict[str, int] = self.workers.call("build", {"slice": str(path)}, progress)
        path.unlink()
        return counts

    def publish(self) -> Summary:
        """Make the folder the dataset that was built; the manifest comes last.

        Raises:
            RejectShareError: too much was rejected; what was published before stays.
        """
        found = {piece.name: self.state.finished(piece) for piece in self.slices}
        if missing := [name for name, place in found.items() if place is None]:
            raise BuildError(f"{self.config.out}: {missing[0]} was changed while building; run the build again")
        places = {name: place for name, place in found.items() if place is not None}
        results = [result for _, result in places.values()]
        rejects = _rejects_jsonl(self.splits, results)
        rejected = Counter(str(r["reason"]) for result in results for r in result["rejects"])
        self._check_share(rejected, results, rejects)
        manifest = Manifest(
            tuple(ShardEntry(**result["entry"]) for result in results if result["entry"]), self.config.written_settings
        )
        stale = self.state.stale(set(places))
        staged = {name: result for name, (target, result) in places.items() if target == self.state.next}
        files = {MANIFEST: manifest.to_json(), "rejects.jsonl": rejects}
        unchanged = not staged and not (stale and self.config.build.overwrite) and _holds(self.config.out, files)
        if unchanged:
            self.state.write(SETTINGS, self.settings)
        else:
            folders = {result["entry"]["name"]: target for target, result in places.values() if result["entry"]}
            files |= report.files(self.config, self.splits, manifest, results, folders)
            self._replace(files, staged, stale)
        shutil.rmtree(self.state.next, ignore_errors=True)
        left = () if self.config.build.overwrite else tuple(stale)
        return Summary(self.config.out, manifest.manifest_id, manifest.splits, rejected, unchanged, left)

    def _check_share(self, rejected: Mapping[str, int], results: Sequence[Any], rejects: bytes) -> None:
        total, allowed = sum(rejected.values()), self.config.build.max_reject_share
        empty = [s.name for s in self.splits if not any(r["entry"] and r["entry"]["split"] == s.name for r in results)]
        if total <= allowed * self.num_records and not empty:
            return
        write_file(self.state.folder / "rejects.jsonl", rejects)
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
        limit = f"no record of split {empty[0]} is left" if empty else f"build.max_reject_share={allowed:g} allows"
        limit += "" if empty else f" {int(allowed * self.num_records)}"
        raise RejectShareError(
            f"{self.config.out}: {total} of {counted(self.num_records, 'record')} rejected ({reasons}), {limit}; nothing was "
            f"published; look into {self.state.folder / 'rejects.jsonl'}, then correct the source, the filters or the share",
            path=self.config.out,
        )

    def _replace(self, files: Mapping[str, bytes], staged: Mapping[str, dict[str, Any]], stale: Sequence[str]) -> None:
        """Put shards and ``files`` in place, the manifest last. What can fail is done before the old manifest goes.

        Without a manifest the folder is no dataset; after a kill in between, the next run goes on from any point.
        """
        self._require_replaceable([*files, *(n for result in staged.values() for n in shard_files(result["entry"]))])
        with ExitStack() as written:
            for name, data in files.items():  # the first one is renamed last: the manifest
                file = written.enter_context(written_aside(self.config.out / name))
                file.write(data)
                file.flush()
            (self.config.out / MANIFEST).unlink(missing_ok=True)
            self.state.write(SETTINGS, self.settings)
            for name, result in staged.items():
                self.state.adopt(name, result)
            if self.config.build.overwrite:
                for name in stale:
                    self.state.remove_shard(name)

    def _require_replaceable(self, names: Sequence[str]) -> None:
        for path in (self.config.out / name for name in names):
            if path.is_dir():
                raise BuildError(
                    f"{path}: is a folder where the build writes a file; nothing was replaced; move it away and run the "
                    "build again, finished shards are kept",
                    path=path,
                )


def _holds(out: Path, files: Mapping[str, bytes]) -> bool:
    names = [out / "report.json", out / "report.html"]
    return all((out / n).exists() and (out / n).read_bytes() == d for n, d in files.items()) and all(
        n.exists() for n in names
    )


def _rejects_jsonl(splits: Sequence[Split], results: Sequence[Mapping[str, Any]]) -> bytes:
    order = {split.name: i for i, split in enumerate(splits)}
    rows = [row for result in results for row in result["rejects"]]
    rows.sort(key=lambda row: (order[row["split"]], row["image_id"]))
    return b"".join(canonical_json(row) + b"\n" for row in rows)


# In a build process


def hash_files(arguments: Mapping[str, Any], progress: Progress) -> list[Any]:
    """sha256 of each file, or reason and detail where it cannot be read."""
    images = open_images(Path(arguments["images"]))
    replies: list[Any] = []
    for name in arguments["names"]:
        data = images.read(name)
        replies.append([data.reason, data.detail] if isinstance(data, Rejection) else hashlib.sha256(data).hexdigest())
    progress(len(replies))
    return replies


def build_shard(arguments: Mapping[str, Any], progress: Progress) -> dict[str, int]:
    """Write one planned shard and record it as finished. A pure function of the slice: same records, same bytes."""
    order = json.loads(Path(arguments["slice"]).read_bytes())
    try:
        return _build_slice(order, progress)
    except OSError as error:  # a failing write names no file
        error.filename = error.filename or str(Path(order["folder"]) / f"{order['name']}.tar")
        raise BuildError(f"{describe(error)}; finished shards are kept", path=error.filename) from None


def _build_slice(order: Mapping[str, Any], progress: Progress) -> dict[str, int]:
    limits = FilterConfig.model_validate(order["limits"])
    images = open_images(Path(order["images"]))
    folder = Path(order["folder"])
    rejects: list[dict[str, Any]] = []
    stats: dict[str, Counter[str]] = {}
    records = iter(order["records"])
    entry = None
    with ExitStack() as stack:
        writer: ShardWriter | None = None
        while chunk := list(islice(records, PROGRESS_EVERY)):
            for record in chunk:
                judged = _judge(record, images, limits)
                if isinstance(judged, Rejection):
                    rejects.append(_reject(order["split"], record, judged))
                    continue
                writer = writer or stack.enter_context(ShardWriter(folder, order["name"], order["split"]))
                writer.write(_sample(record, judged), judged.flags)
                report.count(stats, record, judged)
            progress(len(chunk))
    if writer is not None:
        entry = dataclasses.asdict(writer.entry)
    result = {
        "digest": order["digest"],
        "entry": entry,
        "rejects": rejects,
        "stats": {name: dict(counts) for name, counts in stats.items()},
    }
    write_result(Path(order["result"]), folder, result)
    return {"kept": entry["num_samples"] if entry else 0, "rejected": len(rejects)}


def _judge(record: Mapping[str, Any], images: Images, limits: FilterConfig) -> Picture | Rejection:
    if record["verdict"]:
        return Rejection(Reason(record["verdict"]["reason"]), record["verdict"]["detail"])
    data = images.read(record["file_name"])
    if isinstance(data, Rejection) or hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise BuildError(
            f"{record['file_name']}: the file changed after the build had begun; run the build again once it is settled"
        )
    return measure(data, limits)


def _reject(split: str, record: Mapping[str, Any], rejection: Rejection) -> dict[str, Any]:
    return {
        "split": split,
        "image_id": record["image_id"],
        "file_name": record["file_name"],
        "reason": rejection.reason,
        "detail": rejection.detail,
    }


def _sample(record: Mapping[str, Any], picture: Picture) -> Sample:
    meta = {
        "image_id": record["image_id"],
        "file_name": record["file_name"],
        "width": picture.measured.width,
        "height": picture.measured.height,
        "captions": record["captions"],
        "source": {"kind": "coco", "mode": picture.mode, "sha256": record["sha256"], **record["about"]},
    }
    if record["captions_raw"] is not None:
        meta["captions_raw"] = record["captions_raw"]
    return Sample(f"{record['image_id']:012d}", picture.data, picture.extension, meta)


JOBS: Mapping[str, Callable[[Any, Progress], Any]] = {"hash": hash_files, "build": build_shard}
