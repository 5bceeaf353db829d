"""The embedded sample dataset: drawn scenes with five captions each, in the official COCO layout.

Every scene is a combination of few attributes, and nearly every word of a caption names one of them, so that only a model
that looks at the picture can write it. No scene occurs twice; those of val are not in train.
"""

import json
import math
import random
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

from shards.atomic import aside, publish
from shards.errors import ConfigError
from shards.places import require_folder

WIDTH, HEIGHT = 320, 240
SCALE = 2  # drawn larger and reduced, for smooth edges
VAL_SHARE = 2 / 15  # 200 for the default 1,500
FIRST_ID = {"train": 1, "val": 500_001}

COLORS = {
    "red": (214, 48, 49),
    "green": (39, 160, 79),
    "blue": (38, 98, 217),
    "yellow": (245, 203, 32),
    "purple": (146, 62, 191),
    "orange": (240, 128, 24),
}
GROUNDS = {"white": (246, 245, 240), "gray": (150, 155, 162), "black": (32, 34, 40), "pink": (247, 190, 205)}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = {"small": 0.15, "large": 0.27}  # half a side, as a share of the picture's height
PLACES = {"left": (0.24, 0.5), "right": (0.76, 0.5), "top": (0.5, 0.3), "bottom": (0.5, 0.7), "middle": (0.5, 0.5)}
RELATIONS = {"left of": "right of", "above": "below"}
PAIR_PLACES = {"left of": ((0.26, 0.5), (0.74, 0.5)), "above": ((0.5, 0.27), (0.5, 0.74))}
SMALLER = 0.8  # two things above each other have less room


@dataclass(frozen=True)
class Thing:
    size: str
    color: str
    shape: str

    def __str__(self) -> str:
        return f"{self.size} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One thing at a place, or two in a relation. ``where`` is the place or the relation."""

    ground: str
    where: str
    things: tuple[Thing, ...]

    def captions(self) -> tuple[str, ...]:
        """Five ways to say it, which share most of their word sequences."""
        if len(self.things) == 1:
            thing, at = self.things[0], f"in the {self.where}" if self.where == "middle" else f"at the {self.where}"
            return (
                f"a {thing} {at} on {self.ground}",
                f"{thing} {at}",
                f"on {self.ground} a {thing} {at}",
                f"{self.ground} picture with a {thing} {at}",
                f"{at} a {thing} on {self.ground}",
            )
        first, second = self.things
        return (
            f"a {first} {self.where} a {second} on {self.ground}",
            f"{first} {self.where} {second}",
            f"on {self.ground} a {first} {self.where} a {second}",
            f"{self.ground} picture with a {first} {self.where} a {second}",
            f"a {second} {RELATIONS[self.where]} a {first} on {self.ground}",
        )


def draw_dataset(out: Path, num_images: int, seed: int) -> dict[str, int]:
    """Write the dataset and return the number of pictures per split. The same arguments give the same bytes.

    Raises:
        ConfigError: the folder holds something else, or there are not so many different scenes.
    """
    counts = {"train": num_images, "val": max(2, round(num_images * VAL_SHARE))}
    scenes = choose_scenes(sum(counts.values()), seed)
    content = {split: _annotations(split, seed, _take(scenes, counts, split)) for split in counts}
    if _is_there(out, content):
        return counts
    require_folder(out, "--out")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: is there already and is not this dataset; choose another folder, or remove it", path=out
        )
    out = out.resolve()
    temporary = aside(out)
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "annotations").mkdir(parents=True)
    for split, text in content.items():
        folder = temporary / f"{split}2017"
        folder.mkdir()
        for i, scene in enumerate(_take(scenes, counts, split)):
            image_id = FIRST_ID[split] + i
            draw(scene, random.Random(seed * 1_000_003 + image_id)).save(
                folder / f"{image_id:012d}.jpg", "JPEG", quality=88
            )
        (temporary / "annotations" / f"captions_{split}2017.json").write_text(text)
    publish(temporary, out)
    return counts


def _take(scenes: list[Scene], counts: dict[str, int], split: str) -> list[Scene]:
    return scenes[: counts["train"]] if split == "train" else scenes[counts["train"] :]


def _is_there(out: Path, content: dict[str, str]) -> bool:
    files = {split: out / "annotations" / f"captions_{split}2017.json" for split in content}
    try:
        return all(path.is_file() and path.read_text() == content[split] for split, path in files.items())
    except OSError:  # what is wrong there, is said when it is to be written
        return False


def _annotations(split: str, seed: int, scenes: list[Scene]) -> str:
    images, annotations = [], []
    for i, scene in enumerate(scenes):
        image_id = FIRST_ID[split] + i
        images.append(
            {"id": image_id, "file_name": f"{image_id:012d}.jpg", "width": WIDTH, "height": HEIGHT, "license": 1}
        )
        for j, caption in enumerate(scene.captions()):
            annotations.append({"id": image_id * 10 + j, "image_id": image_id, "caption": caption})
    info = {"description": f"xctrain sample scenes, {split}", "version": "1", "seed": seed}
    licenses = [{"id": 1, "name": "CC0 1.0", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}]
    return json.dumps({"info": info, "licenses": licenses, "images": images, "annotations": annotations})


