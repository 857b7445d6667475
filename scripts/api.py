"""Write the API reference, docs/api/*.md, from signatures and docstrings; `--check` only reports pages that differ.

Public names are those in the `__all__` of the modules in `MODULES`. Nothing is imported: griffe parses the sources.
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
FOLDER = ROOT / "docs" / "api"

MODULES = [
    "streamrag",
    "streamrag.open_questions",
    "streamrag.refresh",
    "streamrag.serve",
    "streamrag.sessions",
    "streamrag.telemetry",
    "streamrag.trace",
    "streamrag.testing",
    "streamrag.adapters.haystack",
    "streamrag.adapters.langchain",
    "streamrag.adapters.llamaindex",
    "streamrag.adapters.livekit",
    "streamrag.adapters.mcp",
    "streamrag.adapters.pipecat",
]

PAGES = {
    "pipeline": (
        "Pipelines and answers",
        "Ask a question, follow what happens, and read the result.",
        "Pipeline QueryOptions SamplingParams PromptTemplate Turn AnswerStream EventStream AnswerChunk Answer "
        "TraceRecorder",
    ),
    "sources": (
        "Sources",
        "Retrieve from the web or from your own function, combine sources, and send updates late.",
        "WebSource CrawlOptions RetrieverSource from_passages from_rankings from_tokens Rewrite search_engine "
        "MergedSource ReplaySource DelayedUpdates",
    ),
    "search": (
        "Searching your documents",
        "Index documents, and search an index or a PostgreSQL table.",
        "VectorSource IvfSource HybridSource PgVectorSource index_source build_index IndexSummary add_documents "
        "remove_documents build_table TableSummary",
    ),
    "backends": (
        "Modes and backends",
        "Fold chunk events into a prompt, and run the model.",
        "UpdateMode AppendMode VllmBackend SchedulerOptions DisaggregatedBackend OpenAIBackend TokenStreams "
        "TokenStream RequestView",
    ),
    "protocols": (
        "Protocols and events",
        "Write a source, mode or backend of your own.",
        "Source Mode Backend Startable Progress SourceEvent Append Update Skipped CutShort Chunk Hint "
        "BackendEvent Prefilled Prompt ModelInfo Tokenizer plain_chat",
    ),
}
"""Pages of the names in `streamrag`: file, title, purpose and names in order. Its errors have a page of their own."""

EXAMPLES = {
    "pipeline": """
        async with Pipeline(source, backend) as pipeline:
            async for chunk in pipeline.stream("Why does the printer jam?"):
                print(chunk.text, end="")""",
    "sources": 'source = WebSource(["https://anyio.readthedocs.io/en/stable/"], CrawlOptions(max_depth=1))',
    "search": """
        async with Pipeline(HybridSource("./handbook-index", k=5), VllmBackend("./model")) as pipeline:
            ...""",
    "backends": 'backend = OpenAIBackend("http://127.0.0.1:8000/v1", "my-model")',
    "protocols": """
        class TicketSource:
            async def stream(self, query: str):
                yield Append(Chunk("The printer jams on thick paper.", "T-101"))""",
    "errors": """
        try:
            async with Pipeline(source, backend) as pipeline:
                print([chunk.text async for chunk in pipeline.stream("Why does the printer jam?")])
        except StreamRagError as error:
            print(error)  # names the value that was wrong, and the remedy""",
}
"""The shortest code that uses the names of a page."""

PURPOSES = {
    "serve": "Configure and run the HTTP service from Python.",
    "open_questions": "Begin retrieval and prefill while a question is still being asked.",
    "refresh": "Retrieve again in the middle of an answer.",
    "sessions": "Stream data into a context that stays open, and ask about it.",
    "telemetry": "Observe what pipelines and engines do: events, timings and request records.",
    "trace": "Read and write traces of retrieval.",
    "testing": "Test your own program without a model.",
    "haystack": "Use streamrag in Haystack, and Haystack's retrievers in streamrag.",
    "langchain": "Use streamrag in LangChain, and LangChain's retrievers in streamrag.",
    "llamaindex": "Use streamrag in LlamaIndex, and LlamaIndex's retrievers in streamrag.",
    "livekit": "Use a pipeline as the LLM of a LiveKit agent.",
    "mcp": "Use the tools and resources of MCP servers as sources.",
    "pipecat": "Use a pipeline as the LLM service of a Pipecat bot.",
}
"""What the page of each other module is for."""

