"""The speed of a machine in each pass of measurements: others may use it as well."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from streamrag_bench.profile.step_times import MeasurementPass, slow_factors, usual_step_s


def slowness(passes: Sequence[MeasurementPass]) -> list[float]:
    """Return for each pass how many times as long as usual its steps took."""
    usual_s = usual_step_s(passes)
    return [median(slow_factors(one, usual_s)) for one in passes]


def at_speed(one: MeasurementPass, factor: float) -> MeasurementPass:
    """Return the pass as on a machine that takes `factor` times as long for everything."""
    steps = [replace(s, step_s=s.step_s * factor, elapsed_s=s.elapsed_s * factor) for s in one.steps]
    return MeasurementPass(tuple(steps), tuple(seconds * factor for seconds in one.beside_s))
