"""``DownloadConfig``: the official COCO files with what is known of them, and any others. Also the flow's parameters."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator

from pipelines.config import Settings
from pipelines.transfer import Wanted

HOST = "http://images.cocodataset.org"  # its https has a certificate for another name; the digests below make up for it
# Size and md5 of the official files. The host publishes neither; these stand in many public projects that check what
# they fetch: the sizes in logs of wget and Keras, the md5 in PaddleDetection (ppdet/utils/download.py), MLPerf inference
# (vision) and LAVIS; seen to agree in at least three unrelated ones each.
OFFICIAL = {
    "coco2017": {
        "train": ("zips/train2017.zip", 19_336_861_798, "cced6f7f71b7629ddf16f17bbcfab6b2"),
        "val": ("zips/val2017.zip", 815_585_330, "442b8da7639aecaf257c1dceb8ba8c80"),
        "annotations": (
            "annotations/annotations_trainval2017.zip", 252_907_541, "f4bbac642086de4f52a3fdda2de5fa2c",
        ),
    },
    "coco2014": {
        "train": ("zips/train2014.zip", 13_510_573_713, "0da8c0bd3d6becc4dcb32757491aca88"),
        "val": ("zips/val2014.zip", 6_645_013_297, "a3d79f5ed8d289b7a7554ce06a5782b3"),
        "annotations": (
            "annotations/annotations_trainval2014.zip", 252_872_794, "0a379cfc70b0e71301e0f377548639bd",
        ),
    },
}  # fmt: skip
CAPTIONS = "annotations/captions_*.json"  # of the annotations, what a build reads
CAPTIONS_BYTES = 100_000_000  # in either year's, rounded up
ANNOTATIONS = frozenset(PurePosixPath(files["annotations"][0]).name for files in OFFICIAL.values())

Digest = Annotated[str, Field(pattern="^[0-9a-f]+$")]


class FileConfig(Settings):
    """One file to fetch."""

    url: str = Field(description="http:// or https://; a signature in it is shown nowhere.")
    name: str = Field("", description="Name in out. Default: the last part of the URL.")
    num_bytes: int | None = Field(None, ge=0, description="Its size; unknown, the server is asked.")
    sha256: Digest | None = Field(None, description="In hex. Without it and md5, a zip's own checksums are compared.")
    md5: Digest | None = Field(None, description="In hex, for publishers that give no sha256.")

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fetchable(self) -> "FileConfig":
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {self.url.partition('?')[0]!r}, expected http:// or https:// and a host")
        if not self.file_name or self.file_name.startswith(".") or set(self.file_name) & set("/\\\0"):
            raise ValueError(f"name is {self.file_name!r}, expected that of a file, without folders; give name")
        for digest, digits in (("sha256", 64), ("md5", 32)):
            if (value := getattr(self, digest)) and len(value) != digits:
                raise ValueError(f"{digest} has {len(value)} digits, expected {digits}")
        return self

    @property
    def file_name(self) -> str:
        return self.name or unquote(PurePosixPath(urlsplit(self.url).path).name)


class DownloadConfig(Settings):
    """Files over HTTP into a folder, from which a build then reads."""

    out: Path = Field(description="Folder for the files; for COCO it then has the official layout.")
    dataset: Literal["coco2017", "coco2014", "none"] = Field(
        "coco2017", description="Official files to fetch; none for those in files alone."
    )
    parts: tuple[Literal["train", "val", "annotations"], ...] = Field(
        ("train", "val", "annotations"),
        description="Which of them. Default all: 20.4 GB each year; val and annotations are 1.1 GB (2017).",
    )
    mirror: str = Field(HOST, description="Host of the official files; another must have the same paths and bytes.")
    files: tuple[FileConfig, ...] = Field(
        (), description="More files: a URL, or url with name, num_bytes, sha256, md5."
    )
    connections: int = Field(4, ge=1, le=32, description="Files fetched at once; a few, as hosts are shared by many.")
    connections_per_host: int = Field(2, ge=1, le=8, description="Of them from one host.")
    tries: int = Field(
        8, ge=1, le=100,
        description="Failures in a row, without a new MiB between them, after which a file is given up; with the "
        "waits between them a minute and more, which outlasts a restart of a server.",
    )  # fmt: skip
    timeout_s: float = Field(
        30, gt=0, le=3600, description="How long to wait for the next byte before the try counts as failed."
    )

    @model_validator(mode="after")
    def _something_to_fetch(self) -> "DownloadConfig":
        names = [wanted.name for wanted in self.wanted]
        if not names:
            raise ValueError("there is nothing to fetch; give dataset and parts, or files")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"files: two are named {doubled[0]!r}; give one of them another name")
        return self

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """All files to fetch."""
        official = OFFICIAL.get(self.dataset, {})
        chosen = [official[part] for part in dict.fromkeys(self.parts) if part in official]
        return (
            *(
                Wanted(PurePosixPath(path).name, f"{self.mirror.rstrip('/')}/{path}", size, md5=md5)
                for path, size, md5 in chosen
            ),
            *(Wanted(f.file_name, f.url, f.num_bytes, f.sha256, f.md5) for f in self.files),
        )
