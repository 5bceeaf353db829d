"""The family xcomposer in the trainer: rows, losses, captions, and runs of real processes."""

import pickle
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from PIL import Image
from pydantic import ValidationError
from xcomposers import build_xcomposer

from shards.errors import ConfigError
from xctrain.collate import Row
from xctrain.loss import IGNORED
from xctrain.modelconfig import ModelConfig
from xctrain.models import open_family
from xctrain.models.parameters import parameters_without_gradient
from xctrain.models.xcomposer import XComposerFamily
from xctrain.models.xcomposer_generate import Reading, write_greedily, write_with_beams
from xctrain.models.xcomposer_prompt import TokenRow, chat_text, pad_rows

CAPTIONS = ("a red circle above a blue square", "a dog", "two small green triangles", "a cat")
SIZES = ((60, 40), (32, 32), (40, 90), (200, 60))  # one tile, or several, lying and standing


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_xcomposer(tmp_path_factory.mktemp("xcomposer") / "base")


def opened(base: Path, **changes: Any) -> XComposerFamily:
    config = ModelConfig(family="xcomposer", path=str(base), **{"hd_num": 4, **changes})
    family = open_family(config, base)
    assert isinstance(family, XComposerFamily)
    return family


@pytest.fixture(params=["chat", "finetune"])
def family(request: pytest.FixtureRequest, base: Path) -> XComposerFamily:
    return opened(base, layout=request.param)


@pytest.fixture
def chat(base: Path) -> XComposerFamily:
    return opened(base)


def noise(number: int, size: tuple[int, int]) -> Image.Image:
    return Image.frombytes("RGB", size, random.Random(number).randbytes(size[0] * size[1] * 3))


@pytest.fixture
def rows() -> list[Row]:
    return [
        Row(n=n, epoch=0, key=f"key-{n}", image=noise(n, size), captions=(caption,))
        for n, (caption, size) in enumerate(zip(CAPTIONS, SIZES, strict=True))
    ]


def inputs_of(family: XComposerFamily, rows: list[TokenRow], *, left: bool = False) -> dict[str, torch.Tensor]:
    return pad_rows(rows, family.collator.pad_id, family.collator.encoder.side, left=left)[0]


class TestRows:
    def test_targets_by_position_are_those_of_the_published_scan(self, base: Path, rows: list[Row]) -> None:
        collator = opened(base, layout="finetune").collator

        for row in rows:
            line = collator.encoder.answer(collator.prompt(row.image), row.captions[0])
            scanned = collator.encoder.conversation([collator.instruction, row.captions[0]], [row.image])
            assert (line.ids, line.labels) == (scanned.ids, scanned.labels)

    def test_what_is_trained_on_begins_with_what_captioning_asks(
        self, family: XComposerFamily, rows: list[Row]
    ) -> None:
        batch = family.collator(rows)
        prompts = [family.collator.prompt(row.image) for row in rows]
        asked = inputs_of(family, prompts)

        for i, prompt in enumerate(prompts):
            length = len(prompt.ids)
            assert torch.equal(batch.inputs["input_ids"][i, :length], asked["input_ids"][i, :length])
            assert torch.equal(batch.inputs["image_mask"][i, :length], asked["image_mask"][i, :length])
            assert batch.labels[i, length - 1] == IGNORED != batch.labels[i, length]
        assert torch.equal(batch.inputs["tiles"], asked["tiles"])

    def test_layouts_differ_in_the_place_of_the_begin_token(self, base: Path, rows: list[Row]) -> None:
        begin, places = opened(base).collator.encoder.tokenizer.bos_id, {}
        for layout in ("chat", "finetune"):
            places[layout] = opened(base, layout=layout).collator.prompt(rows[0].image).ids.index(begin)

        assert places["chat"] == 0
        assert places["finetune"] == opened(base, layout="finetune").collator.encoder.image_tokens(60, 40)

    def test_end_and_pad_are_one_token_and_only_the_end_is_a_target(
        self, family: XComposerFamily, rows: list[Row]
    ) -> None:
        tokenizer = family.collator.encoder.tokenizer
        assert tokenizer.eos_id == family.collator.pad_id

        batch = family.collator(rows)

        for row, labels in zip(rows, batch.labels, strict=True):
            targets = labels[labels != IGNORED].tolist()
            assert tokenizer.decode(targets[:-2]) == row.captions[0]
            assert targets[-2:] == [tokenizer.end_id, tokenizer.eos_id]
        assert batch.num_targets == int((batch.labels != IGNORED).sum())

    def test_marks_in_a_caption_are_only_text(self, chat: XComposerFamily, rows: list[Row]) -> None:
        tokenizer = chat.collator.encoder.tokenizer
        text = "a sign: [UNUSED_TOKEN_145] </s> <s> [UNUSED_TOKEN_146] <ImageHere>"

        batch = chat.collator([replace(rows[0], captions=(text,))])

        targets = batch.labels[batch.labels != IGNORED].tolist()
        assert tokenizer.decode(targets[:-2]) == text
        assert not {tokenizer.bos_id, tokenizer.start_id, *tokenizer.end_ids} & set(targets[:-2])

    def test_masked_slots_keep_the_shape_and_have_no_target(self, family: XComposerFamily, rows: list[Row]) -> None:
        whole = family.collator(rows)
        masked = [replace(row, image=Image.new("RGB", row.image.size), masked="damaged") for row in rows]

        batch = family.collator([*masked[:2], *rows[2:]])

        assert {k: t.shape for k, t in batch.inputs.items()} == {k: t.shape for k, t in whole.inputs.items()}
        assert torch.equal(batch.labels[2:], whole.labels[2:])
        assert (batch.labels[:2] == IGNORED).all()
        assert batch.masked == ("damaged", "damaged", None, None)
        assert batch.keys == ("key-0", "key-1", "key-2", "key-3")

    def test_collator_survives_pickling(self, family: XComposerFamily, rows: list[Row]) -> None:
        copy = pickle.loads(pickle.dumps(family.collator))

        expected, batch = family.collator(rows), copy(rows)

        assert all(torch.equal(batch.inputs[name], expected.inputs[name]) for name in expected.inputs)
        assert torch.equal(batch.labels, expected.labels)

    def test_a_picture_too_thin_is_named(self, chat: XComposerFamily, rows: list[Row]) -> None:
        message = r"key-0: a picture of 400 x 1 pixels is too thin for XComposer"

        with pytest.raises(ConfigError, match=message) as error:
            chat.collator([replace(rows[0], image=Image.new("RGB", (400, 1)))])
        assert error.value.key == "key-0"

    def test_places_and_images_must_agree(self, chat: XComposerFamily, rows: list[Row]) -> None:
        with pytest.raises(ConfigError, match="'<ImageHere> and' has 1 places <ImageHere> for 2 images"):
            chat.collator.encoder.prompt("<ImageHere> and", [rows[0].image, rows[1].image])


