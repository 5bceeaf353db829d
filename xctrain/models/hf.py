"""Any Hugging Face image-text-to-text model whose text holds its image: LLaVA, Qwen-VL, Idefics, PaliGemma ..."""

import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from shards.errors import ConfigError
from xctrain.collate import Batch, Row, append_answers
from xctrain.flops import Shape, Work
from xctrain.loss import IGNORED, num_logits_needed, summed_cross_entropy
from xctrain.models.adapter import adapt, linear_layers
from xctrain.models.lengths import RowLengths, require_all_fit, require_fit
from xctrain.models.parameters import freeze, matrices_of
from xctrain.prompt import Prompt, answer_ids, make_prompt

if TYPE_CHECKING:
    from xctrain.modelconfig import AdapterConfig, ModelConfig

# The tokenizers' thread pool does not survive the fork of a loader worker, and says so on every one of them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_REFERENCE_SIZE = (640, 480)  # width and height of the picture that the fixed part of a prompt is measured with


class CaptionModel(nn.Module):
    """``Batch`` to summed loss. ``model`` is the Hugging Face model, under the parameter names of its own files."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, batch: Batch) -> Tensor:
        """Float32 scalar: cross-entropy summed over the batch's targets."""
        return summed_cross_entropy(self.last_logits(batch), batch.labels)

    def last_logits(self, batch: Batch) -> Tensor:
        """Logits [B, T', vocabulary] of the last positions, at least of those that predict a target."""
        options = {"logits_to_keep": num_logits_needed(batch.labels)} if self._keeps_logits else {}
        inputs = in_dtype(batch.inputs, self.model.dtype)
        logits: Tensor = self.model(**inputs, use_cache=False, **options).logits
        return logits


