"""From tiles to image embeddings: CLIP tower, 2 x 2 merge, separators, projector.

N views (of every image one of the whole, then its tiles), P patches and C = P/2 cells along a side of a tile, V width
of the tower, M = 4V width of a cell, h x w tiles of one image.

Source: arXiv 2103.00020 (CLIP), 2404.06512 (dynamic tiles and their separators);
tests/xctrain/test_xcomposer_parity.py holds it to the published code's numbers.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xctrain.models.xcomposer_config import MERGE, VisionConfig

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, of RGB in 0 .. 1
STD = (0.26862954, 0.26130258, 0.27577711)


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"quick_gelu": quick_gelu, "gelu": F.gelu}


class Embeddings(nn.Module):
    """Patches and the class token, with learned positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.class_embedding = nn.Parameter(torch.randn(size))
        self.patch_embedding = nn.Conv2d(3, size, config.patch_size, config.patch_size, bias=False)
        self.position_embedding = nn.Embedding(config.patches**2 + 1, size)

    def forward(self, views: Tensor) -> Tensor:
        """Shapes: views [N, 3, S, S] to [N, 1 + P * P, V]."""
        patches = self.patch_embedding(views).flatten(2).transpose(1, 2)
        first = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        return torch.cat((first, patches), dim=1) + self.position_embedding.weight


class SelfAttention(nn.Module):
    """Attention among all patches of a view."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [N, 1 + P * P, V], and so the result."""
        heads = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linears around the activation."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = _ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [N, 1 + P * P, V], and so the result."""
        return self.fc2(self.activation(self.fc1(x)))


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = Mlp(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [N, 1 + P * P, V], and so the result."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Tower(nn.Module):
    """CLIP's image encoder up to its last layer. The norm behind it is never used, so it is not here."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.embeddings = Embeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)  # so spelt in every CLIP file
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": layers})

    def forward(self, views: Tensor) -> Tensor:
        """Shapes: views [N, 3, S, S] to [N, 1 + P * P, V], the class token first."""
        x = self.pre_layrnorm(self.embeddings(views))
        layers = self.encoder["layers"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def cut_views(tiles: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
    """The normalised views of all images: of each the whole, squeezed into one tile, then its tiles row by row.

    Shapes: tiles uint8 [sum of h * w, 3, S, S]; grids (h, w) of each image; result float32 [N, 3, S, S].
    """
    mean, std = (torch.tensor(values, device=tiles.device)[:, None, None] for values in (MEAN, STD))
    side = tiles.shape[-1]
    views = []
    for (h, w), own in zip(grids, tiles.split([h * w for h, w in grids]), strict=True):
        pixels = (own.float() / 255 - mean) / std
        picture = pixels.unflatten(0, (h, w)).permute(2, 0, 3, 1, 4).reshape(1, 3, h * side, w * side)
        views += [F.interpolate(picture, size=(side, side), mode="bicubic", align_corners=False), pixels]
    return torch.cat(views)


def merge_patches(features: Tensor, patches: int) -> Tensor:
    """Cells of 2 x 2 neighbouring patches, side by side in one vector. Shapes: [N, P * P, V] to [N, C, C, M]."""
    cells = patches // MERGE
    blocks = features.reshape(len(features), cells, MERGE, cells, MERGE, -1)
    return blocks.transpose(2, 3).reshape(len(features), cells, cells, -1)


def join_views(cells: Tensor, grid: tuple[int, int], line_end: Tensor, join: Tensor) -> Tensor:
    """One image's sequence: the whole view, ``join``, then the tiles as one picture; ``line_end`` after every row.

    Shapes: cells [1 + h * w, C, C, M], line_end and join [M]; result [`num_image_tokens`, M].
    """
    (h, w), side = grid, cells.shape[1]
    picture = cells[1:].unflatten(0, (h, w)).transpose(1, 2).reshape(h * side, w * side, -1)
    lines = [torch.cat((rows, line_end.expand(len(rows), 1, -1)), dim=1).flatten(0, 1) for rows in (cells[0], picture)]
    return torch.cat((lines[0], join[None], lines[1]))


def num_image_tokens(grid: tuple[int, int], cells: int) -> int:
    """Positions of an image of h x w tiles in the sequence."""
    h, w = grid
    return cells * cells * (h * w + 1) + 1 + cells * (h + 1)
