"""Dynamic tiling: a picture of any shape to a grid of square tiles, with Pillow, in a loader worker.

Source: arXiv 2404.06512 (XComposer2-4KHD); tests/xctrain/test_xcomposer_parity.py holds it to the published code's
pictures, byte by byte.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shards.errors import ConfigError
from xctrain.decode import resize

WHITE = (255, 255, 255)


@dataclass(frozen=True)
class Tiling:
    """How a picture is resized and padded before it is cut."""

    enlarge: float  # the longer side grows to this many times its length, as far as the budget allows
    centered: bool  # padding on both sides of the picture, or all behind it

    def grid(self, width: int, height: int, side: int, hd_num: int) -> tuple[int, int]:
        """Tiles (down, across) of a picture.

        Raises:
            ConfigError: the picture is so thin that nothing of it would be left.
        """
        tiles, _ = self._landscape(max(width, height), min(width, height), side, hd_num)
        return tiles if width >= height else (tiles[1], tiles[0])

    def apply(self, image: Image.Image | Tensor, side: int, hd_num: int) -> Image.Image:
        """The picture, resized and padded with white to whole tiles; a tensor uint8 [3, H, W] is resized by torch.

        Raises:
            ConfigError: the picture is so thin that nothing of it would be left.
        """
        if isinstance(image, Tensor):
            height, width = image.shape[1:]
            (_, across), shorter = self._landscape(max(width, height), min(width, height), side, hd_num)
            size = (across * side, shorter) if width >= height else (shorter, across * side)
            return self._padded(Image.fromarray(resize(image, *size, "bilinear").permute(1, 2, 0).numpy()), side)
        picture = image.convert("RGB")
        upright = picture.width < picture.height
        if upright:  # swapped rather than rotated, and not by resizing the other way: rounding depends on the order
            picture = picture.transpose(Image.Transpose.TRANSPOSE)
        (_, across), height = self._landscape(*picture.size, side, hd_num)
        content = picture.resize((across * side, height), Image.Resampling.BILINEAR)
        return self._padded(content.transpose(Image.Transpose.TRANSPOSE) if upright else content, side)

    def _padded(self, content: Image.Image, side: int) -> Image.Image:
        width, height = (math.ceil(length / side) * side for length in content.size)
        left, top = ((width - content.width) // 2, (height - content.height) // 2) if self.centered else (0, 0)
        padded = Image.new("RGB", (width, height), WHITE)
        padded.paste(content, (left, top))
        return padded

    def _landscape(self, width: int, height: int, side: int, hd_num: int) -> tuple[tuple[int, int], int]:
        """Grid of a picture that lies on its longer side, and the height of its content in pixels."""
        ratio = width / height
        across = 1
        while (across + 1) * math.ceil((across + 1) / ratio) <= hd_num:
            across += 1
        across = min(math.ceil(self.enlarge * width / side), across)
        new_height = int(across * side / ratio)
        if not new_height:
            raise ConfigError(f"a picture of {width} x {height} pixels is too thin for XComposer; filter such ones out")
        return (math.ceil(new_height / side), across), new_height


FINETUNE = Tiling(enlarge=1.5, centered=True)  # as the published fine-tuning code
CHAT = Tiling(enlarge=1.0, centered=False)  # as the published chat code


def cut_tiles(pictures: Sequence[Image.Image], side: int) -> tuple[Tensor, Tensor]:
    """Tiles uint8 [sum of h * w, 3, side, side], picture after picture and row by row, and grids int64 [M, 2]."""
    grids = torch.tensor([(p.height // side, p.width // side) for p in pictures], dtype=torch.int64).reshape(-1, 2)
    tiles = [torch.zeros(0, 3, side, side, dtype=torch.uint8)]
    for picture, (h, w) in zip(pictures, grids.tolist(), strict=True):
        pixels = torch.from_numpy(np.array(picture))
        tiles.append(pixels.reshape(h, side, w, side, 3).permute(0, 2, 4, 1, 3).reshape(h * w, 3, side, side))
    return torch.cat(tiles), grids


def join_tiles(tiles: Sequence[Tensor], across: int) -> Image.Image:
    """The picture that was cut into these tiles, ``across`` of them in a row."""
    rows = [torch.cat(list(tiles[i : i + across]), dim=2) for i in range(0, len(tiles), across)]
    return Image.fromarray(torch.cat(rows, dim=1).permute(1, 2, 0).contiguous().numpy())
