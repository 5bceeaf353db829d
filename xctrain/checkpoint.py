"""Save, check, list and prune checkpoints. The old one goes only after the new one is whole and read back.

    checkpoints/step-00000010/
        model.safetensors      trainable weights by parameter name
        optimizer.safetensors  its tensors as ``slot:parameter name``; optimizer.json: the rest
        rng.json               generators of every rank
        scaler.json            fp16 loss scale, {} without one
        position.json          TrainState and the world it was saved in
        config.yaml            resolved config
        files.json             sizes and sha256 of the files above, written last

Only tensors and JSON: loading never unpickles. The same for every parallel mode and number of ranks: tensors are whole.
"""

import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shards.atomic import ASIDE, aside, publish, sync_folder
from xctrain.best import Metric, Scores, best_step, kept_steps
from xctrain.errors import CheckpointError, ConfigError
from xctrain.state import TrainState

if TYPE_CHECKING:
    from xctrain.tensors import Snapshot

T = TypeVar("T")

FILES = "files.json"
POSITION = "position.json"
CONFIG = "config.yaml"
RNG = "rng.json"
SCALER = "scaler.json"
SCORES = "scores"  # in position.json
_REQUIRED = {"model.safetensors", "optimizer.safetensors", "optimizer.json", RNG, SCALER, POSITION, CONFIG}
_SET_ASIDE = "set-aside-"  # begins the name of a checkpoint that was gone back on, until the next save
_SPARE_BYTES = 64 * 2**20  # disk space left free beside a checkpoint, for logs


@dataclass(frozen=True)
class Content:
    """Everything a checkpoint is made of, gathered on rank 0."""

    state: TrainState
    snapshot: "Snapshot"
    scaler: Mapping[str, Any]
    rng: Sequence[Mapping[str, Any]]  # one entry a rank, from rng.capture
    config_yaml: str
    world: Mapping[str, Any]  # world_size, threads, precision, versions: where it was saved
    model_id: str
    scores: Scores = field(default_factory=dict)  # of the held-out split, if it was scored at this step
    logs: Mapping[str, int] = field(default_factory=dict)  # not in it: sizes of the run's logs that belong to it


