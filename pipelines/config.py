"""``BuildConfig``: everything a build can be told. Also the parameters of the Prefect flow, whose form shows it."""

import dataclasses
import difflib
import hashlib
import importlib.util
import math
import os
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pipelines.filters import Limits
from shards.errors import counted

SplitName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", description="Split of the samples; names the shards.")]


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _tab(value: Any) -> Any:
    return "\t" if value in ("tab", "\\t") else value  # as it is written on a command line


# A path or an address such as s3://bucket/folder. Text, as pathlib makes one slash of two.
Location = Annotated[str, BeforeValidator(_as_text), Field(min_length=1)]


# An address that a build can write to.
Address = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^/]+")]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Locations = Location | Annotated[tuple[Location, ...], Field(min_length=1)]
Kind = Literal["coco", "karpathy", "jsonl", "csv", "parquet", "webdataset"]
_NOT_FOR = {  # fields that mean nothing to a kind
    "coco": ("path", "image_field", "caption_field", "id_field", "split_field", "delimiter", "expected_counts"),
    "karpathy": ("path", "image_field", "caption_field", "id_field", "split_field", "delimiter"),
    "jsonl": ("root", "annotations", "delimiter", "expected_counts"),
    "csv": ("root", "annotations", "expected_counts"),
    "parquet": ("root", "annotations", "delimiter", "expected_counts"),
    "webdataset": ("root", "annotations", "images", "delimiter", "expected_counts"),
}


class SourceConfig(Settings):
    """Where records come from: for COCO a folder in the official layout, or annotations and images; else path."""

    kind: Kind = Field(
        "coco", description="Format: coco (Captions 2014 or 2017), karpathy (the split file dataset_coco.json), jsonl, csv, "
        "parquet (Hugging Face datasets too) or webdataset (tars).",
    )  # fmt: skip
    root: Location | None = Field(
        None,
        description="Folder in the official COCO layout: annotations/captions_train*.json, and images in train2017/, "
        "train2017.zip or images/. Default none: then annotations and images are given.",
    )
    annotations: Locations | None = Field(
        None, description="Caption file (JSON), or a list of them. Default: found below root."
    )
    images: Locations | None = Field(
        None,
        description="Folder of images, or a zip of it, which is read in place; a list: one for each file of annotations, or "
        "all searched. Default: found below root; for jsonl, csv and parquet the folder of path. Paths in rows count from it; "
        "absolute ones, and those with .., are followed only into it, so give a folder above them, / for any.",
    )
    path: Locations | None = Field(
        None,
        description="JSONL, CSV, Parquet or tar files: one, a list, a pattern such as data/*.parquet, or a folder of them.",
    )
    image_field: str | None = Field(
        None,
        description="Column of the image: a path below images, an address, or the bytes. Default: the usual names.",
    )
    caption_field: str | None = Field(
        None, description="Column of the caption or the list of captions. Default: the usual names."
    )
    id_field: str | None = Field(
        None,
        description="Column of a whole number or text that names the image for ever. Default none: its path does.",
    )
    split_field: str | None = Field(
        None,
        description="Column of the official split. Default none: the name of the file, such as val.jsonl, says it.",
    )
    delimiter: Annotated[str, BeforeValidator(_tab), Field(min_length=1, max_length=1)] | None = Field(
        None,
        description="Character between the columns of a CSV file, such as ; or tab. Default: tab in .tsv files, else a comma.",
    )
    split: SplitName = "train"
    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")] | None = Field(
        None,
        description="Name in front of every id, for several sources that number their images each for itself. Default none: "
        "ids count as they stand, as those of COCO 2014 and 2017 do.",
    )
    limit: int | None = Field(
        None, ge=1,
        description="Most records taken from this source, chosen by a hash of their ids: the same ones each time, and mostly "
        "the same ones when data are added. Default none: all.",
    )  # fmt: skip
    expected_counts: dict[str, int] | None = Field(
        None,
        description="Images of each split that the Karpathy file must have. Default: 113,287, 5,000 and 5,000 for COCO.",
    )

    @model_validator(mode="before")
    @classmethod
    def _root_alone(cls, value: Any) -> Any:
        return {"root": value} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _complete(self) -> "SourceConfig":
        if useless := [name for name in _NOT_FOR[self.kind] if getattr(self, name) is not None]:
            raise ValueError(
                f"kind={self.kind} does not use {' and '.join(useless)}; remove it, or choose another kind"
            )
        if self.kind in ("coco", "karpathy"):
            if self.root is None and (self.annotations is None or self.images is None):
                missing = [name for name in ("annotations", "images") if getattr(self, name) is None]
                raise ValueError(
                    f"give root (a folder in the official COCO layout), or annotations and images; "
                    f"missing here: root and {' and '.join(missing)}"
                )
        elif self.path is None:
            raise ValueError(f"path is missing; give the {self.kind} file, files or folder")
        return self