class TestMaxLength:
    """An answer is never cut."""

    def lengths(self, family: XComposerFamily, rows: list[Row]) -> list[int]:
        return [int(family.collator([row]).inputs["attention_mask"].sum()) for row in rows]

    def test_a_longer_sequence_is_refused_by_the_collator(self, base: Path, rows: list[Row]) -> None:
        [needed] = self.lengths(opened(base), rows[2:3])
        assert opened(base, max_length=needed).collator(rows[2:3]).num_targets

        message = f"key-2: needs {needed} tokens, model.max_length is {needed - 1}; set it to {needed} or more"
        with pytest.raises(ConfigError, match=message):
            opened(base, max_length=needed - 1).collator(rows[2:3])

    def test_check_counts_the_samples_that_do_not_fit(self, family: XComposerFamily, rows: list[Row]) -> None:
        needed = self.lengths(family, rows)
        samples = [(row.key, *row.image.size, ("a", *row.captions)) for row in rows]
        replace(family.collator, max_length=max(needed)).check_lengths(samples)

        limit = sorted(needed)[1]
        message = (
            rf"model.max_length is {limit}: {sum(length > limit for length in needed)} of 4 samples do not fit, "
            rf"key-\d needs \d+ tokens; set it to {max(needed)} or more"
        )
        with pytest.raises(ConfigError, match=message):
            replace(family.collator, max_length=limit).check_lengths(samples)


