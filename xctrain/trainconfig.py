"""How a run trains and saves: ``train``, ``checkpoint``, ``parallel`` and ``optim``."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from shards.remote import is_remote
from xctrain.best import Metric
from xctrain.section import Section, require_no_secrets, trajectory


class TrainConfig(Section):
    """The loop: batch, length, saving, resuming."""

    global_batch: PositiveInt = trajectory(32, "samples an update, over all ranks; never derived from the GPU count")
    micro_batch: PositiveInt = Field(8, description="samples a forward on one rank; memory decides")
    num_steps: PositiveInt | None = trajectory(None, "length of the run in global batches; or give epochs")
    epochs: PositiveFloat | None = trajectory(None, "length of the run in passes over the split; or give num_steps")
    save_every: PositiveInt | None = Field(
        100, description="steps between checkpoints; empty: by time alone. The last step always saves"
    )
    save_every_minutes: PositiveFloat | None = Field(
        None,
        description="minutes after the newest checkpoint's begin, or the start, after which the step under way saves too; "
        "none unless given, as steps make two runs save alike. What a kill costs at most, where steps differ in length",
    )
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = trajectory(0, "of order, caption choice, dropout and the tiny model")
    log_keys: bool = Field(False, description="write every trained key, so that the audit compares keys one by one")
    resume: str = Field(
        "auto",
        description="auto: newest valid checkpoint, else start; never; a checkpoint's path; or the address that a run was sent "
        "to by checkpoint.push, which is brought into a run.dir that holds no run",
    )
    resume_with: str = Field("", description="comma-separated fields whose change since the checkpoint is accepted")
    precision: Literal["fp32", "bf16", "fp16"] = trajectory(
        "fp32", "autocast type; fp16 scales the loss and needs a GPU"
    )
    deterministic: bool = trajectory(False, "deterministic GPU kernels, for bit-identical resume there; slower")
    compile: bool = trajectory(
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
        require_no_secrets("train.resume", self.resume)
        if (self.num_steps is None) == (self.epochs is None):
            found = "both are set" if self.num_steps is not None else "neither is set"
            how = "; add train.epochs=null or train.num_steps=null to drop one" if self.num_steps is not None else ""
            raise ValueError(f"train.num_steps or train.epochs: {found}; give exactly one, the other follows{how}")
        return self


class CheckpointConfig(Section):
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
        require_no_secrets("checkpoint.push", self.push)
        return self


class ParallelConfig(Section):
    """How the processes share the model."""

    mode: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = trajectory(
        "ddp",
        "ddp: each holds all of it, fastest where it fits; fsdp: each holds a part of weights, gradients and optimizer "
        "(FSDP2); zero1, zero2, zero3: DeepSpeed, a part of the optimizer, of gradients too, of weights too",
    )


class OptimConfig(Section):
    """AdamW and its learning rate."""

    name: Literal["adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit"] = trajectory(
        "adamw",
        "adamw: 8 bytes a weight for its two means in float32; adamw8bit: 2, nearly the same updates; paged: moved to the "
        "machine's memory while a GPU has none left, GPUs only",
    )
    lr: PositiveFloat = trajectory(1e-3, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = trajectory("cosine", "what follows the warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = trajectory(20, "steps of linear warm-up from 0")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = trajectory(0.0, "last learning rate as a share of the peak")
    beta1: Annotated[float, Field(ge=0, lt=1)] = trajectory(0.9, "decay of the gradient's mean")
    beta2: Annotated[float, Field(ge=0, lt=1)] = trajectory(
        0.95, "decay of its square; shorter than 0.999, for runs of few steps"
    )
    weight_decay: Annotated[float, Field(ge=0)] = trajectory(
        0.0, "decoupled; on matrices only, not on biases and norms"
    )
    max_grad_norm: PositiveFloat = trajectory(1.0, "gradients above this norm are scaled down to it")
