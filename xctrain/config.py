"""Everything a training run is told, as frozen, validated models; one YAML file plus ``section.field=value``."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import to_jsonable_python

from shards.remote import is_remote, shown
from xctrain.best import Metric

# Marks a field that decides what is learned: on resume it must match the checkpoint's, or be accepted by name.
TRAJECTORY: dict[str, Any] = {"resume": "must match"}


def _trajectory(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra=TRAJECTORY, **limits)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RunConfig(_Section):
    """Where the run lives."""

    dir: Path = Field(Path("runs/demo"), description="folder of logs and checkpoints; one run, one folder")


def _require_no_secrets(name: str, location: Path | str | None) -> None:
    """Refuse an address with what may be secret: the config is written into the run folder and every checkpoint."""
    if isinstance(location, str) and is_remote(location) and shown(location) != location:
        raise ValueError(
            f"{name}: {shown(location)} has a user, password or query; these belong in the environment or in ~/.netrc"
        )


def _location(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and not is_remote(value) else value


# A folder here, or an address, which stays a text.
Location = Annotated[Path | str, BeforeValidator(_location)]


class SourceConfig(_Section):
    """One of several datasets that a run mixes; a bare path is one that is left at its defaults."""

    path: Location = Field(description="shard folder with a manifest.json: a path or an address")
    repeat: PositiveInt = Field(
        1,
        description="times that each of its samples comes in an epoch, spread evenly; once, as samples are worth the same",
    )
    quarantine: Path | None = Field(None, description="as data.quarantine, for this dataset")

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, values: Any) -> Any:
        return {"path": values} if isinstance(values, str | Path) else values


class DataConfig(_Section):
    """What is read, and by how many workers."""

    shards: Location | dict[Annotated[str, Field(pattern="^[0-9A-Za-z_-]+$")], SourceConfig] = Field(
        Path("data/sample-shards"),
        description="shard folder with a manifest.json: a path, or an address (s3://, gs://, https://, http://); or several "
        "to mix, as `name: path` or `name: {path, repeat}`",
    )
    quarantine: Path | None = Field(
        None,
        description="list of samples that are left out of the order, as `python -m shards verify DIR --quarantine FILE` "
        "writes it; none unless given, as a build rejects what is damaged and a sound dataset has nothing to leave out",
    )
    split: str = _trajectory("train", "split to train on")
    captions: Literal["random", "first", "all"] = _trajectory(
        "random", "which of an image's captions: another one each epoch, the first, or all as rows of one slot"
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="loader workers per process; auto: as many as processes on the node, at most CPUs div processes",
    )
    prefetch: PositiveInt = Field(
        2, description="micro-batches each worker reads ahead; dropped at a stop, never counted"
    )
    cache_dir: Path = Field(
        Path("~/.cache/xctrain"),
        description="shards at an address: folder on a disk of the node for what is needed of them; one run at a time",
    )
    cache_gb: PositiveFloat = Field(
        20.0,
        description="shards at an address: GB that may lie in cache_dir at once; all of COCO's training images are 19, what "
        "the default order needs of them 3; too little is refused with the number that would do",
    )
    requests: PositiveInt = Field(
        16,
        description="shards at an address: fragments that a node fetches at once; stores answer many requests faster",
    )
    read_timeout_s: PositiveInt = Field(
        300,
        description="seconds without data, tries included, after which a read ends the run with an error that names shard "
        "and sample; longer than a store or a file server is away for a moment",
    )
    verify: Literal["sizes", "full"] = Field(
        "sizes", description="what is checked before the model loads; full reads every byte"
    )
    max_damaged: Annotated[int, Field(ge=0)] = Field(
        10,
        description="different damaged samples that may be masked before the run stops; each is logged with key and reason; "
        "those of data.quarantine do not count. Ten are an accident, more are a broken disk or copy",
    )
    max_damaged_in_a_row: PositiveInt = Field(
        5,
        description="damaged samples at positions behind one another that may be masked before the run stops, however high "
        "max_damaged is: neighbours are from all over the dataset, so a row of them says that nothing can be read",
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> "DataConfig":
        if isinstance(self.shards, dict) and not self.shards:
            raise ValueError("data.shards names no dataset; give a shard folder, or `name: path` for each of several")
        if isinstance(self.shards, dict) and self.quarantine:
            raise ValueError(
                "data.quarantine is set, data.shards names several datasets; give each its own as data.shards.NAME.quarantine"
            )
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> "DataConfig":
        for source in self.sources.values():
            _require_no_secrets("data.shards", source.path)
        return self

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The datasets by name; one that has none is called nothing."""
        if isinstance(self.shards, dict):
            return self.shards
        return {"": SourceConfig(path=self.shards, quarantine=self.quarantine)}


