"""The packages as a house: every name that is imported exists, and no import leads back."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "encoder", "graphs", "bench")
FILES = {
    "vitgraph."
    + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import of ours, wherever it is: in functions and for types, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitgraph."):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, None) for a in node.names if a.name.startswith("vitgraph."))


def defined(tree: ast.Module) -> set[str]:
    """Names that a module binds, and what its `__getattr__` serves from a table of strings."""
    names = {"__name__", "__doc__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("module", FILES)
def test_what_is_imported_exists(module) -> None:
    """Also where a function imports it that no test on a CPU calls."""
    for source, name in imports(TREES[module]):
        if f"{source}.{name}" in FILES:
            continue
        assert source in FILES, f"{module} imports {source}"
        assert name is None or name in defined(TREES[source]), f"{module}: no {name} in {source}"


@pytest.mark.parametrize("module", FILES)
def test_neighbours_are_imported_by_their_whole_name(module) -> None:
    """A bare name is found only while the file's own folder is on sys.path."""
    neighbours = {path.stem for path in FILES[module].parent.glob("*.py")}
    neighbours -= sys.stdlib_module_names
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module not in neighbours, ast.unparse(node)
        elif isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & neighbours, ast.unparse(node)


def edges() -> dict[str, set[str]]:
    """Which modules each imports; a name of a package counts as the module that defines it."""
    found: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        targets = {f"{s}.{n}" if f"{s}.{n}" in FILES else s for s, n in imports(tree)}
        found[module] = (targets & FILES.keys()) - {module}
    return found


def test_no_import_leads_back() -> None:
    """Lazy and typing imports counted; a package's own `__init__` only hands out names."""
    graph = {
        module: {target for target in targets if FILES[target].name != "__init__.py"}
        for module, targets in edges().items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_stairs_lead_down() -> None:
    """kernels <- encoder <- graphs <- bench, and the command line above all of them."""

    def floor(module: str) -> int:
        if module.startswith("vitgraph.graphs.cli"):
            return len(PACKAGES)
        return PACKAGES.index(module.split(".")[1])

    for module, targets in edges().items():
        for target in targets:
            assert floor(target) <= floor(module), f"{module} imports {target}"


def test_files_and_folders_stay_small() -> None:
    """A file is read in one go; a folder's files are seen at once. bench/ is a list."""
    lines = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    assert {module: count for module, count in lines.items() if count > 300} == {}
    folders = Counter(path.parent.relative_to(ROOT) for path in FILES.values())
    del folders[Path("bench")]
    assert {folder: count for folder, count in folders.items() if count > 14} == {}
