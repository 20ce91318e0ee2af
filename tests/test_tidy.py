"""The code's manners that no linter checks: lengths, words, dead modules, documents."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("echo2_mesh", "echo2_node")
MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted(p for pattern in ("*.md", "proto/*.md", "runs/*.md") for p in ROOT.glob(pattern))
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
LONG_FUNCTIONS = {
    # The options of a command are its signature: splitting them would hide them.
    "echo2_node/cli.py:join",
}
BANNED_NAMES = ("util", "utils", "helper", "helpers", "manager", "base", "misc", "common")
ENTRY_POINTS = {"echo2_node.cli"}
"""Not imported by anything: started by name. `python -m` programs are found in the sources."""


def name_of(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_fits_its_limits_and_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= MODULE_LINES_MAX
    assert not [n for n, line in enumerate(lines, 1) if len(line) > COLUMNS_MAX]
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not tree.body, "no docstring"
    long = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
        and f"{name_of(path)}:{node.name}" not in LONG_FUNCTIONS
    ]
    assert not long, f"longer than {FUNCTION_LINES_MAX} lines: {long}"
    assert path.stem not in BANNED_NAMES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_library_code_does_not_print_or_promise(path):
    text = path.read_text(encoding="utf-8")
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("print", "breakpoint", "eval", "exec")
    ]
    assert not calls
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=name_of)
def test_no_path_of_somebodys_machine_is_written_down(path):
    if path == Path(__file__).resolve():
        return
    found = re.findall(r"""["'](/(?:home|root|Users|work|opt)/[^"']*)["']""", path.read_text())
    assert not found


def test_every_module_is_used_by_another_or_started_by_name():
    sources = {p: p.read_text(encoding="utf-8") for p in MODULES}
    used = set(ENTRY_POINTS)
    for path, text in sources.items():
        mine = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                mine.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                mine.add(node.module)
                mine.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                mine.update(re.findall(r"\becho2_[a-z_.0-9]+\b", node.value))
        used |= mine - {module_of(path)}
    # What only tests and simulations use is told apart by name.
    support = {"echo2_mesh.testing"}
    dead = [
        name_of(p)
        for p in MODULES
        if module_of(p) not in used | support and p.name != "__init__.py"
    ]
    assert not dead


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_document_has_one_title_and_no_dead_link(path):
    text = path.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert len(re.findall(r"^# ", prose, flags=re.M)) == 1
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        assert (path.parent / target).exists(), f"{target} does not exist"