GIVEN = {"AnswerStream", "EventStream", "Session", "TokenStream", "TokenStreams", "Watch"}
"""Classes that callers receive and do not construct: their constructors are not part of the API."""

INTERNAL = {
    "PromptTemplate.passage_format",
    "Refresh.begin",
    "RestartBudget.begin",
    "RestartBudget.num_begun",
    "Refresh.check_query",
    "Refresh.prefill",
    "Refresh.query_after",
    "Refresh.retrieval",
    "StreamragChatModel.parser",
    "StreamragChatModel.portal",
    "StreamragRetriever.portal",
    "TokenStream.fail",
    "Watch.put",
    "Watch.spec",
    "Watch.stop",
    "Watch.work",
}
"""Members of public classes that only other parts of the package use."""

OF_FIELDS = ("BaseChatModel", "BaseRetriever", "Checked", "NamedTuple", "QueryOptions", "TypedDict")
"""Base classes whose constructor options are their fields."""

SHOWN_DECORATORS = ("classmethod", "staticmethod")

STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}

GENERATED = "<!-- Made by scripts/api.py from signatures and docstrings: change those, and run `make api`. -->"

INDEX = """\
Look up every public class, function, option and default. Import a name from the module that its page names.

```python
from streamrag import Pipeline, VllmBackend, WebSource
from streamrag.testing import ScriptedBackend
```

The names on these pages are public, and the changelog lists changes to them. All other modules, and names outside the
`__all__` of these modules, are private and may change at any time.
"""

PLAIN_TYPES = {"PositiveInt": "int", "NonNegativeInt": "int", "PositiveFloat": "float", "NonNegativeFloat": "float"}
"""Plain types of pydantic's constrained types."""

UNITS = {
    "_s": ("seconds?|_s\\b", "In seconds."),
    "_bytes": ("bytes?|[KMG]i?B", "In bytes."),
    "_tokens": ("tokens?", "In tokens."),
}
"""For each suffix of a name: words that already tell the unit, and the sentence that otherwise does."""

COMMON = {
    "at_s": "Seconds since the query was submitted.",
    "clock": "The clock, in seconds; tests may replace it.",
    "hint": "What is known about the rest of the retrieval; None if nothing is.",
}
"""Meanings of names that have no docstring of their own, because they mean the same everywhere."""

RAISES = re.compile(r":raises (\w+): (.*)")
OPTION = re.compile(r"(\w+(?:, \w+)*): (.*)")


class Documented(NamedTuple):
    """A docstring, split into prose, options and errors."""

    prose: str
    options: dict[str, str]
    raises: list[tuple[str, str]]


class Row(NamedTuple):
    """A row of a table of options or fields."""

    name: str
    annotation: str
    default: str | None
    meaning: str


