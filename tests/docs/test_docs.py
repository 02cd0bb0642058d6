"""Check the documentation: examples run, names and options exist, generated pages are current."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Pages of their own kind, written by other commands.
WRITTEN_ELSEWHERE = {"reproduction", "models"}
PAGES = sorted(path for path in DOCS.rglob("*.md") if not WRITTEN_ELSEWHERE.intersection(path.relative_to(DOCS).parts))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def name_of(path: Path) -> str:
    return str(path.relative_to(DOCS))


def fences(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


WITH_EXAMPLES = [path for path in PAGES if fences(path, "python")]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCKED = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE))


@pytest.mark.skipif(version("typer") != LOCKED["typer"], reason="other versions of typer write other help")
def test_generated_pages_are_current():
    # In a process of its own: plugins that other tests load would be in the help.
    code = "import runpy; pages = runpy.run_path('docs/generate.py')['pages']()"
    code += "; print([path.name for path, text in pages.items() if path.read_text() != text])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["[]"], "run: python docs/generate.py"


def test_the_reference_has_every_command():
    from dave_vit.cli import app

    group = typer.main.get_command(app)
    context = group.make_context("dave", ["--help"], resilient_parsing=True)
    page = (DOCS / "reference" / "cli.md").read_text()
    assert [name for name in group.list_commands(context) if f"\n## dave {name}\n" not in page] == []


def resolves(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_every_name_in_the_pages_exists():
    names = {(name_of(path), name) for path in PAGES for name in re.findall(r"`(dave_vit(?:\.\w+)+)", path.read_text())}
    assert len(names) > 40
    assert [entry for entry in sorted(names) if not resolves(entry[1])] == []


def is_public(name: str) -> bool:
    """Whether the module that a name is imported from exports it; a module is public by its own name."""
    home, _, attribute = name.rpartition(".")
    module = importlib.import_module(home)
    exported = getattr(module, "__all__", [attribute])
    return not attribute.startswith("_") and (attribute in exported or inspect.ismodule(getattr(module, attribute)))


def test_the_python_reference_lists_the_public_names():
    import dave_vit

    names = re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    missing = {f"dave_vit.{name}" for name in dave_vit.__all__} - set(names)
    assert missing == {"dave_vit.METHODS", "dave_vit.__version__"}
    assert [name for name in names if not resolves(name) or not is_public(name)] == []


def test_the_example_of_a_cluster_has_the_form_that_ray_asks_for():
    schemas, home = pytest.importorskip("jsonschema"), importlib.util.find_spec("ray")
    if home is None or home.origin is None:
        pytest.skip("ray is not installed")
    (example,) = (block for block in fences(DOCS / "cluster.md", "yaml") if "cluster_name" in block)
    asked = json.loads((Path(home.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    found = pytest.importorskip("yaml").safe_load(example)
    schemas.validate(found, asked)
    nodes = found["available_node_types"]
    assert found["head_node_type"] in nodes
    gpus = nodes["gpu"]["resources"]["GPU"] * found["max_workers"]
    assert f'request_resources(bundles=[{{\\"GPU\\": 1}}] * {gpus})' in (DOCS / "cluster.md").read_text()


def test_every_equation_has_its_function():
    page = (DOCS / "equations.md").read_text()
    rows = dict(re.findall(r"^\| \((\d)\) (.*) \|$", page, re.MULTILINE))
    assert sorted(rows) == [str(number) for number in range(1, 10)]
    assert all("`dave_vit." in row for row in rows.values())
    marked = {int(n) for path in (ROOT / "src").rglob("*.py") for n in re.findall(r"eq\. \((\d)\)", path.read_text())}
    assert marked <= set(range(1, 10))


def command_lines() -> Iterator[tuple[str, str]]:
    for path in PAGES:
        for block in fences(path, "bash"):
            yield from ((name_of(path), line) for line in block.splitlines() if line.startswith("dave "))


def parse_error(line: str) -> str | None:
    """Return why the command line rejects this line, or None; nothing is run."""
    from dave_vit.cli import app

    command = typer.main.get_command(app)
    context = command.make_context("dave", ["--help"], resilient_parsing=True)
    context.resilient_parsing = False
    _, *words = shlex.split(line)
    try:
        while hasattr(command, "get_command"):
            name, *words = words
            command = command.get_command(context, name)
            context = type(context)(command, info_name=name, parent=context)
        command.make_context(command.name, words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_every_command_line_is_understood(monkeypatch):
    monkeypatch.setattr(
        "dave_vit._internal.registry.import_plugins", tuple
    )  # files that examples speak of are not there
    lines = list(command_lines())
    assert len(lines) > 20
    assert [(page, line, why) for page, line in lines if (why := parse_error(line))] == []


@pytest.fixture
def example_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that examples name; registries forget what examples add."""
    from dave_vit.analysis import ANALYSES
    from dave_vit.data import DATASETS
    from dave_vit.engine.score_registry import SCORES
    from dave_vit.evaluate.engines import ENGINES
    from dave_vit.methods import METHODS
    from dave_vit.methods.presets import PRESETS
    from dave_vit.metrics import METRICS
    from dave_vit.models.families import FAMILIES
    from dave_vit.reduce import REDUCERS

    for registry in (METHODS, METRICS, DATASETS, FAMILIES, ANALYSES, ENGINES, PRESETS, REDUCERS, SCORES):
        monkeypatch.setattr(registry, "data", dict(registry.data))
    pixels = torch.randint(0, 256, (40, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    picture = Image.fromarray(pixels.numpy())
    picture.save(tmp_path / "photo.jpg")
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        picture.save(tmp_path / "photos" / name / "1.png")
    (tmp_path / "findings.txt").write_text("normal\neffusion\nnodule\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tiny_load_model(real):
    """Return a `load_model` that loads a tiny model with random weights and the right classes instead of any other."""
    from torchvision import transforms

    from dave_vit.data.builtin import CLASS_NAMES
    from dave_vit.models import Adapter, Preprocessing
    from dave_vit.models.adapter import read_classes
    from tiny_models import vit

    def load_model(*args, **options):
        given = inspect.signature(real).bind(*args, **options).arguments  # as the real one would be called
        if given.get("spec") == "builtin-captions":  # which writes words, as no classifier does
            return real(*args, **options)
        classes = given.get("prompts") or given.get("classes") or CLASS_NAMES
        names = read_classes(classes)
        transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
        return Adapter(vit(num_classes=len(names)), Preprocessing(transform), names, spec=given.get("spec", "builtin"))

    return load_model


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_run_on_a_tiny_model(page: Path, example_folder: Path, monkeypatch: pytest.MonkeyPatch):
    import dave_vit
    import dave_vit.models

    stand_in = tiny_load_model(dave_vit.models.load_model)
    monkeypatch.setattr(dave_vit, "load_model", stand_in)
    monkeypatch.setattr("dave_vit.models.loading.load_model", stand_in)
    run_examples(page)


def run_examples(page: Path) -> None:
    names: dict[str, object] = {"__name__": "example"}
    for number, block in enumerate(fences(page, "python"), 1):
        exec(compile(block, f"{name_of(page)}, example {number}", "exec", dont_inherit=True), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["methods.md", "howto/own-method.md", "howto/own-metric.md", "concepts.md"])
def test_examples_run_on_the_embedded_model(page: str, example_folder: Path):
    run_examples(DOCS / page)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_hold_their_outputs(notebook: Path):
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/jpeg" in output["data"] for output in outputs), "run: python docs/generate.py --notebooks"
    assert {output["output_type"] for output in outputs} == {"execute_result"}  # neither warnings nor errors


# Fewer samples, steps and pictures than readers see: the same code in a third of the time.
FEWER = ((r'((?:samples|steps)"?[=:] ?)\d+', r"\g<1>4"), (r"\bin range\(6\)", "in range(2)"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    document = nbformat.read(notebook, as_version=4)
    for cell, (pattern, replacement) in product(document.cells, FEWER):
        cell.source = re.sub(pattern, replacement, cell.source)
    NotebookClient(document, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in document.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)


# Links of the README are whole addresses, so that they also work where packages are listed.
REPOSITORY = re.compile(
    r"^https://(github\.com/dave-vit/dave-vit/blob|raw\.githubusercontent\.com/dave-vit/dave-vit)/main/"
)


def linked() -> Iterator[tuple[Path, Path]]:
    """A page or notebook, and each file that it shows or leads to."""
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"), *ROOT.glob("benchmarks/**/*.md")]:
        prose = re.sub(r"`[^`]*`", "", page.read_text())
        for address in re.findall(r"\]\(([^)\s]+)", prose):
            name = REPOSITORY.sub("", address.partition("#")[0])
            if name and not re.match(r"\w+:", name):
                yield page, (page.parent / name).resolve()


def test_every_link_leads_to_a_file():
    links = list(linked())
    assert len(links) > 100
    assert [(page.name, to.name) for page, to in links if not to.exists()] == []


def test_every_test_that_pages_name_exists():
    names = {
        name
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for name in re.findall(r"tests/\w+/\w+\.py", page.read_text())
    }
    assert len(names) > 10
    assert [name for name in sorted(names) if not (ROOT / name).is_file()] == []


def benchmark_rows(text: str) -> dict[str, list[str]]:
    """The five scores of each method in the first table that has them, without intervals and emphasis."""
    table = text.partition("| method | GridPG | EnergyPG |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| `")]
    return {
        re.search("`(.+)`", row[1])[1]: [cell.strip("*").split("[")[0].strip("* ") for cell in row[2:7]]
        for row in cells
    }


def test_the_table_of_the_readme_is_that_of_the_benchmarks():
    short, long = (benchmark_rows(path.read_text()) for path in (ROOT / "README.md", DOCS / "benchmarks.md"))
    assert len(short) > 5
    assert short == {method: long[method] for method in short}


def test_every_figure_is_shown():
    shown = {to for _, to in linked()}
    assert [path.name for path in (DOCS / "figures").iterdir() if path not in shown] == []


def test_what_is_said_of_few_samples_is_in_the_tables():
    errors: dict[tuple[str, int], dict[str, float]] = {}
    for path in DOCS.glob("reproduction/*/tables/convergence.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            found = errors.setdefault((row["model"].partition("_patch")[0], int(row["samples"])), {})
            found[row["what"].removeprefix("error: ")] = float(row["median"])
    for found in errors.values():
        found.pop("step of the average", None)
    best = {model: min(found, key=found.__getitem__) for (model, samples), found in errors.items() if samples == 2}
    assert best == {"deit_tiny": "soft threshold, 2 e", "builtin": "soft threshold, 2 e", "builtin-bcos": "shrinkage"}
    page = (DOCS / "reproduction" / "index.md").read_text()
    for model in ("deit_tiny", "builtin"):
        one, two = (errors[model, 4][f"soft threshold, {count} e"] for count in (1, 2))
        assert f"({one:.3f} against {two:.3f})" in page


FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Requests(HTMLParser):
    """What a browser fetches by itself when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        address = values.get(FETCHED.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address) and values.get("rel") != "canonical":
            self.outside.append(address)


def outside_requests(site: Path) -> list[str]:
    found = []
    for path in site.rglob("*.html"):
        parser = Requests()
        parser.feed(path.read_text())
        found += [f"{path.name}: {address}" for address in parser.outside]
    for path in site.rglob("*.css"):
        found += [
            f"{path.name}: {url}" for url in re.findall(r"""url\(['"]?((?:https?:)?//[^)'"]+)""", path.read_text())
        ]
    return found


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_outside_requests(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    for notebook in NOTEBOOKS:
        page = tmp_path / "site" / "notebooks" / f"{notebook.stem}.html"
        assert f"{notebook.stem}_files/" in page.read_text()  # its pictures
        assert list(page.with_name(f"{notebook.stem}_files").glob("*.jp*g"))
    assert outside_requests(tmp_path / "site") == []
