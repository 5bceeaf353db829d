"""Writes all golden values anew: runs every remake_*.py beside it. A changed value is a break, see CHANGELOG.md."""

import runpy
from pathlib import Path

for script in sorted(Path(__file__).parent.glob("remake_*.py")):
    runpy.run_path(str(script), run_name="__main__")
    print(f"{script.name}: done; `git diff --stat tests/golden` says what changed")
