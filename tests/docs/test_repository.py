"""Check the repository: no paths of one machine, one version everywhere, complete locks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
# Written in pieces, or this file would report itself.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/" + r"(?:work|root|opt|home)/")
REGISTRY = re.compile("|".join([r"pypi\." + "org", r"python" + "hosted", r"registry\." + r"(?:npmjs|yarnpkg)"]))

# Wordings that users stumbled over, and their kind.
AWKWARD = re.compile(
    r"(?<!there )\b(?:is|are) no (?!longer)|\bno \w+ of at least|to chance|against itself|its middle|shows it all"
    r"|once more|turns? (?:it|the order) round|\ball together|\bowes?\b|with commas between|\bas of \b|stands? out of"
    r"|\bgo(?:es)? on with|out of \S+ sight"
    r"|\b(?:one|number|class|name|value|passes)(?: name)? an? (?:class|image|line|map|prompt|sample|token)\b"
)


def repository_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so there is no list of tracked files")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        data = path.read_bytes()
        if b"\0" in data:  # a picture or weights
            continue
        lines = data.decode("utf-8", "replace").splitlines()
        found += [f"{path.name}:{n}: {line}" for n, line in enumerate(lines, 1) if pattern.search(line)]
    return found


def pinned(lock: Path) -> list[Requirement]:
    text = lock.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [Requirement(line.split(" --hash")[0]) for line in lines]


def project() -> dict[str, dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def version() -> str:
    text = (ROOT / "src" / "dave_vit" / "_version.py").read_text()
    return re.search(r'__version__ = "(.+)"', text)[1]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine path", "registry address"])
def test_no_file_names_a_machine_or_a_registry(pattern):
    assert lines_matching(pattern, repository_files()) == []


def message_texts(path: Path) -> list[str]:
    """Texts of a module or script that users may read: of Python without docstrings, which are for readers of code."""
    if path.suffix != ".py":
        return [line for line in path.read_text().splitlines() if not line.strip().startswith("//")]
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation
    ]


def test_messages_are_plain():
    paths = [path for ending in ("py", "js", "html") for path in (ROOT / "src").rglob(f"*.{ending}")]
    texts = [(path.name, text) for path in paths for text in message_texts(path)]
    assert len(texts) > 5000
    commands = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert [found for found in [*texts, ("cli.md", commands)] if AWKWARD.search(found[1])] == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_hold_names_versions_and_hashes_only(lock):
    text = lock.read_text()
    assert re.findall(r"\S*://\S*|\bfile:\S*|--(?!hash=)\S+|^-\w.*", text, re.MULTILINE) == []
    for entry in text.replace("\\\n", " ").splitlines():
        if entry.strip() and not entry.lstrip().startswith("#"):
            assert re.match(r"\S+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry), entry


@pytest.mark.parametrize(("lock", "extras"), [("core.txt", False), ("dev.txt", True)], ids=["core", "all extras"])
def test_locks_fit_the_ranges_of_the_project(lock, extras):
    settings = project()
    table = settings["project"]
    others = [*table["optional-dependencies"].values(), settings["dependency-groups"]["dev"]]
    groups = [table["dependencies"], *(others if extras else [])]
    pins = pinned(ROOT / "requirements" / lock)
    for requirement in map(Requirement, chain(*groups)):
        name = canonicalize_name(requirement.name)
        found = [str(pin.specifier).removeprefix("==") for pin in pins if canonicalize_name(pin.name) == name]
        assert found, f"{requirement} is missing from {lock}; run: make lock"
        assert all(requirement.specifier.contains(Version(pin)) for pin in found), (requirement, found)


def imported_packages() -> set[str]:
    """Top-level names of all packages that the source imports, apart from the standard library and itself."""
    names: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"dave_vit"}


def test_every_imported_package_is_declared():
    table = project()["project"]
    requirements = chain(table["dependencies"], *table["optional-dependencies"].values())
    declared = {canonicalize_name(Requirement(line).name) for line in requirements} | {"triton"}  # comes with torch
    homes = packages_distributions()
    imported = {name: {canonicalize_name(home) for home in homes.get(name, [name])} for name in imported_packages()}
    assert [name for name, found in sorted(imported.items()) if not found & declared] == []


def test_locks_fit_into_one_environment():
    versions = {str(pin).split(";")[0].strip() for pin in pinned(ROOT / "requirements" / "dev.txt")}
    names = {entry.split("==")[0] for entry in versions}
    for lock in LOCKS:
        shared = {str(pin).split(";")[0].strip() for pin in pinned(lock) if pin.name in names}
        assert shared <= versions


def test_one_version_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1].strip("\"'") == version()
    assert re.search(r"^## \[(\d.*?)\]", changelog, re.MULTILINE)[1] == version()


def test_every_version_of_the_changelog_has_its_numbers():
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections if "\n### Numbers\n" not in section] == []


def test_links_of_the_readme_work_where_packages_are_listed():
    prose = re.sub(r"`[^`]*`", "", (ROOT / "README.md").read_text())
    links = re.findall(r"\]\(([^)\s]+)", prose)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []


def test_art_and_its_licences_are_named_once():
    notices = [path for path in repository_files() if path.name == "THIRD_PARTY_NOTICES"]
    assert notices == [ROOT / "THIRD_PARTY_NOTICES"]
    text = notices[0].read_text()
    expression = project()["project"]["license"]
    assert all(name in text for name in ("MIT", "CC-BY-4.0", "CC0 1.0"))
    assert set(expression.split(" AND ")) == {"Apache-2.0", "MIT", "CC-BY-4.0", "CC0-1.0"}


def test_workflows_call_targets_that_exist():
    yaml = pytest.importorskip("yaml", reason="needs the extra eval")
    targets = set(re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    called, versions = set(), set()
    for path in (ROOT / ".github").rglob("*.yml"):
        for job in yaml.safe_load(path.read_text()).get("jobs", {}).values():
            rows = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
            versions |= {row["python"] for row in rows if "python" in row}
            lines = [step["run"] for step in job["steps"] if "run" in step]
            called |= {
                re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found, row=row: row[found[1]], line)
                for line in lines
                for row in rows
            }
    made = {name for line in called for name in re.findall(r"\bmake ([\w-]+)", line)}
    assert {"lint", "docs", "test-oldest", "test-newest"} <= made <= targets
    assert {line for line in called if line.startswith(".ci/")} == {".ci/run"}
    assert (ROOT / ".ci" / "run").is_file()
    assert versions == {"3.11", "3.12", "3.13", "3.14"}
