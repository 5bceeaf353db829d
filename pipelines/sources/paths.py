"""Paths in the rows of a list: which of the images each means.

A path counts from the folder of images. An absolute one, or one that leads up (from there, or from where its list lies), is
followed only into a folder of images: a list made elsewhere could name any file of this machine, and what stands below
that folder is the image's id, which has to be the same on every machine.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.images import ImagesSpec


@dataclass(frozen=True)
class Paths:
    """``tops``: the local folders of images, absolute."""

    tops: Sequence[str]

    @classmethod
    def of(cls, images: ImagesSpec) -> "Paths":
        """Those of a place of images, or of several."""
        places = [images] if isinstance(images, str) else images.get("places", [])
        return cls([place for place in places if "://" not in place])

    def place(self, name: str, starts: Sequence[str]) -> str:
        """The name below the images; as it stands where it leads to none of them from any of the folders ``starts``."""
        if "://" in name or not leads_out(name):
            return name
        for start in starts:
            path = os.path.normpath(os.path.join(start, name))  # noqa: PTH118 - pathlib would ask the disk
            for top in self.tops:
                if path.startswith(below := f"{top.rstrip('/')}/"):
                    return path.removeprefix(below)
        return name


def leads_out(name: str) -> bool:
    """Whether a name says more than a place below the folder of images."""
    return name.startswith("/") or ".." in name.split("/")
