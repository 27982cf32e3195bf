"""What the documentation shows works: its Python runs, its commands parse, its tables are complete."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from models import byte_tokenizer, tiny_llama

from adx.cli.command import AdxCommand
from adx.cli.main import COMMANDS, cli, main

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def command(name: str) -> AdxCommand:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, AdxCommand)
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles that the pages name, of a tiny model."""
    folder = tmp_path_factory.mktemp("docs")
    model = byte_tokenizer(tiny_llama(folder / "model"), chat_template=TEMPLATE)
    assert main(["export", str(model), "--fp32", "-o", str(folder / "my-bundle")]) == 0
    (folder / "smollm2-int8").symlink_to(folder / "my-bundle")
    return folder


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_python_runs(page: str, work: Path) -> None:
    """In a process of its own, without PyTorch and transformers at the end."""
    found = blocks(page, "python")
    assert found
    code = "\n".join([*found, "import sys", "assert not {'torch', 'transformers'} & set(sys.modules)"])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=work, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    """Every `adx ...` line of a page has a command and options that there are."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("adx ")]
    assert lines or page != "README.md"
    for line in lines:
        _, name, *args = shlex.split(line)
        if name == "eval":
            args[args.index("--text") + 1] = str(ROOT / "README.md")
        command(name).make_context(name, args)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described(name: str) -> None:
    """Options, their other names, and those that are refused: each in its command's own section."""
    page = (ROOT / "docs/cli.md").read_text()
    shared, *_ = page.split("\n## adx ")
    (section,) = (part for part in page.split("\n## adx ") if part.startswith(f"{name}\n"))
    described = set(re.findall(r"`(--?[A-Za-z][\w-]*)`", shared + section))
    found = command(name)
    options = {
        spelling for option in found.options(click.Context(found)) for spelling in option.opts + option.secondary_opts
    }
    assert options | set(found.spelling.aliases) | set(found.spelling.unavailable) <= described
    assert set(re.findall(r"`(--[A-Za-z][\w-]*)`", section)) - {"--keep-onnx", "--chat", "--reference"} <= (
        options | set(found.spelling.aliases) | set(found.spelling.unavailable)
    )


def test_every_command_is_described() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    assert re.findall(r"^## adx (\w+)$", page, re.MULTILINE) == list(COMMANDS)
