"""Flows around a build: fetch the official files, and recheck a shard folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from pipelines import prefect_api
from pipelines.config import usable_cpus
from pipelines.download import Download, Downloaded
from pipelines.download_config import DownloadConfig, FileConfig
from pipelines.errors import DamageError, DownloadError
from pipelines.progress import progress_bar
from pipelines.signals import uncovered
from pipelines.tasks import described, make_task, show
from shards.errors import UserError, counted
from shards.mirror import RemoteShards
from shards.remote import is_remote
from shards.verify import Checked, Finding, FolderShards

E = TypeVar("E", bound=UserError)
MAX_SHOWN = 200  # findings on the page


@flow(name="download-coco", persist_result=False, retries=0, validate_parameters=True)
@described(DownloadConfig)
def download_coco(
    out: Path,
    dataset: Literal["coco2017", "coco2014", "none"] = "coco2017",
    parts: tuple[Literal["train", "val", "annotations"], ...] = ("train", "val", "annotations"),
    mirror: str = DownloadConfig.model_fields["mirror"].default,
    files: tuple[FileConfig | str, ...] = (),
    connections: int = DownloadConfig.model_fields["connections"].default,
    connections_per_host: int = DownloadConfig.model_fields["connections_per_host"].default,
    tries: int = DownloadConfig.model_fields["tries"].default,
    timeout_s: float = DownloadConfig.model_fields["timeout_s"].default,
) -> dict[str, Any]:
    """The official COCO files, or any list of URLs, into a folder: resumed, checked, and whole or not there."""
    fields = {name: value for name, value in locals().items() if name in DownloadConfig.model_fields}
    prefect_api.end_with_server()
    prefect_api.say_in_one_paragraph()
    config = DownloadConfig.model_validate(fields)
    with uncovered(), Download(config) as job:
        todo: list[str] = make_task(job.plan, "plan", "plan")()
        fetch = make_task(job.fetch, "fetch", "{name}")
        with (
            progress_bar(job.num_bytes, "download", "B") as progress,
            ThreadPoolTaskRunner[None](max_workers=config.connections) as runner,
        ):
            try:
                errors = [
                    error
                    for future in [runner.submit(fetch, {"name": name, "progress": progress}) for name in todo]
                    if (error := _error_of(future.result, DownloadError))
                ]
            except BaseException:
                job.stop()  # before the block waits for what is being fetched
                raise
        if errors:  # the other files were fetched nevertheless
            raise errors[0]
        done: Downloaded = make_task(job.finish, "finish", "finish")()
    rows = [*((name, "fetched") for name in done.fetched), *((name, "was there") for name in done.present)]
    show("download", f"{config.out}: {counted(len(rows), 'file')}", ("file", ""), rows, str(done))
    return done.to_json()


@flow(name="verify-shards", persist_result=False, retries=0, validate_parameters=True)
def verify_shards(folder: str) -> dict[str, Any]:
    """Recheck every byte of a shard folder against its manifest. Findings fail the run and stand in a table on its page.

    Args:
        folder: Shard folder, or its address (s3://, gs:// or https://).
    """
    prefect_api.end_with_server()
    prefect_api.say_in_one_paragraph()
    shards: Checked = RemoteShards(folder) if is_remote(folder) else FolderShards(Path(folder))
    entries = {entry.name: entry for entry in shards.manifest.shards}

    def verify_shard(name: str) -> None:
        _require_none(shards.verify_shard(entries[name]), name)

    def verify_rest() -> None:
        _require_none([*shards.verify_manifest(), *shards.verify_keys()], folder)

    shard = make_task(verify_shard, "verify-shard", "{name}")
    findings: list[Finding] = []
    with uncovered(), ThreadPoolTaskRunner[None](max_workers=usable_cpus()) as runner:
        results = [runner.submit(shard, {"name": name}).result for name in entries]
        for verify in (*results, make_task(verify_rest, "verify-manifest", "manifest and keys")):
            if error := _error_of(verify, DamageError):
                findings += error.findings
    samples = f"{counted(sum(shards.manifest.splits.values()), 'sample')} in {counted(len(entries), 'shard')}"
    what = counted(len(findings), "finding") if findings else "every byte as the manifest says"
    show(
        "verify-report",
        f"{folder}: {what}",
        ("file", "sample", "finding"),
        [(finding.path, finding.key or "", finding.problem) for finding in findings[:MAX_SHOWN]],
        samples,
        *([f"{len(findings) - MAX_SHOWN:,} more findings"] if len(findings) > MAX_SHOWN else []),
    )
    _require_none(findings, f"{folder}: {samples}")
    return {"ok": True, "manifest_id": shards.manifest.manifest_id, "splits": dict(shards.manifest.splits)}


def _require_none(findings: list[Finding], where: str) -> None:
    if findings:
        raise DamageError(
            f"{where}: {counted(len(findings), 'finding')}, the first: {findings[0]}; run the build again to restore what "
            "differs, or remove what is not of this dataset",
            findings,
        )


def _error_of(function: Callable[[], Any], kind: type[E]) -> E | None:
    try:
        function()
    except kind as error:
        return error
    return None
