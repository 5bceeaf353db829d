"""How do we compare with other loaders: samples a second, time to the first batch, what a resume repeats and skips?

    python benchmarks/peers.py --folder DIR [--samples N] [--rounds K] [--pictures DIR] [--page docs/benchmarks.md]

Each peer runs in an environment of its own below DIR/envs, which is made on first use with pip; torch and what else is
installed here is shared with it. All read the same pictures, each in its own format, in turns, in processes of their own.
Prints one JSON line, and writes the page if asked to. What was measured is kept in DIR/results: a stopped run goes on, and
a new one begins when that folder is removed. A peer that cannot be installed or run is named with the reason.
Without --folder nothing is done.
"""

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from shards.manifest import Manifest
from shards.sample import Sample
from shards.writer import ShardWriter

ROOT = Path(__file__).parents[1]
INSIDE = Path(__file__).parent / "inside" / "peer.py"
PER_SHARD = 250
SIZE = (640, 480)
PACKAGES = {  # distribution that gives a loader its version, and what is installed with it
    "xctrain": ["xctrain"],
    "streaming": ["mosaicml-streaming"],
    "litdata": ["litdata"],
    "energon": ["megatron-energon"],
    "webdataset": ["webdataset"],
    "datasets": ["datasets", "torchdata"],
    "torchdata": ["torchdata"],
}
TITLES = {
    "xctrain": "xctrain",
    "streaming": "mosaicml-streaming",
    "litdata": "litdata",
    "energon": "Megatron-Energon",
    "webdataset": "webdataset",
    "datasets": "Hugging Face datasets",
    "torchdata": "torchdata StatefulDataLoader",
}
RATES = [f"{task}_{workers}" for task in ("raw", "pillow", "turbo") for workers in (0, 2)]
KINDS = ("samples_per_s", "samples_per_cpu_s")
PERCENTS = (5, 50, 95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for environments and data; some 2 GB")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=Path, help="folder of JPEGs to vary; drawn ones by default")
    parser.add_argument("--only", nargs="*", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--page", type=Path, help="write the results to this Markdown file")
    arguments = parser.parse_args()
    if arguments.folder is None:
        print(json.dumps({"benchmark": "peers", "skipped": "give --folder, for environments and data"}))
        return
    folder = arguments.folder.resolve()
    result = measure(folder, arguments)
    print(json.dumps(result))
    if arguments.page:
        arguments.page.write_text(page(result), encoding="utf-8")


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, for every loader that runs."""
    load: list[float] = []
    data, states = folder / f"data-{arguments.samples}", folder / "states"
    if not (data / "shards" / "manifest.json").exists():
        make_dataset(data, arguments.samples, arguments.pictures)
    states.mkdir(exist_ok=True)
    failed: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in arguments.only:
        versions[name] = make_environment(folder, name, failed)
        if name not in failed and not (data / f"{name}.prepared").exists():
            run(folder, data, failed, name, "prepare")
            if name not in failed:
                (data / f"{name}.prepared").touch()
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        names = [name for name in arguments.only if name not in failed]
        turn = names[number % len(names) :] + names[: number % len(names)]
        rounds.append({name: run(folder, data, failed, name, "rates", number) for name in turn})
        load += [found["load"] for found in rounds[-1].values() if found]
        say(f"round {number + 1} of {arguments.rounds} done")
    ran = [name for name in arguments.only if name not in failed]
    resumes: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name in ran:
        whole = run(folder, data, lost, name, "interrupt", states)
        resumes[name] = {**whole, **{str(p): run(folder, data, lost, name, "resume", states, p) for p in PERCENTS}}
    load += [found[key]["load"] for found in resumes.values() for key in found if key.isdigit() and found[key]]
    return {
        "benchmark": "peers",
        "samples": arguments.samples,
        "mean_bytes": round(statistics.mean(path.stat().st_size for path in (data / "files").iterdir())),
        "pictures": "variations of real photos" if arguments.pictures else "drawn",
        "rounds": arguments.rounds,
        "rates": {kind: {name: medians(rounds, name, kind) for name in ran} for kind in KINDS},
        "first_batch_s": {
            name: round(statistics.median(r[name]["pillow_2"]["first_batch_s"] for r in rounds), 2) for name in ran
        },
        "ratios": {kind: ratios(rounds, ran, kind) for kind in KINDS},
        "resumes": {name: resumes[name] for name in ran if name not in lost},
        "not_resumed": lost,
        "failed": failed,
        "versions": versions,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "cpu": cpu_name(),
            "load": [round(f(load), 1) for f in (min, max)],
        },
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def medians(rounds: list[dict[str, Any]], name: str, kind: str) -> dict[str, int]:
    """A loader's rates."""
    return {key: round(statistics.median(r[name][key][kind] for r in rounds)) for key in RATES}


def ratios(rounds: list[dict[str, Any]], ran: list[str], kind: str) -> dict[str, float]:
    """Ours over the fastest peer's, the median over the rounds, by rate; the fastest is the one of the highest median."""
    peers = [name for name in ran if name != "xctrain"]
    if "xctrain" not in ran or not peers:
        return {}

    def median(ours: str, theirs: str) -> float:
        fastest = max(peers, key=lambda name: statistics.median(r[name][theirs][kind] for r in rounds))
        return round(statistics.median(r["xctrain"][ours][kind] / r[fastest][theirs][kind] for r in rounds), 2)

    return {
        **{f"raw_{w}": median(f"raw_{w}", f"raw_{w}") for w in (0, 2)},
        **{f"exact_to_documented_{w}": median(f"pillow_{w}", f"pillow_{w}") for w in (0, 2)},
        **{f"fast_to_documented_{w}": median(f"turbo_{w}", f"pillow_{w}") for w in (0, 2)},
        **{f"fast_to_same_decoder_{w}": median(f"turbo_{w}", f"turbo_{w}") for w in (0, 2)},
    }


# The page


def page(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    ran = list(result["first_batch_s"])
    machine = result["machine"]
    parts = [
        "# Benchmarks against other loaders",
        "Written by `benchmarks/peers.py`; run it again rather than editing this page.",
        f"{result['samples']} JPEGs of 640 x 480 pixels, quality 90, {result['mean_bytes'] / 1e3:.0f} kB in the mean "
        f"({result['pictures']}), warm in the page cache, batches of 25, shuffled. {machine['cpus']} cores of {machine['cpu']}, "
        f"Python {result['python']}, torch {result['torch']}. Medians of {result['rounds']} rounds in which the loaders take "
        "turns, each in a process of its own with one thread, batches at either end of an epoch not counted. Everyone "
        "hands over the same tensors, made in its workers.",
        f"**The machine was busy with other work**: its load was {machine['load'][0]} to {machine['load'][1]} during the run, on "
        f"{machine['cpus']} cores. Rates by the clock are therefore low and unsteady; rates per second of CPU time, of the "
        "process and its workers together, hold better."
        if max(machine["load"]) > machine["cpus"] + 1
        else f"Load of the machine during the run: {machine['load'][0]} to {machine['load'][1]}.",
        "## Samples per second of CPU time",
        rates_table(result, "samples_per_cpu_s", ran),
        "## Samples per second by the clock",
        rates_table(result, "samples_per_s", ran),
        "*raw*: encoded bytes; ours with the crc of every payload compared, the others without a check. *documented*: decoded "
        "and resized to 224 px by Pillow, as the documentations do it; ours with `model.decode=exact`. *TurboJPEG*: decoded by "
        "simplejpeg and resized by torch, in all of them; ours with `model.decode=fast`. 0 and 2 are loader workers. litdata "
        "can also store pictures that torchvision's TurboJPEG decodes; that is nearest to its last columns.",
        "## Against the fastest peer",
        ratio_table(result),
        "## Start and resume",
        "With 2 workers and decoding by Pillow: seconds from making the loader to its first batch (imports not counted), at the "
        "start and after a resume in a new process at 5, 50 and 95 % of an epoch. Below it, of one epoch's number of draws: how "
        "many were of a key drawn before, and how many keys were never drawn.",
        resume_table(result),
        *(f"{TITLES[name]} does not go on: {reason}." for name, reason in result["not_resumed"].items()),
        "webdataset has no state: a restart begins its epoch again. Megatron-Energon has no epochs: slices of the data are drawn "
        "at random, so keys repeat without any interruption. A Hugging Face dataset that shuffles through a buffer loses "
        "what was in it.",
        "## Versions",
        ", ".join(f"{TITLES[name]} {number}" for name, number in result["versions"].items()) + ".",
        *(f"Not run: {TITLES[name]}: {reason}." for name, reason in result["failed"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def rates_table(result: dict[str, Any], kind: str, ran: list[str]) -> str:
    """A row a loader, a column a rate."""
    titles = [f"{task}, {w}" for task in ("raw", "documented", "TurboJPEG") for w in (0, 2)]
    rows = [[TITLES[name], *(f"{result['rates'][kind][name][key]:,}" for key in RATES)] for name in ran]
    return table(["", *titles], rows)


def ratio_table(result: dict[str, Any]) -> str:
    """Ours over the fastest peer's, with what is aimed at."""
    aims = {
        "raw": ("raw, with crc", "1"),
        "exact_to_documented": ("exact mode over documented", ""),
        "fast_to_documented": ("fast mode over documented", "2"),
        "fast_to_same_decoder": ("fast mode over the same decoder", "1"),
    }
    rows = []
    for key, (title, aim) in aims.items():
        found = [f"{result['ratios'][kind].get(f'{key}_{w}', '-')}" for kind in reversed(KINDS) for w in (0, 2)]
        rows.append([title, aim, *found])
    return table(["median ratio", "aim", "CPU, 0", "CPU, 2", "clock, 0", "clock, 2"], rows)


def resume_table(result: dict[str, Any]) -> str:
    """A row a loader that could go on."""
    rows = []
    for name, found in result["resumes"].items():
        stops = [found[str(percent)] for percent in PERCENTS]
        seconds = [f"{stop['first_batch_s']:.1f}" if stop["first_batch_s"] else "none came" for stop in stops]
        lost = [f"{each['repeated']} / {each['skipped']}" for each in (found["epoch"], *stops)]
        size = max(stop["state_bytes"] for stop in stops)
        rows.append([TITLES[name], f"{result['first_batch_s'][name]:.1f}", *seconds, *lost, f"{size:,}"])
    titles = [
        "",
        "start, s",
        *(f"{p} %, s" for p in PERCENTS),
        "no stop",
        *(f"{p} %" for p in PERCENTS),
        "state, bytes",
    ]
    return table(titles, rows)


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Data and environments


def make_dataset(data: Path, samples: int, pictures: Path | None) -> None:
    """The pictures as files and as shards."""
    (data / "files").mkdir(parents=True, exist_ok=True)
    entries = []
    encoded = jpegs(pictures)
    for first in range(0, samples, PER_SHARD):
        with ShardWriter(data / "shards", f"train-{first // PER_SHARD:06d}", "train") as writer:
            for n in range(first, min(samples, first + PER_SHARD)):
                jpeg, key = next(encoded), f"{n:012d}"
                (data / "files" / f"{key}.jpg").write_bytes(jpeg)
                captions = ["a caption of some ten words, as they are in COCO"] * 5
                writer.write(Sample(key, jpeg, "jpg", {"width": SIZE[0], "height": SIZE[1], "captions": captions}))
        entries.append(writer.entry)
    Manifest(tuple(entries)).save(data / "shards")


def jpegs(pictures: Path | None) -> Iterator[bytes]:
    """Different JPEGs of COCO's size, quality 90: random crops of the pictures, mirrored or not; or drawn ones."""
    generator = np.random.default_rng(0)
    sources = (
        [Image.open(path).convert("RGB") for path in sorted(pictures.glob("*.jpg"))] if pictures else drawn(generator)
    )
    while True:
        source = sources[int(generator.integers(len(sources)))]
        share = float(generator.uniform(0.8, 1.0))
        width, height = round(source.width * share), round(source.height * share)
        left, top = (int(generator.integers(n + 1)) for n in (source.width - width, source.height - height))
        picture = source.crop((left, top, left + width, top + height)).resize(SIZE, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        (ImageOps.mirror(picture) if generator.integers(2) else picture).save(file, "JPEG", quality=90)
        yield file.getvalue()


def drawn(generator: np.random.Generator) -> list[Image.Image]:
    """Soft colours with noise, which compress about as photos do."""
    found = []
    for _ in range(64):
        coarse = Image.fromarray(generator.integers(0, 256, (48, 64, 3), np.uint8)).resize(SIZE)
        noisy = np.asarray(coarse, np.int16) + generator.normal(0, 6, (SIZE[1], SIZE[0], 3))
        found.append(Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)))
    return found


def python_of(folder: Path, name: str) -> str:
    """The interpreter that runs a loader."""
    return sys.executable if name == "xctrain" else str(folder / "envs" / name / "bin" / "python")


def make_environment(folder: Path, name: str, failed: dict[str, str]) -> str:
    """A peer's environment, if it is not there yet; the version of its library."""
    home = folder / "envs" / name
    if name != "xctrain" and not (home / ".ready").exists():
        say(f"making an environment for {name}")
        venv.create(home, with_pip=True, clear=True)
        site = next((home / "lib").glob("python*")) / "site-packages"
        (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # torch is 3 GB; once is enough
        pins = folder / "constraints.txt"
        pins.write_text("".join(f"{p}=={version(p).partition('+')[0]}\n" for p in ("torch", "torchvision", "pillow")))
        command = [
            python_of(folder, name),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            pins,
        ]
        done = subprocess.run([*map(str, command), *PACKAGES[name]], capture_output=True, text=True, check=False)
        if done.returncode:
            failed[name] = f"could not be installed: {last_line(done.stderr)}"
            return "-"
        (home / ".ready").touch()
    show = f"from importlib.metadata import version; print(version({PACKAGES[name][0]!r}))"
    found = subprocess.run([python_of(folder, name), "-c", show], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "-"


def run(folder: Path, data: Path, failed: dict[str, str], name: str, job: str, *rest: Any) -> dict[str, Any]:
    """One job of a loader in a process of its own; empty if it failed, which is noted. Done once, a rerun reads it."""
    kept = (
        folder / "results" / f"{'-'.join([data.name, name, job, *(str(r) for r in rest if isinstance(r, int))])}.json"
    )
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    command = [python_of(folder, name), INSIDE, name, data, job, *rest]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        failed[name] = f"{job} took more than 600 s"
        return {}
    if done.returncode:
        failed[name] = f"{job} failed: {last_line(done.stderr)}"
        say(f"{name}: {failed[name]}")
        return {}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    answer["load"] = os.getloadavg()[0]
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(answer))
    return answer


def last_line(text: str) -> str:
    """Of a program's messages, where Python says what went wrong."""
    return (text.strip().splitlines() or ["no message"])[-1][:300]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cpu_name() -> str:
    """Model name of the processor, from the kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
