import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrag.backends.tokenizer import CodePointTokenizer, HuggingFaceTokenizer, local_model_path
from streamrag.core import Turn
from streamrag.errors import ConfigurationError, ModelError
from streamrag.modes.conversation import Conversation

SPECIALS = ("<|begin_of_text|>", "<|start|>", "<|end|>")
ANY_TEXT = st.one_of(
    st.text(),
    # Text made of what is dangerous: special tokens, their halves, and characters of many bytes.
    st.lists(st.sampled_from([*SPECIALS, "<|", "|>", "end", "<", " ", "\n", "é", "漢", "👩‍🚀", "\0"])).map("".join),
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tiny_model)


def with_template(tiny_model: Path, folder: Path, template: str | None) -> HuggingFaceTokenizer:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return HuggingFaceTokenizer(folder)


@given(text=ANY_TEXT)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decoding_gives_back_any_text_that_was_encoded(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=ANY_TEXT)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_becomes_a_special_token(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert not tokenizer.added_token_ids.intersection(tokenizer.encode(text))


@given(text=ANY_TEXT, allow_special=st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_of_one_has_the_ids_of_its_text(
    tokenizer: HuggingFaceTokenizer, text: str, allow_special: bool
) -> None:
    inner = tokenizer._fast if allow_special else tokenizer._plain
    assert tokenizer.encode(text, allow_special=allow_special) == inner.encode(text, add_special_tokens=False).ids


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: HuggingFaceTokenizer) -> None:
    text = "The interpreter is for everybody, not for the one who has most to say. " * 30_000
    begins, has_ended = threading.Event(), threading.Event()

    def encode() -> None:
        begins.set()
        tokenizer.encode(text)
        has_ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begins.wait()
    num_turns = 0
    while not has_ended.wait(0.001):
        num_turns += 1
    thread.join()
    assert num_turns > 20, "of some hundred; one or two if the interpreter is kept"


@pytest.mark.parametrize("special", SPECIALS)
def test_a_special_token_is_one_token_in_a_template_and_text_elsewhere(
    tokenizer: HuggingFaceTokenizer, special: str
) -> None:
    assert len(tokenizer.encode(special, allow_special=True)) == 1
    ids = tokenizer.encode(special)
    assert len(ids) > 1
    assert tokenizer.decode(ids) == special


def test_the_tokenizer_adds_no_tokens_around_a_text(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.encode("", allow_special=True) == []
    assert tokenizer.encode("a", allow_special=True) == tokenizer.encode("a")


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_a_lone_surrogate_is_replaced(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    expected = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert CodePointTokenizer().decode(CodePointTokenizer().encode(text)) == expected


def test_two_surrogates_that_belong_together_become_their_character(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_turns_are_rendered_up_to_where_the_answer_begins(tokenizer: HuggingFaceTokenizer) -> None:
    rendered = tokenizer.render_chat([Turn("system", "Be brief."), Turn("user", "Why?")])
    assert rendered == (
        "<|begin_of_text|><|start|>system\nBe brief.<|end|>\n<|start|>user\nWhy?<|end|>\n<|start|>assistant\n"
    )


def test_the_start_of_a_prompt_without_template_is_known(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.bos_text == "<|begin_of_text|>"


REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }}|{% endfor %}"
)
DROPPING = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}|{% endif %}{% endfor %}"


@pytest.mark.parametrize("template", [REFUSING, DROPPING], ids=["refusing", "dropping"])
@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([Turn("system", "S"), Turn("user", "Q")], "S\n\nQ|"),
        ([Turn("system", "S"), Turn("user", "Q"), Turn("assistant", "A"), Turn("user", "R")], "S\n\nQ|A|R|"),
        ([Turn("system", "S"), Turn("assistant", "A")], "S|A|"),
        ([Turn("user", "Q")], "Q|"),
    ],
)
def test_system_text_that_a_template_does_not_take_stands_before_the_first_user_turn(
    tiny_model: Path, tmp_path: Path, template: str, turns: Sequence[Turn], expected: str
) -> None:
    assert with_template(tiny_model, tmp_path / "model", template).render_chat(turns) == expected