class OrderConfig(_Section):
    """Shape of the shuffle (docs/design.md section 5)."""

    fragment: PositiveInt = _trajectory(
        16,
        "F, neighbouring samples read as one byte range; 16 COCO images are 2.6 MB, enough for a request to pay, and few enough "
        "for the first batches of an epoch to hold 85 % of the shards that a full shuffle would give them",
    )
    window: PositiveInt = _trajectory(16_384, "T, samples that are shuffled together, over all lanes")
    lanes: PositiveInt = _trajectory(8, "L, independent streams; nodes divide it, so that each fetches its own part")


class ModelConfig(_Section):
    """Which model, what it is asked, and what of it trains."""

    family: Literal["hf", "tiny", "xcomposer"] = _trajectory(
        "tiny",
        "hf: any image-text-to-text model; tiny: a small LLaVA built on first use; xcomposer: InternLM-XComposer2.5",
    )
    source: Literal["folder", "huggingface", "modelscope"] = Field(
        "folder",
        description="what model.path names: a folder, or a model of that hub, which is downloaded into the hub's cache "
        "whole and at model.revision before the run; nothing is ever downloaded for `folder` and family xcomposer",
    )
    path: str | None = Field(
        None, description="local folder or hub name; tiny builds into run.dir/base-model when empty"
    )
    revision: str | None = _trajectory(None, "commit of a hub model, so that a new upload cannot change the run")
    prompt: str = _trajectory(
        "Describe the image.", "what stands before the caption; short, as long answers ruin BLEU and CIDEr"
    )
    max_length: PositiveInt | None = _trajectory(
        None, "tokens of prompt, image and caption together; a sample that needs more is refused, never cut"
    )
    decode: Literal["exact", "fast", "scaled"] = _trajectory(
        "exact",
        "how pictures become pixels in training; exact: as the model's own processor does, which scores and captions always "
        "use; fast: decoded and resized as tensors, off by 0.02 of 255 levels in the mean, or by nothing where that "
        "processor works on tensors too; scaled: large JPEGs also decoded at a part of their size, off by 1 level",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = _trajectory("float32", "type the weights are held in")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = _trajectory(
        "auto", "hf: how attention is computed; auto: the fastest that model and machine have, said at every start"
    )
    freeze: tuple[str, ...] = _trajectory((), "patterns of parameter names that do not train, as in `*.vision_tower.*`")
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model; only for a named, pinned model"
    )
    layout: Literal["chat", "finetune"] = _trajectory(
        "chat",
        "xcomposer: where begin token, image and padding stand, in training and captioning alike: as in its published "
        "chat code, so that whatever serves the model asks it as it was trained; or as in its fine-tuning code",
    )
    hd_num: PositiveInt = _trajectory(
        18,
        "xcomposer: most tiles of 560 x 560 pixels an image is cut into; upstream's number. A photo of 640 x 480 has 4 "
        "(2061 tokens) from 4 on, and below that 1 (841 tokens)",
    )
    views_at_once: PositiveInt = Field(
        16, description="xcomposer: tiles that the image encoder sees in one call; memory decides"
    )
    plora: Literal["base", "frozen", "training"] = _trajectory(
        "base",
        "xcomposer: its low-rank branches for image positions; base: as the base model, so they train in full fine-tuning "
        "and are frozen beside an adapter, as upstream: the adapter acts on image positions too. Their dropout stays on",
    )
    separators: Literal["base", "frozen", "training"] = _trajectory(
        "base",
        "xcomposer: the two vectors at ends of lines and between views; base: as for plora. Upstream's LoRA trained them by "
        "accident and lost them on saving",
    )
    gradient_checkpointing: bool = Field(
        False, description="compute each layer again in the backward pass; a third slower, in far less memory"
    )

    @model_validator(mode="after")
    def _path_for_family(self) -> "ModelConfig":
        if (self.family != "tiny" or self.source != "folder") and not self.path:
            raise ValueError(f"model.path is empty; family {self.family} needs a model folder or hub name")
        return self

    @model_validator(mode="after")
    def _pinned(self) -> "ModelConfig":
        if self.source == "huggingface" and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                f"model.source is huggingface, model.revision is {self.revision}; give the commit, 40 digits on the model's "
                "page under Files, so that a new upload cannot change the run"
            )
        if self.source == "modelscope" and not self.revision:
            raise ValueError(
                "model.source is modelscope, model.revision is empty; give a tag or commit of the model's page, so that a "
                "new upload cannot change the run"
            )
        return self

    @model_validator(mode="after")
    def _fields_of_family(self) -> "ModelConfig":
        own = {"layout", "hd_num", "views_at_once", "plora", "separators"}
        changed = sorted(
            n for n in own & self.model_fields_set if getattr(self, n) != type(self).model_fields[n].default
        )
        if self.family != "xcomposer" and changed:
            raise ValueError(f"model.{changed[0]} is for family xcomposer, the family is {self.family}; leave it out")
        if self.family == "xcomposer" and self.attention != "auto":
            raise ValueError(
                f"model.attention is {self.attention}, family xcomposer computes it in its own way; leave it out"
            )
        return self


