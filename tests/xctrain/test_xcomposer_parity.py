"""The native XComposer2.5 against numbers of the published code: every file of the fixtures is a case.

`XCOMPOSER_FIXTURES` names another folder of the same form, made from another checkpoint; nothing here depends on the
number of layers, heads, tiles or images. The README beside the fixtures explains every tensor and the tolerances.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from xctrain.loss import IGNORED
from xctrain.models.xcomposer_config import RopeScaling, read_config
from xctrain.models.xcomposer_decoder import DECODER_LINEARS, KeyValueCache
from xctrain.models.xcomposer_generate import Reading, write_greedily, write_with_beams
from xctrain.models.xcomposer_images import CHAT, FINETUNE, Tiling, cut_tiles
from xctrain.models.xcomposer_model import XComposer
from xctrain.models.xcomposer_prompt import (
    IMAGE,
    LAYOUTS,
    PLACE,
    Encoder,
    TokenRow,
    answer_labels,
    chat_text,
    conversation_text,
    pad_rows,
)
from xctrain.models.xcomposer_tokenizer import Tokenizer
from xctrain.models.xcomposer_vision import cut_views, num_image_tokens
from xctrain.models.xcomposer_weights import UNUSED, empty_model, load_model, official_name, own_name

_GOLDEN = Path(__file__).parents[1] / "golden" / "xcomposer"
_SHARED = Path(__file__).parents[2].parent / "shared" / "xcomposer" / "fixtures"
FOLDER = Path(os.environ.get("XCOMPOSER_FIXTURES") or (_GOLDEN if _GOLDEN.is_dir() else _SHARED))
NAMES = sorted({path.stem for path in (FOLDER / "cases").glob("*")})
TILINGS = {"train": FINETUNE, "infer": CHAT}
FEATURES, LOGITS, LOSS = 5e-5, 1e-4, 1e-5  # absolute

pytestmark = pytest.mark.skipif(
    not NAMES, reason=f"no fixtures in {FOLDER}; set XCOMPOSER_FIXTURES to a folder of them"
)


@cache
def tensors(name: str) -> dict[str, Tensor]:
    path = FOLDER / "cases" / f"{name}.safetensors"
    return load_file(path) if path.exists() else {}


def scalars(name: str) -> Any:
    return json.loads((FOLDER / "cases" / f"{name}.json").read_text(encoding="utf-8"))


@cache
def model() -> XComposer:
    return load_model(read_config(FOLDER), FOLDER, torch.float32).eval()


def fresh_model(**changes: Any) -> XComposer:
    return load_model(read_config(FOLDER).model_copy(update=changes), FOLDER, torch.float32).eval()


@cache
def encoder(layout: str) -> Encoder:
    vision = model().config.vision_config
    return Encoder(Tokenizer(FOLDER), LAYOUTS[layout], vision.image_size, vision.cells, hd_num=18)


def side() -> int:
    return model().config.vision_config.image_size


def image(name: str) -> Image.Image:
    return Image.open(FOLDER / "images" / f"{name}.png").convert("RGB")


def picture(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.numpy())


def close(found: Tensor, expected: Tensor, absolute: float) -> None:
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=absolute)


def inputs_of(rows: list[TokenRow]) -> dict[str, Tensor]:
    return pad_rows(rows, model().config.pad_token_id, side())[0]


# One function a kind of case; the first whose pattern fits the file's name is the test of it.


def preprocess(name: str) -> None:
    for row in scalars(name):
        done = TILINGS[row["mode"]].apply(image(row["image"]), side(), row["hd_num"])
        digest = hashlib.sha256(np.asarray(done).tobytes()).hexdigest()
        grid = (done.height // side(), done.width // side())
        assert (*done.size, *grid, digest) == tuple(
            row[field] for field in ("out_w", "out_h", "tiles_h", "tiles_w", "sha256_uint8_hwc")
        ), row
        assert num_image_tokens(grid, model().config.vision_config.cells) == row["num_image_tokens"]
    for key, expected in tensors(name).items():
        mode, hd, shown, kind = key.split(".")
        done = TILINGS[mode].apply(image(shown), side(), int(hd.removeprefix("hd")))
        if kind == "uint8":
            assert torch.equal(torch.from_numpy(np.array(done)), expected), key
        else:
            assert kind == "global_view"
            tiles, grids = cut_tiles([done], side())
            close(cut_views(tiles, [tuple(grids[0].tolist())])[0], expected, 1e-6)


def geometry(name: str) -> None:
    tile = int(name.removeprefix("geometry_"))
    for row in scalars(name):
        tiling: Tiling = TILINGS[row["mode"]]
        grid = tiling.grid(row["in_w"], row["in_h"], tile, row["hd_num"])
        assert grid == (row["tiles_h"], row["tiles_w"]), row
        assert (grid[1] * tile, grid[0] * tile) == (row["out_w"], row["out_h"]), row
        assert num_image_tokens(grid, tile // 28) == row["num_image_tokens"], row
        if row["in_w"] * row["in_h"] <= 640 * 640:  # black on white shows where the content lies
            done = tiling.apply(Image.new("RGB", (row["in_w"], row["in_h"])), tile, row["hd_num"])
            box = Image.eval(done, lambda value: 255 - value).getbbox()
            assert list(box or ()) == row["content_box"], row


def tokenizer(name: str) -> None:
    case, own = scalars(name), encoder("finetune").tokenizer
    for row in case["conv2text"]:
        assert conversation_text(row["turns"]) == row["text"]
    for row in case["cases"]:
        ids = own.encode(row["text"])
        assert ids == row["ids_no_bos"], row
        assert [own.bos_id, *ids] == row["ids_with_bos"], row
        assert own.decode(ids) == row["decoded_skip_special"], row


def label_mask(name: str) -> None:
    case = scalars(name)
    for row in case["cases"]:
        assert answer_labels(row["ids"], case["end_token_id"], case["eos_token_id"]) == row["labels"], row["note"]


def vision(name: str) -> None:
    case = tensors(name)
    config, cells = model().config.vision_config, model().config.vision_config.cells
    done = [picture(pixels) for key, pixels in tensors("preprocess").items() if re.match(r"train\..*\.uint8", key)]
    lengths = case["split_lengths"].tolist()
    order = next(
        chosen
        for chosen in itertools.permutations(done, len(lengths))
        if [num_image_tokens((p.height // side(), p.width // side()), cells) for p in chosen] == lengths
    )
    tiles, grids = cut_tiles(order, side())
    views = cut_views(tiles, [(h, w) for h, w in grids.tolist()])
    close(model().tower(views), case["tower_hidden_last"], FEATURES)
    assert case["tower_hidden_last"].shape[1:] == (config.patches**2 + 1, config.hidden_size)
    joined = model().image_cells(tiles, grids)
    close(joined[None], case["vit_out"], FEATURES)
    close(model().vision_proj(joined)[None], case["projected"], FEATURES)


def training_row(text: str, pictures: list[Image.Image], max_length: int) -> TokenRow:
    """A row as upstream lays it out: no further piece once the length exceeds ``max_length``."""
    own = encoder("finetune")
    pieces = text.split(PLACE) if PLACE in text or not pictures else ["", text]
    for end in range(1, len(pieces) + 1):
        walked = PLACE.join(pieces[:end]) + PLACE * (end <= len(pictures))
        row = own.interleave(walked, pictures[:end])
        if len(row.ids) > max_length:
            break
    return TokenRow(row.ids, answer_labels(row.ids, own.tokenizer.end_id, own.tokenizer.eos_id), row.pictures)


def training_batch(
    case: Mapping[str, Any], data: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor, list[TokenRow]]:
    """Inputs, labels and rows of a training case, from its texts and images; rows not cut yet."""
    rows = []
    for i, text in enumerate(case["texts"]):
        shown = case["images"][i] if case["images"] else []
        pictures = [FINETUNE.apply(image(entry["image"]), side(), entry["hd_num"]) for entry in shown]
        for j, done in enumerate(pictures):
            assert torch.equal(torch.from_numpy(np.array(done)), data[f"sample{i}.image{j}.uint8"])
        row = training_row(text, pictures, case["max_length"])
        if case["data_type"] == "text":  # here upstream cuts before it makes labels
            ids = row.ids[: case["max_length"]]
            tokens = encoder("finetune").tokenizer
            row = TokenRow(ids, answer_labels(ids, tokens.end_id, tokens.eos_id))
        rows.append(row)
    inputs, labels = pad_rows(rows, model().config.pad_token_id, side())
    return inputs, labels, rows


def training(name: str) -> None:
    case, data = scalars(name), tensors(name)
    own = fresh_model()
    inputs, labels, _ = training_batch(case, data)
    embeddings = own.embed(inputs)
    end = case["max_length"]
    embeddings, labels, image_mask = embeddings[:, :end], labels[:, :end], inputs["image_mask"][:, :end]
    ids = inputs["input_ids"].masked_fill(inputs["image_mask"], IMAGE)[:, :end]

    assert torch.equal(ids, data["token_ids"])
    assert torch.equal(labels, data["labels"])
    assert torch.equal(image_mask, data["im_mask"])
    assert torch.equal(inputs["attention_mask"][:, :end], data["attention_mask"])
    if "inputs_embeds" in data:
        close(embeddings, data["inputs_embeds"], FEATURES)

    states: list[Tensor] = []
    for layer in own.model.layers:
        layer.register_forward_hook(lambda _module, _args, output: states.append(output))
    hidden = own(embeddings, image_mask)
    rows, columns = data["logit_positions"].unbind(dim=1)
    real = data["attention_mask"][rows, columns] == 1
    close(own.logits(hidden)[rows, columns][real], data["logits_at_positions"][real], LOGITS)
    if "hidden_states_after_embed" in data:
        states = [*states[:-1], hidden]
        expected = data["hidden_states_after_embed"]
        found = states if len(expected) == len(states) else [states[0], states[-1]]
        close(torch.stack(found), expected, FEATURES)

    loss = own.summed_loss(hidden, labels)
    num_targets = int((labels[:, 1:] != IGNORED).sum())
    assert num_targets == case["n_target_tokens"]
    close((loss / num_targets)[None], data["loss"], LOSS)
    (loss / num_targets).backward()
    require_gradients(own, case.get("grad_norms", {}), data)


def require_gradients(own: torch.nn.Module, norms: Mapping[str, float | None], data: Mapping[str, Tensor]) -> None:
    """Norms and whole tensors, by official name; None: no gradient, or one that the loss does not depend on."""
    parameters = {official_name(name): p for name, p in own.named_parameters()}
    unknown = [name for name in norms if name not in parameters and not UNUSED.search(name)]
    assert not unknown
    for name, parameter in parameters.items() if norms else ():
        found = 0.0 if parameter.grad is None else float(parameter.grad.double().norm())
        assert found == pytest.approx(norms[name] or 0.0, rel=1e-3, abs=1e-6), name
    for key, expected in data.items():
        if key.startswith("grad."):
            gradient = parameters[key.removeprefix("grad.")].grad
            assert gradient is not None
            close(gradient, expected, 1e-5)


def chat(name: str) -> None:
    case, data = scalars(name), tensors(name)
    own, tokens = encoder("chat"), encoder("chat").tokenizer
    pictures = []
    for i, shown in enumerate(case["images"]):
        hd_num = own.layout.hd_num_of_several if len(case["images"]) > 1 else case["hd_num_argument"]
        assert hd_num == case["hd_num_effective"]
        pictures.append(CHAT.apply(image(shown), side(), hd_num))
        assert torch.equal(torch.from_numpy(np.array(pictures[i])), data[f"image{i}.uint8"])
    text = chat_text(case["query"], [(q, a) for q, a in case["history"]], case["meta_instruction"])
    inputs = inputs_of([own.interleave(text, pictures)])
    assert torch.equal(inputs["image_mask"], data["im_mask"])
    close(model().embed(inputs), data["inputs_embeds"], FEATURES)

    expected = data["generated_ids"][0].tolist()
    options: dict[str, Any] = {"max_new_tokens": case["max_new_tokens"], "end_ids": tokens.end_ids}
    if case["num_beams"] > 1:
        ids = write_with_beams(model(), inputs, num_beams=case["num_beams"], **options)
    else:
        [ids] = write_greedily(model(), inputs, repetition_penalty=case["repetition_penalty"], **options)
    ended = [token for token in expected if token not in tokens.end_ids]
    assert ids == ended
    assert tokens.answer(ids) == case["response"]

    with torch.no_grad():
        reading = Reading(model(), inputs, len(expected))
        close(reading.logits, data["prefill_last_logits"], LOGITS)
        for step, logits in enumerate(data.get("step_logits", ())):
            if step:
                reading.feed(torch.tensor(expected[step - 1 : step]))
            close(reading.logits[0], logits, LOGITS)


def infer_mode(name: str) -> None:
    data = tensors(name)
    hidden = model()(model().model.tok_embeddings(data["token_ids"]), data["im_mask"])
    expected = data["last6_logits.base"]  # the modes `write` and `web` use adapters that training leaves out
    close(model().logits(hidden)[:, -expected.shape[1] :], expected, LOGITS)


def left_pad_cache(name: str) -> None:
    data = tensors(name)
    own, real = model(), data["attention_mask"]
    memory = KeyValueCache(len(own.model.layers), real.shape[1] + 1)
    embeddings = own.model.tok_embeddings(data["token_ids"])
    hidden = own(embeddings, data["im_mask"], positions=data["position_ids"], attention_mask=real, cache=memory)
    kept = real == 1
    close(own.logits(hidden)[kept], data["logits"][kept], LOGITS)
    for found, expected in zip(memory.layer(0), (data["layer0_key"], data["layer0_value"]), strict=True):
        close(found.transpose(1, 2)[kept], expected.transpose(1, 2)[kept], FEATURES)

    inputs = {
        "input_ids": data["token_ids"],
        "attention_mask": real,
        "image_mask": data["im_mask"],
        "tiles": torch.zeros(0, 3, side(), side(), dtype=torch.uint8),
        "grids": torch.zeros(0, 2, dtype=torch.int64),
    }
    with torch.no_grad():
        reading = Reading(own, inputs, max_new_tokens=1)
        assert torch.equal(reading.positions[:, None], data["next_position_ids"])
        close(reading.logits[kept[:, -1]], data["logits"][:, -1][kept[:, -1]], LOGITS)
        reading.feed(data["next_ids"][:, 0])
    close(reading.logits, data["next_logits"][:, 0], LOGITS)


def rope_scaling(name: str) -> None:
    data = tensors(name)
    scalings = {"dynamic": RopeScaling(type="dynamic", factor=2.0), "linear": RopeScaling(type="linear", factor=4.0)}
    for key, expected in data.items():
        if key == "token_ids":
            continue
        match = re.fullmatch(r"(\w+)\.logits_len(\d+)_last(\d+)", key)
        assert match, key
        own = fresh_model(max_position_embeddings=32, rope_scaling=scalings.get(match[1]))
        hidden = own(own.model.tok_embeddings(data["token_ids"][:, : int(match[2])]))
        close(own.logits(hidden)[:, -int(match[3]) :], expected, LOGITS)


def peft(name: str) -> None:
    """The case `peft` with the adapter in `peft_adapter`."""
    from peft import LoraConfig, inject_adapter_in_model

    case, data, adapter = scalars("peft"), tensors("peft"), tensors("peft_adapter")
    own = fresh_model()
    lora = LoraConfig(
        r=case["r"], lora_alpha=case["lora_alpha"], lora_dropout=0.0, bias="none", target_modules=list(DECODER_LINEARS)
    )
    inject_adapter_in_model(lora, own)
    names = {name.replace(".default.weight", ".weight"): p for name, p in own.named_parameters() if ".lora_" in name}
    assert {f"base_model.model.{name}" for name in names} == adapter.keys()
    with torch.no_grad():
        for own_key, parameter in names.items():
            parameter.copy_(adapter[f"base_model.model.{own_key}"])
    own.eval()

    done = FINETUNE.apply(image(case["image"]), side(), case["hd_num"])
    assert torch.equal(torch.from_numpy(np.array(done)), data["sample0.image0.uint8"])
    row = training_row(case["texts"][0], [done], 10**6)
    inputs, labels = pad_rows([row], own.config.pad_token_id, side())
    for parameter_name, parameter in own.named_parameters():
        parameter.requires_grad_(f"base_model.model.{parameter_name}" in case["trainable_parameters"])
    hidden = own(own.embed(inputs), inputs["image_mask"])
    expected = data["last8_logits"]
    close(own.logits(hidden)[:, -expected.shape[1] :], expected, LOGITS)
    loss = own.summed_loss(hidden, labels) / int((labels[:, 1:] != IGNORED).sum())
    close(loss[None], data["loss"], LOSS)
    loss.backward()
    parameters = {f"base_model.model.{n}": p for n, p in own.named_parameters() if p.requires_grad}
    assert parameters.keys() == set(case["trainable_parameters"])
    for key, norm in case["grad_norms"].items():
        gradient = parameters[key].grad
        assert float(gradient.double().norm()) == pytest.approx(norm or 0.0, rel=1e-3, abs=1e-6), key


KINDS: dict[str, Callable[[str], None]] = {
    r"preprocess.*": preprocess,
    r"geometry_\d+": geometry,
    r"tokenizer.*": tokenizer,
    r"label_mask.*": label_mask,
    r"vision.*": vision,
    r"train_.*": training,
    r"chat_.*": chat,
    r"infer_mode": infer_mode,
    r"left_pad_cache": left_pad_cache,
    r"rope_scaling": rope_scaling,
    r"peft(_adapter)?": peft,
}


@pytest.mark.parametrize("name", NAMES)
def test_case_gives_the_numbers_of_the_published_code(name: str) -> None:
    kind = next((check for pattern, check in KINDS.items() if re.fullmatch(pattern, name)), None)
    assert kind, f"{name}: no test for a case of this name"
    kind(name)


def test_names_and_shapes_are_those_of_the_published_state_dict() -> None:
    published = json.loads((FOLDER / "state_dict_shapes.json").read_text(encoding="utf-8"))
    used = {name: shape for name, shape in published.items() if not UNUSED.search(name)}

    parameters = {name: list(p.shape) for name, p in empty_model(read_config(FOLDER)).named_parameters()}

    assert {official_name(name): shape for name, shape in parameters.items()} == used
    assert {own_name(name) for name in used} == parameters.keys()
