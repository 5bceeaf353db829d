"""Progress bars for people, on standard error."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
Progress = Callable[[int], None]  # told how many records are newly done


@contextmanager
def progress_bar(total: int | None, name: str, unit: str = " images") -> Iterator[Progress]:
    """A bar with the time left; now and then a line where standard error is no terminal; nothing for what is quick."""
    from tqdm import tqdm

    interval_s = 0.2 if sys.stderr.isatty() else 10
    with tqdm(
        total=total, unit=unit, unit_scale=unit == "B", desc=name, mininterval=interval_s, delay=0.5, smoothing=0.1
    ) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def map_bounded(executor: Executor, function: Callable[[A], B], arguments: Iterable[A], limit: int) -> Iterator[B]:
    """Results in order, with at most ``limit`` calls waiting or at work: arguments are made as they are needed."""
    waiting: deque[Future[B]] = deque()
    try:
        for argument in arguments:
            waiting.append(executor.submit(function, argument))
            if len(waiting) >= limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