class HeldOutConfig(SourceConfig):
    """A second source of the same shape, whose pictures are kept out of training."""

    split: SplitName = "val"


class SplitConfig(Settings):
    """How records are dealt to splits. Every field changes what is written."""

    by: Literal["auto", "source", "official", "hash"] = Field(
        "auto",
        description="source: source.split and held_out; official: what the data say (the Karpathy split, a column, names of "
        "files such as val.jsonl); hash: fractions. auto: official for karpathy and where there is a split_field, else source.",
    )
    fractions: dict[SplitName, Annotated[float, Field(gt=0, lt=1)]] = Field(
        {"train": 0.98, "val": 0.02},
        description="Share of each split when by=hash, the one to train on first. A picture's bytes decide, so copies of it "
        "land together, and it stays where it is when others are added.",
    )
    seed: int = Field(0, ge=0, description="Seed of by=hash; another one deals anew.")

    @model_validator(mode="after")
    def _whole(self) -> "SplitConfig":
        if abs(sum(self.fractions.values()) - 1) > 1e-9:
            raise ValueError(f"fractions add up to {sum(self.fractions.values()):g}, expected 1")
        return self


MOST_PER_CPU = 8  # processes; more of them is a slip of the pen, and takes the memory of a machine


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


class RunConfig(Settings):
    """How the build runs. Only ``records_per_shard`` and ``seed`` change what it writes."""

    records_per_shard: int = Field(
        1000, ge=1, le=100_000,
        description="Records in a slice, rejected ones included. 1,000 COCO images make a tar of 160 MB.",
    )  # fmt: skip
    seed: int = Field(0, ge=0, description="Seed of the hash order in which records are put before they are cut.")
    runner: Literal["processes", "threads", "dask", "ray"] = Field(
        "processes",
        description="What builds the shards: processes or threads of this machine, or a Dask or Ray cluster (extras dask "
        "and ray). The bytes are the same. Processes: a decoder that crashes then costs one shard, not the build.",
    )
    address: str | None = Field(
        None,
        description="Scheduler of the Dask or Ray cluster, such as tcp://HOST:8786 or ray://HOST:10001. Default none: a "
        "cluster of its own on this machine, for the time of the build.",
    )
    processes: int | Literal["auto"] = Field(
        "auto",
        description="Processes or threads that build shards on this machine; auto is one for each CPU that this process may "
        "use, 8 for each the most. With address, the cluster has its own number and this one is for hashing files.",
    )
    retries: int = Field(
        2, ge=0, le=100,
        description="Times that a shard is tried again after an error that may pass: a killed process, a disk or "
        "server that failed. Two outlast a short fault; what fails three times needs a person.",
    )  # fmt: skip
    overwrite: bool = Field(
        False, description="Accept changed settings in a folder that holds a build; off, such a build is refused."
    )
    max_reject_share: float = Field(
        0.5, ge=0, le=1, description="Share of rejected records above which nothing is published: half the "
        "pictures lost means a wrong folder rather than bad pictures.",
    )  # fmt: skip
    staging: Path | None = Field(
        None,
        description="Folder in which a build is made whose out is an address; kept, so that a rerun sends only what differs. "
        "Default: one for each address in data/staging.",
    )
    gallery: int = Field(24, ge=0, le=200, description="Pictures of either kind, kept and rejected, in the report.")

    @model_validator(mode="after")
    def _sensible(self) -> "RunConfig":
        if self.processes != "auto" and self.processes < 1:
            raise ValueError(f"processes is {self.processes}, expected auto or at least 1")
        most = MOST_PER_CPU * (cpus := usable_cpus())
        if self.num_processes > most:
            raise ValueError(
                f"build.processes is {self.processes}, expected at most {most}: this process may use {counted(cpus, 'CPU')}, "
                f"{MOST_PER_CPU} for each; auto is one for each"
            )
        if self.address is not None and not self.remote:
            raise ValueError(
                f"address is {self.address!r}, runner is {self.runner}; give runner=dask or runner=ray with it"
            )
        return self

    @property
    def remote(self) -> bool:
        """Whether shards are built by processes that this one has not started itself."""
        return self.runner in ("dask", "ray")

    @property
    def note(self) -> str:
        """What whoever starts the build should know of these settings, empty for nothing."""
        if self.num_processes <= (cpus := usable_cpus()):
            return ""
        return (
            f"build.processes is {self.processes}, and this process may use {counted(cpus, 'CPU')}: more processes than that "
            "only take turns, and take more memory; auto is one for each"
        )

    @property
    def num_processes(self) -> int:
        return usable_cpus() if self.processes == "auto" else self.processes


def _finite(values: tuple[float, ...]) -> tuple[float, ...]:
    if not all(math.isfinite(v) for v in values):
        raise ValueError(f"is {list(values)}, expected finite numbers: others turn every pixel into NaN or infinity")
    return values


def _non_zero(values: tuple[float, ...]) -> tuple[float, ...]:
    if any(v == 0 for v in values):
        raise ValueError(f"is {list(values)}, expected no zero: training divides by it")
    return values


ColorMode = Literal["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "I;16B", "F"]


def _script(name: str) -> str:
    letters = (chr(code) for code in range(0x30000) if chr(code).isalpha())
    known = {unicodedata.name(letter, "").partition(" ")[0] for letter in letters}
    if name not in known:
        near = difflib.get_close_matches(name.upper(), known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"is {name!r}, expected the first word of a letter's Unicode name, such as LATIN or CJK{hint}")
    return name


Script = Annotated[str, AfterValidator(_script)]
Triple = Annotated[tuple[float, float, float], AfterValidator(_finite)]


# Those of the first version, which stand in every manifest.
_FIRST_FILTERS = (
    "min_side_px", "max_pixels", "max_aspect_ratio", "constant_levels", "duplicates", "norm_mean", "norm_std",
)  # fmt: skip


class FilterConfig(Settings):
    """What is rejected. Every field changes what is written."""

    min_side_px: int = Field(16, ge=1, description="Shortest side in pixels; below it nothing can be recognised.")
    max_pixels: int = Field(
        50_000_000, ge=1, le=89_000_000,
        description="Most pixels, read from the header before decoding. The default holds any phone photo and decodes "
        "in 150 MB; the bound lies below Pillow's own guard against decompression bombs, which stays on.",
    )  # fmt: skip
    max_aspect_ratio: float = Field(
        20.0, ge=1, allow_inf_nan=False,
        description="Longer side over shorter side; image processors of the models fail on longer strips.",
    )  # fmt: skip
    constant_levels: int = Field(
        2, ge=-1, le=255,
        description="A picture whose channels all vary by at most this many of 255 levels shows nothing. 2 allows for "
        "what JPEG does to a flat picture; -1 keeps such pictures.",
    )  # fmt: skip
    duplicates: bool = Field(True, description="Reject files with the bytes of another; the lowest image id stays.")
    leaks: Literal["reject", "fail"] = Field(
        "reject",
        description="What becomes of images whose id or bytes are in a later split too: the earlier split, which is the one "
        "to train on, loses them, or the build fails and names one.",
    )
    near_duplicate_bits: int | None = Field(
        None, ge=0, le=6,
        description="Reject pictures whose 64-bit perceptual hash differs from that of another in at most this many bits; "
        "the lowest image id stays, and what is like a held-out picture is a split_leak. 4 finds other sizes, qualities "
        "and brightness. Off by default: it decodes every file once more, and likeness, unlike equal bytes, can err.",
    )  # fmt: skip
    color_modes: tuple[ColorMode, ...] | None = Field(
        None, min_length=1,
        description="Colour modes of source files that are let in, by Pillow's names: RGB alone refuses gray, CMYK and "
        "transparent files. Default all: each is made RGB by a stated rule.",
    )  # fmt: skip
    min_caption_words: int | None = Field(
        None, ge=1, description="Captions with fewer words are dropped. Default: none."
    )
    max_caption_words: int | None = Field(
        None, ge=1, description="Captions with more words are dropped. Default: none, training counts tokens itself."
    )
    min_caption_chars: int | None = Field(None, ge=1, description="The same in characters, for scripts without spaces.")
    max_caption_chars: int | None = Field(None, ge=1, description="The same in characters.")
    caption_scripts: tuple[Script, ...] | None = Field(
        None, min_length=1,
        description="Scripts that captions may be written in, by the first word of the Unicode name of their letters: "
        "LATIN, CYRILLIC, GREEK, ARABIC, HANGUL, CJK ... Captions without letters pass. Default: any.",
    )  # fmt: skip
    caption_script_share: float = Field(
        0.8, gt=0, le=1,
        description="Least share of a caption's letters in caption_scripts; below it the caption is dropped. The default "
        "leaves room for a foreign name.",
    )  # fmt: skip
    max_side_px: int | None = Field(
        None, ge=16,
        description="Longest side of stored pictures in pixels; a larger picture is made smaller and stored as JPEG, for "
        "whom disk or network is the limit. Default: original bytes are kept.",
    )  # fmt: skip
    resized_quality: int = Field(
        90,
        ge=1,
        le=95,
        description="JPEG quality of pictures that max_side_px made smaller; at 90 no change is visible.",
    )
    norm_mean: Triple = Field(
        (0.48145466, 0.4578275, 0.40821073),
        description="Mean that training subtracts, channels scaled to 0..1 (default: CLIP). Only checked: with it and "
        "norm_std finite, finite pixels stay finite.",
    )
    norm_std: Annotated[Triple, AfterValidator(_non_zero)] = Field(
        (0.26862954, 0.26130258, 0.27577711),
        description="Deviation that training divides by (default: CLIP), not zero.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "FilterConfig":
        for unit in ("words", "chars"):
            low, high = (getattr(self, f"{end}_caption_{unit}") for end in ("min", "max"))
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"min_caption_{unit} is {low}, more than max_caption_{unit}={high}: no caption is left"
                )
        if self.near_duplicate_bits is not None and importlib.util.find_spec("imagehash") is None:
            raise ValueError("near_duplicate_bits needs the package ImageHash; pip install 'xctrain[near-duplicates]'")
        return self

    @property
    def limits(self) -> Limits:
        """What a file is judged by."""
        return Limits(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Limits)})

    @property
    def written(self) -> dict[str, Any]:
        """What manifest and shards say of the filters: a later field only where it is set, so that the bytes and ids of
        builds that do not use it stay what they were."""
        values = self.model_dump(mode="json", exclude={"leaks"})  # which fails a build, or changes nothing
        return {k: v for k, v in values.items() if k in _FIRST_FILTERS or v != type(self).model_fields[k].default}


