"""What a run would do and need, said before any weights are loaded: from the config, the manifest and shapes."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shards.joined import SampleReader
from shards.stream import accumulation, possible_world_sizes
from xctrain import basemodel, largest, memory, resume
from xctrain.config import Config
from xctrain.data import Data, open_data
from xctrain.errors import ConfigError
from xctrain.heldout import datasets_to_score
from xctrain.hostmemory import available_bytes
from xctrain.largest import Length
from xctrain.loader import num_workers
from xctrain.memory import KINDS, Tally
from xctrain.optim import warmup_notes
from xctrain.state import TrainState
from xctrain.trackers import require_trackers

if TYPE_CHECKING:
    from xctrain.models import Family

_BARS = 10  # lines of the histogram
_BAR_WIDTH = 40  # characters


@dataclass(frozen=True)
class Plan:
    """The answers of ``plan``."""

    split: str
    samples: int
    shards: int
    steps: int
    epochs: float
    gpus: int  # 0: CPU processes
    possible_gpus: list[int]
    micro_batches: int | None  # per GPU and step; None where the GPUs cannot share the global batch
    workers: int  # loader workers per GPU
    mode: str  # full, lora or qlora
    parallel: str  # ddp, fsdp or zero1 to zero3
    mean_tokens: float
    longest: Length  # the sample with the longest row
    largest: Length  # the one that takes the most memory; another one at most where a slot trains on all captions
    too_long: int  # samples that would lose their target
    histogram: list[tuple[int, int, int]]  # tokens from, to, samples
    memory_gb: dict[str, float]  # per GPU when most is held, by kind; empty where it cannot be foretold
    most_gb: dict[str, float]  # per GPU, the most that each kind ever takes
    total_gb: float | None
    refused: list[str]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """As ``plan --json`` prints it."""
        return asdict(self)


def make_plan(config: Config, gpus: int) -> Plan:
    """Everything that can be known; what the run would refuse is among it.

    Raises:
        ConfigError: no dataset, no such split, no such model, or a checkpoint that is not the model's.
    """
    data = open_data(config.data)
    segments = resume.next_segments(config, TrainState(), data)
    steps, end = resume.run_length(config, segments, data.order(segments))
    refused = []
    for required in (require_trackers, datasets_to_score):
        try:
            required(config)
        except ConfigError as error:
            refused.append(str(error))
    micro_batches: int | None = None
    try:
        micro_batches = accumulation(config.train.global_batch, max(1, gpus), config.train.micro_batch)
    except ConfigError as error:
        refused.append(str(error))
    basemodel.ensure_base_model(config, data, weights=False)
    # Its collator would refuse what this plan is about to report.
    unlimited = config.model_copy(update={"model": config.model.model_copy(update={"max_length": None})})
    family = basemodel.open_family(unlimited, empty=True)
    lengths = list(largest.all_lengths(data, family.row_lengths(), config))
    limit = config.model.max_length
    too_long = [length for length in lengths if limit and length.tokens > limit]
    if too_long:
        refused.append(
            f"model.max_length is {limit}: {len(too_long)} of {len(lengths)} samples would lose their target, "
            f"{too_long[0].key} needs {too_long[0].tokens} tokens; set it to {max(x.tokens for x in too_long)} or more"
        )
    try:
        tally = count_memory(config, family, data.reader, lengths, gpus, keeps_gradients=micro_batches != 1)
        note = (
            "memory is that of tensors in a step on the largest samples; leave 1 to 2 GB for the GPU's libraries and its "
            "allocator, and more where evaluation captions many images at once (eval.micro_batch)"
        )
    except memory.NeedsNumbersError as error:
        tally = None
        note = f"memory cannot be foretold: {error}; the dry step at the start of the run fills it in the first minute"
    return Plan(
        split=config.data.split,
        samples=len(lengths),
        shards=sum(len(d.reader.shards) for d in data.datasets),
        steps=steps,
        epochs=end / segments[-1].num_samples,
        gpus=gpus,
        possible_gpus=possible_world_sizes(config.train.global_batch, config.train.micro_batch),
        micro_batches=micro_batches,
        workers=num_workers(config.data.workers, max(1, gpus)),
        mode={"none": "full"}.get(config.adapter.kind, config.adapter.kind),
        parallel=config.parallel.mode,
        mean_tokens=sum(length.tokens for length in lengths) / len(lengths),
        longest=min(lengths, key=lambda length: (-length.tokens, length.key)),
        largest=largest.largest(iter(lengths), 1)[0],
        too_long=len(too_long),
        histogram=histogram([length.tokens for length in lengths]),
        memory_gb={kind: tally.peak.get(kind, 0) / 1e9 for kind in KINDS} if tally else {},
        most_gb={kind: tally.most[kind] / 1e9 for kind in KINDS} if tally else {},
        total_gb=sum(tally.peak.values()) / 1e9 if tally else None,
        refused=refused,
        notes=[*shares(data), note, *checkpoints(config, family), *warmup_notes(steps, config.optim)],
    )


def count_memory(
    config: Config,
    family: "Family",
    reader: SampleReader,
    lengths: Sequence[Length],
    gpus: int,
    *,
    keeps_gradients: bool,
) -> Tally:
    """The bytes of a step on the largest samples on one of so many GPUs, without memory for weights.

    Raises:
        NeedsNumbersError: the model's code asks for numbers that depend on weights.
    """
    limit = config.model.max_length
    fitting = [length for length in lengths if not limit or length.tokens <= limit] or list(lengths)
    chosen = largest.largest(iter(fitting), config.train.micro_batch)
    batch = family.collator(largest.rows_of(chosen, reader, config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return memory.foretell_shared(
            family.module, batch, config, world_size=max(1, gpus), keeps_gradients=keeps_gradients
        )


def checkpoints(config: Config, family: "Family") -> list[str]:
    """How large a checkpoint is, and what it takes of the machine's own memory while it is written."""
    weights = [p for p in family.module.parameters() if p.requires_grad]
    mean_bytes = 1 if config.optim.name.endswith("8bit") else None
    size = sum(p.numel() * (p.element_size() + 2 * (mean_bytes or p.element_size())) for p in weights)
    disk = f"a checkpoint has {size / 1e9:.3g} GB; {config.train.keep + 1} of them are on disk at once"
    if not config.checkpoint.asynchronous:
        return [disk]
    return [
        f"{disk}, and a copy in the memory of rank 0's machine, from the start on; this one has "
        f"{available_bytes() / 1e9:.3g} GB left. Where it is too small, training waits for the writing"
    ]


