"""The build as a Prefect flow: one task run per shard; tasks pass names and counts. Work is done by ``Build``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from pipelines import prefect_api
from pipelines.build import Build, Summary
from pipelines.config import BuildConfig, FilterConfig, HeldOutConfig, RunConfig, SourceConfig
from pipelines.progress import progress_bar
from pipelines.run import await_each


def _task(function: Callable[..., Any], name: str, run_name: str | None = None) -> Any:
    """Prefect's caching, result storage and retries stay off: only the shard folder knows what is finished."""
    return task(name=name, task_run_name=run_name, cache_policy=NO_CACHE, persist_result=False, retries=0)(function)


@flow(name="build-shards", persist_result=False, retries=0, validate_parameters=True)
def build_shards(
    source: SourceConfig | str,
    out: Path,
    held_out: HeldOutConfig | Literal["auto", "none"] = "auto",
    build: RunConfig = RunConfig(),  # noqa: B008 - frozen, and the default that Prefect's form shows
    filters: FilterConfig = FilterConfig(),  # noqa: B008
) -> dict[str, Any]:
    """COCO Captions to filtered, NaN-checked WebDataset shards. The parameters are the fields of the build config."""
    prefect_api.end_with_server()
    prefect_api.say_in_one_paragraph()
    config = BuildConfig.model_validate(
        {"source": source, "out": out, "held_out": held_out, "build": build, "filters": filters}
    )
    with Build(config) as job:
        todo: list[str] = _task(job.plan, "plan", "plan")()
        build_shard = _task(job.build_shard, "build-shard", "{name}")
        runner: ThreadPoolTaskRunner[dict[str, int]] = ThreadPoolTaskRunner(max_workers=len(job.workers))
        with progress_bar(job.num_records(todo), "build") as progress, runner:
            try:
                await_each(
                    lambda name: runner.submit(build_shard, {"name": name, "progress": progress}),
                    todo,
                    limit=2 * len(job.workers),
                )
            except BaseException:
                job.workers.close()  # before the block waits for the threads, which wait for the build processes
                raise
        summary: Summary = _task(job.publish, "publish", "publish")()
    return summary.to_json()
