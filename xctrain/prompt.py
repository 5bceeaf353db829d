"""The text around an answer: what stands before it, and the token that ends it.

Works on a Hugging Face processor without importing the library.
"""

from dataclasses import dataclass
from typing import Any

from shards.errors import ConfigError

_MARK = "ANSWER"  # stands for the answer while the template is taken apart


@dataclass(frozen=True)
class Prompt:
    """One image and an instruction, written as the model was trained to read them."""

    text: str  # all before the answer, the image's placeholder and the generation prompt included
    lead: str  # what the template writes between the generation prompt and an answer: "" or a space
    end: str  # the token that ends an answer; it is a target too
    has_bos: bool  # the text starts with the begin token already, so the tokenizer must not add another


def make_prompt(processor: Any, instruction: str) -> Prompt:
    """The prompt in the processor's chat template, or its image token and the instruction where it has none.

    Raises:
        ConfigError: the processor has neither a chat template nor an image token, so the image does not stand in the
            text and labels cannot be laid along it (encoder-decoder captioners such as BLIP).
    """
    template = getattr(processor, "chat_template", None)
    if not template and not isinstance(getattr(processor, "image_token", None), str):
        raise ConfigError(
            f"model.path: {type(processor).__name__} has neither a chat template nor an image token, expected a model "
            "whose text holds its image; choose another image-text-to-text model"
        )
    tokenizer = processor.tokenizer
    if not template:
        return Prompt(processor.image_token + instruction, lead="", end=tokenizer.eos_token, has_bos=False)
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": instruction}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": _MARK}]}
    text = processor.apply_chat_template([user], add_generation_prompt=True)
    before, _, after = processor.apply_chat_template([user, answer]).rpartition(_MARK)
    return Prompt(
        text,
        # Some templates end the generation prompt without the space that they put before an answer ("ASSISTANT:").
        lead=before[len(text) :] if before.startswith(text) else "",
        end=_first_special_token(tokenizer, after) or tokenizer.eos_token,
        has_bos=bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token),
    )


def answer_ids(tokenizer: Any, prompt: Prompt, caption: str) -> list[int]:
    """Token ids of a caption as it continues the prompt, the end token included."""

    def encode(text: str) -> list[int]:
        # Split: a caption that holds the text of a special token, "<image>" say, must not put that token in.
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    end = tokenizer.convert_tokens_to_ids(prompt.end)
    if prompt.lead:
        # Encoded behind the prompt's last word: SentencePiece puts a space of its own before whatever comes first.
        word = prompt.text.split()[-1]
        before, both = encode(word), encode(word + prompt.lead + caption)
        if both[: len(before)] == before:
            return [*both[len(before) :], end]
    return [*encode(prompt.lead + caption), end]


def _first_special_token(tokenizer: Any, text: str) -> str | None:
    """The special token that ``text`` begins with, white space aside."""
    text = text.lstrip()
    tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return max((token for token in tokens if text.startswith(token)), key=len, default=None)
