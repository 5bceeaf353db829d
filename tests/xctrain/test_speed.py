"""What a run says of its speed, and of why it waits."""

from dataclasses import replace

import pytest

from xctrain.flops import Work
from xctrain.speed import Speed, Speedometer, duration

STEP = Speed(0.5, 0.01, 16, 200, Work(4000, 2500), 3.25, None, read_s=0.02, prepare_s=0.1)


def after(speed: Speed, steps: int = 30, workers: int = 1) -> Speedometer:
    meter = Speedometer(num_workers=workers, local_world_size=1)
    for _ in range(steps):
        meter.add(speed)
    return meter


def test_the_line_says_what_is_asked_of_it() -> None:
    line = after(replace(STEP, mfu=0.41)).line(steps_left=1000)
    assert (
        line
        == "32 samples/s, 3,000 text and 5,000 image tokens/s, 0.5 s a step, 2% waiting for data, 3.25 GB, MFU 41%, 8 min "
        "left"
    )


def test_what_is_not_known_is_not_said() -> None:
    line = after(replace(STEP, work=Work())).line(10)
    assert "MFU" not in line
    assert "tokens" not in line
    assert after(STEP, steps=1).line(10) == ""  # the first step waits for workers to come up


def test_a_log_line_has_tokens_and_utilisation_where_they_are_known() -> None:
    event = replace(STEP, mfu=0.4).as_event()
    assert (event["text_tokens_per_s"], event["image_tokens_per_s"], event["tokens_per_s"]) == (3000, 5000, 400)
    assert (event["samples_per_s"], event["mfu"]) == (32, 0.4)
    assert "mfu" not in STEP.as_event()


def test_waiting_below_a_tenth_is_not_warned_about_and_above_it_once() -> None:
    assert after(replace(STEP, data_wait_s=0.04)).warning() is None
    meter = after(replace(STEP, data_wait_s=0.2))
    assert str(meter.warning()).startswith("40% of the time goes by waiting for data: ")
    assert meter.warning() is None
    assert after(replace(STEP, data_wait_s=0.2), steps=5).warning() is None


def test_the_reason_is_what_the_workers_spent_their_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    slow = replace(STEP, data_wait_s=0.2)
    reading = str(after(replace(slow, read_s=0.4)).warning())
    assert "reading takes 80% of 31.3 ms of a worker a sample; put the shards on a faster disk" in reading
    preparing = "decoding and laying out take 83% of 7.5 ms of a worker a sample; "
    assert preparing + "raise data.workers (1 for each of 1 processes here, 8 CPUs)" in str(after(slow).warning())
    assert preparing + "all 8 CPUs have a worker already" in str(after(slow, workers=8).warning())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42, "42 s"), (720, "12 min"), (3 * 3600 + 300, "3 h 05 min"), (52 * 3600, "2 d 4 h")],
)
def test_times_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
