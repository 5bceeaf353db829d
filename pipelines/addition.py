"""New records to a published dataset, as new shards behind its own, which keep their names and bytes.

.build/adding/             finished new shards, their results and the hashes of their files, until all are finished
.build/pending.json        names of the shards that are being moved to their places: not yet, or already, in the manifest

The old manifest is valid until the new one replaces it in one rename; the new one names it as its parent.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines import report
from pipelines.build import Build, Places, rejects_jsonl
from pipelines.errors import BuildError
from pipelines.facts import FACTS
from pipelines.filters import Reason, Rejection
from pipelines.hashes import CHUNK
from pipelines.known import Known, Likeness, of_dataset, read_known
from pipelines.plan import Slice
from pipelines.progress import map_bounded, progress_bar
from pipelines.state import State, finished_in, shard_files
from pipelines.summary import Summary
from shards.atomic import publish, write_file
from shards.errors import counted
from shards.manifest import Addition as Parent
from shards.manifest import Manifest, ShardEntry
from shards.reader import SplitReader
from shards.verify import PENDING


class AdditionState(State):
    """The folder of a dataset that is added to: what is new is made aside, whatever is published stays as it is."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.next = self.folder / "adding"

    def check(self, settings: Mapping[str, Any], overwrite: bool) -> None:
        """Whatever its settings are, its shards stay as they are."""

    @property
    def memory(self) -> Path:
        self.next.mkdir(parents=True, exist_ok=True)
        return self.next

    def finished(self, piece: Slice) -> tuple[Path, dict[str, Any]] | None:
        result = finished_in(self.next, self.next / f"{piece.name}.json", piece)
        return None if result is None else (self.next, result)


