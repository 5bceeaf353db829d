"""What the flows share: tasks whose results only the folders keep, described parameters, and a table on the run's page."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from pydantic import BaseModel

from pipelines.errors import PassingError
from pipelines.retries import delays_s


def make_task(function: Callable[..., Any], name: str, run_name: str | None = None, retries: int = 0) -> Any:
    """A task without Prefect's caching and result storage: only the folder knows what is finished."""
    options: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
    if retries:
        options |= {"retries": retries, "retry_delay_seconds": delays_s(retries), "retry_condition_fn": _may_pass}
    return task(name=name, task_run_name=run_name, **options)(function)


def _may_pass(task: object, run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, PassingError)


def described(model: type[BaseModel]) -> Callable[[Any], Any]:
    """Add the descriptions of the config's fields to a flow's docstring, from which Prefect's form takes them."""

    def describe(function: Any) -> Any:
        lines = [f"    {name}: {field.description}" for name, field in model.model_fields.items()]
        function.__doc__ = "\n".join([function.__doc__, "", "Args:", *lines])
        return function

    return describe


def show(key: str, title: str, header: Sequence[str], rows: Iterable[Sequence[Any]], *below: str) -> None:
    """A table on the run's page, and paragraphs below it."""
    table = "\n".join([_row(header), _row(["---"] * len(header)), *map(_row, rows)])
    create_markdown_artifact(key=key, description=title, markdown="\n\n".join([f"## {title}", table, *below]))


def _row(cells: Sequence[Any]) -> str:
    texts = (f"{cell:,}" if isinstance(cell, int) else " ".join(str(cell).split()) for cell in cells)
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"