class Checkpoints:
    """The checkpoints of one run. Kept are the newest ``keep``, and the best by ``metric`` if that is given."""

    def __init__(self, folder: Path, keep: int, metric: Metric | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.metric = metric
        self._held: frozenset[int] = frozenset()  # steps that are being read, and so stay until the next save
        self._removing = threading.Lock()

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` stands."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a folder, whole or not, newest first, in numeric order."""
        return _steps_of(self.folder.glob("step-*"))

    def scores(self) -> dict[int, Scores]:
        """What each checkpoint that was scored says of it."""
        return {step: found for step in self.steps() if (found := _scores(self.path(step)))}

    def best(self) -> Path | None:
        """The checkpoint with the best score; None where none has one. It may be damaged: ``check`` it."""
        step = best_step(self.scores(), self.metric)
        return None if step is None else self.path(step)

    def improves(self, step: int, scores: Scores) -> bool:
        """Whether these scores of ``step`` are better than those of every checkpoint there is."""
        before = {s: found for s, found in self.scores().items() if s < step}
        return best_step({**before, step: scores}, self.metric) == step

    def newest_valid(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and why newer ones were passed over; a save that did not end is none.

        The run may be saving meanwhile: nothing is called damaged that was renamed or removed while it was looked at.
        """
        while True:
            names = self._names()
            path, passed_over = self._newest_valid()
            if (path and not passed_over) or self._names() == names:
                return path, passed_over

    def _names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()

    def _newest_valid(self) -> tuple[Path | None, list[str]]:
        passed_over: list[str] = []
        written_aside = _steps_of(self.folder.glob(aside(self.folder / "step-*").name))
        for step in sorted({*self.steps(), *written_aside}, reverse=True):
            # A kill while an older state of the same step gave way leaves the new one whole, but not yet renamed.
            errors = []
            for path in (self.path(step), aside(self.path(step))):
                try:
                    check(path)
                except CheckpointError as error:
                    errors.append(error)
                else:
                    return path, passed_over
            if self.path(step).exists():
                passed_over.append(f"passed over {errors[0]}")
        return None, passed_over

    def save(self, content: Content) -> Path:
        """Write a checkpoint aside, rename it into place, read it back, and only then remove older ones.

        Raises:
            CheckpointError: weights that are not finite, a full disk, or a file that reads back differently. Older
                checkpoints stand as they were.
        """
        path = self.path(content.state.step)
        _require_finite_weights(content, path)
        temporary = aside(path)
        try:
            self._require_space(content, path)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            _write(temporary, content)
            check(temporary)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"{path}: cannot be written: {error.strerror}; {self._newest_text()}; "
                "make room, then start again to go on",
                path=path,
                step=content.state.step,
            ) from error
        if path.exists():  # damaged, or of the same step before batches that were skipped
            shutil.rmtree(path)
        publish(temporary, path)
        self._prune(content.state.step)
        return path

    def go_back(self, step: int) -> list[str]:
        """Set checkpoints above ``step`` aside, and say so: of a past that was gone back on. The next save removes them."""
        lines = []
        for path in sorted(self.folder.glob("step-*")) + sorted(self.folder.glob(aside(self.folder / "step-*").name)):
            if any(later > step for later in _steps_of([path])):
                past = self.folder / f"{_SET_ASIDE}{path.name.removeprefix('.')}"
                shutil.rmtree(past, ignore_errors=True)
                path.rename(past)
                if not path.name.startswith("."):  # a save that did not end is nothing to speak of
                    lines.append(
                        f"{path}: is now {past.name}, as the run goes on from an older step; the next save removes it"
                    )
        return lines

    def finish_save(self) -> None:
        """Give the newest checkpoint its name if a kill came between its last byte and that."""
        if any(self.folder.glob(f".step-*{ASIDE}")):
            path, _ = self.newest_valid()
            if path and path.name.startswith("."):
                final = path.with_name(label(path))
                if final.exists():
                    shutil.rmtree(final)
                publish(path, final)

    @contextmanager
    def hold(self, step: int) -> Iterator[list[int]]:
        """Steps up to this one, newest first, which a save in another thread leaves there until the block ends."""
        with self._removing:
            steps = [s for s in self.steps() if s <= step]
            self._held = frozenset(steps)
        try:
            yield steps
        finally:
            self._held = frozenset()

    def _newest_text(self) -> str:
        newest, _ = self.newest_valid()
        return f"the newest whole checkpoint is {newest.name}" if newest else "there is no older checkpoint"

    def _require_space(self, content: Content, path: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = _SPARE_BYTES + content.snapshot.num_bytes()
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"{path}: needs {needed / 1e6:.0f} MB of disk ({content.snapshot.describe()}, and {_SPARE_BYTES / 1e6:.0f} MB to "
                f"spare for logs), {free / 1e6:.0f} MB are free; {self._newest_text()}; "
                "make room, then start again to go on",
                path=path,
            )

    def _prune(self, saved: int) -> None:
        with self._removing:
            steps = self.steps()
            kept = kept_steps(steps, saved, self.keep, self.scores(), self.metric) | self._held
            for step in steps:
                if step not in kept:
                    shutil.rmtree(self.path(step))
        for leftover in (*self.folder.glob(f".step-*{ASIDE}"), *self.folder.glob(f"{_SET_ASIDE}*")):
            shutil.rmtree(leftover)


def label(path: Path) -> str:
    """The name of a checkpoint for people, also of one that was not renamed into place yet."""
    return path.name.removeprefix(".").removesuffix(ASIDE)


def _steps_of(paths: Iterable[Path]) -> list[int]:
    names = (path.name.removeprefix(".").removeprefix("step-").removesuffix(ASIDE) for path in paths if path.is_dir())
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _scores(path: Path) -> Scores:
    try:
        found = read_json(path, POSITION).get(SCORES, {})
    except (OSError, ValueError, AssertionError):  # damaged, which says itself where it is used
        return {}
    return found if isinstance(found, dict) else {}


def _require_finite_weights(content: Content, path: Path) -> None:
    if bad := content.snapshot.not_finite():
        raise CheckpointError(
            f"{path}: not saved: {len(bad)} weights hold values that are not finite, first {bad[0]}; "
            "go on from the newest checkpoint with a lower optim.lr",
            path=path,
            step=content.state.step,
        )


def _write(folder: Path, content: Content) -> None:
    content.snapshot.write(folder)
    _write_json(folder / RNG, {"ranks": list(content.rng)})
    _write_json(folder / SCALER, dict(content.scaler))
    _write_json(folder / POSITION, _position(content))
    (folder / CONFIG).write_text(content.config_yaml, encoding="utf-8")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    _write_json(folder / FILES, files)
    mode = (folder / POSITION).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors lets nobody but the owner read its files
        _sync(path)
    sync_folder(folder)


def _position(content: Content) -> dict[str, Any]:
    state = content.state
    segment = state.segments[-1]
    order = {"version": segment.order_version, "seed": segment.seed}
    order |= {"fragment": segment.fragment, "window": segment.window, "lanes": segment.lanes}
    return {
        **state.to_json(),
        "epoch": state.epoch,
        "order": order,
        "masked_counts": dict(Counter(entry.reason for entry in state.masked)),
        "world": dict(content.world),
        "model_id": content.model_id,
        **({SCORES: dict(content.scores)} if content.scores else {}),
    }


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def check(path: Path) -> None:
    """Require that every file of a checkpoint is there with the size and hash it was written with.

    Raises:
        CheckpointError: what is missing or differs.
    """
    try:
        values = json.loads((path / FILES).read_text(encoding="utf-8"))
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in values.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: {FILES} is missing or damaged, so the save did not end", path=path) from None
    if unlisted := sorted(_REQUIRED - files.keys()):
        raise CheckpointError(f"{path}: {FILES} does not list {unlisted[0]}", path=path)
    for name, (num_bytes, sha256) in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing", path=path)
        try:
            found_bytes = file.stat().st_size
            found = _sha256(file) if found_bytes == num_bytes else ""
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error.strerror}", path=path) from None
        if found_bytes != num_bytes:
            raise CheckpointError(f"{path}: {name} has {found_bytes} bytes, {FILES} says {num_bytes}", path=path)
        if found != sha256:
            raise CheckpointError(
                f"{path}: {name} has sha256 {found[:12]}..., {FILES} says {str(sha256)[:12]}...", path=path
            )


def read_chosen(choose: Callable[[], Path], read: Callable[[Path], T]) -> tuple[Path, T]:
    """A checkpoint and what is read of it; chosen again where a run that is saving removed or renamed it meanwhile."""
    while True:
        path = choose()
        try:
            return path, read(path)
        except (OSError, ConfigError):
            with suppress(CheckpointError):
                check(path)
                raise  # it is there, whole: the error is another


def read_position(path: Path) -> tuple[TrainState, dict[str, Any]]:
    """The state in a checkpoint, and all of position.json."""
    values = read_json(path, POSITION)
    return TrainState.from_json(values), values


def read_json(path: Path, name: str) -> dict[str, Any]:
    """One of the JSON files of a checkpoint."""
    values = json.loads((path / name).read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values
