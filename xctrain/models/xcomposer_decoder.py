"""InternLM2 with a low-rank branch for image positions (PLoRA) beside every linear.

B rows, T positions, S positions with those in the cache, H hidden size, N key-value heads, G query heads to each of
them, D numbers a head. The plain linears are called wqkv, wo, w1, w2 and w3: what adapters wrap and 4 bits replace.

Source: arXiv 2403.17297 (InternLM2: the fused projection), 2401.16420 (Partial LoRA), 2104.09864 (rotary positions);
tests/xctrain/test_xcomposer_parity.py holds it to the published code's numbers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xctrain.models.xcomposer_config import XComposerConfig

DECODER_LINEARS = ("wqkv", "wo", "w1", "w2", "w3")

Rotary = tuple[Tensor, Tensor]  # cosines and sines, [B, 1, T, D]


class PLora(nn.Module):
    """The low-rank branch of one linear. It acts on image positions only."""

    def __init__(self, num_in: int, num_out: int, config: XComposerConfig) -> None:
        super().__init__()
        self.Plora_A = nn.Linear(num_in, config.plora_r, bias=False)
        self.Plora_B = nn.Linear(config.plora_r, num_out, bias=False)
        self.dropout = nn.Dropout(config.plora_dropout)
        self.scale = config.plora_alpha / config.plora_r

    def forward(self, y: Tensor, x: Tensor, image: Tensor | None) -> Tensor:
        """``y``, what the linear makes of ``x``, with the branch added where ``image`` is true; None: nowhere.

        Shapes: x [B, T, in], y [B, T, out], image bool [B, T].
        """
        if image is None:
            return y
        # Masked at the narrow place: B has no bias, so zeros stay zeros. A batch without an image still goes through,
        # so that every parameter has a gradient, which data-parallel training waits for.
        inner = self.Plora_A(self.dropout(x)).masked_fill(~image[..., None], 0)
        return y + self.Plora_B(inner) * self.scale


class RMSNorm(nn.Module):
    """Root mean square norm: float32 inside, the weight applied to the result in the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [..., H], and so the result."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class KeyValueCache:
    """Rotated keys and values of the positions read so far, in memory taken once."""

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.length = 0
        self.max_length = max_length
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones included. Shapes: [B, N, T, D] in, [B, N, S, D] out."""
        held = self._layers[layer]
        if held is None:
            shape = (*keys.shape[:2], self.max_length, keys.shape[3])
            held = self._layers[layer] = (keys.new_empty(shape), values.new_empty(shape))
        end = self.length + keys.shape[2]
        for memory, new in zip(held, (keys, values), strict=True):
            memory[:, :, self.length : end] = new
        return held[0][:, :, :end], held[1][:, :, :end]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [B, N, S, D]."""
        held = self._layers[index]
        assert held is not None, "nothing was read yet"
        return held[0][:, :, : self.length], held[1][:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; one may stand several times."""
        self._layers = [held and (held[0][rows], held[1][rows]) for held in self._layers]


class Attention(nn.Module):
    """Causal attention with grouped heads from one fused projection."""

    def __init__(self, config: XComposerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_groups, self.head_size = config.num_key_value_heads, config.head_size
        self.queries = config.num_attention_heads // self.num_groups
        num_out = self.num_groups * (self.queries + 2) * self.head_size
        num_heads_out = config.num_attention_heads * self.head_size
        self.wqkv = nn.Linear(config.hidden_size, num_out, bias=config.bias)
        self.wqkv_plora = PLora(config.hidden_size, num_out, config)
        self.wo = nn.Linear(num_heads_out, config.hidden_size, bias=config.bias)
        self.wo_plora = PLora(num_heads_out, config.hidden_size, config)

    def forward(
        self, x: Tensor, image: Tensor | None, rotary: Rotary, mask: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        """Shapes: x [B, T, H], image bool [B, T], mask bool [B, 1, T, S] or None where causality alone decides."""
        batch, length, _ = x.shape
        fused = self.wqkv_plora(self.wqkv(x), x, image)
        # Each key-value head owns a block: its query heads, then its key, then its value.
        blocks = fused.view(batch, length, self.num_groups, self.queries + 2, self.head_size)
        queries = rotate(blocks[..., : self.queries, :].flatten(2, 3).transpose(1, 2), rotary)
        keys = rotate(blocks[..., self.queries, :].transpose(1, 2), rotary)
        values = blocks[..., self.queries + 1, :].transpose(1, 2)
        if cache is not None:
            keys, values = cache.append(self.layer, keys, values)
        if mask is not None:  # the fused kernels that take a mask take no grouped heads
            keys, values = (t.repeat_interleave(self.queries, dim=1) for t in (keys, values))
        heads = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None and length > 1, enable_gqa=mask is None
        )
        heads = heads.transpose(1, 2).flatten(2)
        return self.wo_plora(self.wo(heads), heads, image)


class FeedForward(nn.Module):
    """Gated MLP: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: XComposerConfig) -> None:
        super().__init__()
        narrow, wide = config.hidden_size, config.intermediate_size
        self.w1 = nn.Linear(narrow, wide, bias=config.bias)
        self.w1_plora = PLora(narrow, wide, config)
        self.w3 = nn.Linear(narrow, wide, bias=config.bias)
        self.w3_plora = PLora(narrow, wide, config)
        self.w2 = nn.Linear(wide, narrow, bias=config.bias)
        self.w2_plora = PLora(wide, narrow, config)

    def forward(self, x: Tensor, image: Tensor | None) -> Tensor:
        """Shapes: x [B, T, H], image bool [B, T]."""
        inner = F.silu(self.w1_plora(self.w1(x), x, image)) * self.w3_plora(self.w3(x), x, image)
        return self.w2_plora(self.w2(inner), inner, image)


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, config: XComposerConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, image: Tensor | None, rotary: Rotary, mask: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        """Shapes: as ``Attention``."""
        x = x + self.attention(self.attention_norm(x), image, rotary, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x), image)