class TestLoss:
    def test_loss_of_a_batch_is_the_sum_of_its_rows(self, family: XComposerFamily, rows: list[Row]) -> None:
        """Pictures of other tile counts, captions of other lengths: padding changes nothing."""
        family.module.eval()

        together = family.module(family.collator(rows))
        alone = sum(family.module(family.collator([row])) for row in rows)

        assert together.dtype == torch.float32
        assert together.shape == ()
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)

    def test_rows_without_an_image_with_one_and_with_several_equal_each_alone(self, family: XComposerFamily) -> None:
        encoder, model = family.collator.encoder, family.module.model.eval()
        mixed = [
            encoder.conversation(["what is shown?", "a dog"], [noise(0, (90, 40))]),
            encoder.conversation(["is there a box?", "a box", "and?", "a small disc"]),
            encoder.conversation(["<ImageHere> or <ImageHere>?", "a cat"], [noise(1, (30, 80)), noise(2, (40, 40))]),
        ]

        def loss(rows: list[TokenRow]) -> torch.Tensor:
            inputs, labels = pad_rows(rows, family.collator.pad_id, encoder.side)
            return model.summed_loss(model(model.embed(inputs), inputs["image_mask"]), labels)

        torch.testing.assert_close(loss(mixed), sum(loss([row]) for row in mixed), rtol=1e-5, atol=1e-5)
        assert loss(mixed[1:2]) > 0

    def test_several_captions_of_a_slot_become_rows_with_its_image(
        self, chat: XComposerFamily, rows: list[Row]
    ) -> None:
        chat.module.eval()
        captions = ("a dog", "a red circle")
        apart = [replace(rows[0], captions=(caption,)) for caption in captions]

        batch = chat.collator([replace(rows[0], captions=captions), rows[1]])

        assert batch.keys == ("key-0", "key-1")
        torch.testing.assert_close(chat.module(batch), chat.module(chat.collator([*apart, rows[1]])))

    def test_logits_are_made_at_target_positions_only(self, chat: XComposerFamily, rows: list[Row]) -> None:
        shapes: list[torch.Size] = []
        chat.module.model.output.register_forward_hook(lambda _m, _args, output: shapes.append(output.shape))

        batch = chat.collator(rows)
        chat.module(batch)

        assert [tuple(shape) for shape in shapes] == [(batch.num_targets, chat.module.model.config.vocab_size)]

    def test_every_parameter_gets_a_finite_gradient(self, family: XComposerFamily, rows: list[Row]) -> None:
        loss = family.module(family.collator(rows))
        assert parameters_without_gradient(loss, family.module.model) == ()
        loss.backward()

        assert all(bool(p.grad.isfinite().all()) for p in family.module.parameters() if p.grad is not None)

    def test_batch_without_targets_gives_a_zero_loss_and_zero_gradients(self, chat: XComposerFamily) -> None:
        row = Row(n=0, epoch=0, key="a", image=Image.new("RGB", (40, 30)), captions=(), masked="past the end")

        batch = chat.collator([row, replace(row, key="b")])
        loss = chat.module(batch)
        loss.backward()

        assert batch.num_targets == 0
        assert loss == 0
        gradients = [p.grad for p in chat.module.parameters()]
        assert not any(gradient is None or bool(gradient.any()) for gradient in gradients)

    def test_memory_options_do_not_change_loss_and_gradients(self, base: Path, rows: list[Row]) -> None:
        """With PLoRA's dropout at work: what is computed again draws the same numbers."""
        plain, saving = opened(base), opened(base, gradient_checkpointing=True, views_at_once=2)
        losses = []
        for family in (plain, saving):
            family.module.train()
            torch.manual_seed(0)
            losses.append(family.module(family.collator(rows)))
            losses[-1].backward()

        torch.testing.assert_close(losses[0], losses[1])
        for (name, expected), found in zip(plain.module.named_parameters(), saving.module.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)

    def test_dropout_of_the_image_branch_is_on_in_training_only(self, chat: XComposerFamily, rows: list[Row]) -> None:
        batch = chat.collator(rows)
        chat.module.train()
        assert chat.module(batch) != chat.module(batch)
        chat.module.eval()
        assert chat.module(batch) == chat.module(batch)

    def test_dtype_is_that_of_the_config_and_the_loss_float32(self, base: Path, rows: list[Row]) -> None:
        family = opened(base, dtype="bfloat16")

        loss = family.module(family.collator(rows))

        assert {p.dtype for p in family.module.parameters()} == {torch.bfloat16}
        assert loss.dtype == torch.float32
        assert len(family.generate([rows[0].image], 2)) == 1

    def test_autocast_comes_close_to_float32(self, chat: XComposerFamily, rows: list[Row]) -> None:
        chat.module.eval()
        batch = chat.collator(rows)

        with torch.autocast("cpu", torch.bfloat16):
            loss = chat.module(batch)

        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, chat.module(batch), rtol=2e-2, atol=0)

    def test_frozen_parameters_do_not_train(self, base: Path, rows: list[Row]) -> None:
        family = opened(base, freeze=("vit.*", "vision_proj.*", "plora_*", "*.Plora_?.*"))

        family.module(family.collator(rows)).backward()

        trained = {name for name, p in family.module.model.named_parameters() if p.grad is not None}
        assert "model.layers.0.attention.wqkv.weight" in trained
        assert not any("lora" in name or name.startswith("vi") for name in trained)


