"""Streams against an engine that is a part of the test, see `fake_engine`; a real one is in `test_streaming_engine`."""

import pytest
import vllm.v1.engine.async_llm as async_llm
from client_machine import ClientMachine
from client_mutants import MUTANTS, mutant
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

QUICK = settings(derandomize=True, max_examples=100, stateful_step_count=40, database=None, print_blob=False)


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm.logger, "disabled", True)  # it tells of every engine that dies


def test_whatever_a_program_does_the_engine_has_the_prompt_that_was_pushed() -> None:
    run_state_machine_as_test(ClientMachine, settings=QUICK)


@pytest.mark.parametrize("name", MUTANTS)
def test_this_fault_would_be_found(name: str) -> None:
    class Mutated(ClientMachine):
        module = mutant(name)

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_state_machine_as_test(
            Mutated, settings=settings(QUICK, max_examples=300, phases=[Phase.generate], report_multiple_bugs=False)
        )
