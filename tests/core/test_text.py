"""How texts are split into words that can be compared, and which characters a model reads."""

import time
import unicodedata

import pytest

from streamrag.core.text import is_blank, readable, relevant_terms, terms, words

SAME = [
    ("Reise\xadkosten\xaderstattung", "Reisekostenerstattung"),  # soft hyphens
    ("Donau\u200bdampf", "Donaudampf"),  # a zero-width space
    ("Donau\u2060dampf\ufeff", "Donaudampf"),  # a word joiner, and a zero-width no-break space
    ("Auf\u200clage", "Auflage"),
    ("\u200fabc\u200e", "abc"),  # marks of direction
    ("❤️rot", "❤rot"),  # a variation selector
    ("Zu\u0308rich", "Zürich"),
    ("ZÜRICH", "zürich"),
    ("Ｚürich　２０２４", "Zürich 2024"),
    ("misﬁts Oﬃce", "misfits office"),
    ("ÉCOLE", "école"),
    ("E\u0301COLE", "école"),
    ("İSTANBUL", "istanbul"),
    ("ΑΘΗΝΑ ΟΔΟΣ", "Αθήνα οδός"),
    ("STRASSE", "Straße"),
    ("ｶﾞｲﾄﾞ", "ガイド"),
    ("か\u3099", "が"),
    ("\u1112\u1161\u11ab", "한"),
    ("كِتَابٌ", "كتاب"),
    ("كتـــاب", "كتاب"),
    ("ﻛﺘﺎﺏ", "كتاب"),
    ("الأ\u064eول", "الأول"),
    ("ا\u0654", "أ"),  # decomposed
    ("שָׁלוֹם", "שלום"),
    ("क\u093c", "क़"),
]


@pytest.mark.parametrize(("written", "usual"), SAME)
def test_words_are_compared_whatever_characters_they_are_written_with(written: str, usual: str) -> None:
    assert terms(written) == terms(usual) != []
    assert relevant_terms(written) == relevant_terms(usual)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("word", ["Zürich", "São", "łódź", "Việt", "हिन्दी", "कार्य", "தமிழ்", "বাংলা", "ελληνική", "йод"])
def test_a_word_keeps_its_accents_and_vowel_signs_and_is_not_split_at_them(word: str, form: str) -> None:
    [term] = terms(unicodedata.normalize(form, word))
    assert len(term) == len(unicodedata.normalize("NFC", word))


def test_zurich_is_not_a_page_about_the_rich() -> None:
    assert terms("Zürich") == ["zürich"]
    assert terms("PRÉSENTATION") == ["présentation"]


def test_parts_of_a_camel_case_word_are_words_with_accents_too() -> None:
    assert terms("TaskGroup") == ["taskgroup", "task", "group"]
    assert terms("GrößeBerechnen") == ["grösseberechnen", "grösse", "berechnen"]


def test_a_persian_word_is_found_whole_and_by_its_parts() -> None:
    assert terms("کتاب\u200cها") == ["کتابها", "کتاب", "ها"]


def test_a_question_in_hindi_has_neither_single_letters_nor_function_words() -> None:
    assert relevant_terms("मैं कार्य समूह को कैसे रद्द करूँ?") == ["कार्य", "समूह", "रद्द"]
    assert relevant_terms("है?") == ["है"]


def test_letters_that_an_apostrophe_cuts_off_are_no_words_of_a_question() -> None:
    assert relevant_terms("Qui est l’auteur d'Ulysse?") == ["qui", "est", "auteur", "ulysse"]
    assert relevant_terms("l'") == ["l"]


def test_text_without_spaces_splits_into_characters_or_overlapping_terms() -> None:
    assert terms("日本語・テスト") == list("日本語テスト")
    assert set(relevant_terms("ยกเลิกงาน")) <= set(terms("วิธียกเลิกงานกลุ่ม"))
    assert set(relevant_terms("ยกเลิกงาน")).isdisjoint(terms("สภาพอากาศวันนี้"))
    assert terms("ភាសា\u200bខ្មែរ") == [*terms("ភាសា"), *terms("ខ្មែរ")]  # a zero-width space between words


def test_signs_are_no_words() -> None:
    assert words("a_b · ´ ¨ ️ ⃣ © 1️⃣ \ud800 ^") == ["a", "b", "1"]


def test_a_model_reads_no_soft_hyphens_but_all_joiners() -> None:
    assert readable("Reise\xadkosten\u200berstat\u2060tung\ufeff") == "Reisekostenerstattung"
    for text in ("می\u200cخواهم", "क्\u200dष", "👩\u200d💻", "ភាសា\u200bខ្មែរ", "abc"):
        assert readable(text) == text


@pytest.mark.parametrize("text", ["", " \n\t", "\xa0\u3000", "\u200b\ufeff", "\xad", "\u2800\u3164", "\x00\x1f"])
def test_a_text_that_shows_nothing_is_blank(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(text + ".")


@pytest.mark.parametrize(
    "text",
    [
        "a" + "\u0301\u0316" * 500_000,
        "\u0301\u0316" * 500_000,
        "ا\u200c" * 300_000,
        "\u200c" * 1_000_000,
        "l’" * 300_000,
        "ก" * 300_000,
        "é" * 1_000_000,
    ],
    ids=["accents", "only accents", "non-joiners", "only non-joiners", "elisions", "Thai", "one word"],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    start_s = time.process_time()
    terms(text), relevant_terms(text[: len(text) // 10]), readable(text), is_blank(text)
    assert time.process_time() - start_s < 20
