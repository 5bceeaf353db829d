"""What a run reads, and in which order: ``data`` and ``order``."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from xctrain.section import Location, Section, require_no_secrets, trajectory


class SourceConfig(Section):
    """One of several datasets that a run mixes; a bare path is one that is left at its defaults."""

    path: Location = Field(description="shard folder with a manifest.json: a path or an address")
    repeat: PositiveInt = Field(
        1,
        description="times that each of its samples comes in an epoch, spread evenly; once, as samples are worth the same",
    )
    quarantine: Path | None = Field(None, description="as data.quarantine, for this dataset")

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, values: Any) -> Any:
        return {"path": values} if isinstance(values, str | Path) else values


class DataConfig(Section):
    """What is read, and by how many workers."""

    shards: Location | dict[Annotated[str, Field(pattern="^[0-9A-Za-z_-]+$")], SourceConfig] = Field(
        Path("data/sample-shards"),
        description="shard folder with a manifest.json: a path, or an address (s3://, gs://, https://, http://); or several "
        "to mix, as `name: path` or `name: {path, repeat}`",
    )
    quarantine: Path | None = Field(
        None,
        description="list of samples that are left out of the order, as `python -m shards verify DIR --quarantine FILE` "
        "writes it; none unless given, as a build rejects what is damaged and a sound dataset has nothing to leave out",
    )
    split: str = trajectory("train", "split to train on")
    captions: Literal["random", "first", "all"] = trajectory(
        "random", "which of an image's captions: another one each epoch, the first, or all as rows of one slot"
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=128)] = Field(
        "auto",
        description="loader workers per process; auto: as many as processes on the node, at most CPUs div processes",
    )
    prefetch: PositiveInt = Field(
        2, description="micro-batches each worker reads ahead; dropped at a stop, never counted"
    )
    cache_dir: Path = Field(
        Path("~/.cache/xctrain"),
        description="shards at an address: folder on a disk of the node for what is needed of them; one run at a time",
    )
    cache_gb: PositiveFloat = Field(
        20.0,
        description="shards at an address: GB that may lie in cache_dir at once; all of COCO's training images are 19, what "
        "the default order needs of them 3; too little is refused with the number that would do",
    )
    requests: PositiveInt = Field(
        16,
        description="shards at an address: fragments that a node fetches at once; stores answer many requests faster",
    )
    read_timeout_s: PositiveInt = Field(
        300,
        description="seconds without data, tries included, after which a read ends the run with an error that names shard "
        "and sample; longer than a store or a file server is away for a moment",
    )
    verify: Literal["sizes", "full"] = Field(
        "sizes", description="what is checked before the model loads; full reads every byte"
    )
    max_damaged: Annotated[int, Field(ge=0)] = Field(
        10,
        description="different damaged samples that may be masked before the run stops; each is logged with key and reason; "
        "those of data.quarantine do not count. Ten are an accident, more are a broken disk or copy",
    )
    max_damaged_in_a_row: PositiveInt = Field(
        5,
        description="damaged samples at positions behind one another that may be masked before the run stops, however high "
        "max_damaged is: neighbours are from all over the dataset, so a row of them says that nothing can be read",
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> "DataConfig":
        if isinstance(self.shards, dict) and not self.shards:
            raise ValueError("data.shards names no dataset; give a shard folder, or `name: path` for each of several")
        if isinstance(self.shards, dict) and self.quarantine:
            raise ValueError(
                "data.quarantine is set, data.shards names several datasets; give each its own as data.shards.NAME.quarantine"
            )
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> "DataConfig":
        for source in self.sources.values():
            require_no_secrets("data.shards", source.path)
        return self

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The datasets by name; one that has none is called nothing."""
        if isinstance(self.shards, dict):
            return self.shards
        return {"": SourceConfig(path=self.shards, quarantine=self.quarantine)}


class OrderConfig(Section):
    """Shape of the shuffle (docs/design.md section 5)."""

    fragment: PositiveInt = trajectory(
        16,
        "F, neighbouring samples read as one byte range; 16 COCO images are 2.6 MB, enough for a request to pay, and few enough "
        "for the first batches of an epoch to hold 85 % of the shards that a full shuffle would give them",
    )
    window: PositiveInt = trajectory(16_384, "T, samples that are shuffled together, over all lanes")
    lanes: PositiveInt = trajectory(8, "L, independent streams; nodes divide it, so that each fetches its own part")
