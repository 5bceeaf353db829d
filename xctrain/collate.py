"""How samples become a batch. The only place that pads.

B rows (at least one a slot: a slot with several captions becomes several rows), T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xctrain.flops import Work
from xctrain.loss import IGNORED

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Row:
    """One slot of the stream, read and decoded."""

    n: int  # position: samples consumed before it
    epoch: int
    key: str
    image: "Image | Tensor"  # RGB, as decode.py has it; a blank one where masked
    captions: tuple[str, ...]  # chosen already, usually one
    masked: str | None = None  # why the slot has no loss
    read_s: float = 0.0  # seconds until its bytes were there


@dataclass(frozen=True)
class Batch:
    """One micro-batch: what one forward on one rank takes."""

    inputs: dict[str, Tensor]  # what the model's forward takes besides labels: input_ids int64 [B, T] right-padded ...
    labels: Tensor  # int64 [B, T], -100 where no loss
    positions: tuple[int, ...]  # of each slot
    keys: tuple[str, ...]  # of each slot; goes into every error
    masked: tuple[str | None, ...]  # of each slot: why it has no loss
    num_targets: int  # target tokens
    work: Work = field(default_factory=Work)  # what it gives the model to do
    read_s: float = 0.0  # seconds that reading its samples took
    prepare_s: float = 0.0  # seconds that decoding and laying them out took

    def to(self, device: torch.device | str) -> "Batch":
        """The batch with its tensors on ``device``."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory; the torch loader calls it by this name."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.pin_memory())


def append_answers(
    prompts: Mapping[str, Tensor],
    answers: Sequence[Sequence[int]],
    *,
    pad_id: int,
    answer_values: Mapping[str, int] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and labels of right-padded prompts, each followed by its answer's token ids.

    Labels are set by position, never by token id: the pad token may be the end token. Every other tensor that runs
    along the tokens grows alike, by 0 or by its number in ``answer_values``; pixels are left as they are.

    Shapes: prompts["input_ids"] and prompts["attention_mask"] int64 [B, P]; results [B, T], T the longest row.
    """
    lengths = prompts["attention_mask"].sum(dim=1).tolist()
    shape = prompts["input_ids"].shape
    num_tokens = max(length + len(answer) for length, answer in zip(lengths, answers, strict=True))
    values = {"attention_mask": 1, **(answer_values or {})}
    inputs = dict(prompts)
    labels = torch.full((shape[0], num_tokens), IGNORED)
    for name, tensor in prompts.items():
        if tensor.shape == shape and not tensor.is_floating_point():
            inputs[name] = tensor.new_full((shape[0], num_tokens), pad_id if name == "input_ids" else 0)
    for i, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        span = slice(length, length + len(answer))
        labels[i, span] = torch.tensor(answer)
        for name, tensor in inputs.items():
            if tensor is not prompts[name]:
                tensor[i, :length] = prompts[name][i, :length]
                tensor[i, span] = labels[i, span] if name == "input_ids" else values.get(name, 0)
    return inputs, labels
