"""Three kinds of tiny model through one collator, one loss and one way to write captions."""

import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from shards.errors import ConfigError
from xctrain.collate import Row
from xctrain.decode import as_tensor
from xctrain.loss import IGNORED
from xctrain.modelconfig import ModelConfig
from xctrain.models import open_family
from xctrain.models.hf import HfFamily
from xctrain.models.parameters import parameters_without_gradient, types_and_attention

PROMPT = "Describe the image."
Folders = Callable[[str], Path]


def template_ids(family: HfFamily, row: Row) -> torch.Tensor:
    """Token ids of a whole conversation, as the processor's own chat template writes it."""
    user = {"role": "user", "content": [{"type": "image", "image": row.image}, {"type": "text", "text": PROMPT}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": row.captions[0]}]}
    inputs = family.collator.processor.apply_chat_template(
        [user, answer], tokenize=True, return_dict=True, return_tensors="pt"
    )
    return torch.as_tensor(inputs["input_ids"])[0]


def test_collated_ids_are_those_of_the_chat_template(family: HfFamily, rows: list[Row]) -> None:
    batch = family.collator(rows)

    for i, row in enumerate(rows):
        ids = batch.inputs["input_ids"][i][batch.inputs["attention_mask"][i] == 1]
        assert torch.equal(ids, template_ids(family, row)[: len(ids)])


def test_only_the_answer_and_the_end_token_are_targets(family: HfFamily, rows: list[Row]) -> None:
    tokenizer = family.collator.processor.tokenizer

    batch = family.collator(rows)

    for row, labels in zip(rows, batch.labels, strict=True):
        targets = labels[labels != IGNORED]
        assert tokenizer.decode(targets).strip() == row.captions[0] + family.collator.prompt.end
    assert batch.num_targets == int((batch.labels != IGNORED).sum())


def test_batch_names_its_slots(llava: HfFamily, rows: list[Row]) -> None:
    batch = llava.collator([rows[0], replace(rows[2], masked="damaged")])

    assert batch.positions == (0, 2)
    assert batch.keys == ("key-0", "key-2")
    assert batch.masked == (None, "damaged")


def test_loss_of_a_batch_is_the_sum_of_its_rows(family: HfFamily, rows: list[Row]) -> None:
    family.module.eval()

    together = family.module(family.collator(rows))
    alone = sum(family.module(family.collator([row])) for row in rows)

    assert together.dtype == torch.float32
    assert together.shape == ()
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_loss_is_that_of_the_model_on_the_same_labels(family: HfFamily, rows: list[Row]) -> None:
    family.module.eval()
    batch = family.collator(rows)

    mean = family.module.model(**batch.inputs, labels=batch.labels).loss

    torch.testing.assert_close(family.module(batch), mean * batch.num_targets, rtol=1e-5, atol=1e-5)


def test_several_captions_of_a_slot_become_rows_with_its_image(family: HfFamily, rows: list[Row]) -> None:
    family.module.eval()
    captions = ("a dog", "a red circle")
    apart = [replace(rows[0], captions=(caption,)) for caption in captions]

    batch = family.collator([replace(rows[0], captions=captions), rows[1]])

    assert batch.labels.shape[0] == 3
    assert batch.keys == ("key-0", "key-1")
    torch.testing.assert_close(family.module(batch), family.module(family.collator([*apart, rows[1]])))


def test_every_trainable_parameter_gets_a_finite_gradient(family: HfFamily, rows: list[Row], kind: str) -> None:
    loss = family.module(family.collator(rows))
    unreached = parameters_without_gradient(loss, family.module.model)
    loss.backward()

    parameters = dict(family.module.model.named_parameters())
    without = tuple(name for name, p in parameters.items() if p.grad is None)
    assert without == unreached
    assert all(name.endswith(("post_layernorm.weight", "post_layernorm.bias")) for name in without)
    assert bool(without) == (kind == "llava")
    assert all(bool(p.grad.isfinite().all()) for p in parameters.values() if p.grad is not None)


def test_masked_slots_keep_the_shape_and_have_no_target(family: HfFamily, rows: list[Row]) -> None:
    whole = family.collator(rows)
    masked = [replace(row, image=Image.new("RGB", row.image.size), masked="damaged") for row in rows]

    batch = family.collator([*masked[:2], *rows[2:]])

    assert {k: t.shape for k, t in batch.inputs.items()} == {k: t.shape for k, t in whole.inputs.items()}
    assert torch.equal(batch.labels[2:], whole.labels[2:])
    assert (batch.labels[:2] == IGNORED).all()


def test_batch_without_targets_gives_a_zero_loss_and_zero_gradients(family: HfFamily) -> None:
    row = Row(n=0, epoch=0, key="a", image=Image.new("RGB", (40, 30)), captions=(), masked="past the end")

    batch = family.collator([row, replace(row, key="b")])
    loss = family.module(batch)
    loss.backward()

    assert batch.num_targets == 0
    assert loss == 0
    gradients = [p.grad for p in family.module.parameters() if p.grad is not None]
    assert gradients
    assert not any(bool(gradient.any()) for gradient in gradients)


def test_collator_survives_pickling(family: HfFamily, rows: list[Row]) -> None:
    copy = pickle.loads(pickle.dumps(family.collator))

    expected, batch = family.collator(rows), copy(rows)

    assert batch.inputs.keys() == expected.inputs.keys()
    assert all(torch.equal(batch.inputs[name], expected.inputs[name]) for name in expected.inputs)
    assert torch.equal(batch.labels, expected.labels)


def test_generate_writes_the_caption_and_nothing_else(family: HfFamily, rows: list[Row]) -> None:
    """Each model learns two captions by heart, so that there is something to write."""
    torch.manual_seed(0)
    batch = family.collator(rows[:2])
    optimizer = torch.optim.AdamW(family.module.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        family.module(batch).backward()
        optimizer.step()

    # In one batch with prompts of other lengths, so that padding is on the left in earnest.
    captions = family.generate([row.image for row in rows], max_new_tokens=40)

    assert captions[:2] == [row.captions[0] for row in rows[:2]]
    assert len(captions) == len(rows)


def test_generate_leaves_mode_gradients_and_randomness_alone(family: HfFamily, rows: list[Row]) -> None:
    family.module.train()
    before = torch.get_rng_state()
    images = [row.image for row in rows[:2]]

    first, second = family.generate(images, 5), family.generate(images, 5)

    assert first == second
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in family.module.modules())
    assert all(p.grad is None for p in family.module.parameters())


def test_saved_folder_is_opened_with_the_same_loss_and_captions(
    family: HfFamily, rows: list[Row], tmp_path: Path
) -> None:
    family.module.eval()
    batch = family.collator(rows)
    family.save_pretrained(tmp_path / "saved")

    again = open_family(ModelConfig(family="hf", path="saved", prompt=PROMPT), tmp_path / "saved")
    again.module.eval()

    assert torch.equal(again.module(batch), family.module(batch))
    assert torch.equal(again.collator(rows).labels, batch.labels)


def test_dtype_is_that_of_the_config_and_the_loss_float32(kind: str, base_folders: Folders, rows: list[Row]) -> None:
    family = HfFamily.open(ModelConfig(prompt=PROMPT, dtype="bfloat16"), base_folders(kind))

    loss = family.module(family.collator(rows))

    assert {p.dtype for p in family.module.parameters()} == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert family.generate([rows[0].image], 2)


def test_frozen_parameters_do_not_train(base_folders: Folders, rows: list[Row]) -> None:
    config = ModelConfig(prompt=PROMPT, freeze=("*.vision_tower.*", "*.multi_modal_projector.*"))
    family = HfFamily.open(config, base_folders("llava"))

    family.module(family.collator(rows)).backward()

    trained = {name for name, p in family.module.model.named_parameters() if p.grad is not None}
    assert trained
    assert all(name.startswith("model.language_model.") for name in trained)


class TestMaxLength:
    """An answer is never cut."""

    def collator_of(self, kind: str, folders: Folders, max_length: int) -> HfFamily:
        return HfFamily.open(ModelConfig(prompt=PROMPT, max_length=max_length), folders(kind))

    def lengths(self, family: HfFamily, rows: list[Row]) -> list[int]:
        return [int(family.collator([row]).inputs["attention_mask"].sum()) for row in rows]

    def test_a_longer_sequence_is_refused_by_the_collator(
        self, kind: str, base_folders: Folders, family: HfFamily, rows: list[Row]
    ) -> None:
        needed = self.lengths(family, rows[2:3])[0]
        assert self.collator_of(kind, base_folders, needed).collator(rows[2:3]).num_targets

        message = f"key-2: needs {needed} tokens, model.max_length is {needed - 1}; set it to {needed} or more"
        with pytest.raises(ConfigError, match=message) as error:
            self.collator_of(kind, base_folders, needed - 1).collator(rows[2:3])
        assert error.value.key == "key-2"

    def test_check_counts_the_samples_that_do_not_fit(
        self, kind: str, base_folders: Folders, family: HfFamily, rows: list[Row]
    ) -> None:
        needed = self.lengths(family, rows)
        samples = [(row.key, *row.image.size, ("a", *row.captions)) for row in rows]
        self.collator_of(kind, base_folders, max(needed)).check_lengths(samples)

        limit = sorted(needed)[1]
        first = next(i for i, length in enumerate(needed) if length > limit)
        message = (
            f"model.max_length is {limit}: {sum(length > limit for length in needed)} of 4 samples do not fit, "
            f"key-{first} needs {needed[first]} tokens; set it to {max(needed)} or more"
        )
        with pytest.raises(ConfigError, match=message):
            self.collator_of(kind, base_folders, limit).check_lengths(samples)

    def test_a_processor_that_cannot_count_lays_the_picture_out(
        self, base_folders: Folders, family: HfFamily, kind: str, rows: list[Row], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed = self.lengths(family, rows)
        samples = [(row.key, *row.image.size, row.captions) for row in rows]
        strict = self.collator_of(kind, base_folders, max(needed) - 1)
        for owner in type(strict.collator.processor).__mro__:
            if "_get_num_multimodal_tokens" in vars(owner):
                monkeypatch.delattr(owner, "_get_num_multimodal_tokens")

        with pytest.raises(ConfigError, match=f"set it to {max(needed)} or more"):
            strict.check_lengths(samples)

    def test_without_a_limit_nothing_is_checked(self, llava: HfFamily) -> None:
        llava.check_lengths([("a", 10, 10, ("word " * 1000,))])


class TestOpening:
    def test_a_folder_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        message = f"model.path: {tmp_path / 'none'} cannot be loaded as an image-text-to-text model: "

        with pytest.raises(ConfigError, match=re.escape(message)):
            open_family(ModelConfig(family="hf", path="x"), tmp_path / "none")

    def test_missing_weights_are_not_made_up(self, base_folders: Folders, tmp_path: Path) -> None:
        shutil.copytree(base_folders("llava"), tmp_path / "part")
        weights = load_file(tmp_path / "part" / "model.safetensors")
        lost = sorted(weights)[-1]
        del weights[lost]
        save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})

        with pytest.raises(ConfigError, match=r"part lacks 1 weights of LlavaForConditionalGeneration, .* for example"):
            open_family(ModelConfig(family="hf", path="x"), tmp_path / "part")

    def test_a_tokenizer_without_a_pad_token_pads_with_the_end(
        self, base_folders: Folders, rows: list[Row], tmp_path: Path
    ) -> None:
        family = HfFamily.open(ModelConfig(), base_folders("qwen"))  # its pad token is the end token
        expected = family.collator(rows)
        family.collator.processor.tokenizer.pad_token = None
        family.save_pretrained(tmp_path / "no-pad")

        again = HfFamily.open(ModelConfig(), tmp_path / "no-pad")

        assert torch.equal(again.collator(rows).inputs["input_ids"], expected.inputs["input_ids"])
        assert torch.equal(again.collator(rows).labels, expected.labels)


# Decode modes


def test_batch_of_the_fast_mode_is_that_of_the_exact_mode_where_the_processor_works_on_tensors(
    family: HfFamily, kind: str, base_folders: Folders, rows: list[Row]
) -> None:
    fast = HfFamily.open(ModelConfig(prompt=PROMPT, decode="fast"), base_folders(kind))
    exact = family.collator(rows)

    batch = fast.collator([replace(row, image=as_tensor(row.image)) for row in rows])

    assert batch.inputs.keys() == exact.inputs.keys()
    assert all(torch.equal(tensor, exact.inputs[name]) for name, tensor in batch.inputs.items())


def test_scaled_mode_is_for_models_that_resize_every_picture_alike(base_folders: Folders) -> None:
    assert HfFamily.open(ModelConfig(prompt=PROMPT, decode="scaled"), base_folders("llava")).collator.on_tensors
    with pytest.raises(
        ConfigError, match=r"model\.decode is scaled, but this model resizes or cuts .* use model\.decode=fast"
    ):
        HfFamily.open(ModelConfig(prompt=PROMPT, decode="scaled"), base_folders("qwen"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_the_one_asked_for_and_said(base_folders: Callable[[str], Path], attention: str) -> None:
    family = HfFamily.open(ModelConfig(prompt=PROMPT, attention=attention), base_folders("llava"))
    assert types_and_attention(family.module) == f"weights in float32, attention {attention}"


def test_attention_that_is_not_there_is_refused(base_folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded as an image-text-to-text model: .*[Ff]lash"):
        HfFamily.open(ModelConfig(prompt=PROMPT, attention="flash_attention_2"), base_folders("llava"))