def choose_scenes(count: int, seed: int) -> list[Scene]:
    """Different scenes, a third of them with one thing as far as there are so many."""
    things = [Thing(*values) for values in product(SIZES, COLORS, SHAPES)]
    single = [Scene(ground, place, (t,)) for ground, place, t in product(GROUNDS, PLACES, things)]
    pairs = [
        Scene(ground, relation, (a, b))
        for ground, relation, a, b in product(GROUNDS, RELATIONS, things, things)
        if a.color != b.color
    ]
    if count > len(pairs):
        raise ConfigError(
            f"{count} pictures are asked for; there are {len(pairs)} different scenes, choose fewer images"
        )
    draws = random.Random(seed)
    num_single = min(count // 3, len(single) * 2 // 3)
    chosen = _drawn(single, num_single, draws) + _drawn(pairs, count - num_single, draws)
    return _drawn(chosen, count, draws)


def _drawn(scenes: list[Scene], count: int, draws: random.Random) -> list[Scene]:
    """``count`` of them in random order. By ``random()`` alone, whose values no Python version may change."""
    keyed = [(draws.random(), i) for i in range(len(scenes))]
    return [scenes[i] for _, i in sorted(keyed)[:count]]


def draw(scene: Scene, draws: random.Random) -> Image.Image:
    """The picture of a scene; ``draws`` moves its things a little."""
    image = _ground(GROUNDS[scene.ground])
    places = [PLACES[scene.where]] if len(scene.things) == 1 else PAIR_PLACES[scene.where]
    shrink = SMALLER if scene.where == "above" else 1.0
    for thing, (x, y) in zip(scene.things, places, strict=True):
        centre = (x + 0.08 * (draws.random() - 0.5)) * WIDTH, (y + 0.06 * (draws.random() - 0.5)) * HEIGHT
        radius = SIZES[thing.size] * shrink * HEIGHT * (0.95 + 0.1 * draws.random())
        _place(image, thing, centre, radius)
    return image


def _ground(color: tuple[int, int, int]) -> Image.Image:
    """A wall that is a little lighter on top."""
    light = Image.linear_gradient("L").resize((WIDTH, HEIGHT)).point(lambda v: 60 - v * 60 // 255)
    return Image.composite(Image.new("RGB", (WIDTH, HEIGHT), "white"), Image.new("RGB", (WIDTH, HEIGHT), color), light)


def _place(image: Image.Image, thing: Thing, centre: tuple[float, float], radius: float) -> None:
    """Shadow, body, and light from above."""
    side = math.ceil(radius) * 2 + 2
    mask = Image.new("L", (side * SCALE, side * SCALE))
    _outline(ImageDraw.Draw(mask), thing.shape, side * SCALE / 2, radius * SCALE)
    mask = mask.resize((side, side), Image.Resampling.BOX)
    left, top = round(centre[0] - side / 2), round(centre[1] - side / 2)
    pad = 12
    shadow = Image.new("L", (side + 2 * pad, side + 2 * pad))
    shadow.paste(mask.point(lambda v: v * 2 // 5), (pad, pad))
    image.paste((0, 0, 0), (left - pad + 3, top - pad + 5), shadow.filter(ImageFilter.GaussianBlur(4)))
    color = COLORS[thing.color]
    shade = Image.linear_gradient("L").resize((side, side))
    dark, bright = (tuple(round(c + (end - c) * share) for c in color) for end, share in ((0, 0.22), (255, 0.18)))
    body = Image.composite(Image.new("RGB", (side, side), dark), Image.new("RGB", (side, side), bright), shade)
    image.paste(body, (left, top), mask)


def _outline(pen: ImageDraw.ImageDraw, shape: str, middle: float, r: float) -> None:
    def polygon(*corners: tuple[float, float]) -> None:
        pen.polygon([(middle + x * r, middle + y * r) for x, y in corners], fill=255)

    if shape == "circle":
        pen.ellipse((middle - r, middle - r, middle + r, middle + r), fill=255)
    elif shape == "square":
        pen.rounded_rectangle(
            (middle - 0.9 * r, middle - 0.9 * r, middle + 0.9 * r, middle + 0.9 * r), 0.1 * r, fill=255
        )
    elif shape == "triangle":
        polygon((0, -1), (1, 0.85), (-1, 0.85))
    else:
        arm = 0.3
        for x0, y0 in ((1.0, arm), (arm, 1.0)):
            polygon((-x0, -y0), (x0, -y0), (x0, y0), (-x0, y0))
