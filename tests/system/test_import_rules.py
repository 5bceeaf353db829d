"""Who may import whom. Data moves one way, and so do imports."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each module of xctrain may import only what stands to its left.
ORDER = re.findall(
    r"\w+",
    """
    errors best section dataconfig modelconfig trainconfig evalconfig config state data spikes log flops prompt loss
    ptb scores captions collate speed decode phase processes tracked follow trackers batchmemory loader models basemodel optim
    memory hostmemory rng ranks reading tensors parallel zero checkpoint resume pushed push bring saver evaluate run
    progress badbatch firstbatch loop charts history page proof gallery largest drystep runfolder world startlog
    heldout start plan trained audit report endfigures compare sheet session export scaling launch doctor demo __main__
    """,
)
# Modules that know Prefect; the rest of the build runs as plain Python.
KNOW_PREFECT = {f"pipelines.{name}" for name in ("flows", "folder_flows", "tasks", "prefect_api", "serve")}
MODEL_LIBRARIES = {"transformers", "peft", "bitsandbytes", "tokenizers"}
LATE_IN_SHARDS = {"zlib_ng", "PIL", "yaml", "fsspec", "aiohttp"}


@dataclass(frozen=True)
class Import:
    """One imported module, where it stands, and whether it is imported as soon as its file is."""

    importer: str
    imported: str
    where: str
    early: bool

    @property
    def package(self) -> str:
        return self.imported.partition(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, path: Path) -> Iterator[Import]:
    """Every import in a file, also in functions and under TYPE_CHECKING."""
    tree = ast.parse(source)
    late = {node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.If) for node in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            own = node.module in ("xctrain", "shards", "pipelines", "xctrain.models")
            names = [f"{node.module}.{alias.name}" for alias in node.names] if own else [str(node.module)]
        else:
            continue
        for name in names:
            yield Import(module_name(path), name, f"{path.relative_to(ROOT)}:{node.lineno}", node not in late)


def place(module: str) -> int:
    """Where a module of xctrain stands in the order; a family in models/ stands where models does."""
    return ORDER.index(module.split(".")[1]) if "." in module else -1


def violation(found: Import) -> str | None:
    """What is wrong with an import, None if it may be there."""
    home = found.importer.partition(".")[0]
    own = {"pipelines", "shards", "xctrain"}
    if found.package in own - {home, "shards"}:
        return f"{home} may import shards, not {found.package}"
    if home == "shards" and found.package == "numpy":
        return None
    if home == "shards" and found.package not in own | sys.stdlib_module_names:
        if found.package not in LATE_IN_SHARDS:
            return f"shards needs the standard library and numpy only, not {found.package}"
        if found.early:
            return f"{found.package} is for some uses of shards only; import it inside the function"
    if home == "shards" and found.package in own - {"shards"}:
        return f"shards may not import {found.package}"
    if found.package in MODEL_LIBRARIES and not found.importer.startswith(("xctrain.models", "xctrain.doctor")):
        return f"{found.package} is imported in xctrain/models only"
    if found.package == "prefect" and found.importer not in KNOW_PREFECT:
        return f"prefect is imported in {', '.join(sorted(KNOW_PREFECT))} only"
    if home == found.package == "xctrain":
        inside = found.importer.startswith("xctrain.models") and found.imported.startswith("xctrain.models")
        if not inside and place(found.imported) >= place(found.importer):
            return f"{found.importer} stands before {found.imported} and may not import it"
    return None


def sources() -> list[Path]:
    return sorted(path for package in ("pipelines", "shards", "xctrain") for path in (ROOT / package).rglob("*.py"))


def test_every_import_keeps_the_rules() -> None:
    found = [i for path in sources() for i in imports_of(path.read_text(encoding="utf-8"), path)]
    wrong = [f"{i.where}: {text}" for i in found if (text := violation(i))]
    assert not wrong, "\n".join(wrong)
    assert len(found) > 300


def test_every_module_of_xctrain_has_its_place_in_the_order() -> None:
    modules = {path.stem if path.parent.name == "xctrain" else "models" for path in (ROOT / "xctrain").rglob("*.py")}
    assert modules - {"__init__"} == set(ORDER)


@pytest.mark.parametrize(
    ("file", "source", "text"),
    [
        ("shards/order.py", "import torch", "shards needs the standard library and numpy only, not torch"),
        ("shards/order.py", "from PIL import Image", "import it inside the function"),
        ("shards/order.py", "def f():\n    from xctrain import config", "shards may import shards, not xctrain"),
        ("pipelines/build.py", "from xctrain.config import Config", "pipelines may import shards, not xctrain"),
        ("pipelines/build.py", "def f():\n    import prefect.futures", "prefect is imported in pipelines.f"),
        ("xctrain/loop.py", "from pipelines import coco", "xctrain may import shards, not pipelines"),
        (
            "xctrain/loop.py",
            "from xctrain import start",
            "xctrain.loop stands before xctrain.start and may not import it",
        ),
        ("xctrain/loss.py", "if TYPE_CHECKING:\n    from xctrain.loop import train", "xctrain.loss stands before"),
        ("xctrain/loop.py", "def f():\n    import transformers", "transformers is imported in xctrain/models only"),
    ],
)
def test_violation_is_found_and_explained(file: str, source: str, text: str) -> None:
    [found] = imports_of(source, ROOT / file)
    assert text in str(violation(found))
    assert found.where.startswith(f"{file}:")


def test_late_imports_that_are_allowed_stay_allowed() -> None:
    [found] = imports_of("def f():\n    from PIL import Image", ROOT / "shards/sample.py")
    assert violation(found) is None
