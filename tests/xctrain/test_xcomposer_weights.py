"""Checkpoints of XComposer2.5: what is loaded, refused and saved, and the published model's size."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from xcomposers import CONFIG, build_xcomposer

from shards.errors import ConfigError
from xctrain.collate import Row
from xctrain.modelconfig import ModelConfig
from xctrain.models.xcomposer import XComposerFamily
from xctrain.models.xcomposer_config import XComposerConfig, read_config
from xctrain.models.xcomposer_decoder import DECODER_LINEARS
from xctrain.models.xcomposer_model import XComposer
from xctrain.models.xcomposer_tokenizer import Tokenizer
from xctrain.models.xcomposer_weights import empty_model, load_model, official_name, own_name

_SHARED = Path(__file__).parents[2].parent / "shared" / "xcomposer"
LINEAR = "model.layers.1.feed_forward.w2"
# Sizes of the published model; the totals of its checkpoint follow from these.
PUBLISHED: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if not key.startswith("plora") and key != "vision_config"},
    "vocab_size": 92544,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 24576,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_xcomposer(tmp_path_factory.mktemp("xcomposer") / "base")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(base, tmp_path / "copy"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> XComposer:
    return load_model(read_config(folder), folder, torch.float32)


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def equal_weights(first: XComposer, second: XComposer) -> bool:
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class TestLoading:
    def test_adapters_of_other_modes_and_what_is_never_used_are_dropped(self, base: Path, folder: Path) -> None:
        tower = "vit.vision_tower.vision_model"
        extra = {
            f"{LINEAR}.lora_{kind}_{half}.weight": torch.ones(2) for kind in ("sft", "dpo", "web") for half in "AB"
        }
        extra[f"{tower}.post_layernorm.weight"] = torch.ones(32)
        extra[f"{tower}.embeddings.position_ids"] = torch.arange(17)
        write(folder, {**tensors_of(folder), **extra})

        assert equal_weights(load(folder), load(base))

    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_shards_are_loaded_by_their_index(self, base: Path, folder: Path, suffix: str) -> None:
        self.shard(folder, suffix)

        assert equal_weights(load(folder), load(base))

    def test_a_shard_that_is_not_there_is_named(self, folder: Path) -> None:
        names = self.shard(folder, "bin")
        (folder / names[1]).unlink()

        with pytest.raises(ConfigError, match=rf"copy lacks 1 of 2 weight files, {names[1]} for example; download the"):
            load(folder)

    def test_a_whole_file_of_the_oldest_form_is_loaded(self, base: Path, folder: Path) -> None:
        torch.save(tensors_of(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        (folder / "model.safetensors").unlink()

        assert equal_weights(load(folder), load(base))

    def test_a_file_that_would_run_code_is_refused(self, folder: Path) -> None:
        torch.save({"code": shutil.rmtree}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

        message = r"pytorch_model\.bin: cannot be read as weights alone: Weights only load failed.*; fetch it again"
        with pytest.raises(ConfigError, match=message):
            load(folder)

    def test_a_damaged_file_is_named(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"\x00" * 100)

        with pytest.raises(
            ConfigError, match=r"model\.safetensors: cannot be read as weights alone: .*; fetch it again"
        ):
            load(folder)

    def test_missing_weights_are_not_made_up(self, folder: Path) -> None:
        tensors = tensors_of(folder)
        del tensors[f"{LINEAR}.Plora_A.weight"], tensors["plora_glb_GN"]
        write(folder, tensors)

        message = rf"copy lacks 2 weights of XComposer2\.5, {LINEAR}\.Plora_A\.weight for example; fetch it again"
        with pytest.raises(ConfigError, match=message):
            load(folder)

    def test_a_weight_that_the_model_has_not_is_refused(self, folder: Path) -> None:
        write(folder, {**tensors_of(folder), "video_mem_proj.0.weight": torch.ones(2)})

        with pytest.raises(ConfigError, match=r"copy holds video_mem_proj\.0\.weight, which XComposer2\.5 has not"):
            load(folder)

    def test_a_weight_of_another_shape_is_refused(self, folder: Path) -> None:
        write(folder, {**tensors_of(folder), "plora_glb_GN": torch.ones(1, 1, 4)})

        message = r"copy: plora_glb_GN is \(1, 1, 4\), config\.json makes it \(1, 1, 128\); fetch both from one place"
        with pytest.raises(ConfigError, match=message):
            load(folder)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "model.safetensors"])
    def test_a_file_that_is_not_there_is_named(self, folder: Path, name: str) -> None:
        (folder / name).unlink()

        with pytest.raises(
            ConfigError, match=rf"model\.path: .*copy holds no .*{'' if 'safe' in name else name}.*download"
        ):
            XComposerFamily.open(ModelConfig(family="xcomposer", path="x"), folder)

    def test_a_folder_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        message = f"model.path: {tmp_path / 'none'} holds no config.json; give the folder of a downloaded XComposer2.5"
        with pytest.raises(ConfigError, match=re.escape(message)):
            XComposerFamily.open(ModelConfig(family="xcomposer", path="x"), tmp_path / "none")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rope_theta": "absent"}, "rope_theta: Field required"),
            ({"rope_scaling": "absent"}, "rope_scaling: Field required"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings: Input should be False"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, r"rope_scaling\.type: Input should be 'dynamic' or"),
            ({"vision_config": {"image_size": 50}}, "image_size 50 is no multiple of 2 patches of 14"),
        ],
    )
    def test_a_config_of_another_model_is_refused(self, folder: Path, changes: dict[str, Any], message: str) -> None:
        set_config(folder, **changes)

        with pytest.raises(ConfigError, match=rf"config\.json: is not of XComposer2\.5: .*{message}"):
            read_config(folder)

    def test_a_tokenizer_without_the_marks_of_a_turn_is_refused(self, folder: Path) -> None:
        from sentencepiece import SentencePieceTrainer

        with (folder / "tokenizer.model").open("wb") as file:
            SentencePieceTrainer.train(
                sentence_iterator=iter(["a dog", "a cat"]),
                model_writer=file,
                vocab_size=300,
                hard_vocab_limit=False,
                byte_fallback=True,
                minloglevel=2,
            )

        with pytest.raises(ConfigError, match=r"tokenizer\.model: lacks one of \[UNUSED_TOKEN_146\]"):
            Tokenizer(folder)

    @staticmethod
    def shard(folder: Path, suffix: str) -> list[str]:
        tensors = tensors_of(folder)
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        names = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
        keys = sorted(tensors)
        parts = [{key: tensors[key] for key in keys[i::2]} for i in range(2)]
        for name, part in zip(names, parts, strict=True):
            save_file(part, folder / name) if suffix == "safetensors" else torch.save(part, folder / name)
        index = {"weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part}}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink()
        return names


class TestSaving:
    def test_saved_folder_opens_with_the_same_weights_loss_and_captions(self, base: Path, tmp_path: Path) -> None:
        config = ModelConfig(family="xcomposer", path="x", hd_num=4)
        image = Image.linear_gradient("L").resize((90, 40)).convert("RGB")
        family = XComposerFamily.open(config, base)
        with torch.no_grad():
            for parameter in family.module.parameters():
                parameter.add_(0.01)
        (tmp_path / "saved").mkdir()

        family.save_pretrained(tmp_path / "saved")

        again = XComposerFamily.open(config, tmp_path / "saved")
        batch = family.collator([Row(n=0, epoch=0, key="a", image=image, captions=("a dog",))])
        assert equal_weights(again.module.model, family.module.model)
        assert torch.equal(again.module.eval()(batch), family.module.eval()(batch))
        assert again.generate([image], 5) == family.generate([image], 5)

    def test_names_are_those_of_the_published_checkpoint(self, base: Path) -> None:
        names = tensors_of(base).keys()

        assert {f"{LINEAR}.weight", f"{LINEAR}.Plora_A.weight", f"{LINEAR}.Plora_B.weight"} <= names
        assert not any("_plora" in name for name in names)
        assert {own_name(name) for name in names} == {name for name, _ in load(base).named_parameters()}

    def test_published_code_and_licence_come_along_and_old_weights_do_not(self, folder: Path, tmp_path: Path) -> None:
        (folder / "modeling_internlm2.py").write_text("# never run")
        (folder / "LICENSE").write_text("terms")
        (folder / "pytorch_model.bin.index.json").write_text("{}")
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"output.weight": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        family = XComposerFamily.open(ModelConfig(family="xcomposer", path="x"), folder)

        family.save_pretrained(tmp_path / "saved")

        names = {path.name for path in (tmp_path / "saved").iterdir()}
        assert names == {"config.json", "tokenizer.model", "model.safetensors", "modeling_internlm2.py", "LICENSE"}


class TestPublishedModel:
    """The 7B's names, shapes and totals, without its weights."""

    def test_totals_are_those_of_the_published_checkpoint(self) -> None:
        sizes = {
            name: p.numel() for name, p in empty_model(XComposerConfig.model_validate(PUBLISHED)).named_parameters()
        }

        def total(pattern: str) -> int:
            return sum(size for name, size in sizes.items() if re.match(pattern, name))

        assert total(r".*_plora\.") == 603_979_776
        assert total(r"(model|output)\.(?!.*_plora\.)") == 7_737_708_544
        assert total(r"vit\.") == 304_556_032 - 2_048  # CLIP's last norm is left out
        assert total(r"vision_proj\.") == 33_562_624
        assert total(r"plora_") == 8_192
        assert sum(sizes.values()) == 8_679_813_120

    def test_shapes_are_those_of_the_published_checkpoint(self) -> None:
        shapes = {
            official_name(name): tuple(p.shape)
            for name, p in empty_model(XComposerConfig.model_validate(PUBLISHED)).named_parameters()
        }

        layer, vision = "model.layers.31", "vit.vision_tower.vision_model"
        assert shapes[f"{layer}.attention.wqkv.weight"] == (6144, 4096)
        assert shapes[f"{layer}.feed_forward.w2.Plora_A.weight"] == (256, 14336)
        assert shapes[f"{vision}.embeddings.position_embedding.weight"] == (1601, 1024)
        assert shapes[f"{vision}.encoder.layers.23.mlp.fc1.weight"] == (4096, 1024)
        assert shapes["plora_sub_GN"] == (1, 1, 1, 4096)

    def test_adapters_find_five_plain_linears_a_layer(self) -> None:
        model = empty_model(XComposerConfig.model_validate(PUBLISHED))

        found = [m for name, m in model.named_modules() if name.rpartition(".")[2] in DECODER_LINEARS]

        assert len(found) == 5 * 32
        assert {type(module) for module in found} == {torch.nn.Linear}
        assert (
            sum(64 * (m.in_features + m.out_features) for m in found if isinstance(m, torch.nn.Linear)) == 150_994_944
        )


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    return Tokenizer(_SHARED)


