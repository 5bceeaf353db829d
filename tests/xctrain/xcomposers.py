"""Small random XComposer checkpoints in the published layout, built on the spot."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from xctrain.models.xcomposer_config import XComposerConfig
from xctrain.models.xcomposer_model import XComposer
from xctrain.models.xcomposer_tokenizer import TURN_END, TURN_START
from xctrain.models.xcomposer_weights import save_model

TEXTS = (
    "Describe the image. a red circle above a blue square",
    "two small green triangles on a white background stand alone on the left side of a picture",
    "there is a black box, a yellow disc; what is shown?",
)
CONFIG: dict[str, Any] = {
    "architectures": ["InternLMXComposer2ForCausalLM"],
    "hidden_act": "silu",
    "bias": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "max_position_embeddings": 1024,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "plora_r": 4,
    "plora_alpha": 4,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
}

# An eighth of the published model's width, in every part.
EIGHTH: dict[str, Any] = {
    "vocab_size": 11568,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "plora_r": 32,
    "plora_alpha": 32,
    "vision_config": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
    },
}


def build_xcomposer(folder: Path, seed: int = 0, texts: Iterable[str] = TEXTS, **changes: Any) -> Path:
    """Write a checkpoint with random weights and a tokenizer of its own; ``changes`` to its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_model(texts)
    (folder / "tokenizer.model").write_bytes(tokenizer)
    config = {**CONFIG, "vocab_size": _num_pieces(tokenizer), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = XComposer(XComposerConfig.model_validate(config))
    save_model(model, folder)
    return folder


def tokenizer_model(texts: Iterable[str]) -> bytes:
    """A SentencePiece model with the settings of the published one."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["\n", "user", "system", "ass", "istant", TURN_END, TURN_START],
        minloglevel=2,
    )
    return model.getvalue()


def _num_pieces(tokenizer: bytes) -> int:
    from sentencepiece import SentencePieceProcessor

    return int(SentencePieceProcessor(model_proto=tokenizer).get_piece_size())


def write_large(folder: Path, max_shard_bytes: int) -> tuple[int, int]:
    """Write a checkpoint of an eighth of the published width, in bfloat16 and in shards; bytes of all and of the largest."""
    from huggingface_hub import save_torch_state_dict

    from xctrain.models.xcomposer_weights import empty_model, official_name

    folder.mkdir(parents=True)
    tokenizer = tokenizer_model(TEXTS)
    (folder / "tokenizer.model").write_bytes(tokenizer)
    config = {**CONFIG, **EIGHTH}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        official_name(name): torch.empty(p.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, p in empty_model(XComposerConfig.model_validate(config)).named_parameters()
    }
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_bytes)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes), max(sizes)
