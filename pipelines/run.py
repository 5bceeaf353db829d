"""Ways to run a build: without any orchestration, or as a Prefect flow."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from pipelines import prefect_api
from pipelines.build import Build, Summary
from pipelines.config import BuildConfig
from pipelines.progress import progress_bar


class Pending(Protocol):
    """A future of either kind."""

    def result(self) -> Any: ...


def run_plain(config: BuildConfig) -> Summary:
    """Build with nothing but this process and its build processes."""
    with Build(config) as job:
        todo = job.plan()
        with (
            progress_bar(job.num_records(todo), "build") as progress,
            ThreadPoolExecutor(config.build.num_processes) as threads,
        ):
            try:
                await_each(lambda name: threads.submit(job.build_shard, name, progress), todo, 2 * len(job.workers))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                job.workers.close()  # before the block waits for the threads, which wait for the build processes
                raise
        return job.publish()


def run_with_prefect(config: BuildConfig) -> Summary:
    """The same as a Prefect flow run, on the API in ``PREFECT_API_URL`` or on an embedded one."""
    job = Build(config)  # wrong input is said before anything is started
    if job.state.published:
        with job:
            if not job.plan():
                return job.publish()  # nothing to orchestrate
    prefect_api.prepare_environment()
    prefect_api.require_home()
    with prefect_api.api():
        from pipelines.flows import build_shards

        fields = {name: getattr(config, name) for name in BuildConfig.model_fields}
        return Summary.from_json(build_shards(**fields))


def await_each(submit: Callable[[str], Pending], names: Iterable[str], limit: int) -> None:
    """Submit every name and wait for all, at most ``limit`` at a time: a submitted task costs memory until it ran."""
    in_flight: deque[Pending] = deque()
    for name in names:
        in_flight.append(submit(name))
        if len(in_flight) >= limit:
            in_flight.popleft().result()
    for future in in_flight:
        future.result()