def shares(data: Data) -> list[str]:
    """What each dataset of a mix is of every global batch; nothing for a single one."""
    counts = [source.repeat * source.num_samples for source in data.sources]
    return [
        f"{source.name}: {source.num_samples} samples x {source.repeat}, {count / sum(counts):.1%} of every global batch"
        for source, count in zip(data.sources, counts, strict=True)
        if len(counts) > 1
    ]


def histogram(tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """At most ten equal ranges of tokens, both ends included, with the number of samples in each."""
    low, high = min(tokens), max(tokens)
    width = -(-(high - low + 1) // _BARS)
    starts = range(low, high + 1, width)
    return [(s, s + width - 1, sum(s <= count < s + width for count in tokens)) for s in starts]


def as_text(plan: Plan) -> str:
    """For people."""
    most = max(count for _, _, count in plan.histogram)
    where = f"{plan.gpus} GPUs" if plan.gpus else "a CPU process"
    lines = [
        f"split {plan.split}: {plan.samples} samples in {plan.shards} shards",
        f"{plan.steps} steps, {plan.epochs:.3g} epochs",
        f"{where}: {plan.micro_batches or 'no whole number of'} micro-batches a step, {plan.workers} loader workers "
        f"each; possible: {', '.join(map(str, plan.possible_gpus)) or 'none'}",
        "",
        f"tokens per sample: mean {plan.mean_tokens:.1f}, most {plan.longest.tokens} ({plan.longest.key})",
    ]
    for start, stop, count in plan.histogram:
        lines.append(f"{start:>7} - {stop:<7} {count:>9}  {'#' * -(-_BAR_WIDTH * count // most)}".rstrip())
    if plan.largest.rows > 1:
        big = plan.largest
        lines.append(f"largest sample: {big.key}, {big.rows} captions a slot, rows of up to {big.tokens} tokens")
    lines.append("")
    if plan.total_gb is not None:
        lines.append(f"memory of {plan.mode} training ({plan.parallel}) in GB per GPU   at the peak   at most")
        for kind in (kind for kind in KINDS if plan.most_gb[kind]):
            lines.append(f"{kind:>38} {plan.memory_gb[kind]:>13.3f} {plan.most_gb[kind]:>9.3f}")
        lines += [f"{'sum':>38} {plan.total_gb:>13.3f}", ""]
    return "\n".join(
        [*lines, *(f"refused: {text}" for text in plan.refused), *(f"note: {text}" for text in plan.notes)]
    )