class BuildConfig(Settings):
    """Images with captions in, shards out."""

    source: SourceConfig | None = Field(
        None, description="Records to train on; a path alone means source.root. Or give sources."
    )
    sources: tuple[SourceConfig, ...] = Field((), description="Several sources in one build, instead of source.")
    held_out: HeldOutConfig | Literal["auto", "none"] = Field(
        "auto",
        description="Records for evaluation: a source, none, or auto, which takes captions_val*.json below source.root "
        "where there is one.",
    )
    split: SplitConfig = Field(default_factory=lambda: SplitConfig(), description="How records are dealt to splits.")
    out: Address | Path = Field(
        description="Shard folder to write: a path, or an address such as s3://bucket/shards, to which what was built in "
        "build.staging is sent."
    )
    build: RunConfig = Field(default_factory=lambda: RunConfig(), description="How the build runs.")
    filters: FilterConfig = Field(default_factory=lambda: FilterConfig(), description="What is rejected.")

    @model_validator(mode="after")
    def _fit_together(self) -> "BuildConfig":
        if (self.source is None) == (not self.sources):
            raise ValueError("give source or sources, one of them")
        held_out = self.held_out if isinstance(self.held_out, HeldOutConfig) else None
        if held_out and self.split_by != "source":
            raise ValueError(f"held_out is given, but split.by={self.split_by} makes the splits; set held_out=none")
        for source in self.all_sources:
            if held_out and held_out.split == source.split:
                raise ValueError(f"held_out.split is {held_out.split!r}, as source.split is; choose another name")
        if self.split_by == "source" and any(s.split_field for s in self.all_sources):
            raise ValueError("split_field is given, but split.by=source does not use it; set split.by=official")
        return self

    @model_validator(mode="after")
    def _writable(self) -> "BuildConfig":
        if isinstance(self.out, str) and self.out.startswith("http"):
            raise ValueError(
                f"out is {self.out!r}, and a web server cannot be written to; give s3://, gs:// or a folder"
            )
        return self

    @property
    def folder(self) -> Path:
        """Where this machine writes the shards: ``out``, or for an address the folder that is sent there."""
        if isinstance(self.out, Path):
            return self.out
        address = self.out.rstrip("/")
        name = f"{address.rpartition('/')[2]}-{hashlib.sha256(address.encode()).hexdigest()[:8]}"
        return self.build.staging or Path("data/staging") / name

    @property
    def folder_setting(self) -> str:
        """Name of the setting that says ``folder``."""
        return "out" if isinstance(self.out, Path) else "build.staging"

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """``source`` or ``sources``, without the held-out one."""
        return self.sources or ((self.source,) if self.source else ())

    @property
    def split_by(self) -> Literal["source", "official", "hash"]:
        """``split.by`` without auto."""
        if self.split.by != "auto":
            return self.split.by
        said = any(source.kind == "karpathy" or source.split_field for source in self.all_sources)
        return "official" if said else "source"

    @property
    def written_settings(self) -> dict[str, Any]:
        """The settings that the bytes of the data files depend on."""
        return {
            "build": {"records_per_shard": self.build.records_per_shard, "seed": self.build.seed},
            "filters": self.filters.written,
            **({} if self.split_by == "source" else {"split": self._written_split}),
        }

    @property
    def _written_split(self) -> dict[str, Any]:
        by = {"by": self.split_by}
        return {**by, **self.split.model_dump(include={"fractions", "seed"})} if self.split_by == "hash" else by
