"""The checkpoint's SentencePiece model as a tokenizer."""

import re
from collections.abc import Iterable
from pathlib import Path

from shards.errors import ConfigError

TOKENIZER = "tokenizer.model"
TURN_START, TURN_END = "[UNUSED_TOKEN_146]", "[UNUSED_TOKEN_145]"
BOS, EOS = "<s>", "</s>"
# transformers 4.33, which the checkpoint was trained with, took the white space around these tokens away.
_CONTROL = re.compile(rf"\s*({re.escape(BOS)}|{re.escape(EOS)})\s*")
_USER_DEFINED = re.compile(r"(?<=\[UNUSED_)(?=TOKEN_\d+\])")


class Tokenizer:
    """Text to ids and back. Can be pickled."""

    def __init__(self, folder: Path) -> None:
        """Read the model in ``folder``.

        Raises:
            ConfigError: it is not there, is damaged, or lacks the marks around a turn.
        """
        from sentencepiece import SentencePieceProcessor, set_min_log_level

        path = folder / TOKENIZER
        if not path.is_file():
            raise ConfigError(f"model.path: {folder} holds no {TOKENIZER}; download it", path=folder)
        set_min_log_level(2)  # it warns of a piece in the published model that no text can ever use
        try:
            self.model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{path}: is not a SentencePiece model; fetch it again", path=path) from error
        self.bos_id: int = self.model.bos_id()
        self.eos_id: int = self.model.eos_id()
        self.start_id, self.end_id = (self.model.piece_to_id(mark) for mark in (TURN_START, TURN_END))
        if self.model.unk_id() in (self.start_id, self.end_id) or min(self.bos_id, self.eos_id) < 0:
            raise ConfigError(
                f"{path}: lacks one of {TURN_START}, {TURN_END}, {BOS}, {EOS}; give the tokenizer of XComposer2.5",
                path=path,
            )

    @property
    def end_ids(self) -> frozenset[int]:
        """What stops an answer."""
        return frozenset((self.eos_id, self.end_id))

    def encode(self, text: str) -> list[int]:
        """Ids of a text of our own, with the tokens that it names: ``</s>`` is the end token. No token is added."""
        control = {BOS: [self.bos_id], EOS: [self.eos_id]}
        return [token for part in _CONTROL.split(text) for token in control.get(part) or self.model.encode(part)]

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text from the data: what looks like a special token in it is only text."""
        return [token for part in _USER_DEFINED.split(text) for token in self.model.encode(part)]

    def piece(self, token: int) -> str:
        """Text of one token, special ones by their names."""
        text: str = self.model.id_to_piece(token).replace("▁", " ")
        return text

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, without unknown, begin and end tokens."""
        special = (self.model.unk_id(), self.bos_id, self.eos_id)
        text: str = self.model.decode([token for token in ids if token not in special])
        return text

    def answer(self, ids: Iterable[int]) -> str:
        """Text of generated ids up to the end of the turn."""
        return self.decode(ids).partition(TURN_END)[0]
