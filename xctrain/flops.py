"""Model FLOPs utilisation: the products that a step's mathematics asks for, of those that its GPUs could do in that time.

A product of a token with a weight is 2 operations; a training step makes it once forward, once backward for what lies
before the weight and once for the weight's own gradient: 6 in all, as long as both are wanted. Attention adds, forward,
4 x layers x width operations for each pair of tokens that is looked at; all pairs of a row are counted, as if not causal.
What gradient checkpointing computes again, padding and dropped batches are no work of the model and not counted.

Source: PaLM (Chowdhery et al. 2022), appendix B, with its 6 split up for parts that are frozen.
"""

from collections.abc import Iterator
from dataclasses import dataclass

# Dense operations a second by what the driver calls the GPU: (products in 16 bits, in float32 without TF32), in 10^12.
# The first name that is part of the GPU's holds. Source: NVIDIA's data sheets; where these give numbers for sparse
# matrices, half of them.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GH200", 989.4, 66.9),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 66.9),
    ("H100 NVL", 835.5, 60.0),
    ("H100 PCIe", 756.0, 51.2),
    ("H100", 989.4, 66.9),
    ("H800", 989.4, 66.9),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("L40S", 362.1, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("RTX 6000 Ada", 364.2, 91.1),
    ("RTX A6000", 154.8, 38.7),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("V100-SXM2", 125.0, 15.7),
    ("V100-PCIE", 112.0, 14.0),
    ("T4", 65.0, 8.1),
)


@dataclass(frozen=True)
class Part:
    """Weights of matrices in a part of a model; tables that are only looked up in are none."""

    weights: int = 0
    trainable: int = 0  # of them, adapters included


@dataclass(frozen=True)
class Shape:
    """What a model multiplies with, in the order in which data go through it."""

    pictures: Part  # vision tower and projector, once for each patch
    decoder: Part  # once for each token of text and pictures
    head: Part  # once for each target token
    layers: int  # of the decoder
    width: int  # of its attention: heads times their size


@dataclass(frozen=True)
class Work:
    """What a batch gives a model to do, without padding; sums over micro-batches and ranks."""

    tokens: int = 0  # of text and pictures, as the decoder reads them
    image_tokens: int = 0  # of them
    patches: int = 0
    token_pairs: int = 0  # sum of the squared lengths of its rows

    def __iter__(self) -> Iterator[int]:
        """The numbers in the order of the fields, as ranks add them up."""
        return iter((self.tokens, self.image_tokens, self.patches, self.token_pairs))

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens + other.tokens,
            self.image_tokens + other.image_tokens,
            self.patches + other.patches,
            self.token_pairs + other.token_pairs,
        )


def step_flops(shape: Shape, work: Work, num_targets: int) -> float:
    """Operations of one update: forward, and backward as far as something trains."""
    total, backward = 0, False
    for part, times in ((shape.pictures, work.patches), (shape.decoder, work.tokens), (shape.head, num_targets)):
        backward = backward or part.trainable > 0  # gradients pass through whatever lies behind a weight that trains
        total += times * 2 * (part.weights + backward * part.weights + part.trainable)
        if part is shape.decoder:
            total += 4 * shape.layers * shape.width * work.token_pairs * (3 if backward else 1)
    return float(total)


def peak_flops(device: str, *, half: bool) -> float | None:
    """Most operations a second of a GPU of this name, with products in 16 bits or in float32; None if it is not known."""
    for name, in_half, in_float in _PEAKS:
        if name in device:
            return (in_half if half else in_float) * 1e12
    return None
