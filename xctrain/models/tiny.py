"""A small LLaVA built on the spot: same bytes from the same seed and captions; `hf.py` then treats it as any model."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from shards.atomic import aside, publish

# Chosen for what is learned of drawn scenes in a minute or two of one CPU core.
IMAGE_SIDE = 48  # pixels; pictures are squeezed into a square, so that nothing of them is cut off
PATCH_SIDE = 8  # 16 of 64 pixels is cheaper, and learned next to nothing of the picture in 600 steps
HIDDEN = 96
NUM_LAYERS = 2  # of each tower
NUM_HEADS = 4
VOCABULARY = 512  # at most: 256 bytes, merges and special tokens
DROPOUT = 0.1  # of attention; costs 0.02 of BLEU-4, and makes exact resume worth testing
# Standard deviations of the first weights. The usual 0.02 is for wide models: this one learns slower with it.
VISION_INIT = 0.3
TEXT_INIT = 0.1

PAD, END, IMAGE, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|image|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<|image|>' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tiny(folder: Path, captions: Iterable[str], seed: int) -> None:
    """Write model and processor into ``folder``, whole or not at all. The order of the captions does not matter."""
    import transformers

    transformers.logging.disable_progress_bar()
    tokenizer = _tokenizer(captions)
    temporary = aside(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _model(tokenizer, seed).save_pretrained(temporary)
    _processor(tokenizer).save_pretrained(temporary)
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    publish(temporary, folder)


def _tokenizer(captions: Iterable[str]) -> Any:
    """ByteLevel BPE trained on the captions; every text can be written in it, since it starts from bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, END, IMAGE, USER, ASSISTANT]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sorted(captions), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        extra_special_tokens={"image_token": IMAGE},
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    square = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    return LlavaProcessor(
        CLIPImageProcessor(size=square, crop_size=square),
        tokenizer,
        patch_size=PATCH_SIDE,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,  # CLIP's class token, which the strategy "default" drops again
    )


def _model(tokenizer: Any, seed: int) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": HIDDEN, "num_attention_heads": NUM_HEADS, "attention_dropout": DROPOUT}
    vision = CLIPVisionConfig(
        **sizes,
        initializer_range=VISION_INIT,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        image_size=IMAGE_SIDE,
        patch_size=PATCH_SIDE,
    )
    text = LlamaConfig(
        **sizes,
        initializer_range=TEXT_INIT,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(IMAGE_SIDE // PATCH_SIDE) ** 2,
        vision_feature_layer=-1,  # all layers are used; the usual -2 would leave the last one without a gradient
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config)
