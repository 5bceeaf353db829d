"""What stands before an answer, and what ends it."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from shards.errors import ConfigError
from xctrain.models.hf import HfFamily
from xctrain.prompt import answer_ids, make_prompt

EXPECTED = {
    "llava": ("<|user|><|image|>Describe the image.<|end|><|assistant|>", "", "<|end|>"),
    "qwen": (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\n"
        "<|im_start|>assistant\n",
        "",
        "<|im_end|>",
    ),
    "idefics": ("User:<image>Describe the image.<end_of_utterance>\nAssistant:", " ", "<end_of_utterance>"),
}


def test_prompt_is_that_of_the_chat_template(kind: str, family: HfFamily) -> None:
    prompt = make_prompt(family.collator.processor, "Describe the image.")

    assert (prompt.text, prompt.lead, prompt.end) == EXPECTED[kind]
    assert not prompt.has_bos


def test_without_a_chat_template_the_image_token_stands_before_the_instruction(llava: HfFamily) -> None:
    processor = llava.collator.processor
    processor.chat_template = None

    prompt = make_prompt(processor, "caption en")

    assert (prompt.text, prompt.lead, prompt.end) == ("<|image|>caption en", "", "<|end|>")


@pytest.mark.parametrize("processor", [SimpleNamespace(tokenizer=SimpleNamespace()), SimpleNamespace()])
def test_a_model_without_an_image_in_its_text_is_refused(processor: Any) -> None:
    message = re.escape("model.path: SimpleNamespace has neither a chat template nor an image token, expected a model")

    with pytest.raises(ConfigError, match=message):
        make_prompt(processor, "caption en")


def test_a_special_token_in_a_caption_is_plain_text(llava: HfFamily) -> None:
    tokenizer = llava.collator.processor.tokenizer

    ids = answer_ids(tokenizer, llava.collator.prompt, "a <|image|> b")

    assert tokenizer.convert_tokens_to_ids("<|image|>") not in ids
    assert tokenizer.decode(ids[:-1]) == "a <|image|> b"
    assert ids[-1] == tokenizer.eos_token_id


def test_an_answer_behind_a_space_is_encoded_as_in_its_sentence() -> None:
    """SentencePiece marks the start of any text as a space; the answer must not get two of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from xctrain.prompt import Prompt

    words = {token: i for i, token in enumerate(["</s>", "▁ASSISTANT:", "▁a", "▁dog", "▁"])}
    words_only = Tokenizer(models.WordLevel(words, unk_token="▁"))
    words_only.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    words_only.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_only, eos_token="</s>")
    prompt = Prompt("USER: hello ASSISTANT:", lead=" ", end="</s>", has_bos=False)

    assert answer_ids(tokenizer, prompt, "a dog") == [2, 3, 0]
