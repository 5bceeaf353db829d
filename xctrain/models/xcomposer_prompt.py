"""Conversations as XComposer reads them: the text, images among its tokens, and which tokens are targets.

Source: the format of the published checkpoint; tests/xctrain/test_xcomposer_parity.py holds it to the published code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from PIL import Image
from torch import Tensor

from shards.errors import ConfigError
from xctrain.loss import IGNORED
from xctrain.models.xcomposer_images import CHAT, FINETUNE, Tiling, cut_tiles
from xctrain.models.xcomposer_tokenizer import EOS, TURN_END, TURN_START, Tokenizer
from xctrain.models.xcomposer_vision import num_image_tokens

PLACE = "<ImageHere>"  # stands in a text for an image; never reaches the tokenizer
IMAGE = -100  # stands among the ids for one position of an image
ROLES = ("user", "assistant")
HEADER_TOKENS = 5  # of the assistant's turn, from the newline behind the question: \\n, the mark, "ass", "istant", \\n


@dataclass(frozen=True)
class Layout:
    """Where things stand in a sequence. The published code trains with one layout and chats with another."""

    tiling: Tiling
    bos_first: bool  # the begin token before everything, or before the first text
    hd_num_of_several: int | None  # tiles of each image, if there are several


LAYOUTS = {
    "chat": Layout(CHAT, bos_first=True, hd_num_of_several=6),
    "finetune": Layout(FINETUNE, bos_first=False, hd_num_of_several=None),
}


@dataclass(frozen=True)
class TokenRow:
    """One row before padding."""

    ids: list[int]  # IMAGE at the positions of images
    labels: list[int]  # IGNORED where no loss
    pictures: list[Image.Image] = field(default_factory=list)  # in whole tiles, in the order of their places


@dataclass(frozen=True)
class Encoder:
    """Texts and images to rows, in one layout."""

    tokenizer: Tokenizer
    layout: Layout
    side: int  # of a tile, in pixels
    cells: int  # along a side of a tile
    hd_num: int  # most tiles of one image

    def tile(self, images: Sequence[Image.Image | Tensor]) -> list[Image.Image]:
        """The images of one row, resized and padded to whole tiles."""
        hd_num = self.layout.hd_num_of_several if len(images) > 1 else None
        return [self.layout.tiling.apply(image, self.side, hd_num or self.hd_num) for image in images]

    def image_tokens(self, width: int, height: int) -> int:
        """Positions of an image of this size that is alone in its row."""
        return num_image_tokens(self.layout.tiling.grid(width, height, self.side, self.hd_num), self.cells)

    def prompt(self, text: str, images: Sequence[Image.Image | Tensor] = ()) -> TokenRow:
        """A row without targets, from a text with a place for each image; one image without a place comes first."""
        return self.interleave(text, self.tile(images))

    def conversation(self, turns: Sequence[str], images: Sequence[Image.Image] = ()) -> TokenRow:
        """A row whose targets are the assistant's turns; user and assistant take turns, the user begins."""
        row = self.interleave(conversation_text(turns), self.tile(images))
        labels = answer_labels(row.ids, self.tokenizer.end_id, self.tokenizer.eos_id)
        return TokenRow(row.ids, labels, row.pictures)

    def answer(self, prompt: TokenRow, text: str) -> TokenRow:
        """The prompt followed by an answer. Targets by position: the answer and the tokens that end it."""
        ids = [*self.tokenizer.encode_plain(text.strip()), self.tokenizer.end_id, self.tokenizer.eos_id]
        return TokenRow([*prompt.ids, *ids], [*prompt.labels, *ids], prompt.pictures)

    def interleave(self, text: str, pictures: list[Image.Image]) -> TokenRow:
        """A row without targets, from a text and pictures that are tiled already.

        Raises:
            ConfigError: the text has not as many places as there are pictures.
        """
        bos = [self.tokenizer.bos_id]
        ids = list(bos) if self.layout.bos_first else []
        for piece, picture in zip_longest(_pieces(text, len(pictures)), pictures):
            if piece:
                ids += ([] if bos[0] in ids else bos) + self.tokenizer.encode(piece)
            if picture is not None:
                grid = (picture.height // self.side, picture.width // self.side)
                ids += [IMAGE] * num_image_tokens(grid, self.cells)
        return TokenRow(ids, [IGNORED] * len(ids), pictures)


def conversation_text(turns: Sequence[str]) -> str:
    """The text of a conversation for training, which ends with the end token."""
    return "".join(_turn(ROLES[i % 2], turn.strip()) for i, turn in enumerate(turns)) + EOS


def chat_text(query: str, history: Sequence[tuple[str, str]] = (), system: str = "") -> str:
    """The text before an answer: a system turn if there is one, earlier questions and answers, the question."""
    turns = [_turn("system", system)] if system else []
    for question, answer in history:
        turns += [_turn("user", question), _turn("assistant", answer)]
    return "".join([*turns, _turn("user", query), f"{TURN_START}assistant\n"])


def answer_labels(ids: Sequence[int], end_id: int, eos_id: int) -> list[int]:
    """Labels of a conversation: its ids, with IGNORED for all but the assistant's answers and what ends them.

    Counts the ends of turns: questions end at the even ones. For a row that was cut off the result is that of the
    published code, which leaves one token behind the last whole answer.
    """
    labels = list(ids)
    num_ends = answered = 0  # answered: position behind the last whole answer
    for i, token in enumerate(ids):
        if token == end_id:
            if num_ends % 2:
                answered = i + 1
            else:
                stop = min(i + 1 + HEADER_TOKENS, len(ids))
                labels[answered:stop] = [IGNORED] * (stop - answered)
            num_ends += 1
        elif token == eos_id:
            labels[i + 1 :] = [IGNORED] * (len(ids) - i - 1)
            break
    else:
        if num_ends % 2 == 0:
            labels[answered + 1 :] = [IGNORED] * len(labels[answered + 1 :])
    return labels


def pad_rows(
    rows: Sequence[TokenRow], pad_id: int, side: int, *, left: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """The model's inputs and labels of rows, with and without images, padded to the longest.

    Shapes: input_ids and attention_mask int64, image_mask bool, labels int64, all [B, T]; tiles and grids of all
    images, row after row, as in ``cut_tiles``.
    """
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids, labels, mask = torch.full(shape, pad_id), torch.full(shape, IGNORED), torch.zeros(shape, dtype=torch.int64)
    for i, row in enumerate(rows):
        span = slice(shape[1] - len(row.ids), None) if left else slice(len(row.ids))
        ids[i, span], labels[i, span], mask[i, span] = torch.tensor(row.ids), torch.tensor(row.labels), 1
    image_mask = ids == IMAGE
    tiles, grids = cut_tiles([picture for row in rows for picture in row.pictures], side)
    inputs = {
        "input_ids": ids.masked_fill(image_mask, pad_id),
        "attention_mask": mask,
        "image_mask": image_mask,
        "tiles": tiles,
        "grids": grids,
    }
    return inputs, labels


def _pieces(text: str, num_pictures: int) -> list[str]:
    pieces = text.split(PLACE)
    if len(pieces) == 1 and num_pictures == 1:
        return ["", text]
    if len(pieces) != num_pictures + 1:
        raise ConfigError(
            f"{text!r} has {len(pieces) - 1} places {PLACE} for {num_pictures} images; write one for each image"
        )
    return pieces


def _turn(role: str, text: str) -> str:
    return f"{TURN_START}{role}\n{text}{TURN_END}\n"
