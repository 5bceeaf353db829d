"""The build without any orchestration, and what its two ways of running share."""

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from pipelines import prefect_api
from pipelines.build import Build, Summary
from pipelines.config import BuildConfig
from pipelines.workers import Progress


@contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """A bar over records with the time left, on standard error; a line now and then where that is no terminal."""
    from tqdm import tqdm

    quiet_s = 0.2 if sys.stderr.isatty() else 10
    with tqdm(total=total, unit=" images", desc="build", mininterval=quiet_s, smoothing=0.1, dynamic_ncols=True) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def run_plain(config: BuildConfig) -> Summary:
    """Build in this process and its build processes."""
    with Build(config) as job, progress_bar(job.num_records) as progress:
        todo = job.plan(progress)
        with ThreadPoolExecutor(config.build.num_processes) as threads:
            in_flight: deque[Future[dict[str, int]]] = deque()
            try:
                for name in todo:
                    in_flight.append(threads.submit(job.build_shard, name, progress))
                    if len(in_flight) >= 2 * config.build.num_processes:
                        in_flight.popleft().result()
                while in_flight:
                    in_flight.popleft().result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                job.stop()  # before the block waits for the threads, which wait for the build processes
                raise
        return job.publish()


def run_with_prefect(config: BuildConfig) -> Summary:
    """The same as a Prefect flow run, on the API in ``PREFECT_API_URL`` or on an embedded one."""
    Build(config)  # wrong input is said before anything is started
    prefect_api.prepare_environment()
    with prefect_api.api():
        from pipelines.flows import build_shards

        fields = {name: getattr(config, name) for name in BuildConfig.model_fields}
        return Summary.from_json(build_shards(**fields))
