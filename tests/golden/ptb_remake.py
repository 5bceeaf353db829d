"""Asks Java for the words of every text in ``ptb_odd.json`` and writes the file again. Needs Java and the extra ``scores``.

python tests/golden/ptb_remake.py
"""

import json
from pathlib import Path

from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

path = Path(__file__).with_name("ptb_odd.json")
texts = [pair["text"] for pair in json.loads(path.read_text(encoding="utf-8"))]
words = PTBTokenizer().tokenize({i: [{"caption": text}] for i, text in enumerate(texts)})
lines = (json.dumps({"text": t, "words": words[i][0]}, ensure_ascii=False) for i, t in enumerate(texts))
path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