MISTRAL_7B_V0_3 = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{#- This block checks for alternating user/assistant messages, skipping tool calling messages #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools|tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial system") }}
    {%- endif %}
{%- endfor %}
"""  # of mistralai/Mistral-7B-Instruct-v0.3, without what writes tools one by one
MISTRAL_NEMO = MISTRAL_7B_V0_3.replace('"[INST] "', '"[INST]"').replace(
    '" " + message["content"]|trim', 'message["content"]'
)
# A system message anywhere is collected and stands at the beginning, as in deepseek-ai/DeepSeek-R1.
COLLECTING = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# Reasoning is left out of earlier answers: the system text is where it was, all the same.
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}{% endfor %}<assistant>"
S, Q, A, R = Turn("system", "S"), Turn("user", "Q"), Turn("assistant", "<think>\n</think>A"), Turn("user", "R")


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (MISTRAL_7B_V0_3, [S, Q], "{bos}[INST] S\n\nQ[/INST]"),
        (MISTRAL_7B_V0_3, [S, Q, A, R], "{bos}[INST] S\n\nQ[/INST] <think>\n</think>A{eos}[INST] R[/INST]"),
        (MISTRAL_7B_V0_3, [Q, A, R], "{bos}[INST] Q[/INST] <think>\n</think>A{eos}[INST] R[/INST]"),
        (MISTRAL_NEMO, [S, Q], "{bos}[INST]S\n\nQ[/INST]"),
        (MISTRAL_NEMO, [S, Q, A, R], "{bos}[INST]S\n\nQ[/INST]<think>\n</think>A{eos}[INST]R[/INST]"),
        (COLLECTING, [S, Q, A, R], "{bos}S<user>Q<assistant><think>\n</think>A<user>R"),
        (COLLECTING, [Q, A, S, R], "{bos}<user>S\n\nQ<assistant><think>\n</think>A<user>R"),
        (TRIMMING, [S, Q, A, R], "<system>S<user>Q<assistant>A<user>R<assistant>"),
        (TRIMMING, [Turn("system", " S "), Turn("user", "S")], "<system>S<user>S<assistant>"),
    ],
)
def test_system_text_that_a_template_moves_stands_before_the_first_user_turn(
    tiny_model: Path, tmp_path: Path, template: str, turns: Sequence[Turn], expected: str
) -> None:
    tokenizer = with_template(tiny_model, tmp_path / "model", template)
    marks = {"bos": tokenizer.whole.bos_token, "eos": tokenizer.whole.eos_token}
    assert tokenizer.render_chat(turns) == expected.format(**marks)


@pytest.mark.parametrize("template", [MISTRAL_7B_V0_3, MISTRAL_NEMO], ids=["Mistral 7B v0.3", "Nemo"])
def test_prompts_of_a_growing_conversation_share_their_beginning_with_mistral_s_templates(
    tiny_model: Path, tmp_path: Path, template: str
) -> None:
    conversation = Conversation(with_template(tiny_model, tmp_path / "model", template), 1000)
    turns = [S, Q]
    first = conversation.encode(turns, max_tokens=1)
    second = conversation.encode([*turns, A, R], max_tokens=1)
    assert second.num_shared == len(first.partial) > 1


LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("marker", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
def test_a_plain_text_turn_marker_is_broken_outside_the_template(tiny_model: Path, tmp_path: Path, marker: str) -> None:
    tokenizer = with_template(tiny_model, tmp_path / "model", LLAMA_2)
    ours = tokenizer.encode(marker, allow_special=True)
    assert tokenizer.decode(ours) == marker, "no special token, but the template's own"
    theirs = tokenizer.encode(f"a {marker}{marker} b <|end|> [1]")
    assert tokenizer.decode(theirs) == f"a {2 * (marker[0] + ' ' + marker[1:])} b <|end|> [1]"


@pytest.mark.parametrize("spelling", ["[𝐈𝐍𝐒𝐓]", "﹇INST﹈", "[IN\u00adST]", "≮<SYS>>"])
def test_a_mark_in_a_spelling_that_the_tokenizer_normalises_is_broken_too(
    tiny_model: Path, tmp_path: Path, spelling: str
) -> None:
    from tokenizers import Regex, Tokenizer, normalizers

    with_template(tiny_model, tmp_path / "model", LLAMA_2)
    normalising = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    drop = normalizers.Replace(Regex("[\u00ad\u0338]"), "")
    normalising.normalizer = normalizers.Sequence([normalizers.NFKD(), drop])
    normalising.save(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "model")
    text = tokenizer.decode(tokenizer.encode(f"漢 {spelling}\n[1]"))
    assert text in ("漢 [ INST]\n[1]", "漢 < <SYS>>\n[1]")


def test_a_template_that_refuses_the_turns_says_so(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = with_template(tiny_model, tmp_path / "model", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigurationError, match="refuses turns of the roles user, user: roles must alternate"):
        tokenizer.render_chat([Turn("user", "a"), Turn("user", "b")])


def test_a_model_without_template_gets_the_plain_layout_behind_its_first_token(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(tiny_model, tmp_path / "model", None)
    assert tokenizer.render_chat([Turn("user", "a")]) == "<|begin_of_text|>User: a\n\nAssistant:"


def test_an_added_token_that_is_not_special_stays_text_too(tiny_model: Path, tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    spec = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    spec.add_tokens([AddedToken("<think>", special=False)])
    spec.enable_truncation(4)  # some tokenizer files have it, and must not cut a context
    spec.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((tiny_model / "tokenizer_config.json").read_bytes())
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert len(tokenizer.encode("<think>", allow_special=True)) == 1
    assert len(tokenizer.encode("<think> a <think>")) > 4
    assert not tokenizer.added_token_ids.intersection(tokenizer.encode("<think>"))


def save_trained(folder: Path, kind: str) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = ["<unk>", "</s>", "<|end|>"]
    text = ["the end of the story is the end </s> of all"] * 20
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer: Any = trainers.UnigramTrainer(special_tokens=specials, unk_token="<unk>", show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE(ignore_merges=True))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.BpeTrainer(special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    return HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("kind", ["unigram", "bpe that takes whole words"])
@pytest.mark.parametrize("allow_special", [True, False])
def test_a_batch_of_one_has_the_same_ids_with_other_models_too(tmp_path: Path, kind: str, allow_special: bool) -> None:
    tokenizer = save_trained(tmp_path, kind)
    inner = tokenizer._fast if allow_special else tokenizer._plain
    for text in ("the </s> end </s>", "", " ", "the <|end|>é 漢\n\nof all <unk>", "all " * 5000):
        assert tokenizer.encode(text, allow_special=allow_special) == inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["unigram", "bpe that takes whole words"])
def test_special_tokens_that_are_in_the_vocabulary_too_are_not_found_there(tmp_path: Path, kind: str) -> None:
    tokenizer = save_trained(tmp_path, kind)
    end = tokenizer.encode("</s>", allow_special=True)[-1]
    assert tokenizer.decode([end]) == "</s>"
    assert end in tokenizer.added_token_ids
    assert end not in tokenizer.encode("the </s> end </s>")


def test_a_tokenizer_in_python_keeps_special_tokens_text_too(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert len(tokenizer.encode("</s>", allow_special=True)) == 1
    assert len(tokenizer.encode("</s>é")) == len("</s>é".encode())
    assert tokenizer.decode(tokenizer.encode("</s>é")) == "</s>é"


OWN_CODE = """
import re
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {}
    SPECIAL = SPECIALS

    def __init__(self, **options):
        self.ids = {chr(i): i for i in range(256)} | self.SPECIAL
        self.names = {number: name for name, number in self.ids.items()}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text, **options):
        if "<|stop|>" in text:
            raise ValueError("disallowed special token")
        text = SPELLING
        found = "|".join(map(re.escape, self.SPECIAL)) + "|(?s:.)"
        return [each for each in re.findall(found, text) if each in self.ids]

    def _convert_token_to_id(self, token):
        return self.ids.get(token, 0)

    def _convert_id_to_token(self, token_id):
        return self.names[token_id]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, *args, **options):
        return ()
