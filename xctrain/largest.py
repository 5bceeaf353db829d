"""The largest samples of a split, in tokens: memory that suffices for them suffices for the whole run."""

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from shards.atomic import write_file
from shards.joined import SampleReader
from shards.stream import Slot
from xctrain.config import Config
from xctrain.data import Data, joint_quarantine_id

if TYPE_CHECKING:
    from xctrain.collate import Row
    from xctrain.models import Family
    from xctrain.models.lengths import RowLengths

CACHE = "largest.json"  # in the run folder
_CANDIDATES = 256  # samples whose captions are counted
_BYTES_A_TOKEN = 4  # of text, roughly


@dataclass(frozen=True)
class Length:
    """A sample, the tokens of its longest row, and the rows that a slot makes of it."""

    index: int
    key: str
    tokens: int
    rows: int = 1

    @property
    def rank(self) -> tuple[int, str]:
        """Sorts the largest first: rows are padded to the longest one, so both numbers count."""
        return -self.tokens * self.rows, self.key


def rows_of(samples: Sequence[Length], reader: SampleReader, config: Config, count: int | None = None) -> list["Row"]:
    """These samples, over and over until they fill a micro-batch, or ``count`` rows, each with its longest caption, or
    with all of them where a slot trains on all.
    """
    from xctrain.loader import SlotRows

    rows = SlotRows(reader, "all", seed=0)
    chosen = islice(cycle(samples), count or config.train.micro_batch)
    found = [rows[Slot(n=-1, epoch=0, index=sample.index)] for sample in chosen]
    if config.data.captions == "all":
        return found
    return [replace(row, captions=(max(row.captions, key=lambda text: len(text.encode())),)) for row in found]


def all_lengths(data: Data, lengths: "RowLengths", config: Config) -> Iterator[Length]:
    """The tokens of every sample, in order; reads all captions."""
    return (_length(data.reader, lengths, config, index) for index in data.kept)


def _length(reader: SampleReader, lengths: "RowLengths", config: Config, index: int) -> Length:
    meta, captions = reader.meta(index), reader.read_json(index)["captions"]
    rows = len(captions) if config.data.captions == "all" else 1
    return Length(index, meta.key, lengths.longest(meta.width, meta.height, captions), rows)


def largest(found: Iterator[Length], count: int) -> list[Length]:
    """The largest ones, largest first; of equal ones those with the smallest keys."""
    return heapq.nsmallest(count, found, key=lambda length: length.rank)


def find_largest(data: Data, lengths: "RowLengths", config: Config) -> list[Length]:
    """Nearly the largest samples, as many as a micro-batch has: those with the most tokens among the likely ones.

    Pictures decide most of a sample's tokens, and their sizes are in the list of samples. Captions are counted only
    where pictures and the size of the text make a sample likely to be among the largest, so that a million samples
    take seconds.
    """

    every, count = config.data.captions == "all", config.train.micro_batch

    def guess(prompt: int, text_bytes: int) -> int:
        # How many captions there are stands in the sample alone; the bytes of all of them grow with their number.
        return prompt * text_bytes if every else prompt + text_bytes // _BYTES_A_TOKEN

    guesses = (
        (-guess(lengths.of_prompt(meta.width, meta.height), meta.parts[-1].num_bytes), meta.key, i)
        for i, meta in ((i, data.reader.meta(i)) for i in data.kept)
    )
    likely = heapq.nsmallest(max(count, _CANDIDATES), guesses)
    return largest((_length(data.reader, lengths, config, index) for _, _, index in likely), count)


def checked_largest(config: Config, data: Data, family: "Family", model_id: str) -> list[Length]:
    """The largest samples of a run, after it is sure that every sample fits in `model.max_length`.

    Remembered in the run folder, as long as data, model and what else decides lengths stay the same.

    Raises:
        ConfigError: a sample does not fit.
    """
    path = config.run.dir / CACHE
    about: list[Any] = [
        data.manifest_id,
        joint_quarantine_id(data.sources),
        config.data.split,
        config.data.captions,
        model_id,
        config.train.micro_batch,
    ]
    about.append(config.model.model_dump(mode="json", exclude={"path", "freeze", "dtype"}))
    fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["of"] == fingerprint:
            return [Length(*entry) for entry in known["samples"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # absent, or not ours: found again, the same
    if config.model.max_length is not None:
        family.check_lengths(
            (meta.key, meta.width, meta.height, data.reader.read_json(i)["captions"])
            for i, meta in ((i, data.reader.meta(i)) for i in data.kept)
        )
    found = find_largest(data, family.row_lengths(), config)
    write_file(path, json.dumps({"of": fingerprint, "samples": [astuple(length) for length in found]}).encode())
    return found
