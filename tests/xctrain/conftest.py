"""Tiny models of three kinds, built from their configs, and rows to feed them."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from xctrain.collate import Row
from xctrain.modelconfig import ModelConfig
from xctrain.models.hf import HfFamily
from xctrain.models.tiny import build_tiny

CAPTIONS = ("a red circle above a blue square", "a dog", "two small green triangles on a white background", "a cat")
SIZES = ((60, 40), (32, 32), (40, 90), (64, 32))
PROMPT = "Describe the image."
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE_PLACE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def base_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a saved tiny model by kind: llava, qwen or idefics; built once a session, on first use."""
    root = tmp_path_factory.mktemp("models")

    def folder_of(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            _BUILDERS[kind](folder)
        return folder

    return folder_of


@pytest.fixture(params=["llava", "qwen", "idefics"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def family(kind: str, base_folders: Callable[[str], Path]) -> HfFamily:
    """A freshly loaded model of each kind; a test may change it."""
    return HfFamily.open(ModelConfig(prompt=PROMPT), base_folders(kind))


@pytest.fixture
def llava(base_folders: Callable[[str], Path]) -> HfFamily:
    return HfFamily.open(ModelConfig(prompt=PROMPT), base_folders("llava"))


@pytest.fixture
def rows() -> list[Row]:
    """Four slots with captions of different lengths and pictures of different sizes."""
    return [make_row(n, caption, size) for n, (caption, size) in enumerate(zip(CAPTIONS, SIZES, strict=True))]


def make_row(n: int, caption: str, size: tuple[int, int] = (32, 32), masked: str | None = None) -> Row:
    width, height = size
    noise = random.Random(n).randbytes(width * height * 3)
    image = Image.frombytes("RGB", size, noise) if masked is None else Image.new("RGB", size)
    return Row(n=n, epoch=0, key=f"key-{n}", image=image, captions=(caption,), masked=masked)


def _build_llava(folder: Path) -> None:
    build_tiny(folder, CAPTIONS, seed=0)


def _build_qwen(folder: Path) -> None:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _chat_tokenizer(marks)
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks}
    pixels = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 64 * 64}
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        text_config=_text_config(
            tokenizer, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    template = TEMPLATE.replace("IMAGE_PLACE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**pixels), tokenizer, Qwen2VLVideoProcessor(**pixels), chat_template=template
    )
    _save(Qwen2_5_VLForConditionalGeneration, config, processor, folder)


def _build_idefics(folder: Path) -> None:
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer = _chat_tokenizer(marks)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        text_config={"model_type": "llama", **_text_config(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    # As Idefics3 has it: no space behind the generation prompt, one before the answer, and an end token of its own.
    template = (
        "{% for message in messages %}{{ message['role'] | capitalize }}"
        "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
        "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    images = Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    _save(Idefics3ForConditionalGeneration, config, processor, folder)


def _text_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        **more,
    }


def _chat_tokenizer(marks: list[str]) -> Any:
    """Bytes only, with pad and end as one token, as XComposer and many others have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_end|>", "<|im_start|>", *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CAPTIONS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *marks],
    )


def _save(model_class: Any, config: Any, processor: Any, folder: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


_BUILDERS = {"llava": _build_llava, "qwen": _build_qwen, "idefics": _build_idefics}


@pytest.fixture
def shards(drawn_shards: Path, tmp_path: Path) -> Path:
    """A copy of 100 samples that a test may change."""
    return Path(shutil.copytree(drawn_shards, tmp_path / "shards"))
