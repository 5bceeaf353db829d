"""Writing with a key-value cache: greedy for a batch, beam search for one prompt. Draws no random number."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from xctrain.models.xcomposer_decoder import KeyValueCache
from xctrain.models.xcomposer_model import XComposer


class Reading:
    """What a model has read of a batch of prompts, and what it would say next. B rows, T positions, V vocabulary."""

    def __init__(self, model: XComposer, inputs: Mapping[str, Tensor], max_new_tokens: int) -> None:
        """Read the prompts; inputs as ``pad_rows`` makes them, padded on the left."""
        self.model = model
        real = inputs["attention_mask"]
        self.positions = real.sum(dim=1)  # of the next token in each row
        self.mask = None if bool(real.all()) else real  # None spares a mask, and allows the fastest kernels
        self.cache = KeyValueCache(len(model.model.layers), real.shape[1] + max_new_tokens)
        positions = (real.cumsum(dim=1) - 1).masked_fill(real == 0, 1)
        self.logits = self._read(model.embed(inputs), inputs["image_mask"], positions)

    def feed(self, tokens: Tensor) -> None:
        """Read one more token in each row. Shapes: int64 [B]."""
        if self.mask is not None:
            self.mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), dim=1)
        embeddings = self.model.model.tok_embeddings(tokens[:, None])
        self.logits = self._read(embeddings, None, self.positions[:, None])
        self.positions = self.positions + 1

    def select(self, rows: Tensor) -> None:
        """Go on with these rows; one may stand several times."""
        self.cache.select(rows)
        self.logits, self.positions = self.logits[rows], self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]

    def _read(self, embeddings: Tensor, image_mask: Tensor | None, positions: Tensor) -> Tensor:
        hidden = self.model(embeddings, image_mask, positions=positions, attention_mask=self.mask, cache=self.cache)
        return self.model.logits(hidden[:, -1])


@torch.no_grad()
def write_greedily(
    model: XComposer,
    inputs: Mapping[str, Tensor],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    repetition_penalty: float = 1.0,
) -> list[list[int]]:
    """The likeliest token after each prompt, again and again; ids of each row without the token that ended it.

    A penalty above 1 makes tokens that were written before less likely (arXiv 1909.05858); the prompt is not counted.
    """
    reading = Reading(model, inputs, max_new_tokens)
    ends = torch.tensor(sorted(end_ids), dtype=torch.int64, device=model.device)
    written = ends.new_empty((len(reading.logits), 0))
    done = torch.zeros(len(written), dtype=torch.bool, device=model.device)
    while written.shape[1] < max_new_tokens and not done.all():
        if written.shape[1]:
            reading.feed(written[:, -1])
        said = reading.logits.gather(1, written)
        said = torch.where(said < 0, said * repetition_penalty, said / repetition_penalty)
        token = reading.logits.scatter(1, written, said).argmax(dim=-1)
        done |= torch.isin(token, ends)  # a row that is done writes on beside the others; that is cut off
        written = torch.cat((written, token[:, None]), dim=1)
    return [_until_end(row, end_ids) for row in written.tolist()]


@torch.no_grad()
def write_with_beams(
    model: XComposer, inputs: Mapping[str, Tensor], *, num_beams: int, max_new_tokens: int, end_ids: Collection[int]
) -> list[int]:
    """The best answer to one prompt, by mean log-probability, among the ``num_beams`` best at every length.

    An answer counts as ended if its end token is among the ``num_beams`` best continuations, and the search stops
    when no running beam beats the ``num_beams`` ended ones: what transformers calls ``early_stopping=False``.
    """
    reading = Reading(model, inputs, max_new_tokens)
    reading.select(torch.zeros(num_beams, dtype=torch.int64, device=model.device))
    beams: list[list[int]] = [[]] * num_beams
    scores = torch.tensor([0.0] + [-torch.inf] * (num_beams - 1), device=model.device)  # all beams begin as one
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, max_new_tokens + 1):
        totals = reading.logits.log_softmax(dim=-1) + scores[:, None]
        best = totals.flatten().topk(2 * num_beams)
        going: list[tuple[float, int, int]] = []
        for rank, (total, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            beam, token = divmod(index, totals.shape[1])
            if token not in end_ids:
                going.append((total, beam, token))
            elif rank < num_beams:
                ended.append((total / length, beams[beam]))
        going = going[:num_beams]
        beams = [[*beams[beam], token] for _, beam, token in going]
        ended = sorted(ended, key=lambda e: e[0], reverse=True)[:num_beams]
        if len(ended) == num_beams and going[0][0] / length <= ended[-1][0]:
            break
        if length == max_new_tokens:
            ended += [(total / length, beam) for (total, *_), beam in zip(going, beams, strict=True)]
        else:
            values, rows, tokens = (torch.tensor(column, device=model.device) for column in zip(*going, strict=True))
            scores = values
            reading.select(rows)
            reading.feed(tokens)
    return max(ended, key=lambda e: e[0])[1]


def _until_end(ids: list[int], end_ids: Collection[int]) -> list[int]:
    return next((ids[:i] for i, token in enumerate(ids) if token in end_ids), ids)
