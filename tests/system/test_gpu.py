"""What only a CUDA device can show: `make test-gpu`."""

from pathlib import Path

import pytest
import runs
import torch

from xctrain.saver import HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_killed_run_is_bit_identical_with_deterministic_kernels(
    drawn_shards: Path, tmp_path: Path, precision: str
) -> None:
    changes = {"train__precision": precision, "train__deterministic": True}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    runs.train(drawn_shards, straight, **changes)
    for step in (7, 20):
        runs.kill_at(runs.launcher(runs.settings(drawn_shards, killed, **changes), 1), killed, step)
    runs.train(drawn_shards, killed, **changes)

    assert runs.trajectory(killed) == runs.trajectory(straight)
    assert runs.weights(killed) == runs.weights(straight)


def test_memory_of_the_device_is_logged(drawn_shards: Path, tmp_path: Path) -> None:
    runs.train(drawn_shards, tmp_path / "run", train__num_steps=3)

    assert 0 < runs.events(tmp_path / "run", "step")[-1]["max_memory_gb"] < torch.cuda.mem_get_info()[1] / 1e9


def test_state_on_the_device_is_copied_into_pinned_memory_and_stays_what_it_was() -> None:
    copies = HostCopies()
    tensor = torch.arange(1000.0, device="cuda")
    copy = copies("a", tensor)
    tensor.zero_()
    torch.cuda.synchronize()
    assert copy.is_pinned()
    assert torch.equal(copy, torch.arange(1000.0))