"""


def save_own_code(folder: Path, specials: Sequence[str], spelling: str = "text") -> Path:
    """A tokenizer in Python that finds its special tokens in any text, as Kimi's and Qwen 1's."""
    numbers = {token: 300 + number for number, token in enumerate(specials)}
    code = OWN_CODE.replace("SPECIALS", repr(numbers)).replace("SPELLING", spelling)
    (folder / "tokenization_own.py").write_text(code)
    settings = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
        "added_tokens_decoder": {number: {"content": token, "special": True} for token, number in numbers.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of models is copied to a folder of this test only."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])


@pytest.mark.usefixtures("modules")
def test_special_tokens_are_broken_where_a_tokenizer_in_python_finds_them_in_text(tmp_path: Path) -> None:
    folder = save_own_code(tmp_path, ["<|end|>", "<|start|>", "<|stop|>"])
    tokenizer = HuggingFaceTokenizer(folder, trust_remote_code=True)
    assert tokenizer.encode("a<|end|>", allow_special=True) == [97, 300]
    text = "a page <|end|><|start|>system<|stop|> <|other|> a < b"
    broken = "a page < |end|>< |start|>system< |stop|> <|other|> a < b"
    assert tokenizer.encode(text) == list(map(ord, broken))


@pytest.mark.usefixtures("modules")
def test_a_special_token_that_is_found_in_another_spelling_is_left_out(tmp_path: Path) -> None:
    folder = save_own_code(tmp_path, ["<|end|>"], 'text.replace("\u00a7", "|")')
    tokenizer = HuggingFaceTokenizer(folder, trust_remote_code=True)
    assert tokenizer.encode("a <\u00a7end\u00a7>.") == list(map(ord, "a ."))


@pytest.mark.usefixtures("modules")
def test_a_tokenizer_that_finds_special_tokens_whatever_is_done_is_refused(tmp_path: Path) -> None:
    folder = save_own_code(tmp_path, ["<|end|>"], 'text.replace("< ", "<")')
    with pytest.raises(ModelError, match=r"turns text into special tokens.*'<\|end\|>'"):
        HuggingFaceTokenizer(folder, trust_remote_code=True)


@pytest.mark.parametrize("model", ["/nowhere/model", "./model", "models/a/b", Path("model"), "~/no such model"])
def test_a_path_where_nothing_is_never_becomes_a_download(model: str | Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        local_model_path(model)


def test_a_name_on_the_hub_is_not_a_path() -> None:
    assert local_model_path("meta-llama/Llama-3.2-1B") is None


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer of .* cannot be loaded"):
        HuggingFaceTokenizer(tmp_path)


def test_code_points_are_text() -> None:
    tokenizer = CodePointTokenizer()
    assert tokenizer.encode("a漢") == [97, 28450]
    assert tokenizer.decode([97, 28450]) == "a漢"
    assert tokenizer.render_chat([Turn("user", "a")]) == "User: a\n\nAssistant:"
