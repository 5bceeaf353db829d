"""The build as a Prefect flow: one task run per shard; tasks pass names and counts. Work is done by ``Build``."""

from pathlib import Path
from typing import Any, Literal

from prefect import flow, get_client, get_run_logger, runtime
from prefect.settings import PREFECT_API_URL
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel

from pipelines import cluster, prefect_api, remote
from pipelines.addition import Addition
from pipelines.build import Build
from pipelines.config import BuildConfig, FilterConfig, HeldOutConfig, RunConfig, SourceConfig, SplitConfig
from pipelines.progress import Progress, progress_bar
from pipelines.run import each_result
from pipelines.signals import uncovered
from pipelines.summary import Summary
from pipelines.tasks import described, make_task, show

IN_FLIGHT = 256  # tasks that wait at a cluster, whose size can change; more than any small cluster works at


@flow(name="build-shards", persist_result=False, retries=0, validate_parameters=True)
@described(BuildConfig)
def build_shards(
    out: Path | str,
    source: SourceConfig | str | None = None,
    sources: tuple[SourceConfig, ...] = (),
    held_out: HeldOutConfig | Literal["auto", "none"] = "auto",
    split: SplitConfig = SplitConfig(),  # noqa: B008
    build: RunConfig = RunConfig(),  # noqa: B008 - frozen, and the default that Prefect's form shows
    filters: FilterConfig = FilterConfig(),  # noqa: B008
) -> dict[str, Any]:
    """Images with captions to filtered, NaN-checked WebDataset shards. The parameters are the fields of the build config.

    Of split, build and filters, fields that are not given keep what the deployment says of them.
    """
    given = {"source": source, "sources": sources, "held_out": held_out, "out": out}
    return _run(Build, given, {"split": split, "build": build, "filters": filters})


@flow(name="add-shards", persist_result=False, retries=0, validate_parameters=True)
@described(BuildConfig)
def add_shards(
    out: Path | str,
    source: SourceConfig | str | None = None,
    sources: tuple[SourceConfig, ...] = (),
    held_out: HeldOutConfig | Literal["auto", "none"] = "auto",
    split: SplitConfig = SplitConfig(),  # noqa: B008
    build: RunConfig = RunConfig(),  # noqa: B008
    filters: FilterConfig = FilterConfig(),  # noqa: B008
) -> dict[str, Any]:
    """New records to the dataset in out, as new shards; its own keep their bytes. Parameters as for build-shards."""
    given = {"source": source, "sources": sources, "held_out": held_out, "out": out}
    return _run(Addition, given, {"split": split, "build": build, "filters": filters})


def _run(kind: type[Build], given: dict[str, Any], sections: dict[str, BaseModel]) -> dict[str, Any]:
    prefect_api.end_with_server()
    prefect_api.say_in_one_paragraph()
    config = BuildConfig.model_validate({**given, **_completed(sections)})
    if runtime.deployment.id and config.build.note:  # else the command line has said it
        get_run_logger().warning(config.build.note)
    with uncovered(), kind(config) as job:
        todo: list[str] = make_task(job.plan, "plan", "plan")()
        with progress_bar(job.num_records(todo), "build") as progress:
            _build_all(job, todo, progress)
        summary: Summary = make_task(job.publish, "publish", "publish")()
    _show(summary)
    return summary.to_json()


def _completed(given: dict[str, BaseModel]) -> dict[str, Any]:
    """Each section with what it does not name as the deployment has it, where a deployment is what runs."""
    sections: dict[str, Any] = {name: section.model_dump(exclude_unset=True) for name, section in given.items()}
    if not (identifier := runtime.deployment.id):
        return sections
    with get_client(sync_client=True) as client:
        shipped = client.read_deployment(identifier).parameters
    for name, fields in sections.items():
        if added := {field: value for field, value in (shipped.get(name) or {}).items() if field not in fields}:
            fields.update(added)
            settings = ", ".join(f"{name}.{field}={value}" for field, value in added.items())
            get_run_logger().info(f"as in the deployment: {settings}")
    return sections


def _build_all(job: Build, todo: list[str], progress: Progress) -> None:
    """Build every shard, here or on a cluster."""
    config = job.config.build
    if not todo:
        return
    runner: Any
    if config.remote:
        cluster.require_reachable_api(config, str(PREFECT_API_URL.value()))
        runner = cluster.task_runner(config)
        shard, limit = make_task(build_elsewhere, "build-shard", "{name}", config.retries), IN_FLIGHT
        same = {"run": job.lock.run, "expected": remote.versions()}
    else:
        runner = ThreadPoolTaskRunner(max_workers=len(job.workers))
        shard, limit = make_task(job.build_shard, "build-shard", "{name}", config.retries), 2 * len(job.workers)

    def submit(name: str) -> Any:
        if config.remote:
            return runner.submit(shard, {"name": name, "order": str(job.write_order(name).absolute()), **same})
        return runner.submit(shard, {"name": name, "progress": progress})

    with cluster.at_work(config, runner) if config.remote else runner:
        try:
            for counts in each_result(submit, todo, limit):
                if config.remote:
                    progress(sum(counts.values()))
        except BaseException:
            job.stop()  # before the block waits for what is at work
            raise


def build_elsewhere(name: str, order: str, run: str, expected: dict[str, str]) -> dict[str, int]:
    """``remote.build_shard`` in a worker of a cluster, whose own log says no more than that of a build here."""
    prefect_api.say_what_matters()
    return remote.build_shard(name, order, run, expected)


def _show(summary: Summary) -> None:
    """The result on the run's page."""
    page = Path(summary.report).resolve()
    reasons = sorted(summary.rejected.items(), key=lambda pair: (-pair[1], pair[0]))
    rows = [
        *((f"kept, {split}", count) for split, count in summary.splits.items()),
        *((f"rejected, {reason}", count) for reason, count in reasons),
    ]
    show(
        "build-report",
        f"{summary.out}: manifest {summary.manifest_id[:16]}",
        ("records", "number"),
        rows,
        f"Pictures and histograms: [{page}]({page.as_uri()}), on the machine that built it.",
        f"manifest_id `{summary.manifest_id}`" + (", nothing has changed" if summary.unchanged else ""),
    )