class AdapterConfig(_Section):
    """Small matrices that train beside a frozen base model (LoRA, QLoRA)."""

    kind: Literal["none", "lora", "qlora"] = _trajectory(
        "none",
        "none: the base itself trains; lora: the base is frozen; qlora: frozen, the linear layers of its language model in "
        "4 bits (nf4, scales quantised again), a quarter of their memory in bf16",
    )
    rank: PositiveInt = _trajectory(
        16, "inner size of the matrices; more learns more, in more memory. Family xcomposer: 64, as published"
    )
    alpha: PositiveFloat = _trajectory(
        32.0,
        "their product counts alpha / rank times; usually once or twice the rank. Family xcomposer: 64, as published",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = _trajectory(
        0.05, "share of their inputs that is dropped; the common value"
    )
    targets: tuple[str, ...] = _trajectory(
        ("*",),
        "patterns of linear layers of the language model, as in `*.q_proj`; all of them, as attention alone learns less",
    )
    other_targets: tuple[str, ...] = _trajectory(
        (), "patterns of linear layers elsewhere, as in `*.vision_tower.*`; none, as they see well before any training"
    )
    train_also: tuple[str, ...] = _trajectory(
        (), "patterns of base parameters that train in full beside the adapter, as in `*projector*`"
    )
    compute: Literal["float32", "bfloat16", "float16"] = _trajectory(
        "bfloat16", "qlora: type that 4-bit weights are multiplied in; float16 where a GPU lacks bfloat16"
    )


# What a family's adapters have unless told otherwise, where that is not the above: its published recipe.
_ADAPTERS: dict[str, dict[str, Any]] = {"xcomposer": {"rank": 64, "alpha": 64.0}}


class TrainConfig(_Section):
    """The loop: batch, length, saving, resuming."""

    global_batch: PositiveInt = _trajectory(32, "samples an update, over all ranks; never derived from the GPU count")
    micro_batch: PositiveInt = Field(8, description="samples a forward on one rank; memory decides")
    num_steps: PositiveInt | None = _trajectory(None, "length of the run in global batches; or give epochs")
    epochs: PositiveFloat | None = _trajectory(None, "length of the run in passes over the split; or give num_steps")
    save_every: PositiveInt | None = Field(
        100, description="steps between checkpoints; empty: by time alone. The last step always saves"
    )
    save_every_minutes: PositiveFloat | None = Field(
        None,
        description="minutes after the newest checkpoint's begin, or the start, after which the step under way saves too; "
        "none unless given, as steps make two runs save alike. What a kill costs at most, where steps differ in length",
    )
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = _trajectory(0, "of order, caption choice, dropout and the tiny model")
    log_keys: bool = Field(False, description="write every trained key, so that the audit compares keys one by one")
    resume: str = Field(
        "auto",
        description="auto: newest valid checkpoint, else start; never; a checkpoint's path; or the address that a run was sent "
        "to by checkpoint.push, which is brought into a run.dir that holds no run",
    )
    resume_with: str = Field("", description="comma-separated fields whose change since the checkpoint is accepted")
    precision: Literal["fp32", "bf16", "fp16"] = _trajectory(
        "fp32", "autocast type; fp16 scales the loss and needs a GPU"
    )
    deterministic: bool = _trajectory(False, "deterministic GPU kernels, for bit-identical resume there; slower")
    compile: bool = _trajectory(
        False,
        "compile the model's repeated layers (torch.compile) in the dry step, which takes minutes; off, as only long runs on "
        "GPUs earn that back. Captions are written without; dropout draws other numbers",
    )
    on_not_finite: Literal["raise", "skip"] = Field(
        "raise", description="a loss or gradient that is not finite: stop, or mask the batch and go on"
    )
    max_skips: PositiveInt = Field(3, description="batches in a row that on_not_finite=skip may skip")
    processes: PositiveInt | None = Field(
        None, description="world size to insist on; launch sets it, since launchers can fall short silently"
    )
    timeout_s: PositiveInt = Field(1800, description="longest wait for another rank, in seconds")

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        _require_no_secrets("train.resume", self.resume)
        if (self.num_steps is None) == (self.epochs is None):
            found = "both are set" if self.num_steps is not None else "neither is set"
            how = "; add train.epochs=null or train.num_steps=null to drop one" if self.num_steps is not None else ""
            raise ValueError(f"train.num_steps or train.epochs: {found}; give exactly one, the other follows{how}")
        return self


class CheckpointConfig(_Section):
    """How checkpoints are written, kept and copied."""

    asynchronous: bool = Field(
        True,
        description="write them while training goes on, which waits only while the state is copied; the copy stays in the "
        "memory of rank 0's machine, and where that is too small training waits, as it does with false",
    )
    best: Metric | None = Field(
        None,
        description="score of the held-out split by which the best checkpoint is kept beside the newest, lowest of loss, "
        "highest of all else; an evaluation that is better than all before saves; none unless given, as it needs eval.every",
    )

    push: str | None = Field(
        None,
        description="address (s3://, gs://) to which each checkpoint is sent with the run's logs once it is whole, in the "
        "background; a start without a run in run.dir goes on from there. None unless given",
    )

    @model_validator(mode="after")
    def _pushable(self) -> "CheckpointConfig":
        if self.push is not None and (not is_remote(self.push) or self.push.startswith(("http", "file:", "local:"))):
            raise ValueError(
                f"checkpoint.push is {self.push}, expected an address that takes files, such as s3://bucket/runs/name; to copy "
                "to another disk, let run.dir lie there"
            )
        _require_no_secrets("checkpoint.push", self.push)
        return self


class ParallelConfig(_Section):
    """How the processes share the model."""

    mode: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = _trajectory(
        "ddp",
        "ddp: each holds all of it, fastest where it fits; fsdp: each holds a part of weights, gradients and optimizer "
        "(FSDP2); zero1, zero2, zero3: DeepSpeed, a part of the optimizer, of gradients too, of weights too",
    )


class OptimConfig(_Section):
    """AdamW and its learning rate."""

    name: Literal["adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit"] = _trajectory(
        "adamw",
        "adamw: 8 bytes a weight for its two means in float32; adamw8bit: 2, nearly the same updates; paged: moved to the "
        "machine's memory while a GPU has none left, GPUs only",
    )
    lr: PositiveFloat = _trajectory(1e-3, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = _trajectory("cosine", "what follows the warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = _trajectory(20, "steps of linear warm-up from 0")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = _trajectory(0.0, "last learning rate as a share of the peak")
    beta1: Annotated[float, Field(ge=0, lt=1)] = _trajectory(0.9, "decay of the gradient's mean")
    beta2: Annotated[float, Field(ge=0, lt=1)] = _trajectory(
        0.95, "decay of its square; shorter than 0.999, for runs of few steps"
    )
    weight_decay: Annotated[float, Field(ge=0)] = _trajectory(
        0.0, "decoupled; on matrices only, not on biases and norms"
    )
    max_grad_norm: PositiveFloat = _trajectory(1.0, "gradients above this norm are scaled down to it")


class EvalConfig(_Section):
    """Scoring a held-out split."""

    split: str = Field("val", description="split that is captioned and scored")
    every: PositiveInt | None = Field(
        None, description="steps between evaluations; also before the first and after the last step; empty: never"
    )
    source: str | None = Field(
        None, description="which dataset of a mix is scored; empty: each that has the split, one after the other"
    )
    num_images: PositiveInt | None = Field(None, description="first images of the split; empty: all")
    micro_batch: PositiveInt = Field(32, description="images captioned at once on one rank")
    max_new_tokens: PositiveInt = Field(40, description="longest caption in tokens; COCO's are about 12")
    checkpoint: str = Field(
        "newest",
        description="for `evaluate`: newest, best (see checkpoint.best), base (the untrained model), or a checkpoint's path",
    )
    blank: bool = Field(False, description="feed gray pictures instead: what the score is worth without looking")


class WatchConfig(_Section):
    """Where the run can be looked at while it trains, beside its own log."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = Field(
        (),
        description="what else gets the figures of metrics.jsonl, each through a process of its own; none, as each is an "
        "optional package: `pip install 'xctrain[tensorboard]'` and so on",
    )
    project: str = Field(
        "xctrain", description="name of the project or experiment in them; the run has that of run.dir"
    )
    captions_every: PositiveInt | None = Field(
        None,
        description="steps between captions of a few held-out pictures, on run.dir/samples.html; also before the first and "
        "after the last step; none unless given, as it takes a moment and a held-out split",
    )
    num_captions: PositiveInt = Field(
        8, description="first pictures of eval.split that it captions; a glance takes in eight"
    )
    online: bool = Field(
        False,
        description="wandb and mlflow send to the server that their own environment variables name; otherwise all is "
        "written to run.dir/trackers, as nothing leaves the machine unasked",
    )

    @model_validator(mode="after")
    def _each_tracker_once(self) -> "WatchConfig":
        if twice := [name for name in self.trackers if self.trackers.count(name) > 1]:
            raise ValueError(f"watch.trackers names {twice[0]} more than once; name each once")
        return self


class Config(_Section):
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
                return {**values, "adapter": {**_ADAPTERS.get(family, {}), **values["adapter"]}}
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
        assert issubclass(field.annotation, _Section)
        for name, inner in field.annotation.model_fields.items():
            if inner.json_schema_extra == TRAJECTORY:
                yield f"{section}.{name}", values[section][name]