class Reference:
    """The pages, with links between them."""

    def __init__(self, package: griffe.Module) -> None:
        self._package = package
        self._modules = {path: module_at(package, path) for path in MODULES}
        self._home = {name: path for path in reversed(MODULES) for name in public_names(self._modules[path])}
        self._page_of = {name: self._page_name(name, path) for name, path in self._home.items()}
        self._current = ""
        unlisted = {name for name, page in self._page_of.items() if page not in {*PAGES, *PURPOSES, "errors"}}
        assert not unlisted, f"add these names to PAGES: {unlisted}"
        classes = {name: resolved(self._modules[path][name]) for name, path in self._home.items()}
        stale = {member for member in INTERNAL if member.split(".")[1] not in classes[member.split(".")[0]].all_members}
        assert not stale, f"remove these names from INTERNAL: {stale}"

    def pages(self) -> dict[str, str]:
        """Return the text of each page by its name."""
        pages = {}
        for page in ("index", *PAGES, "errors", *PURPOSES):
            self._current = page
            text = "\n\n".join(block.strip("\n") for block in self._blocks(page)) + "\n"
            pages[page] = re.sub(r"\n{3,}", "\n\n", text)
        return pages

    def _page_name(self, name: str, module: str) -> str:
        if module != "streamrag":
            return module.rpartition(".")[2]
        if self._is_error(name):
            return "errors"
        return next((page for page, (_, _, names) in PAGES.items() if name in names.split()), "")

    def _blocks(self, page: str) -> Iterator[str]:
        if page == "index":
            yield from ["# API", GENERATED, INDEX, *self._overview()]
        elif page == "errors":
            yield from ["# Errors", GENERATED, "Catch what goes wrong. Import each error from `streamrag`."]
            yield example(page)
            yield self._text(self._package["errors"].docstring, ())[0]
            yield from self._entries("errors")
        elif page in PAGES:
            title, purpose, _ = PAGES[page]
            yield from [f"# {title}", GENERATED, f"{purpose} Import each name from `streamrag`."]
            yield example(page)
            yield self._names(page)
            yield from self._entries(page)
        else:
            path = self._module_of(page)
            yield from [f"# {path}", GENERATED, f"{PURPOSES[page]} Import each name from `{path}`."]
            yield self._text(self._modules[path].docstring, ())[0]
            yield self._names(page)
            yield from self._entries(page)

    def _overview(self) -> Iterator[str]:
        for title, pages in (("`streamrag`", (*PAGES, "errors")), ("Other modules", tuple(PURPOSES))):
            yield f"## {title}"
            for page in pages:
                module = f"`{self._module_of(page)}`" if page in PURPOSES else ""
                heading = module or (PAGES[page][0] if page in PAGES else "Errors")
                yield f"- [{heading}]({page}.md): {self._names(page)}"

    def _module_of(self, page: str) -> str:
        return next(path for path in MODULES if path.rpartition(".")[2] == page)

    def _listed(self, page: str) -> list[str]:
        if page in PAGES:
            return PAGES[page][2].split()
        module = self._modules["streamrag" if page == "errors" else self._module_of(page)]
        return [name for name in public_names(module) if self._page_of[name] == page]

    def _names(self, page: str) -> str:
        return ", ".join(map(self._link, self._listed(page)))

    def _entries(self, page: str) -> Iterator[str]:
        module = self._modules["streamrag" if page in PAGES or page == "errors" else self._module_of(page)]
        for name in self._listed(page):
            found = resolved(module[name])
            if page == "errors" and isinstance(found, griffe.Class):
                yield from [f"## {name}", fenced(self._signature(found)), self._text(found.docstring, ())[0]]
            else:
                yield from self._entry(found, name)

    def _is_error(self, name: str) -> bool:
        return (
            str(self._package[name].target_path).startswith("streamrag.errors.")
            if self._package[name].is_alias
            else False
        )

    def _entry(self, found: griffe.Object, name: str) -> Iterator[str]:
        yield f"## {name}"
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
            document = self._text(found.docstring, [member.name for member in fields])
            rows = [self._field(member, document.options.get(member.name, "")) for member in fields]
        else:
            parameters = [] if found.name in GIVEN else list(found.parameters)[1:]
            document = self._text(found.docstring, [parameter.name for parameter in parameters])
            rows = [self._row(parameter, document.options.get(parameter.name, "")) for parameter in parameters]
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
                yield from self._function(member, f"{found.name}.{name}", level="###")
            elif isinstance(member, griffe.Attribute):
                document = self._text(member.docstring, ())
                yield f"### {found.name}.{name}"
                yield fenced(f"{name}: {self._type(member.annotation)}" if member.annotation else name)
                yield document.prose
                yield self._raises(document)

    def _function(self, found: griffe.Function, name: str, level: str = "") -> Iterator[str]:
        document = self._text(found.docstring, [parameter.name for parameter in found.parameters])
        if level:
            yield f"{level} {name}"
        decorators = "".join(f"@{d.value}\n" for d in found.decorators if str(d.value) in SHOWN_DECORATORS)
        is_async = "async " if "async" in found.labels else ""
        signature = f"{is_async}def {found.name}({self._parameters(found.parameters)}) -> {self._type(found.returns)}"
        yield fenced(signature, decorators)
        yield document.prose
        by_name = {parameter.name: parameter for parameter in found.parameters}
        yield table([self._row(by_name[option], meaning) for option, meaning in document.options.items()], "Option")
        yield self._raises(document)

    def _row(self, parameter: griffe.Parameter, meaning: str) -> Row:
        name, default = parameter.name, self._default(parameter.default)
        return Row(name, self._type(parameter.annotation), default, with_unit(name, meaning or COMMON.get(name, "")))

    def _field(self, member: griffe.Attribute, meaning: str) -> Row:
        """Return a field's row: what the class's docstring says on it, or its own, or its `description`."""
        meaning = meaning or " ".join(self._text(member.docstring, ())[0].split())
        meaning = meaning or sentence(field_option(member.value, "description"))
        name, default = member.name, self._default(member.value)
        return Row(name, self._type(member.annotation), default, with_unit(name, meaning or COMMON.get(name, "")))

    def _default(self, value: str | griffe.Expr | None) -> str | None:
        """Return the default as code: a constant by its value, a `field(...)` by the default that it gives."""
        if isinstance(value, griffe.ExprName) and value.canonical_path.startswith("streamrag."):
            found = resolved(self._package.modules_collection[value.canonical_path])
            value = found.value if isinstance(found, griffe.Attribute) else value
        if value is None:
            return None
        text = str(value)
        if re.match(r"[Ff]ield\(", text):
            factory = field_option(value, "default_factory")
            text = field_option(value, "default") or (f"{factory}()" if factory else "")
        return re.sub(r"^'([^'\"]*)'$", r'"\1"', text)

    def _raises(self, document: Documented) -> str:
        return "\n".join(f"- Raises {self._link(name)}: {when}" for name, when in document.raises)

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
        """Return the annotation as a caller sees it: private aliases are expanded, value checks removed."""
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
        if not isinstance(target, griffe.Attribute):
            return part.name
        value = target.value
        is_checked = isinstance(value, griffe.ExprName) or str(value).startswith(("Annotated[", "Literal["))
        return self._type(value) if is_checked or "TypeAlias" in str(target.annotation) else part.name

    def _text(self, docstring: griffe.Docstring | None, names: Iterable[str]) -> Documented:
        document = documented(docstring.value if docstring else "", set(names))
        link: Callable[[str], str] = self._linked
        return Documented(
            link(document.prose),
            {name: link(meaning) for name, meaning in document.options.items()},
            [(name, link(when)) for name, when in document.raises],
        )

    def _linked(self, text: str) -> str:
        """Link public names in backticks to their entries, outside of code blocks."""
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
        page = self._page_of[name]
        return f"[`{name}`]({'' if page == self._current else f'{page}.md'}#{name.lower()})"