class Collator:
    """Rows to a Batch: prompts through the processor at once, answers appended behind them."""

    def __init__(
        self,
        processor: Any,
        prompt: Prompt,
        max_length: int | None,
        on_tensors: Any = None,
        values_per_patch: int = 3 * 14 * 14,
    ) -> None:
        self.processor = processor
        self.values_per_patch = values_per_patch  # numbers in one patch of a picture, as the vision tower cuts it
        self.on_tensors = on_tensors  # the same, for rows whose pictures are tensors
        self.prompt = prompt
        self.max_length = max_length
        tokenizer = processor.tokenizer
        self.pad_id: int = tokenizer.pad_token_id
        # PaliGemma reads type 0 with attention both ways and trains on type 1; elsewhere type 1 means image tokens.
        has_suffix = "suffix" in inspect.signature(type(processor).__call__).parameters
        self.answer_values = {"token_type_ids": 1} if has_suffix else {}

    def __call__(self, rows: Iterable[Row]) -> Batch:
        """The rows as one micro-batch.

        Raises:
            ConfigError: a sequence is longer than model.max_length; an answer is never cut.
        """
        rows = list(rows)
        # A masked row keeps one line, so that the shapes of a step do not depend on what turned out damaged.
        lines = [(row, text) for row in rows for text in ((row.captions[:1] or ("",)) if row.masked else row.captions)]
        prompts = self.process([row.image for row, _ in lines], padding_side="right")
        answers = [answer_ids(self.processor.tokenizer, self.prompt, text) for _, text in lines]
        lengths = (prompts["attention_mask"].sum(dim=1) + torch.tensor([len(a) for a in answers])).tolist()
        for (row, _), length in zip(lines, lengths, strict=True):
            require_fit(row.key, length, self.max_length)
        inputs, labels = append_answers(prompts, answers, pad_id=self.pad_id, answer_values=self.answer_values)
        for i, (row, _) in enumerate(lines):
            if row.masked:
                labels[i] = IGNORED
        return Batch(
            inputs=inputs,
            labels=labels,
            positions=tuple(row.n for row in rows),
            keys=tuple(row.key for row in rows),
            masked=tuple(row.masked for row in rows),
            num_targets=int((labels != IGNORED).sum()),
            work=self._work(inputs),
        )

    def _work(self, inputs: dict[str, Tensor]) -> Work:
        lengths = inputs["attention_mask"].sum(dim=1)
        marks = inputs["input_ids"] == getattr(self.processor, "image_token_id", -1)
        return Work(
            tokens=int(lengths.sum()),
            image_tokens=int(marks.sum()),
            patches=inputs["pixel_values"].numel() // self.values_per_patch if "pixel_values" in inputs else 0,
            token_pairs=int((lengths**2).sum()),
        )

    def process(self, images: Sequence[Image.Image | Tensor], padding_side: str) -> dict[str, Tensor]:
        """Model inputs of the prompt with each of the images, padded to the longest."""
        processor = self.on_tensors if isinstance(images[0], Tensor) else self.processor
        inputs = processor(
            images=[[image] for image in images],
            text=[self.prompt.text] * len(images),
            padding=True,
            padding_side=padding_side,
            add_special_tokens=not self.prompt.has_bos,
            return_tensors="pt",
        )
        return {name: tensor for name, tensor in inputs.items() if name != "labels"}

    def check_lengths(self, samples: Iterable[tuple[str, int, int, Sequence[str]]]) -> None:
        """Refuse a max_length that a sample does not fit in; samples are (key, width, height, captions).

        Raises:
            ConfigError: names the number of samples that do not fit, one of them, and the length that would do.
        """
        require_all_fit(samples, self.max_length, self.row_lengths())

    def row_lengths(self) -> RowLengths:
        """Counts the tokens of a sample."""
        return RowLengths(self._prompt_length, self._answer_length, added=len(self.prompt.lead) + 2)

    def least_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that a picture of this size is resized to; its own where that is not a fixed size."""
        match {name: side for name, side in dict(self.processor.image_processor.size).items() if side}:
            case {"height": int(least_height), "width": int(least_width), **others} if not others:
                return least_width, least_height
            case {"shortest_edge": int(side), **others} if not others:
                return ceil(width * side / min(width, height)), ceil(height * side / min(width, height))
        return width, height

    def require_scalable(self) -> None:
        """Require that the model makes the same of every picture, whatever its size.

        Raises:
            ConfigError: how it cuts or resizes a picture depends on the picture's size.
        """
        fixed = self.least_size(*_REFERENCE_SIZE) != _REFERENCE_SIZE
        lengths = {self._laid_out_length(*size) for size in (_REFERENCE_SIZE, (320, 240), (1280, 320))}
        if not fixed or len(lengths) > 1:
            raise ConfigError(
                "model.decode is scaled, but this model resizes or cuts pictures by their own size, which decoding at a part "
                "of it would change; use model.decode=fast"
            )

    def _answer_length(self, caption: str) -> int:
        return len(answer_ids(self.processor.tokenizer, self.prompt, caption))

    def _prompt_length(self, width: int, height: int) -> int:
        """Tokens of the prompt with a picture of this size: counted where the processor can, else laid out."""
        if not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return self._laid_out_length(width, height)
        return self._text_length + self._num_image_tokens(width, height)

    @cached_property
    def _text_length(self) -> int:
        """Tokens of the prompt besides those that the processor counts for the picture."""
        return self._laid_out_length(*_REFERENCE_SIZE) - self._num_image_tokens(*_REFERENCE_SIZE)

    def _num_image_tokens(self, width: int, height: int) -> int:
        # The library's own way to ask, made for inference servers; a private name, hence the check above.
        return int(self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])

    def _laid_out_length(self, width: int, height: int) -> int:
        return self.process([Image.new("RGB", (width, height))], padding_side="right")["input_ids"].shape[1]


@dataclass(frozen=True)
class HfFamily:
    """A loaded model with its collator and its way to write captions."""

    module: CaptionModel
    collator: Collator

    @classmethod
    def open(
        cls,
        config: "ModelConfig",
        base: Path | str,
        adapter: "AdapterConfig | None" = None,
        seed: int = 0,
        *,
        empty: bool = False,
    ) -> "HfFamily":
        """The model in the folder, or of the hub name, ``base``. A folder never asks the network.

        With ``empty`` no weights are read: the model has names, shapes and types alone.

        Raises:
            ConfigError: it cannot be loaded, lacks weights, does not show its image in its text, or a pattern of what
                trains fits nothing.
        """
        model, processor = load(config, base, empty=empty)
        prompt = make_prompt(processor, config.prompt)
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token  # pads are masked by position
        if adapter is None or adapter.kind == "none":
            freeze(model, config.freeze)
        else:
            adapt(model, adapter, linear_layers(model, language_model(model)), seed)
        if config.gradient_checkpointing:
            checkpoint_gradients(model)
        on_tensors = None if config.decode == "exact" else processor_on_tensors(config, base, processor)
        collator = Collator(processor, prompt, config.max_length, on_tensors, values_per_patch(model))
        if config.decode == "scaled":
            collator.require_scalable()
        return cls(CaptionModel(model), collator)

    def check_lengths(self, samples: Iterable[tuple[str, int, int, Sequence[str]]]) -> None:
        """Refuse a `model.max_length` that some of the (key, width, height, captions) do not fit in."""
        self.collator.check_lengths(samples)

    def row_lengths(self) -> RowLengths:
        """Counts the tokens of a sample."""
        return self.collator.row_lengths()

    def generate(self, images: Sequence[Image.Image | Tensor], max_new_tokens: int) -> list[str]:
        """One greedy caption an image, without prompt and special tokens. Draws no random number."""
        model, end_ids = self.module.model, self._end_ids
        prompts = self.collator.process(images, padding_side="left")
        inputs = in_dtype({name: tensor.to(model.device) for name, tensor in prompts.items()}, model.dtype)
        with evaluating(model), torch.no_grad():
            ids = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                synced_gpus=False,  # each rank captions its own pictures, with all weights at hand
                use_cache=True,
                eos_token_id=sorted(end_ids),
                pad_token_id=self.collator.pad_id,
            )
        answers = ids[:, prompts["input_ids"].shape[1] :].tolist()
        # Cut at the end by position first: an end token that is not marked special would stay in the text.
        return [self._text(takewhile(lambda token: token not in end_ids, answer)) for answer in answers]

    def tokens(self, batch: Batch) -> list[list[str]]:
        """Text of each token of each row, without padding; picture positions by the name of the model's token."""
        decode = self.collator.processor.tokenizer.decode
        rows = zip(batch.inputs["input_ids"], batch.inputs["attention_mask"].bool(), strict=True)
        return [[decode([token]) for token in ids[real].tolist()] for ids, real in rows]

    def pictures(self, batch: Batch) -> list[list[Image.Image]]:
        """The pictures of each row as the model sees them; none at all where it takes patches rather than pictures."""
        pixels, num_rows = batch.inputs.get("pixel_values"), len(batch.labels)
        if pixels is None or pixels.ndim not in (4, 5) or len(pixels) != num_rows or pixels.shape[-3] != 3:
            return []
        settings = self.collator.processor.image_processor
        mean, std = (torch.tensor(getattr(settings, name))[:, None, None] for name in ("image_mean", "image_std"))
        levels = ((pixels.float() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
        grouped = levels if levels.ndim == 5 else levels[:, None]
        return [[Image.fromarray(view.permute(1, 2, 0).numpy()) for view in row] for row in grouped]

    def shape(self) -> Shape:
        """What the model multiplies with."""
        model = self.module.model
        decoder, head, text = model.get_decoder(), model.get_output_embeddings(), model.config.get_text_config()
        width = text.num_attention_heads * (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        )
        return Shape(
            pictures=matrices_of(model, without=(decoder, head)),
            decoder=matrices_of(decoder),
            head=matrices_of(head),
            layers=text.num_hidden_layers,
            width=width,
        )

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that the Auto classes load without a network."""
        self.module.model.save_pretrained(folder)
        self.collator.processor.save_pretrained(folder)

    @property
    def _end_ids(self) -> set[int]:
        """What stops a caption: the end token it was trained with, and the model's own."""
        own = self.module.model.generation_config.eos_token_id
        own_ids = own if isinstance(own, list) else [own]
        end = self.collator.processor.tokenizer.convert_tokens_to_ids(self.collator.prompt.end)
        return {end, *own_ids} - {None}

    def _text(self, ids: Iterable[int]) -> str:
        text = self.collator.processor.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return " ".join(text.split())


def load(config: "ModelConfig", base: Path | str, *, empty: bool = False) -> tuple[Any, Any]:
    """Model, in the config's dtype, and processor; with ``empty``, the model without memory for its weights.

    Raises:
        ConfigError: not found, not an image-text-to-text model, or some weights are not in its files; the library
            would fill those with random numbers and go on.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    options = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": Path(base).is_dir(),
    }
    try:
        processor = transformers.AutoProcessor.from_pretrained(str(base), **options)
        auto, dtype = transformers.AutoModelForImageTextToText, getattr(torch, config.dtype)
        attention = {} if config.attention == "auto" else {"attn_implementation": config.attention}
        if empty:
            report: dict[str, Any] = {"missing_keys": ()}
            with torch.device("meta"):
                model = auto.from_config(
                    transformers.AutoConfig.from_pretrained(str(base), **options),
                    dtype=dtype,
                    trust_remote_code=config.trust_remote_code,
                    **attention,
                )
        else:
            model, report = auto.from_pretrained(
                str(base), dtype=dtype, output_loading_info=True, **attention, **options
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"model.path: {base} cannot be loaded as an image-text-to-text model: {' '.join(str(error).split())}; give "
            "the folder of one, or a hub name and a network",
            path=base,
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model.path: {base} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} for example; "
            "fetch it again, or choose a model of that kind",
            path=base,
        )
    if getattr(model.config, "quantization_config", None):
        raise ConfigError(
            f"model.path: {base} is quantised already, which cannot be trained or merged well; give the model that it was "
            "made from, with adapter.kind=qlora to hold it in 4 bits",
            path=base,
        )
    return model, processor


def processor_on_tensors(config: "ModelConfig", base: Path | str, processor: Any) -> Any:
    """The processor, with an image processor that works on tensors: its own, if it does so anyway.

    Raises:
        ConfigError: the library has none for this model.
    """
    from transformers import AutoImageProcessor
    from transformers.image_processing_backends import TorchvisionBackend

    found = processor.image_processor
    if not isinstance(found, TorchvisionBackend):
        found = AutoImageProcessor.from_pretrained(
            str(base),
            backend="torchvision",
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            local_files_only=Path(base).is_dir(),
        )
    if not isinstance(found, TorchvisionBackend):
        raise ConfigError(
            f"model.decode is {config.decode}, {type(found).__name__} does not work on tensors; use model.decode=exact"
        )
    result = copy(processor)
    result.image_processor = found
    return result


def values_per_patch(model: Any) -> int:
    """Numbers in one patch of a picture: colours times the area of a patch, times the frames that one holds."""
    vision = getattr(model.config, "vision_config", None)
    side = getattr(vision, "patch_size", 14)
    return 3 * getattr(vision, "temporal_patch_size", 1) * (side if isinstance(side, int) else side[0]) ** 2


def language_model(model: Any) -> str:
    """Name of the submodule that reads text, which adapters go to unless told otherwise.

    Raises:
        ConfigError: the model does not have one of its own.
    """
    decoder = model.get_decoder()
    name: str = next(name for name, module in model.named_modules() if module is decoder)
    if not name:
        raise ConfigError(
            f"adapter.kind: {type(model).__name__} does not keep its language model in a module of its own, so "
            "adapters cannot be kept out of the rest; use adapter.kind=none with model.freeze"
        )
    return name


def checkpoint_gradients(model: Any) -> None:
    """Compute each layer again in the backward pass, where the model can do that.

    Raises:
        ConfigError: it cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"model.gradient_checkpointing is true, {type(model).__name__} does not support it; set it to false"
        )
    # The older name is deprecated from transformers 5.24 on, and the only one before.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Reentrant checkpoints lose the gradient of a layer whose input needs none, such as the first above frozen
    # embeddings. These do not, so the embeddings need not pretend, which breaks models that write images into them.
    model.disable_input_require_grads()


def in_dtype(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs with pixels in the weights' type."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off inside the block, and as it was after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
