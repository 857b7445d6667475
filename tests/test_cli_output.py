import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.markup import escape
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import streamrag
from streamrag.cli.output import Output, markup

HOSTILE = (
    "a\x1b[2J\x9b31m\x07\x08\r\u202eb\u2066\u200b\ufeff\ud800c[red][/nothing] :smile: $x$ <b>\x1b]8;;http://x\x1b\\"
)
OBEYED = {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\u200b", "\ufeff", "\ud800"} - {
    "\n"
}


def table_of(name: str, figures: tuple[str, ...]) -> Table:
    table = Table("", *figures, box=None, pad_edge=False)
    table.add_row(name, *figures)
    return table


def test_hostile_text_cannot_steer_a_terminal_in_any_way_of_printing(capsys: pytest.CaptureFixture[str]) -> None:
    for stderr in (False, True):
        console = Output(stderr=stderr)
        console.print(HOSTILE)
        console.print(HOSTILE, soft_wrap=True, style="dim")
        console.out(HOSTILE, end="")
        console.print(Text(HOSTILE))
        console.print(markup("[bold]{}", HOSTILE))
        console.print([HOSTILE])
        console.print_table(table_of(HOSTILE, (HOSTILE, "1")))
        with Progress(TextColumn("{task.description}"), console=console) as progress:
            progress.add_task(escape(HOSTILE), total=1)
    out, err = capsys.readouterr()
    for printed in (out, err):
        assert printed.count("[/nothing]") >= 6
        assert not OBEYED & set(printed)


def test_markup_and_emoji_codes_of_a_text_stay_text(capsys: pytest.CaptureFixture[str]) -> None:
    Output().print(HOSTILE, soft_wrap=True)
    Output().print(markup("[dim]{}[/] {}", "[red]", "\\[/dim] {} {0}"), soft_wrap=True)
    printed = capsys.readouterr().out.splitlines()
    assert "[red][/nothing] :smile: $x$ <b>" in printed[0]
    assert printed[1] == "[red] \\[/dim] {} {0}"


def test_styles_of_our_own_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    Output().print(markup("[bold]{}", "\x1b[31m"))
    assert capsys.readouterr().out == "\x1b[1m\N{REPLACEMENT CHARACTER}[31m\x1b[0m\n"


def test_no_command_prints_in_any_other_way() -> None:
    folder = Path(streamrag.__file__).parent / "cli"
    wrong = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            is_other = name in ("print", "Console", "sys.stdout.write", "sys.stderr.write")
            what = node.args[0] if isinstance(node, ast.Call) and node.args else None
            is_safe = isinstance(what, ast.Constant) or (what is not None and ast.unparse(what).startswith("sanitize("))
            if is_other and path.name != "output.py" and not (name == "print" and is_safe):
                wrong.append(f"{path.name}: {ast.unparse(node)}")
    assert wrong == []


def test_json_keeps_what_it_does_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    Output().print_json_text({HOSTILE: [HOSTILE + "\U000e0041é"]})
    printed = capsys.readouterr().out
    assert not OBEYED & set(printed)
    assert "é" in printed
    assert json.loads(printed) == {HOSTILE: [HOSTILE + "\U000e0041é"]}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_figure_of_a_table_is_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    figures = tuple(f"{12345678 + number:,}.00" for number in range(7))
    Output().print_table(table_of("tokens invalidated per query", figures))
    printed = capsys.readouterr().out
    assert all(printed.count(figure) == 2 for figure in figures)  # in the head and below it
    assert "…" not in printed
    if width == 200:
        assert "tokens invalidated per query" in printed


def run_in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run what a user types. Paths in it must be quoted."""
    program = f'streamrag() {{ {shlex.quote(sys.executable)} -m streamrag "$@"; }}'
    return subprocess.run(
        ["/bin/bash", "-c", f"{program}; {command}"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


TRACE = quoted(next((Path(__file__).parents[1] / "traces").glob("*.jsonl.gz")))


@pytest.mark.parametrize("options", ["--no-plot", "--json"])
def test_a_full_disk_at_the_standard_output_is_an_error_and_no_traceback(options: str) -> None:
    done = run_in_shell(f"streamrag trace show {TRACE} {options} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "streamrag: OutputError: the standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("options", ["--no-plot", "--json"])
def test_a_reader_that_has_seen_enough_is_no_error(options: str) -> None:
    assert run_in_shell(f"streamrag trace show {TRACE} {options} | true").stderr == ""


def test_a_full_disk_at_the_standard_error_stops_nothing(tmp_path: Path) -> None:
    path = quoted(tmp_path / "a streamrag.jsonl")
    done = run_in_shell(f"streamrag trace generate crawler --queries 2 --output {path} 2> /dev/full")
    assert done.returncode == 0
    assert (tmp_path / "a streamrag.jsonl").exists()


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    done = run_in_shell(f"PYTHONIOENCODING=ascii streamrag trace show {TRACE}é")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["", "trace show", "trace", "bench report x", "trace generate"])
def test_a_terminal_obeys_nothing_of_what_the_parser_repeats(command: str) -> None:
    done = run_in_shell(f"streamrag {command} x $'--\\e]0;x\\a' $'\\e[2J\\u202e'")
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert not set("\x1b\x07\u202e") & set(done.stderr)


@pytest.mark.parametrize("command", ["--help", "trace show --help", "--version"])
def test_help_that_cannot_be_written_is_an_error(command: str) -> None:
    done = run_in_shell(f"streamrag {command} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "streamrag: OutputError: the standard output cannot be written: No space left on device\n"
    assert run_in_shell(f"streamrag {command} | true").stderr == ""


@pytest.mark.parametrize("command", ["--help", "trace show {trace} --no-plot", "trace show {trace} --json"])
def test_a_closed_standard_output_is_an_error(command: str) -> None:
    done = run_in_shell(f"streamrag {command.format(trace=TRACE)} >&-")
    assert (done.returncode, done.stderr) == (1, "streamrag: OutputError: the standard output is closed\n")


def test_a_closed_standard_error_stops_nothing(tmp_path: Path) -> None:
    path = quoted(tmp_path / "a streamrag.jsonl")
    done = run_in_shell(f"streamrag trace generate crawler --queries 2 --output {path} 2>&-")
    assert done.returncode == 0
    assert run_in_shell("streamrag trace show nowhere 2>&-").returncode == 1


def test_json_loses_nothing_where_the_standard_output_is_not_utf_8() -> None:
    code = "from streamrag.cli.output import Output; Output().print_json_text({'name': 'm\u00fc\U0001f600'})"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == {"name": "m\u00fc\U0001f600"}


@pytest.mark.parametrize(
    "command",
    [
        "trace show {long}",
        "bench report {long}",
        "bench simulate --workload {long} --profile h200-llama8b-tp2 --output {here}/out",
        "bench simulate --workload crawler --profile {long} --output {here}/out",
        "ask --index {long} --model m --server http://127.0.0.1:9 Why?",
        "index build {here} --out {here}/{long}",
        "record --index {here} --output {long} Why?",
        "record --url http://127.0.0.1:9 --output /proc/nope/x Why?",
        "trace generate crawler --queries 2 --output /etc/hosts/a/b.jsonl",
    ],
)
def test_a_path_that_cannot_be_used_is_an_error_without_traceback(command: str, tmp_path: Path) -> None:
    done = run_in_shell(f"streamrag {command.format(long='x' * 300, here=quoted(tmp_path))}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("streamrag: ")
