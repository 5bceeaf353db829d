"""How long scoring takes: 5,000 images with 5 references each, tokenization included. Prints one JSON line.

python benchmarks/scores.py
"""

import json
import platform
import random
import time

from xctrain.scores import score_captions

NUM_IMAGES, NUM_REFERENCES, NUM_WORDS, VOCABULARY = 5000, 5, 11, 10_000


def main() -> None:
    draw = random.Random(1)
    # Words as frequent as in real text (the k-th most frequent one 1/k as often), some with punctuation.
    words = [f"w{''.join(chr(97 + int(digit)) for digit in str(k))}" for k in range(VOCABULARY)]
    weights = [1 / (k + 1) for k in range(VOCABULARY)]

    def caption() -> str:
        chosen = draw.choices(words, weights, k=NUM_WORDS)
        if draw.random() < 0.1:
            chosen[3] += draw.choice((",", "'s", "-up", ' "5"'))
        return " ".join(chosen).capitalize() + "."

    references = {i: [caption() for _ in range(NUM_REFERENCES)] for i in range(NUM_IMAGES)}
    predictions = {i: caption() for i in references}
    started = time.perf_counter()
    scores = score_captions(predictions, references)
    seconds = time.perf_counter() - started
    result = {
        "benchmark": "scores",
        "num_images": scores.num_images,
        "num_references": NUM_REFERENCES,
        "seconds": round(seconds, 2),
    }
    print(json.dumps(result | {"python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