class Addition(Build):
    """An addition to the dataset in ``config.out``. Used as a ``Build``; publishes nothing where there is nothing new.

    Raises:
        ConfigError: there is no dataset in ``config.out``, or the source is not what the config says.
    """

    def _read_input(self) -> None:
        super()._read_input()
        if self._upload is not None:
            with progress_bar(None, "fetch", "B") as progress:
                self._upload.fetch(progress)
        self.before = Manifest.load(self.config.folder)

    def _open_state(self) -> State:
        return AdditionState(self.config.folder)

    def _require_records(self) -> None:
        """What is new need not be in every split."""

    def _known_already(self) -> Known:
        known = read_known(self.config.folder, self.before)
        wanted = self.config.filters.near_duplicate_bits is not None
        return replace(known, likeness=self._likeness()) if wanted else known

    def _likeness(self) -> Likeness:
        """Of every picture of the dataset, as it is stored; the build processes read all of them."""
        images = {"kind": "tars", "folder": str(self.config.folder.resolve())}
        readers = [SplitReader(self.config.folder, split, self.before) for split in self.before.splits]
        keys, splits, hashes = [], [], []
        with progress_bar(sum(map(len, readers)), "compare") as progress, self._threads() as threads:
            chunks = (chunk for reader in readers for chunk in _chunks(reader))
            asked = ((lambda chunk: (chunk, self.facts_of(images, chunk[2], progress))), chunks, 2 * len(self.workers))
            for (split, names, _), replies in map_bounded(threads, *asked):
                for key, reply in zip(names, replies, strict=True):
                    facts = None if isinstance(reply, Rejection) else np.frombuffer(reply, FACTS)[0]
                    if facts is not None and facts["comparable"]:
                        keys.append(key)
                        splits.append(split)
                        hashes.append(facts["likeness"])
        return Likeness(np.array(hashes, np.uint64), keys, splits)

    def _publish(self) -> Summary:
        places = self._places()
        results = [result for _, result in places.values()]
        rejected = Counter(str(row["reason"]) for result in results for row in result["rejects"])
        entries = tuple(ShardEntry(**result["entry"]) for result in results if result["entry"])
        rejects = rejects_jsonl(self.planned, results)
        if not entries:
            return self._nothing_new(places, rejected, rejects)
        added = Manifest(entries, self.config.written_settings)
        self._check_share(self._without_known(rejected, results), places, rejects, may_be_empty=True)
        parent = Parent(self.before.manifest_id, self.config.written_settings)
        manifest = Manifest((*self.before.shards, *entries), self.before.settings, (*self.before.additions, parent))
        number = len(manifest.additions)
        folders = {entry.name: self.state.next for entry in entries}
        subject = report.Subject("addition", manifest.manifest_id, self.before.manifest_id)
        pages = report.files(self.config, self.planned, added, results, folders, subject)
        files = {name.replace(".", f"-{number}.", 1): data for name, data in pages.items()}
        self._forget_refusal()
        self._put(manifest, results, {f"rejects-{number}.jsonl": rejects, **files})
        return Summary(
            self.config.out, manifest.manifest_id, manifest.splits, rejected, False,
            parent=self.before.manifest_id, added=added.splits,
            rejects=str(self.config.folder / f"rejects-{number}.jsonl"),
            report=str(self.config.folder / f"report-{number}.html"),
        )  # fmt: skip

    def _nothing_new(self, places: Places, rejected: Mapping[str, int], rejects: bytes) -> Summary:
        """The dataset stays as it is; why, is kept in .build."""
        if not any(_is_known(row) for _, result in places.values() for row in result["rejects"]):
            self._check_share(rejected, places, rejects)
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
        total = counted(sum(rejected.values()), "record")
        self._keep_lists(places, rejects, f"all {total} rejected ({reasons}), nothing was added")
        shutil.rmtree(self.state.next, ignore_errors=True)
        return Summary(
            self.config.out, self.before.manifest_id, self.before.splits, rejected, True,
            parent=self.before.parent,
            rejects=str(self.state.folder / "rejects.jsonl"), report=str(self.state.folder / "report.html"),
        )  # fmt: skip

    def _put(self, manifest: Manifest, results: list[dict[str, Any]], files: Mapping[str, bytes]) -> None:
        out, names = self.config.folder, [entry.name for entry in manifest.shards[len(self.before.shards) :]]
        self._require_replaceable([*files, *(n for result in results for n in shard_files(result["entry"]))])
        leftover = self._pending() - {entry.name for entry in manifest.shards}
        self.state.write_json(PENDING, {"shards": sorted({*names, *leftover})})
        for name in leftover:  # of an addition that was killed here, and whose source has changed since
            self.state.remove_shard(name.removesuffix(".tar"))
        for name, data in files.items():
            write_file(out / name, data)
        for result in results:
            for name in reversed(shard_files(result["entry"])):  # the tar last, as the writer does
                publish(self.state.next / name, out / name)
        if Manifest.load(out).manifest_id != self.before.manifest_id:
            raise BuildError(f"{out}: the dataset was changed while it was added to; run the addition again")
        manifest.save(out)
        (self.state.folder / PENDING).unlink()
        shutil.rmtree(self.state.next, ignore_errors=True)

    def _pending(self) -> set[str]:
        with suppress(OSError, ValueError, KeyError):
            return set(json.loads((self.state.folder / PENDING).read_bytes())["shards"])
        return set()

    def _without_known(self, rejected: Mapping[str, int], results: list[dict[str, Any]]) -> Counter[str]:
        """Rejections that speak against the source: that the dataset has a picture already does not."""
        known = Counter(str(row["reason"]) for result in results for row in result["rejects"] if _is_known(row))
        return Counter(rejected) - known


def _chunks(reader: SplitReader) -> Iterator[tuple[str, list[str], list[str]]]:
    """Split, and keys and places of some pictures at a time."""
    for number, entry in enumerate(reader.shards):
        shard = reader.shard(number)
        for start in range(0, entry.num_samples, CHUNK):
            metas = [shard.meta(i) for i in range(start, min(start + CHUNK, entry.num_samples))]
            places = [f"{entry.name}:{m.parts[0].offset}:{m.parts[0].num_bytes}" for m in metas]
            yield entry.split, [m.key for m in metas], places


def _is_known(row: Mapping[str, Any]) -> bool:
    reasons = (Reason.KNOWN_ID, Reason.DUPLICATE_IMAGE, Reason.NEAR_DUPLICATE, Reason.SPLIT_LEAK)
    return row["reason"] in reasons and of_dataset(str(row["detail"]))