@pytest.mark.skipif(not (_SHARED / "tokenizer.model").exists(), reason=f"no published tokenizer in {_SHARED}")
class TestPublishedTokenizer:
    def test_ids_are_those_of_the_published_code(self, published: Tokenizer) -> None:
        text = (
            "[UNUSED_TOKEN_146]user\nHello world[UNUSED_TOKEN_145]\n"
            "[UNUSED_TOKEN_146]assistant\nA cat sits.[UNUSED_TOKEN_145]\n"
        )
        ids = "92543 1008 364 9843 2028 92542 364 92543 525 11353 364 290 8383 23334 281 92542 364"

        assert published.encode(text) == list(map(int, ids.split()))
        assert (published.bos_id, published.eos_id, published.end_id, published.start_id) == (1, 2, 92542, 92543)
        assert published.encode("<ImageHere>") == [45910, 8554, 330]
        assert published.encode("system") == [9081]

    @pytest.mark.parametrize("caption", ["A cat sits.", "2 dogs", "(a) sign", "ünder the 猫", "...", "-"])
    def test_an_answer_encoded_alone_is_that_of_the_whole_text(self, published: Tokenizer, caption: str) -> None:
        prompt = "[UNUSED_TOKEN_146]assistant\n"
        whole = published.encode(f"{prompt}{caption}[UNUSED_TOKEN_145]\n</s>")

        ends = [published.end_id, published.eos_id]
        assert [*published.encode(prompt), *published.encode_plain(caption), *ends] == whole
