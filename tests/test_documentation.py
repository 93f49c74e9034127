"""Prose that goes stale or wide: files that it names, links, and lengths of lines and pages."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("", "docs", "docs/*", "benchmarks", "examples/*", "docker", "slurm")
    for path in ROOT.glob(f"{folder}/*.md" if folder else "*.md")
)
MOST_LINES = {"README.md": 150, "CHANGELOG.md": 180, "docs/architecture.md": 250}
MADE_BY_USERS = {
    "JOB.sbatch",
    "site.yaml",
    "file.py",
    "agent.py",
    "reward.py",
    "index.json",
    "driver.json",
    "config.json",
}
"""Files that runs and users have, which the repository does not."""
TOP = ("nemo_like/", "tests/", "examples/", "docs/", "configs/", "slurm/", "docker/", "benchmarks/")


def text_of(page):
    return (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    named = set(
        re.findall(r"(?<![\w./-])((?:\w[\w-]*/)*[\w-]+\.(?:py|sbatch|md))\b", text_of(page))
    )
    for file in named - MADE_BY_USERS:
        folders = (ROOT, ROOT / "nemo_like", (ROOT / page).parent)
        if file.startswith(TOP) or "/" in file:
            assert any((folder / file).is_file() for folder in folders), file
        else:
            assert any(ROOT.glob(f"[!.]*/**/{file}")) or (ROOT / file).is_file(), file


def test_each_view_of_the_dashboard_has_a_screenshot_on_its_page():
    script = (ROOT / "nemo_like" / "viewer" / "page" / "app.js").read_text()
    (views,) = re.findall(r"^const VIEWS = \{(.*)\};", script, re.MULTILINE)
    names = [one.partition(":")[0].strip() for one in views.split(",")]
    assert len(names) == 6
    for name in names:
        assert f"](viewer-{name}.png)" in text_of("docs/viewer.md")
        assert (ROOT / "docs" / f"viewer-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", text_of(page)):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", [one for one in PAGES if not one.startswith("docs/report/")])
def test_lines_fit_an_editor(page):
    """Tables may be wider: a row cannot be wrapped."""
    wide = [line for line in text_of(page).splitlines() if len(line) > 120 and "|" not in line]
    assert not wide


@pytest.mark.parametrize("page", MOST_LINES)
def test_pages_stay_short(page):
    assert len(text_of(page).splitlines()) <= MOST_LINES[page]


def test_the_readme_names_commands_that_exist():
    from nemo_like.cli import COMMANDS
    from nemo_like.compose import registry

    named = set(re.findall(r"(?<!pip install )\bnemo-like ([a-z][a-z-]*)", text_of("README.md")))
    assert {"grpo", "plan"} <= named <= {*registry.names(), *COMMANDS}


def test_the_workflow_calls_the_commands_of_ci_and_the_makefile():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["run"]
    assert [one["run"] for one in job["steps"] if "run" in one] == [".ci/run ${{ matrix.part }}"]
    makefile = (ROOT / "Makefile").read_text()
    for part in job["strategy"]["matrix"]["part"]:
        assert f"\n{part}:" in makefile
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", ROOT / ".ci/run"], check=True)


def test_the_citation_has_the_version():
    from nemo_like import __version__

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_sets_exists(page):
    from nemo_like.compose import registry
    from nemo_like.compose.overrides import is_in_free_dict
    from nemo_like.config.section import keys_of

    schemas = [registry.find(name).config for name in registry.names()]
    keys = {key for schema in schemas for key, _ in keys_of(schema)}
    tops = "|".join(sorted({key.split(".")[0] for key in keys}))
    for key in re.findall(rf"(?<![\w.])((?:{tops})\.[a-z_.0-9]+)=", text_of(page)):
        assert key in keys or any(is_in_free_dict(key, schema) for schema in schemas), key
