import json
import runpy
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def test_manifest_and_rejections_are_those_of_every_version_so_far(tmp_path):
    expected = json.loads((GOLDEN / "build.json").read_text())
    build = runpy.run_path(str(GOLDEN / "remake_build.py"))["build"]
    found = build(expected["pictures"], tmp_path / "source")
    assert found["rejects"] == expected["rejects"]
    assert found["manifest"] == expected["manifest"]