def example(page: str) -> str:
    return f"```python\n{dedent(EXAMPLES[page]).strip()}\n```"


def documented(text: str, names: set[str]) -> Documented:
    """Split a docstring into prose, `name: meaning` lines of known names, and `:raises Name: when` lines."""
    prose: list[str] = []
    options: dict[str, str] = {}
    raises: list[tuple[str, str]] = []
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        raised, option = RAISES.match(line), OPTION.match(line)
        if not raised and not (option and names.issuperset(option[1].split(", "))):
            prose.append(line)
            continue
        while lines and lines[0].startswith("    "):
            line = f"{line} {lines.pop(0).strip()}"
        if raised:
            name, when = RAISES.match(line).groups()  # type: ignore[union-attr]
            raises.append((name, when))
        else:
            listed, meaning = OPTION.match(line).groups()  # type: ignore[union-attr]
            options |= dict.fromkeys(listed.split(", "), meaning)
    return Documented(fence_code("\n".join(prose).strip()), options, raises)


def fence_code(text: str) -> str:
    """Fence doctests, and indented blocks that are not drawings, as code blocks."""
    text = re.sub(r"^>>> .*(?:\n.+)*", lambda found: f"```pycon\n{found[0]}\n```", text, flags=re.MULTILINE)
    return re.sub(r"(?<=\n\n)    .*(?:\n(?:    .*)?)*", _fenced_block, text)


def _fenced_block(found: re.Match[str]) -> str:
    if set("└─▶│") & set(found[0]):
        return found[0]
    return f"```python\n{dedent(found[0]).strip()}\n```\n\n"


