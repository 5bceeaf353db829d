"""Encoded pictures to pixels for training, in the mode that `model.decode` names.

exact   Pillow's picture, for the model's own processor.
fast    uint8 [3, H, W] from TurboJPEG: bit by bit Pillow's pixels. What resizes it works on tensors.
scaled  as fast, but a JPEG is decoded to the smallest multiple of an eighth of its size, at most a half, that is not
        below what the model resizes it to.

Measured per core on 640 x 480: Pillow decodes 530 pictures a second, TurboJPEG 650. In exact mode the difference would be
lost again on copying into Pillow's picture, so TurboJPEG is left out there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from shards.sample import Sample

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["exact", "fast", "scaled"]
_PILLOWS_COLORS = ("YCbCr", "Gray", "RGB")  # where both libraries give the same bits; they round CMYK differently


@dataclass(frozen=True)
class Decoder:
    """Makes pixels of samples. ``least_size``: width and height that a picture of (width, height) is resized to."""

    mode: Mode = "exact"
    least_size: Callable[[int, int], tuple[int, int]] | None = None

    def __call__(self, sample: Sample) -> "Image | Tensor":
        """The picture, RGB.

        Raises:
            DamagedSampleError: the bytes are not a whole picture.
        """
        if self.mode == "exact":
            return sample.open_image()
        pixels = None
        if sample.extension == "jpg" and "orientation" not in sample.meta:
            pixels = self._decode_jpeg(sample)
        # What TurboJPEG has no answer to, or objects to, is Pillow's to show or to refuse.
        return as_tensor(sample.open_image()) if pixels is None else pixels

    def _decode_jpeg(self, sample: Sample) -> Tensor | None:
        import simplejpeg

        try:
            height, width, colors, _ = simplejpeg.decode_jpeg_header(sample.image)
            if colors not in _PILLOWS_COLORS:
                return None
            limits = {}
            if self.mode == "scaled" and self.least_size:
                least_width, least_height = self.least_size(width, height)
                if 2 * least_width <= width and 2 * least_height <= height:
                    limits = {"min_width": least_width, "min_height": least_height, "min_factor": 2}
            pixels = simplejpeg.decode_jpeg(sample.image, "RGB", **limits)
        except ValueError:
            return None
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def ready(self, image: "Image") -> "Image | Tensor":
        """A picture of Pillow's in the form that the mode has."""
        return image if self.mode == "exact" else as_tensor(image)


def as_tensor(image: "Image") -> Tensor:
    """A picture of Pillow's as uint8 [3, H, W], a view of [H, W, 3]: the layout that torch resizes fastest."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def resize(pixels: Tensor, width: int, height: int, mode: Literal["bilinear", "bicubic"]) -> Tensor:
    """uint8 [3, height, width] of uint8 [3, H, W], antialiased as Pillow does, to within rounding."""
    size = (height, width)
    return torch.nn.functional.interpolate(pixels[None], size=size, mode=mode, antialias=True, align_corners=False)[0]
