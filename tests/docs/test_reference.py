"""The reference leaves nothing out: whatever a user can type, catch or listen for has a place in it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from pages import DOCS, ROOT

import strongroom
from strongroom import errors, events, frontend, resume, stores, testing

REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md")))
SOURCES = [path for part in ("core", "security", "plugins") for path in (ROOT / part).rglob("*.py")]


def missing(names: Iterable[str], text: str = REFERENCE) -> list[str]:
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


def section(page: str) -> str:
    return (DOCS / "reference" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("module", (strongroom, stores, testing, resume), ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: object) -> None:
    assert missing(module.__all__) == []  # type: ignore[attr-defined]


def test_every_error_is_in_the_table_of_errors() -> None:
    assert missing(errors.__all__, section("errors.md")) == []


def test_the_tree_of_errors_is_the_one_in_the_code() -> None:
    tree = str(errors.__doc__).partition("::\n\n")[2].partition("\n\n")[0]
    assert len(tree.splitlines()) == len(errors.__all__)
    assert inspect.cleandoc(tree) in section("errors.md")


def test_every_event_is_in_the_table_of_events_with_its_fields() -> None:
    page = section("events.md")
    kinds = [
        kind
        for kind in vars(events).values()
        if inspect.isclass(kind) and issubclass(kind, events.Event) and kind is not events.Event
    ]
    assert len(kinds) > 5
    assert missing((kind.__name__ for kind in kinds), page) == []
    for kind in kinds:
        (row,) = re.findall(rf"^\| `{kind.__name__}` .*$", page, re.MULTILINE)
        fields = set(kind.__dataclass_fields__) - {"run"}
        assert missing(fields, row) == [], kind


def test_every_environment_variable_is_in_the_reference() -> None:
    if not (ROOT / "core").is_dir():
        pytest.skip("the sources are not beside the tests")
    variables = {
        name for path in SOURCES for name in re.findall(r"STRONGROOM_[A-Z0-9_]+", path.read_text("utf-8"))
    }
    assert "STRONGROOM_CONFIG" in variables
    assert missing(variables | {"WORLD_SIZE"}, section("configuration.md")) == []


def test_every_argument_of_a_checkpointer_is_in_the_reference() -> None:
    arguments = set(inspect.signature(strongroom.Checkpointer).parameters)
    assert missing(arguments, section("configuration.md")) == []


def test_every_option_of_all_front_ends_is_in_the_reference_with_its_default() -> None:
    table = section("front-ends.md").partition("| option | default |")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", table, re.MULTILINE))
    assert {name: ast.literal_eval(default) for name, default in shown.items()} == dict(frontend.DEFAULTS)
    assert set(frontend.DEFAULTS) == set(frontend.RunOptions.__annotations__)


def test_the_lightning_callback_has_the_options_of_all_front_ends_under_their_names() -> None:
    pytest.importorskip("lightning")
    from strongroom_lightning import StrongroomCheckpoint

    arguments = inspect.signature(StrongroomCheckpoint).parameters
    named = {name: one.default for name, one in arguments.items() if name in frontend.DEFAULTS}
    # Whether a job goes back into the queue, its SLURMEnvironment says.
    assert named == {name: value for name, value in frontend.DEFAULTS.items() if name != "requeue"}


def test_every_tag_of_the_typed_json_is_in_the_format_and_in_the_reference() -> None:
    from strongroom.arrays import ARRAY_TAGS
    from strongroom.atoms import ATOM_TAGS

    tags = [*ATOM_TAGS, *ARRAY_TAGS]
    assert missing(tags, (DOCS / "format.md").read_text("utf-8")) == []


def layers() -> dict[str, int]:
    """The layer of each of the core's modules, by the map's table; 0 is the lowest."""
    page = (DOCS / "explanation" / "architecture.md").read_text("utf-8")
    table = page.partition("| layer |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    return {
        name: height
        for height, row in enumerate(reversed(rows))
        for name in re.findall(r"`(\w+)`", row.partition("|")[2])
    }


def imported(path: Path) -> set[str]:
    """The core's modules that a file imports when it runs, by their first name."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "strongroom":
            found |= {f"strongroom.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return {name.split(".")[1] for name in found if name.startswith("strongroom.")}


def test_the_map_of_the_code_shows_every_module_where_it_is() -> None:
    core = ROOT / "core" / "strongroom"
    if not core.is_dir():
        pytest.skip("the sources are not beside the tests")
    height = layers()
    paths = [path for path in core.rglob("*.py") if not path.stem.startswith("_")]
    assert [path.stem for path in paths if path.stem not in height] == []
    for path in paths:
        part = path.relative_to(core).parts[0].removesuffix(".py")
        above = [name for name in imported(path) if height.get(name, 0) > height[part]]
        assert above == [], path


def test_the_map_of_the_code_shows_every_module_of_every_front_end() -> None:
    if not (ROOT / "plugins").is_dir():
        pytest.skip("the sources are not beside the tests")
    page = (DOCS / "explanation" / "architecture.md").read_text("utf-8")
    front_ends = [path for path in (ROOT / "plugins").glob("strongroom_*") if path.name != "strongroom_cli"]
    assert len(front_ends) == 4
    for front_end in front_ends:
        (row,) = re.findall(rf"^\| `{front_end.name}` \|.*$", page, re.MULTILINE)
        modules = [path.stem for path in front_end.glob("*.py") if path.stem != "__init__"]
        assert missing(modules, row) == [], front_end.name


def test_a_name_that_is_part_of_another_does_not_count() -> None:
    assert missing(["Save"], "SaveError") == ["Save"]


def test_no_page_speaks_of_where_it_was_written() -> None:
    for page in DOCS.rglob("*.md"):
        text = Path(page).read_text("utf-8")
        assert not re.search(r"/(work|opt|home|root|tmp)/", text), page
