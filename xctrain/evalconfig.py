"""How a run is scored and watched: ``eval`` and ``watch``."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from xctrain.section import Section


class EvalConfig(Section):
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


class WatchConfig(Section):
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
