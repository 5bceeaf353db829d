"""Ways to run a build: without any orchestration, or as a Prefect flow."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from pipelines import prefect_api
from pipelines.build import Build
from pipelines.config import BuildConfig
from pipelines.errors import PassingError
from pipelines.progress import Progress, progress_bar
from pipelines.retries import delays_s, trying_again
from pipelines.summary import Summary
from shards.errors import ConfigError


class Pending(Protocol):
    """A future of either kind."""

    def result(self) -> Any: ...


def run_plain(config: BuildConfig, kind: type[Build] = Build) -> Summary:
    """Build, or add, with nothing but this process and its build processes.

    Raises:
        ConfigError: the config asks for other machines, which only a flow can give work to.
    """
    if config.build.remote:
        raise ConfigError(
            f"build.runner is {config.build.runner}, which runs through Prefect; leave out --plain, or give "
            "build.runner=processes"
        )
    with kind(config) as job:
        todo = job.plan()
        with (
            progress_bar(job.num_records(todo), "build") as progress,
            ThreadPoolExecutor(config.build.num_processes) as threads,
        ):
            try:
                for _ in each_result(
                    lambda name: threads.submit(_build_shard, job, name, progress), todo, 2 * len(job.workers)
                ):
                    pass
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                job.stop()  # before the block waits for the threads, which wait for the build processes
                raise
        return job.publish()


def _build_shard(job: Build, name: str, progress: Progress) -> dict[str, int]:
    """A shard, tried again as often as the config says; in a flow this is Prefect's work."""
    retries = job.config.build.retries
    for attempt, delay_s in enumerate(delays_s(retries), 1):
        try:
            return job.build_shard(name, progress)
        except PassingError as error:
            # In one write, as several threads may have something to say.
            print(f"{trying_again(name, error, attempt, retries)}\n", end="", file=sys.stderr)
            time.sleep(delay_s)
    return job.build_shard(name, progress)


def run_with_prefect(config: BuildConfig, kind: type[Build] = Build) -> Summary:
    """The same as a Prefect flow run, on the API in ``PREFECT_API_URL`` or on an embedded one."""
    if done := _already_done(kind(config)):
        return done
    prefect_api.prepare_environment()
    prefect_api.require_home()
    with prefect_api.api():
        from pipelines import flows

        flow = flows.build_shards if kind is Build else flows.add_shards
        return Summary.from_json(flow(**{name: getattr(config, name) for name in BuildConfig.model_fields}))


def _already_done(job: Build) -> Summary | None:
    """The summary if there is nothing to orchestrate. Wrong input was said before anything is started."""
    if job.state.published:
        with job:
            if not job.plan():
                return job.publish()
    return None


def each_result(submit: Callable[[str], Pending], names: Iterable[str], limit: int) -> Iterator[Any]:
    """Submit every name; results in order. At most ``limit`` at a time: a submitted task costs memory until it ran."""
    in_flight: deque[Pending] = deque()
    for name in names:
        in_flight.append(submit(name))
        if len(in_flight) >= limit:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()
