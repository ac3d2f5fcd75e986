"""The documentation: generated pages, links, names of verbs and options, man pages, the README's size and figures."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

from bench import report
from bench.__main__ import ORDER
from cachefs import hints
from cachefs.base import linux, shared_memory
from cachefs.cli.main import cli
from cachefs.config.config import Config
from cachefs.fs import freshness, xattrs
from cachefs.fuse import native_backend
from cachefs.origin import local
from cachefs.store import space, tier
from cachefs.upload import journal, room, staging
from scripts import reference

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
README = ROOT / "README.md"
SOURCES = [path for place in ("bench", "cachefs", "tests") for path in (ROOT / place).rglob("*.py")]
OTHERS_OPTIONS = {"--device", "--user", "--vfs-cache-mode", "--budget"}
"""Of docker, rclone and scripts/mutate, where a page names them alone."""
MAN = ("man/cachefs.1", "man/mount.cachefs.8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text() == reference.PAGES[name](), "run scripts/docs"


def test_the_default_that_pages_show_of_a_switch_is_its_value() -> None:
    """`--restart` was shown as off."""
    switches = {item.name: item.default for item in fields(Config) if isinstance(item.default, bool)}
    page = reference.PAGES["docs/reference/options.md"]()
    for name, value in switches.items():
        flag = name.replace("_", "-")
        row = re.search(rf"^\| `--{flag}`[^|]*\|[^|]*\| ([^|]*) \|", page, re.MULTILINE)
        assert row is not None and row[1] == ("yes" if value else "no"), flag


def build_site(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Not `--quiet`: then MkDocs counts no warnings, and `--strict` passes everything."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`--strict` fails for dead links and anchors, and for pages that the navigation leaves out."""
    built = build_site(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        html = (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").read_text()
        body = html.partition('role="main"')[2].partition("<footer")[0]
        assert body and "\\|" not in body
        for text in re.findall(r"<p>(.*?)</p>", body, re.DOTALL):  # Markdown that was not recognised
            assert not re.search(r"^\s*([-*] |\d+\. |\||```|#+ )", text, re.MULTILINE), (
                f"{shown(page)}: {text[:200]}"
            )


@pytest.mark.parametrize("broken", ["[x](nowhere.md)", "[x](glossary.md#nowhere)", "[x](../README.md)"])
def test_a_dead_link_fails_the_build(tmp_path: Path, broken: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Here\n\n{broken}\n")
    (tmp_path / "docs/glossary.md").write_text("# Glossary\n")
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:\n  - Home")[0]
    (tmp_path / "mkdocs.yml").write_text(settings)
    built = build_site(tmp_path, tmp_path / "site")
    assert built.returncode == 1 and built.stderr.count("WARNING") == 1 and broken[4:-1] in built.stderr


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and MkDocs spell them where both agree."""
    found = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def test_the_readme_has_no_dead_links() -> None:
    links = re.findall(r"\]\(([^)]+)\)", without_code(README.read_text()))
    assert len(links) > 20
    for link in links:
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = ROOT / path if path else README
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_readme_fits_a_few_screens() -> None:
    assert len(README.read_text().splitlines()) <= 160


def columns(text: str, wanted: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Of tables in Markdown: a row's first cell → its cells in the wanted columns, of those tables that have one."""
    found: dict[str, tuple[str, ...]] = {}
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            heads = []
        elif not heads:
            heads = cells
        elif wanted[0] in heads and not set(line) <= set("|-: "):
            found[cells[0]] = tuple(
                (cells[heads.index(name)] if name in heads else "") or "–" for name in wanted
            )
    return found


def test_the_readme_shows_figures_that_were_measured() -> None:
    wanted = ("cachefs", "ext4", "rclone mount", "s3fs")
    measured = columns((ROOT / "docs/benchmarks.md").read_text(), wanted)
    save = "large file saved, in the store, 20 ms and 100 MB/s (MB/s)"
    shown = columns(README.read_text(), wanted)
    writes = columns(
        (ROOT / "docs/benchmarks.md").read_text(), ("cachefs", "ext4", "rclone mount, writes", "s3fs")
    )
    measured[save] = writes[save]
    assert len(shown) == 8
    for name, figures in shown.items():
        assert figures == measured[name], name


def test_the_benchmarks_page_shows_what_bench_results_holds() -> None:
    found = report.records(ORDER)
    text = "\n\n".join((report.table(found), report.side_by_side(found), report.provenance(found)))
    assert text in (ROOT / "docs/benchmarks.md").read_text(), "run scripts/bench report"


def test_every_file_that_a_page_names_is_there() -> None:
    places = "tests|scripts|bench|docker|systemd|constraints|cachefs|docs|man"
    for page in [*PAGES, README]:
        named = re.findall(rf"`((?:{places})/[\w./@-]+)(?=[`: ])", page.read_text())
        gone = {
            name for name in named if not (ROOT / name).exists() and not (ROOT / "cachefs" / name).exists()
        }
        assert not gone, f"{shown(page)}: {gone}"
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            assert any(path.as_posix().endswith(f"/{name}") for path in SOURCES), f"{shown(page)}: {name}"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("guarantees", f"A cache disk that hangs takes its tier down after {linux.HANGS_AFTER_S:g} s:"),
        ("explanation/consistency", f"What arrived at most {freshness.BURST_S:g} s ago (`BURST_S`)"),
        ("reference/on-disk-format", f"a file {'a day' * (local.KILLED_S == 86_400)} after its last change"),
        ("how-to/systemd-and-fstab", f"up to {staging.HELD_ALTOGETHER >> 20} MiB"),
        ("how-to/systemd-and-fstab", f"beyond {shared_memory.MOST_RECORDS:,} dirty files"),
        ("explanation/eviction", f"RAM spills its oldest copies to SSD above {100 * space.SPILL_ABOVE:g} %"),
        ("explanation/eviction", f"reads again after {space.REUSE_AFTER_S:g} s is copied up"),
        ("explanation/architecture", f"Beyond {tier.GOING_BYTES >> 20} MiB or a sixteenth of the tier"),
        ("explanation/architecture", f"{room.UNSENT >> 20} MiB of a file may wait to be sent"),
        ("explanation/architecture", f"waits up to {room.WAIT_S:g} s for other files"),
        ("explanation/architecture", f"up to {journal.CONTENTS_BYTES >> 20} MiB of all files"),
        ("explanation/architecture", f"a turn every {'millisecond' * (native_backend.SLICE_S == 1e-3)}."),
        ("explanation/architecture", f"repeated after {journal.RETRY_S:g} s to a minute"),
    ],
)
def test_figures_that_pages_give_are_those_of_the_code(page: str, said: str) -> None:
    assert said in " ".join((ROOT / f"docs/{page}.md").read_text().split())
    assert tier.GOING_SHARE == 16 and journal.LONGEST_RETRY_S == 60


def test_every_verb_that_a_page_names_is_there() -> None:
    known = {*cli.commands, "VERB"}
    found = 0
    for page in [*PAGES, README]:
        named = set(re.findall(r"`cachefs ([a-zV][a-zERB-]*)(?=[ `])", page.read_text()))
        assert named <= known, f"{shown(page)}: {named - known}"
        found += len(named)
    assert found > 50


def test_every_option_that_a_page_names_is_there() -> None:
    known = {
        flag
        for command in cli.commands.values()
        for param in command.params
        if isinstance(param, click.Option)
        for flag in (*param.opts, *param.secondary_opts)
    } | {"--help", "--no-SWITCH", "--version"}
    others = re.compile(r"`(scripts/|rclone|rsync|systemctl|systemd-escape)[^`]*`")
    for page in [*PAGES, README]:
        text = others.sub("", without_code(page.read_text()))
        named = set(re.findall(r"`(?:cachefs [a-z-]+ )?(--[a-zA-Z-]+)(?=[ `=])", text))
        gone = named - known - OTHERS_OPTIONS
        assert not gone, f"{shown(page)}: {gone}"


def test_every_attribute_and_python_name_has_its_line() -> None:
    page = (ROOT / "docs/reference/xattrs.md").read_text()
    for name in (xattrs.REFRESH, xattrs.ETAG, xattrs.CACHED, xattrs.KEY, xattrs.HIDDEN, xattrs.LISTED):
        assert f"| `{name.decode()}` |" in page
    page = (ROOT / "docs/reference/python-api.md").read_text()
    for name in hints.__all__:
        assert f"## {name}" in page


@pytest.mark.parametrize("name", MAN)
def test_man_pages_are_clean(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text.isascii()
    for (
        line
    ) in text.splitlines():  # a dot at the start of a line is a request, and there are no others than these
        if line.startswith((".", "'")):
            assert re.match(r"\.(\\\"|TH|SH|SS|TP|PP|B|I|BR|RI|RB|IR|nf|fi)( |$)", line), line
    assert text.count("\n.nf\n") == text.count("\n.fi\n")
    if shutil.which("groff"):
        made = subprocess.run(
            ["groff", "-man", "-ww", "-z", "-Tascii", name], cwd=ROOT, capture_output=True, text=True
        )
        assert (made.returncode, made.stderr) == (0, "")
