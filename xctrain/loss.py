"""Summed cross-entropy over the target tokens. The loop divides it by their number in the global batch.

B rows, T tokens, K last positions whose logits were computed, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # label of a token without loss; PyTorch's own default


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Float32 scalar: cross-entropy summed over the targets; 0 with zero gradients where there are none.

    Shapes: logits [B, K, V] of the last K <= T positions; labels int64 [B, T]. Position t predicts label t + 1.
    """
    num_predicted = logits.shape[1] - 1
    targets = labels[:, labels.shape[1] - num_predicted :]
    kept = targets != IGNORED
    # Selected before the cast: at a vocabulary of 150,000, float32 logits of padding would be most of the memory.
    return F.cross_entropy(logits[:, :num_predicted][kept].float(), targets[kept], reduction="sum")


def num_logits_needed(labels: Tensor) -> int:
    """Number K >= 1 of last positions whose logits the loss reads: the one before the first target, and all behind."""
    columns = (labels != IGNORED).any(dim=0).nonzero()
    first = int(columns[0]) if len(columns) else labels.shape[1]
    return labels.shape[1] - first + 1 if first else labels.shape[1]
