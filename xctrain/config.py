"""Everything a training run is told, as frozen, validated models; one YAML file plus ``section.field=value``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from pydantic_core import to_jsonable_python

from xctrain.dataconfig import DataConfig, OrderConfig
from xctrain.evalconfig import EvalConfig, WatchConfig
from xctrain.modelconfig import ADAPTERS, AdapterConfig, ModelConfig
from xctrain.section import TRAJECTORY, Section
from xctrain.trainconfig import CheckpointConfig, OptimConfig, ParallelConfig, TrainConfig


class RunConfig(Section):
    """Where the run lives."""

    dir: Path = Field(Path("runs/demo"), description="folder of logs and checkpoints; one run, one folder")


class Config(Section):
    """One training job."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    order: OrderConfig = OrderConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="before")
    @classmethod
    def _adapter_of_family(cls, values: Any) -> Any:
        match values:
            case {"model": {"family": str(family)}, "adapter": {"kind": "lora" | "qlora"}}:
                return {**values, "adapter": {**ADAPTERS.get(family, {}), **values["adapter"]}}
        return values

    @model_validator(mode="after")
    def _adapter_or_freeze(self) -> "Config":
        if self.adapter.kind != "none" and self.model.freeze:
            raise ValueError(
                f"model.freeze is {list(self.model.freeze)}, adapter.kind is {self.adapter.kind}, which freezes the whole "
                "base model; leave model.freeze empty and choose layers by adapter.targets"
            )
        return self

    @model_validator(mode="after")
    def _scored_to_be_best(self) -> "Config":
        if self.checkpoint.best and self.eval.every is None:
            raise ValueError(
                f"checkpoint.best is {self.checkpoint.best}, eval.every is empty: nothing would be scored; set eval.every, or "
                "leave checkpoint.best out"
            )
        return self

    @model_validator(mode="after")
    def _possible_in_mode(self) -> "Config":
        mode = self.parallel.mode
        if mode != "ddp" and self.adapter.kind == "qlora":
            raise ValueError(
                f"parallel.mode is {mode}, adapter.kind is qlora: weights in 4 bits cannot be cut over processes, their scales "
                "belong to whole blocks; use parallel.mode=ddp, which a 4-bit model leaves room for, or adapter.kind=lora"
            )
        scored = {"eval.every": self.eval.every, "watch.captions_every": self.watch.captions_every}
        if mode == "zero3" and (every := next(((n, v) for n, v in scored.items() if v is not None), None)):
            raise ValueError(
                f"parallel.mode is zero3, {every[0]} is {every[1]}: DeepSpeed makes the processes wait for each other "
                f"in every forward, and they caption different numbers of pictures; use {every[0]}=null and `python -m xctrain "
                "evaluate` on a checkpoint, or parallel.mode=fsdp"
            )
        if mode != "ddp" and self.train.compile:
            raise ValueError(
                f"parallel.mode is {mode}, train.compile is true: weights that come and go while a layer computes break its "
                "compiled form; use train.compile=false, or parallel.mode=ddp"
            )
        if mode != "ddp" and self.optim.name != "adamw":
            raise ValueError(
                f"parallel.mode is {mode}, optim.name is {self.optim.name}: its means in blocks cannot be cut over processes; "
                "use optim.name=adamw, of which each process holds a part, or parallel.mode=ddp"
            )
        if mode != "ddp" and self.train.precision == "fp16":
            raise ValueError(
                f"parallel.mode is {mode}, train.precision is fp16: each process would see overflows of its own part alone "
                "and scale by itself; use train.precision=bf16, or parallel.mode=ddp"
            )
        return self

    def to_yaml(self) -> str:
        """The resolved config, readable by ``load_settings`` again."""
        import yaml

        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def moved_to(self, run_dir: Path) -> "Config":
        """The same job in another run folder: a folder can have been moved since its config was written."""
        return self.model_copy(update={"run": self.run.model_copy(update={"dir": run_dir})})


def trajectory_fields(config: Config) -> dict[str, Any]:
    """``{"section.field": value}`` of every field that must match on resume."""
    return dict(_trajectory_items(config))


def default_of(name: str) -> Any:
    """The default of ``section.field``, as ``trajectory_fields`` has values."""
    section, field = name.split(".")
    fields: Any = Config.model_fields[section].annotation
    return to_jsonable_python(fields.model_fields[field].get_default(call_default_factory=True))


def _trajectory_items(config: Config) -> Iterator[tuple[str, Any]]:
    values = config.model_dump(mode="json")
    for section, field in type(config).model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        for name, inner in field.annotation.model_fields.items():
            if inner.json_schema_extra == TRAJECTORY:
                yield f"{section}.{name}", values[section][name]
