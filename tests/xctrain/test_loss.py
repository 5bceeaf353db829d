"""Summed cross-entropy."""

import pytest
import torch

from xctrain.loss import IGNORED, num_logits_needed, summed_cross_entropy


def test_loss_is_the_sum_of_minus_log_probabilities_of_the_next_token() -> None:
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[IGNORED, IGNORED, 3, 1], [IGNORED, 5, IGNORED, IGNORED]])
    log_probabilities = logits.log_softmax(dim=-1)

    expected = -(log_probabilities[0, 1, 3] + log_probabilities[0, 2, 1] + log_probabilities[1, 0, 5])

    assert summed_cross_entropy(logits, labels) == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([[IGNORED, IGNORED, 3, 1]], 3),
        ([[IGNORED, IGNORED, IGNORED, 1], [IGNORED, 2, IGNORED, IGNORED]], 4),
        ([[IGNORED, IGNORED, IGNORED]], 1),
        ([[4, 3, 1]], 3),
    ],
)
def test_last_logits_are_enough(labels: list[list[int]], expected: int) -> None:
    tensor = torch.tensor(labels)
    logits = torch.randn(*tensor.shape, 7)

    num_kept = num_logits_needed(tensor)

    assert num_kept == expected
    assert torch.equal(summed_cross_entropy(logits[:, -num_kept:], tensor), summed_cross_entropy(logits, tensor))


@pytest.mark.parametrize("num_logits", [1, 4])
def test_no_target_gives_a_zero_loss_with_zero_gradients(num_logits: int) -> None:
    logits = torch.full((2, num_logits, 7), torch.inf, requires_grad=True)

    loss = summed_cross_entropy(logits, torch.full((2, 4), IGNORED))
    loss.backward()

    assert loss == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_loss_of_low_precision_logits_is_float32() -> None:
    loss = summed_cross_entropy(torch.zeros(1, 3, 7, dtype=torch.bfloat16), torch.tensor([[IGNORED, 1, 2]]))

    assert loss.dtype == torch.float32
