"""Padding and labels."""

import torch

from xctrain.collate import Batch, append_answers
from xctrain.loss import IGNORED

PAD = 2  # also the end token


def prompts() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([[7, 8, 9], [7, 9, PAD]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "token_type_ids": torch.tensor([[0, 1, 0], [0, 1, 0]]),
        "pixel_values": torch.ones(2, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 2]]).repeat(2, 1),
    }


def test_answers_follow_their_prompt_without_a_gap() -> None:
    inputs, _ = append_answers(prompts(), [[4, PAD], [5, 6, 4, PAD]], pad_id=PAD)

    assert inputs["input_ids"].tolist() == [[7, 8, 9, 4, PAD, PAD], [7, 9, 5, 6, 4, PAD]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]


def test_labels_are_the_answers_by_position_where_the_pad_is_the_end_token() -> None:
    _, labels = append_answers(prompts(), [[4, PAD], [5, 6, 4, PAD]], pad_id=PAD)

    assert labels.tolist() == [
        [IGNORED, IGNORED, IGNORED, 4, PAD, IGNORED],
        [IGNORED, IGNORED, 5, 6, 4, PAD],
    ]


def test_tensors_along_the_tokens_grow_alike_and_pixels_stay() -> None:
    given = prompts()
    inputs, _ = append_answers(given, [[4, PAD], [5, PAD]], pad_id=PAD, answer_values={"token_type_ids": 1})

    assert inputs["token_type_ids"].tolist() == [[0, 1, 0, 1, 1], [0, 1, 1, 1, 0]]
    assert inputs["pixel_values"] is given["pixel_values"]
    assert inputs["image_grid_thw"] is given["image_grid_thw"]


def test_batch_moves_to_a_device_with_all_else_kept() -> None:
    batch = Batch({"input_ids": torch.ones(1, 2)}, torch.ones(1, 2), (5,), ("a",), (None,), 1)

    moved = batch.to("meta")

    assert moved.labels.device.type == moved.inputs["input_ids"].device.type == "meta"
    assert (moved.positions, moved.keys, moved.masked, moved.num_targets) == ((5,), ("a",), (None,), 1)