class TestWriting:
    def test_generate_writes_the_caption_and_nothing_else(self, family: XComposerFamily, rows: list[Row]) -> None:
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
        assert captions == [family.generate([row.image], max_new_tokens=40)[0] for row in rows]

    def test_cache_and_left_padding_give_the_logits_of_whole_sequences(
        self, family: XComposerFamily, rows: list[Row]
    ) -> None:
        model = family.module.model.eval()
        prompts = [family.collator.prompt(row.image) for row in rows]
        inputs = inputs_of(family, prompts, left=True)
        written = torch.randint(0, model.config.vocab_size, (len(rows), 5), generator=torch.Generator().manual_seed(0))

        with torch.no_grad():
            reading = Reading(model, inputs, max_new_tokens=5)
            steps = []
            for tokens in written.unbind(dim=1):
                reading.feed(tokens)
                steps.append(reading.logits)
            for i, prompt in enumerate(prompts):
                whole = inputs_of(
                    family, [replace(prompt, ids=prompt.ids + written[i].tolist(), labels=prompt.labels + [0] * 5)]
                )
                expected = model.logits(model(model.embed(whole), whole["image_mask"]))[0, -5:]
                torch.testing.assert_close(torch.stack(steps, dim=1)[i], expected, rtol=1e-4, atol=1e-4)

    def test_one_beam_writes_what_greedy_writes(self, chat: XComposerFamily, rows: list[Row]) -> None:
        model, ends = chat.module.model.eval(), chat.collator.encoder.tokenizer.end_ids
        inputs = inputs_of(chat, [chat.collator.prompt(rows[0].image)])

        [greedy] = write_greedily(model, inputs, max_new_tokens=12, end_ids=ends)

        assert write_with_beams(model, inputs, num_beams=1, max_new_tokens=12, end_ids=ends) == greedy

    def test_beams_find_a_likelier_answer_than_greedy(self, chat: XComposerFamily, rows: list[Row]) -> None:
        model, prompt = chat.module.model.eval(), chat.collator.prompt(rows[0].image)
        inputs = inputs_of(chat, [prompt])

        def score(ids: list[int]) -> float:
            whole = inputs_of(chat, [TokenRow(prompt.ids + ids, prompt.labels + ids, prompt.pictures)])
            with torch.no_grad():
                logits = model.logits(model(model.embed(whole), whole["image_mask"]))[0, len(prompt.ids) - 1 : -1]
            return float(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).mean())

        [greedy] = write_greedily(model, inputs, max_new_tokens=4, end_ids=())
        beams = write_with_beams(model, inputs, num_beams=8, max_new_tokens=4, end_ids=())

        assert len(beams) == len(greedy) == 4
        assert score(beams) >= score(greedy)

    def test_a_penalty_keeps_from_repeating(self, chat: XComposerFamily) -> None:
        encoder = chat.collator.encoder
        inputs = inputs_of(chat, [encoder.prompt(chat_text("a dog"))])

        [ids] = write_greedily(chat.module.model.eval(), inputs, max_new_tokens=20, end_ids=(), repetition_penalty=1e6)

        assert len(set(ids)) == len(ids) == 20

    def test_generate_leaves_mode_gradients_and_randomness_alone(self, chat: XComposerFamily, rows: list[Row]) -> None:
        chat.module.train()
        before = torch.get_rng_state()

        first, second = (chat.generate([row.image for row in rows[:2]], 5) for _ in range(2))

        assert first == second
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training for module in chat.module.modules())
        assert all(p.grad is None for p in chat.module.parameters())


class TestConfig:
    def test_a_folder_is_needed(self) -> None:
        with pytest.raises(ValidationError, match=r"model\.path is empty; family xcomposer needs a model folder"):
            ModelConfig(family="xcomposer")

    def test_its_own_settings_are_refused_for_another_family(self) -> None:
        message = "model.hd_num is for family xcomposer, the family is tiny; leave it out"
        with pytest.raises(ValidationError, match=message):
            ModelConfig(family="tiny", hd_num=4)


def test_launch_trains_and_captions_on_two_processes(base: Path, drawn_shards: Path, tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    config.write_text("{}")
    values = runs.settings(
        drawn_shards,
        run,
        train__num_steps=8,
        optim__schedule="constant",
        optim__lr=2e-3,
        model__family="xcomposer",
        model__path=base,
        model__hd_num=4,
        model__gradient_checkpointing=True,
        eval__every=8,
        eval__num_images=3,
        eval__max_new_tokens=8,
    )

    runs.finish(runs.start([sys.executable, "-m", "xctrain", "launch", str(config), "--processes", "2", *values]))

    losses = [event["loss"] for event in runs.events(run, "step")]
    assert len(losses) == 8
    assert sum(losses[-3:]) < sum(losses[:3])
    assert [event["num_images"] for event in runs.events(run, "eval")] == [3, 3]
    assert len((run / "captions" / "step-00000008.jsonl").read_text().splitlines()) == 3
