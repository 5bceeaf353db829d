"""The build as a Prefect flow: one task run per shard, tasks that pass names and counts. Only this module and
``prefect_api`` know Prefect; the work is done by ``Build`` in its own processes."""

from collections import deque
from pathlib import Path
from typing import Any, Literal

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from pipelines.build import Build, Summary
from pipelines.config import BuildConfig, FilterConfig, HeldOutConfig, RunConfig, SourceConfig
from pipelines.run import progress_bar

# Prefect's own caching and result storage stay off: what is finished, only the shard folder knows.
OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}


@flow(name="build-shards", persist_result=False, retries=0)
def build_shards(
    source: SourceConfig | str,
    out: Path,
    held_out: HeldOutConfig | Literal["auto", "none"] = "auto",
    build: RunConfig = RunConfig(),  # noqa: B008 - frozen, and the default that Prefect's form shows
    filters: FilterConfig = FilterConfig(),  # noqa: B008
) -> dict[str, Any]:
    """COCO Captions to filtered, NaN-checked WebDataset shards. The parameters are the fields of the build config."""
    config = BuildConfig.model_validate(
        {"source": source, "out": out, "held_out": held_out, "build": build, "filters": filters}
    )
    processes = config.build.num_processes
    with Build(config) as job, progress_bar(job.num_records) as progress:
        plan = task(job.plan, name="plan", **OPTIONS)
        todo: list[str] = plan(progress)
        build_shard = task(job.build_shard, name="build-shard", task_run_name="{name}", **OPTIONS)
        with ThreadPoolTaskRunner(max_workers=processes) as runner:
            in_flight: deque[PrefectFuture[dict[str, int]]] = deque()
            try:
                for name in todo:
                    in_flight.append(runner.submit(build_shard, {"name": name, "progress": progress}))
                    if len(in_flight) >= 2 * processes:  # what is submitted and not yet running costs memory
                        in_flight.popleft().result()
                while in_flight:
                    in_flight.popleft().result()
            except BaseException:
                job.stop()
                raise
        publish = task(job.publish, name="publish", **OPTIONS)
        summary: Summary = publish()
    return summary.to_json()
