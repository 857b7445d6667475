"""The bookkeeping of host memory."""

import random

from streamrag.engine.host_pool import HostPool


def pool_with(*keys: str, owner: str = "a", num_slots: int = 4) -> HostPool:
    pool = HostPool(num_slots)
    for key in keys:
        slot = pool.reserve(owner, key)
        assert slot is not None
        pool.on_saved(slot, is_valid=True)
    return pool


def test_a_block_can_be_loaded_only_after_its_copy_has_ended() -> None:
    pool = HostPool(2)
    slot = pool.reserve("a", "x")
    assert slot is not None
    assert pool.num_valid(["x"]) == 0
    pool.on_saved(slot, is_valid=True)
    assert pool.num_valid(["x"]) == 1


def test_a_block_whose_save_failed_is_absent_and_takes_no_room() -> None:
    pool = HostPool(1)
    slot = pool.reserve("a", "x")
    assert slot is not None
    pool.on_saved(slot, is_valid=False)
    assert (pool.num_valid(["x"]), pool.num_used) == (0, 0)


def test_only_leading_blocks_count() -> None:
    pool = pool_with("x", "z")
    assert pool.num_valid(["x", "y", "z"]) == 1


def test_a_block_is_stored_once_and_stays_until_its_last_owner_is_gone() -> None:
    pool = pool_with("x")
    assert pool.claim("b", "x")
    pool.release("a")
    assert pool.num_valid(["x"]) == 1
    pool.release("b")
    assert (pool.num_valid(["x"]), pool.num_used) == (0, 0)


def test_an_owner_may_keep_some() -> None:
    pool = pool_with("x", "y", "z")
    pool.release("a", but={"x", "z"})
    assert sorted(map(str, pool.keys_of("a"))) == ["x", "z"]
    assert pool.num_used == 2


def test_a_full_pool_gives_up_what_was_used_longest_ago() -> None:
    pool = pool_with("x", "y", "z", num_slots=3)
    assert pool.claim("a", "x")
    pool.reserve("b", "new")
    assert [pool.num_valid([key]) for key in "xyz"] == [1, 0, 1]
    assert sorted(map(str, pool.keys_of("a"))) == ["x", "z"]


def test_blocks_that_the_device_has_too_are_given_up_first() -> None:
    pool = pool_with("v", "w", "x", "y", "z", num_slots=5)
    pool.pin(["y"])  # is loaded
    pool.unpin()
    assert pool.claim("a", "x", is_spare=True)
    for key in "12":
        pool.reserve("b", key)
    assert [pool.num_valid([key]) for key in "vwxyz"] == [1, 1, 0, 0, 1]
    pool.reserve("b", "3")
    assert [pool.num_valid([key]) for key in "vwz"] == [0, 1, 1]


def test_the_last_of_the_blocks_loaded_together_are_given_up_first() -> None:
    pool = pool_with("u", "v", "w", "x", "y", "z", num_slots=6)
    pool.pin("vwxyz")
    pool.unpin()
    for key in "123":
        pool.reserve("b", key)
    assert [pool.num_valid([key]) for key in "uvwxyz"] == [1, 1, 1, 0, 0, 0]


def test_a_spare_takes_no_room_from_others_and_is_none_when_the_device_has_lost_it() -> None:
    pool = HostPool(2)
    for key in "xy":
        slot = pool.reserve("a", key, is_spare=True)
        assert slot is not None
        pool.on_saved(slot, is_valid=True)
    assert pool.reserve("a", "z", is_spare=True) is None
    assert pool.claim("a", "y")
    assert pool.reserve("a", "z") is not None
    assert (pool.num_valid(["x"]), pool.num_valid(["y"])) == (0, 1)


def test_blocks_being_saved_or_loaded_are_not_given_up() -> None:
    pool = pool_with("x", num_slots=2)
    pool.reserve("a", "saving")
    pool.pin(["x"])
    assert pool.reserve("b", "new") is None
    pool.unpin()
    assert pool.reserve("b", "new") is not None
    assert pool.num_valid(["x"]) == 0


def test_a_slot_is_free_only_when_the_copy_into_it_has_ended() -> None:
    pool = HostPool(1)
    slot = pool.reserve("a", "x")
    assert slot is not None
    pool.release("a")
    assert pool.reserve("b", "y") is None
    pool.on_saved(slot, is_valid=True)
    assert pool.num_valid(["x"]) == 0
    assert pool.reserve("b", "y") == slot


def test_a_block_that_comes_back_while_its_first_copy_is_under_way_waits_for_the_second() -> None:
    pool = HostPool(2)
    first = pool.reserve("a", "x")
    pool.release("a")
    second = pool.reserve("b", "x")
    assert first is not None
    assert second is not None
    pool.on_saved(first, is_valid=True)
    assert pool.num_valid(["x"]) == 0
    pool.on_saved(second, is_valid=True)
    assert pool.num_valid(["x"]) == 1


def test_a_pinned_block_outlives_its_owner_until_it_is_sent() -> None:
    pool = pool_with("x")
    (slot,) = pool.pin(["x"])
    pool.release("a")
    assert pool.num_used == 1
    pool.unpin()
    assert (pool.num_used, pool.num_valid(["x"])) == (0, 0)
    assert slot in range(4)


def test_a_pool_can_turn_out_to_be_smaller() -> None:
    pool = HostPool(3)
    slots = [pool.reserve("a", key) for key in "xy"]
    assert None not in slots
    pool.limit(1)
    for slot in slots:
        pool.on_saved(slot or 0, is_valid=slot == 0)
    assert pool.num_valid("xy") == 1
    assert pool.reserve("a", "z") == 0


def test_after_any_calls_no_slot_is_lost_and_none_is_used_twice() -> None:
    rng = random.Random(0)
    pool = HostPool(5)
    saving: list[int] = []
    for _ in range(3_000):
        owner, key = rng.choice("abc"), rng.choice("tuvwxyz")
        match rng.randrange(6):
            case 0 | 1 if not pool.claim(owner, key, is_spare=rng.random() < 0.5):
                slot = pool.reserve(owner, key, is_spare=rng.random() < 0.5)
                assert slot not in saving
                saving += [slot] if slot is not None else []
            case 2 if saving:
                pool.on_saved(saving.pop(rng.randrange(len(saving))), is_valid=rng.random() < 0.8)
            case 3:
                pool.release(owner, but={key})
            case 4 if pool.num_valid([key]):
                pool.pin([key])
                pool.unpin()
            case 5 if rng.random() < 0.1:
                pool.clear()
        assert len(saving) <= pool.num_used <= pool.num_slots
    for slot in saving:
        pool.on_saved(slot, is_valid=True)
    for owner in "abc":
        pool.release(owner)
    assert pool.num_used == 0
