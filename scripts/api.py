"""Writes docs/api.md, the reference, from signatures and docstrings; with `--check` only says whether it would differ.

What is public is what `__all__` of the modules in `MODULES` has. Nothing is imported: griffe reads the sources.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"

MODULES = [
    "streamrag",
    "streamrag.serve",
    "streamrag.sessions",
    "streamrag.telemetry",
    "streamrag.trace",
    "streamrag.testing",
    "streamrag.adapters.haystack",
    "streamrag.adapters.langchain",
    "streamrag.adapters.llamaindex",
    "streamrag.adapters.mcp",
]

SECTIONS = {
    "Asking": "Pipeline QueryOptions SamplingParams PromptTemplate Turn AnswerStream EventStream AnswerChunk Answer",
    "Sources": "WebSource VectorSource build_index IndexSummary RetrieverSource from_passages "
    "from_rankings Merged ReplaySource WorthSending NearEnd calibrate Calibration "
    "search_engine PgVectorSource build_table TableSummary HybridSource IvfSource index_source "
    "add_documents remove_documents",
    "Modes": "UpdateMode AppendMode",
    "Backends": "VllmBackend OpenAIBackend TokenStreams TokenStream StreamedTokens RequestView",
    "Recording": "TraceRecorder",
    "Parts of your own": "Source Mode Backend Startable Progress SourceEvent Append Update Skipped CutShort Chunk Hint "
    "BackendEvent Prefilled Prompt ModelInfo Tokenizer plain_chat",
}
"""Groups of the names of `streamrag`, in the order of the page. Errors come after them."""

GIVEN = {"AnswerStream", "EventStream", "TokenStream", "TokenStreams", "Watch"}
"""Classes whose objects a caller is given: how they are made is no promise."""

INTERNAL = {
    "PromptTemplate.passage_format",
    "StreamragChatModel.home",
    "StreamragRetriever.home",
    "TokenStream.fail",
    "Watch.put",
    "Watch.spec",
    "Watch.stop",
    "Watch.work",
    "WorthSending.num_others",
}
"""Members of public classes that are there for other parts of the package."""

OF_FIELDS = ("BaseChatModel", "BaseRetriever", "NamedTuple", "TypedDict")
"""Bases of classes whose options are their fields."""

STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}

HEAD = """\
# API

<!-- Made by scripts/api.py from signatures and docstrings: change those, and run `make api`. -->

