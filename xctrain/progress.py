"""What rank 0 shows while it trains: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from xctrain.run import StepMetrics
from xctrain.speed import Speed, Speedometer
from xctrain.state import TrainState

_LINE_EVERY_S = 10.0  # between lines where there is no terminal


class Progress:
    """Step, loss, speed and time left, on rank 0; a warning with its reason where the run waits for data."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def begin(self, num_steps: int, state: TrainState, speedometer: Speedometer) -> None:
        """Say where the run stands and start the bar."""
        if not self.shown:
            return
        from tqdm import tqdm

        if state.samples_consumed:
            print(f"resumed at step {state.step}, {state.samples_consumed} samples consumed", file=sys.stderr)
        self.num_steps, self.said, self.speedometer = num_steps, time.monotonic(), speedometer
        if sys.stderr.isatty():
            self.bar = tqdm(total=num_steps, initial=state.step, unit="step", desc="train", mininterval=0.2)

    def show(self, state: TrainState, metrics: StepMetrics, speed: Speed) -> None:
        """After a step."""
        if not self.shown:
            return
        self.speedometer.add(speed)
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(state.step - self.bar.n)
        if now - self.said >= (_LINE_EVERY_S if self.bar is None else 1.0):
            self.said = now
            line = self.speedometer.line(self.num_steps - state.step)
            figures = f"loss {metrics.loss:.3f}, lr {metrics.lr:.1e}{', ' if line else ''}{line}"
            if self.bar is None:
                print(f"step {state.step} of {self.num_steps}, {figures}", file=sys.stderr)
            else:
                self.bar.set_postfix_str(figures)
        if warning := self.speedometer.warning():
            (print if self.bar is None else self.bar.write)(f"warning: {warning}", file=sys.stderr)
