from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from streamrag.routing.prefix_index import PrefixIndex


def prompt(*blocks, size=4):
    return tuple(token for block in blocks for token in [block] * size)


def test_each_replica_has_the_leading_blocks_that_it_was_given():
    index = PrefixIndex(block_size=4)
    index.hold(index.keys(prompt(1, 2, 3)), "a")
    index.hold(index.keys(prompt(1, 2)), "b")
    index.hold(index.keys(prompt(9)), "c")
    assert index.matches(index.keys((*prompt(1, 2, 3, 4), 7))) == {"a": 12, "b": 8}
    assert index.matches(index.keys(prompt(2, 3))) == {}, "a block is another one behind other blocks"
    assert index.matches(index.keys((1, 1, 1))) == {}, "less than a block is not known"


def test_lists_and_tuples_have_the_same_keys():
    index = PrefixIndex(block_size=4)
    assert index.keys(prompt(1, 2)) == index.keys(list(prompt(1, 2)))


def test_a_replica_forgets_what_was_used_least_recently_and_ends_before_beginnings():
    index = PrefixIndex(block_size=4)
    index.resize("a", 16)
    index.hold(index.keys(prompt(1, 2)), "a")
    index.hold(index.keys(prompt(5, 6)), "a")
    index.hold(index.keys(prompt(1)), "a")  # used again
    index.hold(index.keys(prompt(8)), "a")
    assert index.matches(index.keys(prompt(1, 2))) == {"a": 4}
    assert index.matches(index.keys(prompt(5, 6))) == {"a": 8}
    index.hold(index.keys(prompt(9)), "a")
    assert index.matches(index.keys(prompt(5, 6))) == {"a": 4}


def test_a_prompt_that_is_larger_than_the_memory_keeps_its_beginning():
    index = PrefixIndex(block_size=4)
    index.resize("a", 8)
    index.hold(index.keys(prompt(1, 2, 3)), "a")
    assert index.matches(index.keys(prompt(1, 2, 3))) == {"a": 8}


def test_all_replicas_together_have_a_bound():
    index = PrefixIndex(block_size=4, max_blocks=6)
    index.hold(index.keys(prompt(1, 2, 3, 4, 5, 6, 7)), "a")
    assert index.num_tokens("a") == 24
    index.hold(index.keys(prompt(1, 2, 3, 4, 5)), "b")
    assert (index.num_tokens("a"), index.num_tokens("b")) == (12, 12)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "hold", "hold", "forget", "resize"]),
        st.sampled_from("abc"),
        st.lists(st.integers(0, 1), max_size=4),
    ),
    max_size=30,
)


@given(ACTIONS, st.integers(3, 12))
def test_the_index_finds_the_same_matches_as_a_list_for_each_replica(actions, max_blocks):
    index = PrefixIndex(block_size=2, max_blocks=max_blocks)
    model: dict[str, OrderedDict[tuple[int, ...], None]] = {}
    sizes: dict[str, int] = {}
    for action, replica, blocks in actions:
        keys = index.keys(prompt(*blocks, size=2))
        if action == "hold":
            index.hold(keys, replica)
            known = model.setdefault(replica, OrderedDict())
            most = min(sizes.get(replica, max_blocks), max_blocks // len(model))
            for n in range(min(len(blocks), most), 0, -1):
                known[tuple(blocks[:n])] = None
                known.move_to_end(tuple(blocks[:n]))
            while len(known) > most:
                known.popitem(last=False)
            while sum(map(len, model.values())) > max_blocks:
                max(model.values(), key=len).popitem(last=False)
        elif action == "forget":
            index.forget(replica)
            model.pop(replica, None)
            sizes.pop(replica, None)
        else:
            sizes[replica] = len(blocks) + 1
            index.resize(replica, 2 * (len(blocks) + 1))
        for other, known in model.items():
            assert index.num_tokens(other) == 2 * len(known)
        found = index.matches(keys)
        for other in "abc":
            held = [n for n in range(len(blocks) + 1) if n == 0 or tuple(blocks[:n]) in model.get(other, ())]
            assert held == list(range(len(held))), "whoever has an end has its beginning"
            assert found.get(other, 0) == 2 * (len(held) - 1)