What this page lists is public: it is imported from the module under which it stands, and changes are told in the
changelog. All else is private and may change at any time, whatever its name: every other module of the package, and
what is not in the `__all__` of these.
"""

RAISES = re.compile(r":raises (\w+): (.*)")
OPTION = re.compile(r"(\w+): (.*)")


class Documented(NamedTuple):
    """A docstring in parts."""

    prose: str
    options: dict[str, str]
    raises: list[tuple[str, str]]


class Row(NamedTuple):
    """An option or a field."""

    name: str
    annotation: str
    default: str | None
    meaning: str


class Reference:
    """The page."""

    def __init__(self, package: griffe.Module) -> None:
        self._package = package
        self._modules = {path: module_at(package, path) for path in MODULES}
        self._home = {name: path for path in reversed(MODULES) for name in public_names(self._modules[path])}

    def page(self) -> str:
        return "\n\n".join(block.strip("\n") for block in self._blocks()) + "\n"

    def _blocks(self) -> Iterator[str]:
        yield HEAD
        for path, module in self._modules.items():
            names = [name for name in public_names(module) if self._home[name] == path]
            yield f"## {path}"
            yield self._text(module.docstring, ())[0]
            if path == "streamrag":
                yield from self._sections(names)
            else:
                yield ", ".join(self._link(name) for name in names)
                for name in names:
                    yield from self._entry(resolved(module[name]), name)

    def _sections(self, names: list[str]) -> Iterator[str]:
        errors = [name for name in names if self._is_error(name)]
        sections = {title: listed.split() for title, listed in SECTIONS.items()}
        listed = sorted(name for group in sections.values() for name in group)
        assert listed == sorted({*names} - {*errors}), {*listed} ^ ({*names} - {*errors})
        lines = [f"- {title}: {', '.join(map(self._link, group))}" for title, group in sections.items()]
        yield "\n".join([*lines, "- [Errors](#errors)"])
        for title, group in sections.items():
            yield f"### {title}"
            for name in group:
                yield from self._entry(resolved(self._package[name]), name)
        yield "### Errors"
        yield self._text(self._package["errors"].docstring, ())[0]
        found = [error for name in errors if isinstance(error := resolved(self._package[name]), griffe.Class)]
        yield "\n".join(f"- `{self._signature(error)}`: {self._text(error.docstring, ())[0]}" for error in found)

    def _is_error(self, name: str) -> bool:
        return (
            str(self._package[name].target_path).startswith("streamrag.errors.")
            if self._package[name].is_alias
            else False
        )

    # --------------------------------------------------------------------------------------------------- one name

    def _entry(self, found: griffe.Object, name: str) -> Iterator[str]:
        yield f"#### {name}"
        match found:
            case griffe.Class():
                yield from self._class(found)
            case griffe.Function():
                yield from self._function(found, name)
            case griffe.Attribute():
                yield fenced(f"{name} = {self._type(found.value)}")
                yield self._text(found.docstring, ())[0]

    def _class(self, found: griffe.Class) -> Iterator[str]:
        fields = [
            member
            for name, member in found.members.items()
            if isinstance(member, griffe.Attribute) and is_field(member) and f"{found.name}.{name}" not in INTERNAL
        ]
        has_fields = "dataclass" in found.labels or any(str(base).endswith(OF_FIELDS) for base in found.bases)
        if has_fields:
            rows = [self._field(member) for member in fields]
            document = self._text(found.docstring, ())
        else:
            parameters = [] if found.name in GIVEN else list(found.parameters)[1:]
            document = self._text(found.docstring, [parameter.name for parameter in parameters])
            rows = [
                Row(p.name, self._type(p.annotation), self._default(p.default), document.options.get(p.name, ""))
                for p in parameters
            ]
        yield fenced(self._signature(found))
        yield document.prose
        yield table(rows, "Field" if "dataclass" in found.labels or "NamedTuple" in str(found.bases) else "Option")
        yield self._raises(document)
        for name, member in sorted(found.all_members.items(), key=lambda item: item[1].lineno or 0):
            member = resolved(member)
            if (
                name.startswith("_")
                or f"{found.name}.{name}" in INTERNAL
                or not member.docstring
                or (has_fields and is_field(member))
            ):
                continue
            if isinstance(member, griffe.Function):
                yield from self._function(member, f"{found.name}.{name}", level="#####")
            elif isinstance(member, griffe.Attribute):
                document = self._text(member.docstring, ())
                yield f"##### {found.name}.{name}"
                yield fenced(f"{name}: {self._type(member.annotation)}" if member.annotation else name)
                yield document.prose
                yield self._raises(document)

    def _function(self, found: griffe.Function, name: str, level: str = "") -> Iterator[str]:
        document = self._text(found.docstring, [parameter.name for parameter in found.parameters])
        if level:
            yield f"{level} {name}"
        decorators = "".join(f"@{decorator.value}\n" for decorator in found.decorators)
        is_async = "async " if "async" in found.labels else ""
        signature = f"{is_async}def {found.name}({self._parameters(found.parameters)}) -> {self._type(found.returns)}"
        yield fenced(signature, decorators)
        yield document.prose
        yield "\n".join(f"- `{option}`: {meaning}" for option, meaning in document.options.items())
        yield self._raises(document)

    def _field(self, member: griffe.Attribute) -> Row:
        meaning = " ".join(self._text(member.docstring, ())[0].split())
        return Row(member.name, self._type(member.annotation), self._default(member.value), meaning)

    def _default(self, value: str | griffe.Expr | None) -> str | None:
        """As in the source, but a constant's name becomes its value, and a dataclass's `field` the default it gives."""
        if isinstance(value, griffe.ExprName) and value.canonical_path.startswith("streamrag."):
            found = resolved(self._package.modules_collection[value.canonical_path])
            value = found.value if isinstance(found, griffe.Attribute) else value
        if value is None:
            return None
        made = re.fullmatch(r"field\((?:default=(.+?)|default_factory=(\w+))(?:, kw_only=True)?\)", str(value))
        return str(value) if not made else made[1] or f"{made[2]}()"

    def _raises(self, document: Documented) -> str:
        return "\n".join(f"- Raises {self._link(name)}: {when}" for name, when in document.raises)

    # -------------------------------------------------------------------------------------------------- its parts

    def _signature(self, found: griffe.Class) -> str:
        kept = [base for base in found.bases if isinstance(base, griffe.Expr) and self._may_be_shown(base)]
        bases = ", ".join(map(self._type, kept))
        return f"class {found.name}({bases})" if bases else f"class {found.name}"

    def _may_be_shown(self, base: griffe.Expr) -> bool:
        path = base.canonical_path
        return not path.startswith("streamrag.") or path.rpartition(".")[2] in self._home

    def _parameters(self, parameters: Iterable[griffe.Parameter]) -> str:
        parts: list[str] = []
        for p in parameters:
            if p.name in ("self", "cls"):
                continue
            if (
                p.kind is griffe.ParameterKind.keyword_only
                and "*" not in parts
                and not any(x.startswith("*") for x in parts)
            ):
                parts.append("*")
            stars = STARS.get(p.kind, "") if p.kind else ""
            default = "" if p.default is None or stars else f" = {self._default(p.default)}"
            parts.append(f"{stars}{p.name}: {self._type(p.annotation)}{default}")
        return ", ".join(parts)

    def _type(self, expression: str | griffe.Expr | None) -> str:
        """As in the source, without checks of values; what a private alias stands for, in its place."""
        if expression is None or isinstance(expression, str):
            return str(expression)
        return without_checks("".join(self._part(part) for part in expression.iterate(flat=True)))

    def _part(self, part: str | griffe.Expr) -> str:
        if not isinstance(part, griffe.ExprName) or part.name in self._home:
            return str(part)
        try:
            target = resolved(self._package.modules_collection[part.canonical_path])
        except KeyError:
            return part.name
        is_alias = isinstance(target, griffe.Attribute) and "TypeAlias" in str(target.annotation)
        return self._type(target.value) if isinstance(target, griffe.Attribute) and is_alias else part.name

    def _text(self, docstring: griffe.Docstring | None, names: Iterable[str]) -> Documented:
        document = documented(docstring.value if docstring else "", set(names))
        link: Callable[[str], str] = self._linked
        return Documented(
            link(document.prose),
            {name: link(meaning) for name, meaning in document.options.items()},
            [(name, link(when)) for name, when in document.raises],
        )

    def _linked(self, text: str) -> str:
        """Public names in backticks lead to their entries, but not in code."""
        lines = []
        is_code = False
        for line in text.splitlines():
            is_code ^= line.startswith("```")
            if not is_code and not line.startswith("    "):
                line = re.sub(r"(?<!\[)`(\w+)`", lambda found: self._link(found[1]), line)
            lines.append(line)
        return "\n".join(lines)

    def _link(self, name: str) -> str:
        if name not in self._home:
            return f"`{name}`"
        return f"[`{name}`](#{'errors' if name.endswith('Error') else name.lower()})"


def documented(text: str, names: set[str]) -> Documented:
    """Splits `name: meaning` lines of known names, and `:raises Name: when` lines, off a docstring."""
    prose: list[str] = []
    options: dict[str, str] = {}
    raises: list[tuple[str, str]] = []
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        raised, option = RAISES.match(line), OPTION.match(line)
        if not raised and not (option and option[1] in names):
            prose.append(line)
            continue
        while lines and lines[0].startswith("    "):
            line = f"{line} {lines.pop(0).strip()}"
        if raised:
            name, when = RAISES.match(line).groups()  # type: ignore[union-attr]
            raises.append((name, when))
        else:
            name, meaning = OPTION.match(line).groups()  # type: ignore[union-attr]
            options[name] = meaning
    return Documented(fence_code("\n".join(prose).strip()), options, raises)


def fence_code(text: str) -> str:
    """Doctests, up to the next empty line, and indented blocks that are no drawings, as code."""
    text = re.sub(r"^>>> .*(?:\n.+)*", lambda found: f"```pycon\n{found[0]}\n```", text, flags=re.MULTILINE)
    return re.sub(r"(?<=\n\n)    .*(?:\n(?:    .*)?)*", _fenced_block, text)


def _fenced_block(found: re.Match[str]) -> str:
    if "└" in found[0]:
        return found[0]
    return f"```python\n{dedent(found[0]).strip()}\n```\n\n"


CHECKED_TYPES = {
    "int": ("Whole", "Count", "CountOrZero"),
    "float": ("Number", "NumberOrZero", "Positive", "Seconds", "SecondsOrZero", "Fraction", "PositiveFraction"),
    "str": ("Text", "NonEmptyText", "StopText"),
    "bool": ("Flag",),
    "tuple[str, ...]": ("StopTexts",),
    "Sequence[int]": ("GrowingCounts",),
}
"""The plain types of those in `streamrag.support.validation`."""


class _WithoutChecks(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        plain = next((plain for plain, checked in CHECKED_TYPES.items() if node.id in checked), node.id)
        return ast.parse(plain, mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in {"Annotated", "InstanceOf", "SkipValidation"}:
            first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            return self.visit(first)  # type: ignore[no-any-return]
        return self.generic_visit(node)  # type: ignore[return-value]


def without_checks(annotation: str) -> str:
    """Return the type that a checked annotation has for a caller: `int` for `Annotated[int, Field(ge=1)]`."""
    names = {name for checked in CHECKED_TYPES.values() for name in checked}
    if not names & set(re.findall(r"\w+", annotation)) and not re.search("Annotated|InstanceOf", annotation):
        return annotation
    return ast.unparse(_WithoutChecks().visit(ast.parse(annotation, mode="eval"))).replace("'", '"')


def fenced(code: str, above: str = "") -> str:
    """A signature, on lines of their own if it is long."""
    if len(code) > 100 and "(" in code:
        head, _, rest = code.partition("(")
        inside, _, tail = rest.rpartition(")")
        code = f"{head}(\n" + "".join(f"    {part},\n" for part in split_commas(inside)) + f"){tail}"
    elif len(code) > 100:
        name, _, kinds = code.partition(" = ")
        code = f"{name} = (\n    {kinds}\n)".replace(" | ", "\n    | ")
    return f"```py\n{above}{code}\n```"


def split_commas(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def table(rows: list[Row], what: str) -> str:
    """Options or fields; nothing if there are none."""
    if not rows:
        return ""
    columns = [[what, *(code(row.name) for row in rows)], ["Type", *(code(row.annotation) for row in rows)]]
    if any(row.default is not None for row in rows):
        columns.append(["Default", *("" if row.default is None else code(row.default) for row in rows)])
    if any(row.meaning for row in rows):
        columns.append([" ", *(row.meaning[:1].upper() + row.meaning[1:].replace("|", "\\|") for row in rows)])
    first, *others = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in [first, ["---"] * len(columns), *others])


def code(text: str) -> str:
    """Code in a cell of a table, where a bar must be escaped."""
    return f"`{text}`".replace("|", "\\|")


def is_field(member: griffe.Object | griffe.Alias) -> bool:
    return (
        isinstance(member, griffe.Attribute)
        and bool(member.annotation)
        and not member.name.startswith("_")
        and "property" not in member.labels
    )


def module_at(package: griffe.Module, path: str) -> griffe.Module:
    found = package if path == package.name else package[path.removeprefix(f"{package.name}.")]
    assert isinstance(found, griffe.Module)
    return found


def public_names(module: griffe.Module) -> list[str]:
    """The names in `__all__`, or those that load their modules when they are used."""
    if "_NAMES" in module.members:
        return sorted(" ".join(ast.literal_eval(str(module["_NAMES"].value)).values()).split())
    if "_HOMES" in module.members:
        return sorted(str(key).strip("'\"") for key in module["_HOMES"].value.keys)
    return [str(name) for name in module.exports or ()]


def resolved(found: griffe.Object | griffe.Alias) -> griffe.Object:
    return found.final_target if isinstance(found, griffe.Alias) else found


def main() -> int:
    package = griffe.load("streamrag", search_paths=[ROOT])
    assert isinstance(package, griffe.Module)
    page = re.sub(r"\n{3,}", "\n\n", Reference(package).page())
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != page:
            print(f"{PAGE.relative_to(ROOT)} is not what the docstrings say now: run `make api`")
            return 1
        return 0
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