class Decoder(nn.Module):
    """Embeddings to hidden states after the last norm."""

    def __init__(self, config: XComposerConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # recompute each layer in the backward pass
        # The pad token is the end token: its embedding is read, but gets no gradient, as in the published code.
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        image: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Hidden states [B, T, H] of embeddings [B, T, H].

        ``attention_mask`` [B, S] is needed where padding stands to the left of what reads it. Padding on the right
        is not: no real position looks that far.

        Shapes: image bool [B, T]; positions int64 [B, T], counted from the cache's end if None.
        """
        past = cache.length if cache is not None else 0
        total = past + x.shape[1]
        if positions is None:
            positions = torch.arange(past, total, device=x.device)[None]
        rotary = rotary_table(self.config, positions, total, x.dtype)
        mask = None if attention_mask is None else attention_pattern(attention_mask.bool(), x.shape[1])
        if mask is None and past and x.shape[1] > 1:
            mask = attention_pattern(torch.ones(1, total, dtype=torch.bool, device=x.device), x.shape[1])
        for layer in self.layers:
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, image, rotary, mask, cache, use_reentrant=False)
            else:
                x = layer(x, image, rotary, mask, cache)
        if cache is not None:
            cache.length = total
        return self.norm(x)


def attention_pattern(real: Tensor, num_queries: int) -> Tensor:
    """Who may look at whom, bool [B, 1, T, S]: real positions up to oneself, and always oneself.

    A padding position without anything to look at would be NaN, and spoil every row through its keys.

    Shapes: real bool [B, S], of which the last T = ``num_queries`` are new.
    """
    total = real.shape[1]
    keys = torch.arange(total, device=real.device)
    own = keys[total - num_queries :, None]
    return (((keys <= own) & real[:, None]) | (keys == own))[:, None]


def rotary_table(config: XComposerConfig, positions: Tensor, total: int, dtype: torch.dtype) -> Rotary:
    """Cosines and sines [B, 1, T, D] of positions [B, T] in a sequence of ``total``."""
    size, base, scaling = config.head_size, config.rope_theta, config.rope_scaling
    angles = positions[..., None].float()
    if scaling and scaling.type == "linear":
        angles = angles / scaling.factor
    elif scaling and total > config.max_position_embeddings:
        stretch = scaling.factor * total / config.max_position_embeddings - (scaling.factor - 1)
        base *= math.pow(stretch, size / (size - 2))
    exponents = torch.arange(0, size, 2, device=positions.device).float() / size
    angles = (angles * base**-exponents).repeat(1, 1, 2)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """``x`` turned by its position; number i pairs with i + D/2. Shapes: x [B, heads, T, D]."""
    cos, sin = (t.to(x.dtype) for t in rotary)  # autocast can make heads of another type than the residual stream
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
