"""Dynamic tiling and the join of views, for pictures of any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shards.errors import ConfigError
from xctrain.models.xcomposer_images import CHAT, FINETUNE, Tiling, cut_tiles
from xctrain.models.xcomposer_vision import cut_views, join_views, merge_patches, num_image_tokens

SIDE = 28
SIZES = st.integers(1, 300)
BUDGETS = st.integers(1, 30)
TILINGS = st.sampled_from([CHAT, FINETUNE])


@settings(deadline=None, max_examples=60)
@given(SIZES, SIZES, BUDGETS, TILINGS)
def test_grid_keeps_the_budget_and_is_that_of_the_picture(width: int, height: int, hd_num: int, tiling: Tiling) -> None:
    if max(width, height) > SIDE * min(width, height):
        return
    h, w = tiling.grid(width, height, SIDE, hd_num)

    picture = tiling.apply(Image.new("RGB", (width, height)), SIDE, hd_num)

    assert 1 <= h * w <= max(hd_num, h, w)
    assert picture.size == (w * SIDE, h * SIDE)


@settings(deadline=None, max_examples=60)
@given(SIZES, SIZES, BUDGETS, TILINGS)
def test_a_picture_on_its_side_has_the_grid_on_its_side(width: int, height: int, hd_num: int, tiling: Tiling) -> None:
    if max(width, height) > SIDE * min(width, height):
        return
    h, w = tiling.grid(width, height, SIDE, hd_num)

    assert tiling.grid(height, width, SIDE, hd_num) == ((w, h) if width != height else (h, w))


def test_nothing_of_the_picture_is_cut_off() -> None:
    box = Image.eval(CHAT.apply(Image.new("RGB", (90, 40)), SIDE, 6), lambda value: 255 - value).getbbox()
    assert box == (0, 0, 84, 37)


@pytest.mark.parametrize("size", [(2000, 3), (3, 2000)])
def test_a_picture_that_would_vanish_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="a picture of 2000 x 3 pixels is too thin for XComposer"):
        CHAT.grid(*size, SIDE, 1)


def test_tiles_are_cut_row_by_row_picture_after_picture() -> None:
    pictures = [Image.new("RGB", (2 * SIDE, SIDE), "red"), Image.new("RGB", (SIDE, SIDE), "blue")]
    pictures[0].paste("lime", (SIDE, 0, 2 * SIDE, SIDE))

    tiles, grids = cut_tiles(pictures, SIDE)

    assert grids.tolist() == [[1, 2], [1, 1]]
    assert tiles.dtype == torch.uint8
    assert tiles[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert (tiles == tiles[:, :, :1, :1]).all()


def test_without_pictures_there_are_no_tiles() -> None:
    tiles, grids = cut_tiles([], SIDE)

    assert tiles.shape == (0, 3, SIDE, SIDE)
    assert grids.shape == (0, 2)


def test_each_picture_has_a_view_of_the_whole_before_its_tiles() -> None:
    pictures = [Image.new("RGB", (SIDE * w, SIDE * h), color) for w, h, color in ((2, 1, "red"), (1, 2, "blue"))]
    tiles, grids = cut_tiles(pictures, SIDE)

    views = cut_views(tiles, [(h, w) for h, w in grids.tolist()])

    assert views.shape == (6, 3, SIDE, SIDE)
    torch.testing.assert_close(views[0], views[1])
    torch.testing.assert_close(views[3], views[5])
    assert not torch.allclose(views[0], views[3])


def test_merged_patches_keep_their_place() -> None:
    patches = torch.arange(16.0).reshape(1, 16, 1)  # a 4 x 4 picture of its own numbers

    cells = merge_patches(patches, 4)

    assert cells[0, 0, 0].tolist() == [0, 1, 4, 5]
    assert cells[0, 1, 0].tolist() == [8, 9, 12, 13]


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (3, 1)])
def test_sequence_is_whole_view_join_and_tiles_with_an_end_on_every_row(grid: tuple[int, int]) -> None:
    (h, w), side = grid, 2
    picture = torch.arange(float(h * side * w * side)).reshape(h * side, w * side)
    tiles = picture.reshape(h, side, w, side).transpose(1, 2).reshape(h * w, side, side)
    cells = torch.cat((torch.full((1, side, side), -3.0), tiles))[..., None]

    sequence = join_views(cells, grid, torch.tensor([-1.0]), torch.tensor([-2.0]))[:, 0].tolist()

    local = [value for row in picture.tolist() for value in (*row, -1)]
    assert sequence == [-3, -3, -1, -3, -3, -1, -2, *local]
    assert len(sequence) == num_image_tokens(grid, side)
