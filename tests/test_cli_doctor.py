"""`streamrag doctor` against real local servers. They take no time: they move the clock that the doctor looks at."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from streamrag.backends.openai import OpenAIBackend
from streamrag.cli import main
from streamrag.cli.doctor.server import Pair, ServerExaminer
from streamrag.core import common_prefix_len

S_PER_TOKEN = 0.001
REQUEST_S = 0.01


class Server:
    """Computes prompts, from the longest prefix that it has seen if it `reuses` them."""

    def __init__(self, *, reuses: bool, takes_ids: bool = True, models: dict[str, int | None] | None = None) -> None:
        self.reuses = reuses
        self.takes_ids = takes_ids
        self.models = {"tiny": 8192} if models is None else models
        self.now_s = 100.0
        self.prompts: list[list[int]] = []
        self.streamed: list[dict[str, Any]] = []
        self.on_completion: Callable[[], None] = lambda: None

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            lens = {name: {"max_model_len": most} if most else {} for name, most in self.models.items()}
            return 200, {"data": [{"id": name, **most} for name, most in lens.items()]}
        if path == "/tokenize" and self.takes_ids and "prompt" in body:
            return 200, {"tokens": [ord(character) + 1 for character in body["prompt"]]}
        if path != "/v1/completions" or isinstance(body["prompt"], str) == self.takes_ids:
            return 400, {"error": {"message": "not here"}}
        self.on_completion()
        prompt = body["prompt"]
        ids = list(map(ord, prompt)) if isinstance(prompt, str) else prompt
        known = max((common_prefix_len(ids, seen) for seen in self.prompts), default=0) if self.reuses else 0
        self.now_s += REQUEST_S + (len(ids) - known) * S_PER_TOKEN
        self.prompts.append(ids)
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length) or b"{}")
            status, value = server.answer(self.command, self.path, body)
            text = json.dumps(value)
            if body.get("stream") and status == 200:
                server.streamed.append(body)
                text = f"data: {text}\n\ndata: [DONE]\n\n"
            self.send_response(status)
            self.send_header("content-type", "text/event-stream" if body.get("stream") else "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            with suppress(BrokenPipeError):  # who asked has given up
                self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Asks the doctor about a server: the exit status, and what was printed."""

    def ask(server: Server, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr("streamrag.cli.doctor.command.monotonic", lambda: server.now_s)
        with serving(server) as url:
            status = main(["doctor", "--server", url, *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return ask


def test_a_server_that_reuses_prefixes_is_told_so_and_by_how_much(doctor: Any) -> None:
    status, out, err = doctor(Server(reuses=True))
    assert status == 0
    assert "prompts are sent as: token ids, exact" in out
    assert "tokenizer: the server's" in out
    assert "warming saves up to 97% of the time to the first token: the server reuses prefixes" in " ".join(out.split())
    assert "measuring, 5 of 5" in err


def test_a_server_without_prefix_cache_gains_nothing(doctor: Any) -> None:
    _, out, _ = doctor(Server(reuses=False))
    assert "gains nothing here" in " ".join(out.split())


def test_each_context_is_new_and_the_warm_ones_were_sent_before(doctor: Any) -> None:
    server = Server(reuses=True)
    doctor(server, "--repetitions", "2", "--prompt-tokens", "640")
    asked = [body["prompt"] for body in server.streamed]
    contexts = {tuple(prompt[:640]) for prompt in asked}
    assert len(asked) == len(contexts) == 6  # one pair to begin
    sent_before = [tuple(prompt) for prompt in server.prompts if len(prompt) == 640]
    assert len(sent_before) == 3
    assert {*sent_before} <= contexts


def test_json_has_what_was_measured(doctor: Any) -> None:
    _, out, _ = doctor(Server(reuses=True), "--json", "--repetitions", "3", "--prompt-tokens", "1600")
    found = json.loads(out)
    assert found["model"] == "tiny"
    assert found["max_model_len"] == 8192
    assert found["takes_token_ids"] is True
    assert found["helps"] is True
    assert found["num_prompt_tokens"] == 1600
    assert len(found["pairs"]) == 3
    question = found["cold_ttft_s"] - REQUEST_S - 1600 * S_PER_TOKEN
    by_chance_s = 5 * S_PER_TOKEN  # contexts are random: two may begin with the same few
    assert found["warm_ttft_s"] == pytest.approx(REQUEST_S + question, abs=by_chance_s)
    assert found["saved"] == pytest.approx(1 - found["warm_ttft_s"] / found["cold_ttft_s"])
    assert found["pairs"][0]["warming_s"] == pytest.approx(REQUEST_S + 1600 * S_PER_TOKEN, abs=by_chance_s)


def test_a_server_that_takes_only_text_is_asked_with_text(doctor: Any) -> None:
    _, out, _ = doctor(Server(reuses=True, takes_ids=False, models={"tiny": 9000}))
    assert "tokenizer: none: characters are counted" in out
    assert "prompts are sent as: text" in out
    assert "the server reuses prefixes" in " ".join(out.split())


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ({"a": 8192, "b": 8192}, [], "serves a, b: name the model"),
        ({}, [], "serves no model"),
        ({"n" * 3_000_000: 8192}, [], "serves a model whose name has 3,000,000 characters, and 500 is the most"),
        ({"a": 8192}, ["--model", "c"], "does not serve 'c'. It serves: a"),
        ({"a": None}, [], "reports no length of the model: give max_model_len (--max-model-len)"),
        ({"a": 1024}, [], "a takes at most 1024 tokens: use --prompt-tokens 960"),
        ({"a": 100}, [], "too few to measure a difference"),
    ],
)
def test_a_server_that_cannot_be_measured_is_explained(
    doctor: Any, models: dict[str, int | None], options: list[str], message: str
) -> None:
    status, _, err = doctor(Server(reuses=True, models=models), *options)
    assert status == 1
    assert message in err.replace("\n", " ")
    assert len(err) < 2000


def test_a_tokenizer_that_loses_the_context_is_refused(doctor: Any) -> None:
    class Lossy(Server):
        def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if path == "/tokenize" and len(body.get("prompt", "")) > 1000:
                return 200, {"tokens": [1]}
            return super().answer(method, path, body)

    status, _, err = doctor(Lossy(reuses=True), "--timeout", "20")
    assert status == 1
    assert "the tokenizer returned only 1 tokens for 2,000 words" in err.replace("\n", " ")


def test_a_model_among_several_and_a_length_can_be_named(doctor: Any) -> None:
    server = Server(reuses=True, models={"a": None, "b": None})
    status, out, _ = doctor(server, "--model", "b", "--max-model-len", "4096", "--repetitions", "1")
    assert status == 0
    assert "model: b, prompts of at most 4,096" in out


def test_a_server_that_hangs_is_given_up(doctor: Any) -> None:
    server = Server(reuses=True)
    is_given_up = threading.Event()
    server.on_completion = lambda: server.streamed and is_given_up.wait(20)  # type: ignore[func-returns-value]
    status, _, err = doctor(server, "--timeout", "1")
    is_given_up.set()
    assert status == 1
    assert (
        "was not done in 1 s. Give it more time with --timeout, or measure less: --prompt-tokens 166 --repetitions 2"
        in err.replace("\n", " ")
    )


@pytest.mark.parametrize(
    ("num_measured", "given", "smaller"),
    [
        (0, (2000, 5), "--prompt-tokens 166 --repetitions 2"),  # less than a pair: as if it had been half done
        (2, (2000, 5), "--prompt-tokens 666 --repetitions 2"),
        (5, (2000, 5), "--prompt-tokens 1666 --repetitions 2"),
        (15, (2000, 20), "--prompt-tokens 2000 --repetitions 2"),
        (1, (2000, 1), "--prompt-tokens 333 --repetitions 1"),
        (0, (100, 5), "--prompt-tokens 64 --repetitions 2"),
    ],
)
def test_smaller_options_take_about_half_the_time(num_measured: int, given: tuple[int, int], smaller: str) -> None:
    examiner = ServerExaminer(OpenAIBackend("http://127.0.0.1:1"), 2000, True, lambda: 0.0)
    examiner.measured = [Pair(1.0, 0.1, 1.0)] * num_measured
    assert examiner.smaller_options(*given) == smaller


def test_the_doctor_says_plainly_what_it_sends(doctor: Any) -> None:
    _, _, err = doctor(Server(reuses=True), "--repetitions", "1", "--prompt-tokens", "64")
    assert (
        "tiny is served, prompts are sent as token ids, without the model's chat template (give its tokenizer for "
        "that); text that looks like a special token, such as <|end|>, gets a space"
    ) in " ".join(err.split())


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--server", "http://127.0.0.1:1"]) == 1
    assert "Is the server running?" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--prompt-tokens", "10"], ["--timeout", "0"], ["--repetitions", "0"]])
def test_options_that_cannot_work_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--server", "http://127.0.0.1:1", *options])
    assert options[0] in capsys.readouterr().err
