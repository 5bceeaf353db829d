"""Records to a shard folder: ``plan``, then ``build_shard`` for each slice, in any order, then ``publish``."""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipelines import report
from pipelines.config import BuildConfig
from pipelines.errors import BuildError, RejectShareError
from pipelines.fetched import with_local_files
from pipelines.filters import Reason, Rejection
from pipelines.folder_lock import FolderLock
from pipelines.images import ImagesSpec
from pipelines.jobs import JOBS, WHERE
from pipelines.known import NOTHING_KNOWN, Known
from pipelines.plan import Plan, make_plan, require_images
from pipelines.progress import Progress, map_bounded, progress_bar
from pipelines.records import id_order
from pipelines.sources import Origin, open_sources
from pipelines.sources.apart import require_apart
from pipelines.spool import Numbers, Spool
from pipelines.state import REPLACING, SETTINGS, State, shard_files
from pipelines.summary import Summary
from pipelines.upload import Upload
from pipelines.workers import Processes, Threads, Workers
from shards.atomic import write_file, written_aside
from shards.errors import ConfigError, counted, describe
from shards.manifest import NAME as MANIFEST
from shards.manifest import Manifest, ShardEntry
from shards.sample import canonical_json

NOT_COMPARED = {"root", "annotations", "images", "path", "split", "expected_counts"}  # of a source, in a rerun
Places = Mapping[str, tuple[Path, dict[str, Any]]]  # folder and result of every planned shard


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
        self.planned: Plan
        self._held = ExitStack()
        self.lock: FolderLock
        self.workers: Workers

    def _read_input(self) -> None:
        config = self.config
        self._upload: Upload | None = None
        self.state = self._open_state()
        self.state.require_writable(config.folder_setting)
        require_apart(config)
        self.origins = open_sources(with_local_files(config))
        for origin in self.origins:
            require_images(origin.source)
        if isinstance(config.out, str):
            self._upload = Upload(config.folder, config.out, config.build.overwrite)
        self.settings = {
            **config.written_settings,
            "sources": _described(self.origins),
        }
        self.state.check(self.settings, config.build.overwrite)

    def _open_state(self) -> State:
        return State(self.config.folder)

    def _known_already(self) -> Known:
        """What the dataset holds that is added to; a build begins with nothing."""
        return NOTHING_KNOWN

    def __enter__(self) -> Self:
        with ExitStack() as held:
            self.lock = held.enter_context(self.state.locked())
            limit = self.config.build.num_processes
            threads = self.config.build.runner == "threads"
            self.workers = Threads(limit, self.lock, JOBS) if threads else Processes(limit, self.lock)
            held.callback(self.state.sweep)
            held.callback(self.workers.close)
            self.state.begin(self.settings, self.config.build.overwrite)
            if isinstance(self.workers, Processes) and not self.config.build.remote and not self.state.published:
                self.workers.start()  # while the captions are read; a rerun may have nothing for them to do
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def plan(self) -> list[str]:
        """Names of the shards that have to be built; the others are finished."""
        spool = Spool(self.state.folder, self.config.build.seed)
        self._held.callback(spool.close)
        with progress_bar(None, "read") as progress:
            self.planned = make_plan(
                self.config, self.origins, spool, self.state.memory, self._hash_files, progress, self._known_already()
            )
        self._require_records()
        self._pieces = {piece.name: piece for piece in self.planned.slices}
        return [piece.name for piece in self.planned.slices if not self.state.finished(piece)]

    def _require_records(self) -> None:
        """Raises ConfigError: a split has none, so that nothing could be published."""
        for split in self.planned.splits:
            if split.num_records == 0:
                raise ConfigError(f"{self.config.out}: {self._why_empty(split.name)}; nothing was built")

    def _why_empty(self, name: str) -> str:
        total, fraction = counted(self.planned.num_records, "picture"), self.config.split.fractions.get(name, 0)
        if self.config.split_by != "hash":
            return f"split {name} is empty: no record of the source is in it; correct the source, or its limit"
        return (
            f"split {name} is empty: split.fractions gives it {fraction:g} of {total}, {fraction * self.planned.num_records:.2g} "
            f"on average, and none fell into it; give it a larger fraction ('split.fractions={{train: 0.8, val: 0.2}}'), give "
            "more pictures, deal anew with another split.seed, or say what is held out yourself (split.by=official, or held_out)"
        )

    def num_records(self, names: Sequence[str]) -> int:
        """Number of records in planned shards."""
        return sum(len(self._pieces[name].numbers) for name in names)

    def _hash_files(
        self, requests: Iterator[tuple[Numbers, int]], spool: Spool
    ) -> Iterator[tuple[Numbers, Sequence[bytes | Rejection]]]:
        def ask(request: tuple[Numbers, int]) -> tuple[Numbers, Sequence[bytes | Rejection]]:
            numbers, source = request
            names = [spool.place(number) for number in numbers.tolist()]
            return numbers, self.facts_of(self.origins[source].source.images, names, progress)

        with progress_bar(None, "hash") as progress, self._threads() as threads:
            yield from map_bounded(threads, ask, requests, 2 * self.config.build.num_processes)

    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.config.build.num_processes)

    def facts_of(self, images: ImagesSpec, names: Sequence[str], progress: Progress) -> list[bytes | Rejection]:
        """What ``hash_files`` finds out about some files, by ``workers``; for threads."""
        arguments = {"images": images, "names": names, "limits": dataclasses.asdict(self.config.filters.limits)}
        replies = self.workers.call("hash", arguments, progress)
        return [Rejection(Reason(r[0]), r[1]) if isinstance(r, list) else bytes.fromhex(r) for r in replies]

    def write_order(self, name: str) -> Path:
        """Write what a build process is to do for one shard; another machine may read it too."""
        target = self.state.target
        result = self.state.results(target) / f"{name}.json"
        about = {"folder": str(target.absolute()), "result": str(result.absolute())}
        return self.state.write(f"slices/{name}.json", self.planned.order(self._pieces[name], about))

    def build_shard(self, name: str, progress: Progress = lambda count: None) -> dict[str, int]:
        """Build one planned shard by ``workers``; for threads. Counts of what became of its records."""
        path = self.write_order(name)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(count)

        try:
            counts: dict[str, int] = self.workers.call("build", {"slice": str(path)}, advance)
        except BaseException:
            progress(-done)  # it is tried again from its first record
            raise
        path.unlink()
        return counts

    def stop(self) -> None:
        """End all that works for this build, here and elsewhere."""
        self.workers.close()
        self.lock.release()

    def publish(self) -> Summary:
        """Make the folder, or the address, the dataset that was built; the manifest comes last.

        Raises:
            RejectShareError: too much was rejected; what was published before stays.
            RemoteError: the store refused, or went away.
        """
        summary = self._publish()
        shutil.rmtree(self.state.folder / "images", ignore_errors=True)  # see sources/parquet.py
        if self._upload is None:
            return summary
        with progress_bar(None, "send", "B") as progress:
            sent = self._upload.send(progress)
        return dataclasses.replace(summary, num_sent=sent, unchanged=summary.unchanged and not sent)

    def _publish(self) -> Summary:
        places = self._places()
        results = [result for _, result in places.values()]
        rejects = rejects_jsonl(self.planned, results)
        rejected = Counter(str(r["reason"]) for result in results for r in result["rejects"])
        self._check_share(rejected, places, rejects)
        manifest = Manifest(
            tuple(ShardEntry(**result["entry"]) for result in results if result["entry"]), self.config.written_settings
        )
        stale, left = self.state.stale(set(places), self.config.build.overwrite)
        staged = {name: result for name, (target, result) in places.items() if target == self.state.next}
        files = {MANIFEST: manifest.to_json(), "rejects.jsonl": rejects}
        unchanged = not staged and not stale and _holds(self.config.folder, files)
        if unchanged:
            self.state.write_json(SETTINGS, self.settings)
        else:
            folders = {result["entry"]["name"]: target for target, result in places.values() if result["entry"]}
            files |= report.files(self.config, self.planned, manifest, results, folders, self._subject(manifest))
            self._replace(files, staged, stale, left)
        shutil.rmtree(self.state.next, ignore_errors=True)
        self._forget_refusal()
        for order in self.state.slices.glob("*.json"):
            order.unlink()
        return Summary(
            self.config.out, manifest.manifest_id, manifest.splits, rejected, unchanged, tuple(left),
            rejects=str(self.config.folder / "rejects.jsonl"), report=str(self.config.folder / "report.html"),
        )  # fmt: skip

    def _places(self) -> Places:
        """Folder and result of every planned shard."""
        found = {piece.name: self.state.finished(piece) for piece in self.planned.slices}
        if missing := [name for name, place in found.items() if place is None]:
            raise BuildError(f"{self.config.out}: {missing[0]} was changed while building; run the build again")
        return {name: place for name, place in found.items() if place is not None}

    def _subject(self, manifest: Manifest) -> report.Subject:
        """What the report is of."""
        return report.Subject("build", manifest.manifest_id)

    def _check_share(
        self, rejected: Mapping[str, int], places: Places, rejects: bytes, may_be_empty: bool = False
    ) -> None:
        """Raises RejectShareError: too much was rejected. A report of it is in .build then."""
        results = [result for _, result in places.values()]
        total, allowed = sum(rejected.values()), self.config.build.max_reject_share
        num_records = self.planned.num_records
        empty = [
            split
            for split in self.planned.splits
            if not may_be_empty and not any(r["entry"] and r["entry"]["split"] == split.name for r in results)
        ]
        if total <= allowed * num_records and not empty:
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
        limit = f"build.max_reject_share={allowed:g} allows {int(allowed * num_records)}"
        if empty:
            limit = f"all {empty[0].num_records} of split {empty[0].name} among them"
        why = f"{total} of {counted(num_records, 'record')} rejected ({reasons}), {limit}; nothing was published"
        self._keep_lists(places, rejects, why)
        raise RejectShareError(
            f"{self.config.out}: {why}; look at {self.state.folder / 'report.html'}, and into rejects.jsonl beside it, then "
            "correct the source, the filters or the share",
            path=self.config.folder,
        )

    def _keep_lists(self, places: Places, rejects: bytes, why: str) -> None:
        """Keep rejects and report of what was not published in .build; ``why`` it was not."""
        results = [result for _, result in places.values()]
        shards = Manifest(tuple(ShardEntry(**result["entry"]) for result in results if result["entry"]))
        folders = {result["entry"]["name"]: target for target, result in places.values() if result["entry"]}
        subject = report.Subject("unpublished", why=why)
        pages = report.files(self.config, self.planned, shards, results, folders, subject)
        for name, data in {"rejects.jsonl": rejects, **pages}.items():
            write_file(self.state.folder / name, data)

    def _forget_refusal(self) -> None:
        for name in ("rejects.jsonl", "report.json", "report.html"):
            (self.state.folder / name).unlink(missing_ok=True)

    def _replace(
        self,
        files: Mapping[str, bytes],
        staged: Mapping[str, dict[str, Any]],
        stale: Sequence[str],
        left: Sequence[str],
    ) -> None:
        """Put shards and ``files`` in place, the manifest last. What can fail is done before the old manifest goes.

        Without a manifest the folder is no dataset; after a kill in between, the next run goes on from any point.
        """
        self._require_replaceable([*files, *(n for result in staged.values() for n in shard_files(result["entry"]))])
        with ExitStack() as written:
            for name, data in files.items():  # the first one is renamed last: the manifest
                file = written.enter_context(written_aside(self.config.folder / name))
                file.write(data)
                file.flush()
            self.state.give_up_manifest(self.settings, stale, left)
            for name, result in staged.items():
                self.state.adopt(name, result)
            self.state.remove_older(stale)
        (self.state.folder / REPLACING).unlink()

    def _require_replaceable(self, names: Sequence[str]) -> None:
        for path in (self.config.folder / name for name in names):
            if path.is_dir():
                raise BuildError(
                    f"{path}: is a folder where the build writes a file; nothing was replaced; move it away and run the "
                    "build again, finished shards are kept",
                    path=path,
                )


def _described(origins: Sequence[Origin]) -> dict[str, Any]:
    """The sources as a rerun compares them: locations by split, and of what is not COCO how it is read."""
    found: dict[str, list[Any]] = {}
    for origin in origins:
        how = origin.config.model_dump(mode="json", exclude=NOT_COMPARED, exclude_none=True)
        plain = how == {"kind": "coco"}
        location = origin.source.location
        found.setdefault(origin.split or "*", []).append(location if plain else {"location": location, **how})
    return {split: places[0] if len(places) == 1 else places for split, places in found.items()}


def _holds(out: Path, files: Mapping[str, bytes]) -> bool:
    names = [out / "report.json", out / "report.html"]
    return all((out / n).exists() and (out / n).read_bytes() == d for n, d in files.items()) and all(
        n.exists() for n in names
    )


def rejects_jsonl(planned: Plan, results: Sequence[Mapping[str, Any]]) -> bytes:
    order = {split.name: i for i, split in enumerate(planned.splits)}
    rows = [{k: v for k, v in row.items() if k not in WHERE} for result in results for row in result["rejects"]]
    rows.sort(key=lambda row: (order[row["split"]], id_order(row["image_id"])))
    return b"".join(canonical_json(row) + b"\n" for row in rows)
