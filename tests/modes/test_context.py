from streamrag import Append, AppendMode, Chunk, Update, UpdateMode

A, B, C = (Chunk(text, f"{text}.md") for text in "abc")


def test_update_mode_follows_the_source() -> None:
    mode = UpdateMode()
    assert mode.fold((), Append(A)) == (A,)
    assert mode.fold((A,), Append(B)) == (A, B)
    assert mode.fold((A, B), Update((C, A))) == (C, A)
    assert mode.fold((A, B), Update(())) == ()


def test_append_mode_only_grows() -> None:
    mode = AppendMode()
    assert mode.fold((A,), Append(B)) == (A, B)
    assert mode.fold((A, B), Update((C, A))) == (A, B, C)
    assert mode.fold((A, B), Update(())) == (A, B)


def test_no_chunk_is_in_a_context_twice() -> None:
    for mode in (AppendMode(), UpdateMode()):
        assert mode.fold((A, B), Append(A)) == (A, B)
        assert mode.fold((), Update((A, B, A))) == (A, B)


def test_passages_of_one_document_are_different_chunks() -> None:
    first, second = Chunk("same", "a.md", passage=0), Chunk("same", "a.md", passage=1)
    assert UpdateMode().fold((first,), Append(second)) == (first, second)
