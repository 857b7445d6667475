"""Recomputing against copying out and back, by tokens, on three devices: figure 5."""

from collections.abc import Iterator

from streamrag.engine.costs.copy_costs import CopyCosts
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import StepProfile, recompute_s
from streamrag_bench.profile.crossing import crossing

from ..markdown import table
from ..pictures import Line, Lines, draw_lines
from .section import Report, Section, nothing

DEVICES = {"H200": "h200-llama8b-tp2", "H100": "h100-llama8b-tp2", "A40": "a40-llama8b-tp2"}
SIZES = tuple(1 << power for power in range(10, 18))
"""1K to 128K tokens, as there."""
SHOWN = (1_024, 8_192, 32_768, 131_072)
BUDGET = 2_048


def write(report: Report) -> str:
    panels = [
        Lines(f"{device}, 2 x", {"recompute": _line(profile, "recompute"), "copy out and back": _line(profile, "copy")})
        for device, profile, _ in _profiles()
    ]
    picture = draw_lines(panels, "tokens", "seconds", x_log=True, shares_y=True)
    return (
        "Seconds to recompute a prompt's KV from its first token on, in steps of 2,048, and to copy it out and back. "
        "The paper measures H200, H100 and A40 and publishes its curves as a picture only, with one figure in the "
        "text: a recomputation of 50 ms on an H100 may take 200 ms on an A40. Ours follow from data-sheet rooflines "
        "(docs/traces.md): not measured; each file says where its figures come from.\n\n"
        + table(["", *(f"{num:,} tokens: recompute / copy" for num in SHOWN), "copying is quicker from"], _rows())
        + f"\nWhat takes 50 ms on the H100 takes {_like_50_ms() * 1e3:.0f} ms on the A40.\n\n"
        + report.pictures.add("recompute-or-copy", picture, "Recomputing and copying by tokens")
    )


def _profiles() -> Iterator[tuple[str, StepProfile, CopyCosts]]:
    for device, name in DEVICES.items():
        profile = load_profile(name)
        assert profile.copies
        yield device, profile, profile.copies


def copy_s(copies: CopyCosts, num_tokens: int, block_size: int) -> float:
    """Out and back."""
    num_blocks = -(-num_tokens // block_size)
    return copies.out_s(num_blocks) + copies.in_s(num_blocks)


def _line(profile: StepProfile, what: str) -> Line:
    copies = profile.copies
    assert copies
    if what == "recompute":
        return Line(SIZES, [recompute_s(profile, 0, num, BUDGET) for num in SIZES])
    return Line(SIZES, [copy_s(copies, num, profile.block_size) for num in SIZES])


def _rows() -> Iterator[list[str]]:
    for device, profile, copies in _profiles():

        def out_and_in_s(num_blocks: int, copies: CopyCosts = copies) -> float:
            return copies.out_s(num_blocks) + copies.in_s(num_blocks)

        found = crossing(profile, out_and_in_s, SIZES[-1])
        times = [
            f"{1e3 * recompute_s(profile, 0, num, BUDGET):.0f} / {1e3 * copy_s(copies, num, profile.block_size):.1f} ms"
            for num in SHOWN
        ]
        yield [device, *times, "never" if found is None else f"{found:,} tokens"]


def _like_50_ms() -> float:
    h100, a40 = load_profile(DEVICES["H100"]), load_profile(DEVICES["A40"])
    num = next(num for num in range(64, 131_072, 16) if recompute_s(h100, 0, num, BUDGET) >= 0.05)
    return recompute_s(a40, 0, num, BUDGET)


SECTION = Section("copying", "Recompute or copy (figure 5)", nothing, write)