class _WithoutChecks(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(PLAIN_TYPES.get(node.id, node.id))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        name = ast.unparse(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in ("Annotated", "InstanceOf", "SkipValidation"):
            return self.visit(parts[0])  # type: ignore[no-any-return]
        if name == "Literal":  # a Literal in a Literal is flat
            nested = [part.slice if isinstance(part, ast.Subscript) else part for part in parts]
            flat = [value for part in nested for value in (part.elts if isinstance(part, ast.Tuple) else [part])]
            return ast.Subscript(node.value, ast.Tuple(flat) if len(flat) > 1 else flat[0])
        return self.generic_visit(node)  # type: ignore[return-value]


def without_checks(annotation: str) -> str:
    """Return the plain type of a checked annotation: `int` for `Annotated[int, Field(ge=1)]`."""
    if not re.search(r"\b(Annotated|InstanceOf|SkipValidation|Literal|" + "|".join(PLAIN_TYPES) + r")\b", annotation):
        return annotation
    return ast.unparse(_WithoutChecks().visit(ast.parse(annotation, mode="eval"))).replace("'", '"')


def field_option(value: str | griffe.Expr | None, name: str) -> str:
    """Return an option of a dataclass's or pydantic's `field(...)`, a text without its quotes; "" if it has none."""
    if not re.match(r"[Ff]ield\(", str(value)):
        return ""
    (call,) = (node for node in [ast.parse(str(value), mode="eval").body] if isinstance(node, ast.Call))
    option = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if option is None:
        return ""
    return str(option.value) if name == "description" and isinstance(option, ast.Constant) else ast.unparse(option)


def sentence(text: str) -> str:
    return f"{text}." if text and not text.endswith(".") else text


def with_unit(name: str, meaning: str) -> str:
    """Return the meaning of an option, with the unit that its name ends in unless the meaning tells it."""
    for suffix, (words, sentence) in UNITS.items():
        if name.endswith(suffix) and not re.search(words, meaning, re.IGNORECASE):
            return f"{meaning.rstrip()} {sentence}".strip()
    return meaning


def fenced(code: str, above: str = "") -> str:
    """Return a signature as a code block, with one parameter per line if it is long."""
    if len(code) > 100 and "(" in code:
        head, _, rest = code.partition("(")
        inside, _, tail = rest.rpartition(")")
        code = f"{head}(\n" + "".join(f"    {part},\n" for part in split_commas(inside)) + f"){tail}"
    elif len(code) > 100:
        name, _, kinds = code.partition(" = ")
        code = f"{name} = (\n    {kinds}\n)".replace(" | ", "\n    | ")
    return f"```py\n{above}{code}\n```"


def split_commas(text: str) -> list[str]:
    """Split `text` at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def table(rows: list[Row], what: str) -> str:
    """Return a table of options or fields, or "" without rows."""
    if not rows:
        return ""
    columns = [[what, *(code(row.name) for row in rows)], ["Type", *(code(row.annotation) for row in rows)]]
    if any(row.default is not None for row in rows):
        columns.append(["Default", *("" if row.default is None else code(row.default) for row in rows)])
    if any(row.meaning for row in rows):
        columns.append(["Meaning", *(row.meaning[:1].upper() + row.meaning[1:].replace("|", "\\|") for row in rows)])
    first, *others = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in [first, ["---"] * len(columns), *others])


def code(text: str) -> str:
    """Return `text` as code in a table cell, with bars escaped."""
    return f"`{text}`".replace("|", "\\|")


def is_field(member: griffe.Object | griffe.Alias) -> bool:
    return (
        isinstance(member, griffe.Attribute)
        and bool(member.annotation)
        and not member.name.startswith("_")
        and "instance-attribute" in member.labels  # not a ClassVar
        and "property" not in member.labels
    )


def module_at(package: griffe.Module, path: str) -> griffe.Module:
    found = package if path == package.name else package[path.removeprefix(f"{package.name}.")]
    assert isinstance(found, griffe.Module)
    return found


def public_names(module: griffe.Module) -> list[str]:
    """Return the names in `__all__`, or of the module's lazy imports."""
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
    pages = {FOLDER / f"{name}.md": text for name, text in Reference(package).pages().items()}
    if sys.argv[1:] == ["--check"]:
        there = {path: path.read_text() for path in FOLDER.glob("*.md")}
        different = sorted(path.name for path in {*pages, *there} if pages.get(path) != there.get(path))
        if different:
            print(f"docs/api differs from signatures and docstrings in {', '.join(different)}: run `make api`")
        return 1 if different else 0
    FOLDER.mkdir(exist_ok=True)
    for path in {*FOLDER.glob("*.md")} - {*pages}:
        path.unlink()
    for path, text in pages.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
