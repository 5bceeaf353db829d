"""XComposer2.5: CLIP tower, projector and decoder, under the parameter names of the published checkpoint."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xctrain.loss import IGNORED
from xctrain.models.xcomposer_config import XComposerConfig
from xctrain.models.xcomposer_decoder import Decoder, KeyValueCache
from xctrain.models.xcomposer_vision import Tower, cut_views, join_views, merge_patches


class XComposer(nn.Module):
    """The model without its tokenizer. B rows, T positions, M images, S pixels along a side of a tile."""

    def __init__(self, config: XComposerConfig) -> None:
        super().__init__()
        self.config = config
        self.views_at_once = 16  # in one call of the tower; what they need at a time bounds memory
        merged, hidden = config.merged_size, config.hidden_size
        self.plora_glb_GN = nn.Parameter(torch.randn(1, 1, merged))
        self.plora_sub_GN = nn.Parameter(torch.randn(1, 1, 1, merged))
        tower = nn.ModuleDict({"vision_model": Tower(config.vision_config)})
        self.vit = nn.ModuleDict({"vision_tower": tower})
        self.vision_proj = nn.Sequential(nn.Linear(merged, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.model = Decoder(config)
        self.output = nn.Linear(hidden, config.vocab_size, bias=False)

    @property
    def tower(self) -> Tower:
        """The image encoder."""
        tower = self.vit.get_submodule("vision_tower.vision_model")
        assert isinstance(tower, Tower)
        return tower

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.plora_glb_GN.device

    def checkpoint_gradients(self, enabled: bool) -> None:
        """Recompute every layer in the backward pass: a third more time for a fraction of the memory."""
        self.model.gradient_checkpointing = self.tower.gradient_checkpointing = enabled

    def image_cells(self, tiles: Tensor, grids: Tensor) -> Tensor:
        """The images' sequences before the projector, one behind another: [sum of their tokens, merged size].

        Shapes: tiles uint8 [sum of h * w, 3, S, S], image after image, row by row; grids int64 [M, 2], (h, w).
        """
        shapes = [(h, w) for h, w in grids.tolist()]
        dtype = self.plora_sub_GN.dtype
        views = cut_views(tiles, shapes).to(dtype)
        features = torch.cat([self.tower(chunk)[:, 1:].to(dtype) for chunk in views.split(self.views_at_once)])
        cells = merge_patches(features, self.config.vision_config.patches).split([1 + h * w for h, w in shapes])
        line_end, join = self.plora_sub_GN.flatten(), self.plora_glb_GN.flatten()
        return torch.cat([join_views(own, grid, line_end, join) for own, grid in zip(cells, shapes, strict=True)])

    def embed(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Embeddings [B, T, hidden]: of the token ids, and of the images where ``image_mask`` is true.

        Shapes: input_ids int64 [B, T], image_mask bool [B, T], tiles and grids as ``image_cells``: images in the order
        of their places.
        """
        embeddings: Tensor = self.model.tok_embeddings(inputs["input_ids"])
        if not len(inputs["grids"]):
            return embeddings
        images = self.vision_proj(self.image_cells(inputs["tiles"], inputs["grids"])).to(embeddings.dtype)
        return embeddings.masked_scatter(inputs["image_mask"][..., None], images)

    def forward(
        self,
        embeddings: Tensor,
        image_mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Hidden states [B, T, hidden]; arguments as ``Decoder``'s. ``logits`` makes logits of those that are wanted."""
        hidden: Tensor = self.model(
            embeddings, image_mask, positions=positions, attention_mask=attention_mask, cache=cache
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [..., vocabulary]."""
        logits: Tensor = self.output(hidden)
        return logits.float()

    def summed_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Float32 scalar: cross-entropy summed over the targets; 0 with zero gradients where there are none.

        Logits are made of the positions that predict a target and of no others: at 92,544 tokens and 2,061 image
        positions a row, all of them would be most of the memory.

        Shapes: hidden [B, T, hidden], labels int64 [B, T]; position t predicts label t + 1.
        """
        targets = labels[:, 1:]
        kept = targets != IGNORED
        return F.cross_entropy(self.logits(hidden[:, :-1][kept]), targets[kept], reduction="sum")
