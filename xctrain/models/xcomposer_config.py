"""What a checkpoint of XComposer2.5 says about its model in `config.json`."""

import json
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from shards.errors import ConfigError

CONFIG = "config.json"
MERGE = 2  # patches a side that become one cell of the picture as the decoder reads it


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class VisionConfig(_Section):
    """The CLIP tower. Published in a repository of its own, hence the defaults: ViT-L/14 at 560 pixels."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    image_size: int = 560
    patch_size: int = 14
    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: float = 1e-5

    @model_validator(mode="after")
    def _whole_cells(self) -> "VisionConfig":
        if self.image_size % (self.patch_size * MERGE):
            raise ValueError(f"image_size {self.image_size} is no multiple of {MERGE} patches of {self.patch_size}")
        return self

    @property
    def patches(self) -> int:
        """Patches along a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def cells(self) -> int:
        """Cells of 2 x 2 patches along a side of a tile."""
        return self.patches // MERGE


class RopeScaling(_Section):
    """How rotary positions are stretched beyond the length of pre-training."""

    type: Literal["dynamic", "linear"] = Field(validation_alias=AliasChoices("type", "rope_type"))
    factor: float


class XComposerConfig(_Section):
    """The whole model. Keys without a default must stand in the file: the published class's own defaults are wrong."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_act: Literal["silu"]
    bias: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    pad_token_id: int
    tie_word_embeddings: Literal[False]
    # Constants in the published code; a small model sets them.
    plora_r: int = 256
    plora_alpha: float = 256
    plora_dropout: float = 0.05
    vision_config: VisionConfig = VisionConfig()

    @property
    def head_size(self) -> int:
        """Numbers of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def merged_size(self) -> int:
        """Numbers of one cell before the projector."""
        return MERGE * MERGE * self.vision_config.hidden_size


def read_config(folder: Path) -> XComposerConfig:
    """The configuration in a model folder.

    Raises:
        ConfigError: there is no folder or file, or a key is missing or has a value that this model cannot have.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"model.path: {folder} holds no {CONFIG}; give the folder of a downloaded XComposer2.5 checkpoint",
            path=folder,
        )
    try:
        return XComposerConfig.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{path}: is not of XComposer2.5: {found}; fetch the checkpoint again", path=path) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: is not JSON: {error}; fetch the checkpoint again", path=path) from error
