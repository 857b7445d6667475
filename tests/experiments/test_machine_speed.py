import pytest
from machine_speed import at_speed, slowness

from streamrag.bench.profile.step_times import MeasurementPass, measure, table_profile
from streamrag.bench.virtual_time import run_virtual
from streamrag.engine.costs.step_profiles import TableProfile
from tests.bench.measured import TRUE, measured_engine


def test_the_slowness_of_the_machine_in_each_pass_is_known_and_removed() -> None:
    async def main() -> tuple[list[float], TableProfile]:
        async with measured_engine() as client:
            one: MeasurementPass = await measure(client, 512, 2_048, max_num_seqs=16)  # type: ignore[arg-type]
            passes = [one, at_speed(one, 1.5), at_speed(one, 0.8)]
            told = slowness(passes)
            alike = [at_speed(each, 1.2 / of_it) for each, of_it in zip(passes, told, strict=True)]
            return told, table_profile(alike, client, "found")  # type: ignore[arg-type]

    told, found = run_virtual(main())
    assert told == pytest.approx([1.0, 1.5, 0.8])
    step = [(300, 1_000)]
    assert found.step_s(step) == pytest.approx(1.2 * TRUE.step_s(step), rel=0.02)
    assert found.unsteadiness == pytest.approx([1.0] * len(found.unsteadiness))
    assert found.unsteadiness
