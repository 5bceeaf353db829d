"""What build processes are asked to do: hash files, and build a shard. Pure functions of their arguments, JSON in and out."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines import stats
from pipelines.errors import BuildError, enough_memory, system_error
from pipelines.facts import find_facts
from pipelines.filters import Limits, Reason, Rejection
from pipelines.images import Images, are_far, open_images, read_all
from pipelines.measure import Picture, measure
from pipelines.progress import Progress
from pipelines.state import shard_files, write_result
from shards.atomic import publish
from shards.checksum import crc32
from shards.sample import Sample, key_of_id
from shards.writer import ShardWriter

PROGRESS_EVERY = 32  # records
STEP_BYTES = 8_000_000  # of files that go from step to step together
WHERE = ("place", "source")  # of a record: where its picture is; not in rejects.jsonl


def hash_files(arguments: Mapping[str, Any], progress: Progress) -> list[Any]:
    """Facts about each file (bytes of dtype FACTS in hex), or reason and detail where it cannot be read."""
    images, limits = open_images(arguments["images"]), Limits(**arguments["limits"])
    replies: list[Any] = []
    for name, data in zip(arguments["names"], read_all(images, arguments["names"]), strict=True):
        if isinstance(data, Rejection) and data.reason is Reason.MISSING_FILE and not are_far(images, [name]):
            raise _gone(name, data)  # it was there a moment ago: no picture is rejected because a disk went away
        with enough_memory(name):
            replies.append(
                [data.reason, data.detail] if isinstance(data, Rejection) else find_facts(data, limits).hex()
            )
    progress(len(replies))
    return replies


def build_shard(arguments: Mapping[str, Any], progress: Progress) -> dict[str, int]:
    """Write one planned shard and record it as finished. A pure function of the slice: same records, same bytes.

    ``attempt``: folder to write in, where another machine may be at the same shard; what is whole is moved from there.
    """
    order = json.loads(Path(arguments["slice"]).read_bytes())
    folder = Path(arguments.get("attempt") or order["folder"])
    try:
        return _build_slice(order, folder, progress)
    except OSError as error:  # a failing write names no file
        error.filename = error.filename or str(Path(order["folder"]) / f"{order['name']}.tar")
        raise system_error(error) from None


def _build_slice(order: Mapping[str, Any], folder: Path, progress: Progress) -> dict[str, int]:
    limits = Limits(**order["judged_by"])
    images = [open_images(spec) for spec in order["images"]]
    target = Path(order["folder"])
    rejects: list[dict[str, Any]] = []
    counts: stats.Stats = {}
    kept: Counter[str] = Counter()  # by source
    records = iter(order["records"])
    entry = None
    with ExitStack() as stack:
        writer: ShardWriter | None = None
        while chunk := list(islice(records, PROGRESS_EVERY)):
            for record, judged in _judge(_read_chunk(chunk, images), limits):
                stats.count_captions(counts, record)
                if isinstance(judged, Rejection):
                    rejects.append(_reject(order["split"], record, judged))
                    continue
                writer = writer or stack.enter_context(ShardWriter(folder, order["name"], order["split"]))
                writer.write(_sample(record, judged), judged.flags)
                stats.count(counts, record, judged)
                kept[str(record.get("source", 0))] += 1
            progress(len(chunk))
    if writer is not None:
        entry = dataclasses.asdict(writer.entry)
    result = {
        "digest": order["digest"],
        "kept": dict(kept),
        "entry": entry,
        "rejects": rejects,
        "stats": stats.remembered(counts),
    }
    if folder != target:
        for name in shard_files(entry):
            publish(folder / name, target / name)
    write_result(Path(order["result"]), target, result)
    return {"kept": entry["num_samples"] if entry else 0, "rejected": len(rejects)}


def _read_chunk(
    chunk: Sequence[Mapping[str, Any]], images: Sequence[Images]
) -> Iterator[tuple[Mapping[str, Any], bytes | Rejection]]:
    """Each record with its file, or with the rejection that planning gave it."""
    readers = [
        read_all(each, [_place(r) for r in chunk if r.get("source", 0) == number and not r["verdict"]])
        for number, each in enumerate(images)
    ]
    for record in chunk:
        verdict = record["verdict"]
        if verdict:
            yield record, Rejection(Reason(verdict["reason"]), verdict["detail"])
        else:
            yield record, next(readers[record.get("source", 0)])


def _place(record: Mapping[str, Any]) -> str:
    return str(record.get("place", record["file_name"]))


def _judge(
    files: Iterator[tuple[Mapping[str, Any], bytes | Rejection]], limits: Limits
) -> Iterator[tuple[Mapping[str, Any], Picture | Rejection]]:
    """Each record with its picture or rejection.

    Some files are read, then the same ones decoded, then written: the code of one step stays in the processor's cache,
    which takes a tenth less time than file by file. Large files are few at a time, for memory's sake.
    """
    some: list[tuple[Mapping[str, Any], bytes | Rejection]] = []
    size = 0
    for record, data in files:
        some.append((record, data))
        size += len(data) if isinstance(data, bytes) else 0
        if size >= STEP_BYTES:
            yield from _judge_some(some, limits)
            some, size = [], 0
    yield from _judge_some(some, limits)


def _judge_some(
    files: Sequence[tuple[Mapping[str, Any], bytes | Rejection]], limits: Limits
) -> list[tuple[Mapping[str, Any], Picture | Rejection]]:
    for record, data in files:
        _require_unchanged(record, data)
    return [(record, _measured(record, data, limits)) for record, data in files]


def _measured(record: Mapping[str, Any], data: bytes | Rejection, limits: Limits) -> Picture | Rejection:
    if isinstance(data, Rejection):
        return data
    with enough_memory(record["file_name"]):
        return measure(data, limits)


def _require_unchanged(record: Mapping[str, Any], data: bytes | Rejection) -> None:
    if record["verdict"]:
        assert isinstance(data, Rejection)
    elif isinstance(data, Rejection):
        raise _gone(record["file_name"], data)
    elif crc32(data) != record["crc32"]:
        raise BuildError(
            f"{record['file_name']}: the file changed after the build had begun; run the build again once it is settled"
        )


def _gone(file_name: str, found: Rejection) -> BuildError:
    return BuildError(
        f"{file_name}: was there when the build began and is not any more ({found.reason}: {found.detail}); bring it back, or "
        "run the build again once the source is settled; finished shards are kept"
    )


def _reject(split: str, record: Mapping[str, Any], rejection: Rejection) -> dict[str, Any]:
    return {
        "split": split,
        "image_id": record["image_id"],
        "file_name": record["file_name"],
        "reason": rejection.reason,
        "detail": rejection.detail,
        **{name: record[name] for name in WHERE if name in record},
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
    return Sample(key_of_id(record["image_id"]), picture.data, picture.extension, meta)


JOBS: Mapping[str, Callable[[Any, Progress], Any]] = {"hash": hash_files, "build": build_shard}
