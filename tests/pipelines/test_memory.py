"""A machine with too little memory: an error that names the file, never a rejection of it."""

import json
import resource
import subprocess
import sys

import pytest
from PIL import Image

FORMATS = {
    "progressive JPEG": ("JPEG", "RGB", {"progressive": True}),
    "CMYK JPEG": ("JPEG", "CMYK", {}),
    "PNG": ("PNG", "RGB", {}),
    "transparent PNG": ("PNG", "RGBA", {}),
    "WebP": ("WEBP", "RGB", {}),
    "TIFF": ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    "AVIF": ("AVIF", "RGB", {}),
    "JPEG 2000": ("JPEG2000", "RGB", {}),
}
QUICK = (("progressive JPEG", 2), ("PNG", 2), ("WebP", 20), ("JPEG 2000", 20))
MEASURE = """
import resource, sys
from pathlib import Path
from pipelines.config import FilterConfig
from pipelines.measure import measure
data = Path(sys.argv[1]).read_bytes()
measure(data[:200], FilterConfig())  # so that all code is loaded
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]) * 1_000_000,) * 2)
try:
    print(type(measure(data, FilterConfig())).__name__)
except MemoryError:
    print("MemoryError")
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory, pictures):
    """A picture of 6 million pixels in each format."""
    folder = tmp_path_factory.mktemp("large")
    for name, (kind, mode, options) in FORMATS.items():
        data = pictures.encode(pictures.photo(1, 3000, 2000, mode), kind, **options)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("name", "free_mb"),
    [
        pytest.param(name, free_mb, marks=() if (name, free_mb) in QUICK else pytest.mark.slow)
        for name in FORMATS
        for free_mb in (2, 20)
    ],
)
def test_too_little_memory_is_never_taken_for_a_damaged_picture(large, name, free_mb):
    command = [sys.executable, "-c", MEASURE, large / name, str(free_mb)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("MemoryError", "Picture")
    assert free_mb > 2 or done.stdout.strip() == "MemoryError"


def test_a_build_that_runs_out_of_memory_names_the_file_and_what_to_do(pictures, coco, command, tmp_path):
    image = Image.linear_gradient("L").resize((8000, 6000)).convert("RGBA")
    source = coco(tmp_path / "source", {"large.png": pictures.encode(image, "PNG", compress_level=1)})
    path = tmp_path / "build.yaml"
    build = {"runner": "threads", "processes": 1, "retries": 1}
    path.write_text(json.dumps({"source": str(source), "out": str(tmp_path / "out"), "build": build}))

    def starve():
        resource.setrlimit(resource.RLIMIT_AS, (500_000_000,) * 2)

    process = command("build", path, "--plain", preexec_fn=starve)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1, errors
    assert "large.png: there is too little memory to decode it; lower build.processes or filters.max_pixels" in errors
    assert "trying again (1 of 1)" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "manifest.json").exists()
