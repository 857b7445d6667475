"""`make mutants` takes long; that each mutant still names a line that is there is known at once."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.fuzz.transfers import FIRST_SEED
from tests.engine.mutants import FIRST_TRANSFER, MUTANTS, Mutant
from tests.sessions.mutants import MUTANTS as OF_SESSIONS


def test_mutants_of_transfers_begin_with_their_first_seed() -> None:
    assert FIRST_TRANSFER == FIRST_SEED


@pytest.mark.parametrize("mutants", [MUTANTS, OF_SESSIONS], ids=["engine", "sessions"])
def test_each_mutant_changes_one_place(mutants: Sequence[Mutant]) -> None:
    for mutant in mutants:
        spec = find_spec(mutant.module)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).read_text().count(mutant.old) == 1, f"{mutant.name}: its text is not there once"
        assert mutant.new != mutant.old
        assert bool(mutant.within) != bool(mutant.test)
