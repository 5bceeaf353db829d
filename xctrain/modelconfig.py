"""Which model a run trains, and what of it: ``model`` and ``adapter``."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from xctrain.section import Section, trajectory


class ModelConfig(Section):
    """Which model, what it is asked, and what of it trains."""

    family: Literal["hf", "tiny", "xcomposer"] = trajectory(
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
    revision: str | None = trajectory(None, "commit of a hub model, so that a new upload cannot change the run")
    prompt: str = trajectory(
        "Describe the image.", "what stands before the caption; short, as long answers ruin BLEU and CIDEr"
    )
    max_length: PositiveInt | None = trajectory(
        None, "tokens of prompt, image and caption together; a sample that needs more is refused, never cut"
    )
    decode: Literal["exact", "fast", "scaled"] = trajectory(
        "exact",
        "how pictures become pixels in training; exact: as the model's own processor does, which scores and captions always "
        "use; fast: decoded and resized as tensors, off by 0.02 of 255 levels in the mean, or by nothing where that "
        "processor works on tensors too; scaled: large JPEGs also decoded at a part of their size, off by 1 level",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = trajectory("float32", "type the weights are held in")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = trajectory(
        "auto", "hf: how attention is computed; auto: the fastest that model and machine have, said at every start"
    )
    freeze: tuple[str, ...] = trajectory((), "patterns of parameter names that do not train, as in `*.vision_tower.*`")
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model; only for a named, pinned model"
    )
    layout: Literal["chat", "finetune"] = trajectory(
        "chat",
        "xcomposer: where begin token, image and padding stand, in training and captioning alike: as in its published "
        "chat code, so that whatever serves the model asks it as it was trained; or as in its fine-tuning code",
    )
    hd_num: PositiveInt = trajectory(
        18,
        "xcomposer: most tiles of 560 x 560 pixels an image is cut into; upstream's number. A photo of 640 x 480 has 4 "
        "(2061 tokens) from 4 on, and below that 1 (841 tokens)",
    )
    views_at_once: PositiveInt = Field(
        16, description="xcomposer: tiles that the image encoder sees in one call; memory decides"
    )
    plora: Literal["base", "frozen", "training"] = trajectory(
        "base",
        "xcomposer: its low-rank branches for image positions; base: as the base model, so they train in full fine-tuning "
        "and are frozen beside an adapter, as upstream: the adapter acts on image positions too. Their dropout stays on",
    )
    separators: Literal["base", "frozen", "training"] = trajectory(
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


class AdapterConfig(Section):
    """Small matrices that train beside a frozen base model (LoRA, QLoRA)."""

    kind: Literal["none", "lora", "qlora"] = trajectory(
        "none",
        "none: the base itself trains; lora: the base is frozen; qlora: frozen, the linear layers of its language model in "
        "4 bits (nf4, scales quantised again), a quarter of their memory in bf16",
    )
    rank: PositiveInt = trajectory(
        16, "inner size of the matrices; more learns more, in more memory. Family xcomposer: 64, as published"
    )
    alpha: PositiveFloat = trajectory(
        32.0,
        "their product counts alpha / rank times; usually once or twice the rank. Family xcomposer: 64, as published",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = trajectory(
        0.05, "share of their inputs that is dropped; the common value"
    )
    targets: tuple[str, ...] = trajectory(
        ("*",),
        "patterns of linear layers of the language model, as in `*.q_proj`; all of them, as attention alone learns less",
    )
    other_targets: tuple[str, ...] = trajectory(
        (), "patterns of linear layers elsewhere, as in `*.vision_tower.*`; none, as they see well before any training"
    )
    train_also: tuple[str, ...] = trajectory(
        (), "patterns of base parameters that train in full beside the adapter, as in `*projector*`"
    )
    compute: Literal["float32", "bfloat16", "float16"] = trajectory(
        "bfloat16", "qlora: type that 4-bit weights are multiplied in; float16 where a GPU lacks bfloat16"
    )


# What a family's adapters have unless told otherwise, where that is not the above: its published recipe.
ADAPTERS: dict[str, dict[str, Any]] = {"xcomposer": {"rank": 64, "alpha": 64.0}}
