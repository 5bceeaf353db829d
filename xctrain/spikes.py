"""A loss that stands out from those before it: data to look at, or a learning rate that is too high."""

from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW = 64  # steps that a loss is compared with
_LEAST = 32  # of them, before anything is said
_DEVIATIONS = 10  # from the median; losses of small batches have tails that are heavier than a normal's
_SHARE = 0.25  # and at least this share of the median, where losses hardly vary


class SpikeWatch:
    """Compares each loss with the median of those before it, by their median deviation."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    def expected(self, loss: float) -> float | None:
        """The median of the losses before, if this one stands out above it; then it is one of them itself."""
        found = None
        if len(self._losses) >= _LEAST:
            middle = median(self._losses)
            deviation = median(abs(other - middle) for other in self._losses)
            if loss - middle > max(_DEVIATIONS * deviation, _SHARE * abs(middle)):
                found = middle
        self._losses.append(loss)
        return found
