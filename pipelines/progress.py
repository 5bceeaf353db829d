"""Progress bars for people, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int], None]  # told how many records are newly done


@contextmanager
def progress_bar(total: int, name: str, unit: str = " images") -> Iterator[Progress]:
    """A bar with the time left; now and then a line where standard error is no terminal; nothing for what is quick."""
    from tqdm import tqdm

    interval_s = 0.2 if sys.stderr.isatty() else 10
    with tqdm(
        total=total, unit=unit, unit_scale=unit == "B", desc=name, mininterval=interval_s, delay=0.5, smoothing=0.1
    ) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance
