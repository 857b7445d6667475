"""The load that other programs put on this machine."""

from contextlib import suppress

import psutil  # type: ignore[import-untyped]


class OthersLoad:
    """The load that other programs put on this machine, from its making on."""

    def __init__(self) -> None:
        self._start = core_seconds()

    def share(self) -> float:
        """Return the share of the cores that programs other than this one and its children kept busy."""
        all_s, idle_s, own_s = (now - before for now, before in zip(core_seconds(), self._start, strict=True))
        return max(all_s - idle_s - own_s, 0.0) / all_s if all_s > 0 else 0.0


def core_seconds() -> tuple[float, float, float]:
    """Return the seconds of all cores since the machine started, idle ones, and those of this program."""
    times = psutil.cpu_times()._asdict()
    all_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # "user" has these already
    me = psutil.Process()
    own_s = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            own_s += sum(process.cpu_times()[:4])  # user, system, and both of children that have ended
    return all_s, times["idle"] + times.get("iowait", 0.0), own_s
