"""The time of steps with copies between a device and host memory, in virtual time.

    step    start ──▶ must-saves ──▶ forward of num_layers layers ──▶ end
    out     [held of the step before][must-saves][held ......]
    in                               [loads ..........]

Blocks that a step overwrites (must-saves) are saved before its forward. Blocks that stay (held) are saved beside it,
and loads overlap with the forward layer by layer. On a device that cannot copy and compute at the same time, such as a
CPU, all copies add to the step.
"""

from dataclasses import dataclass, field

from streamrag.engine.costs.copy_costs import CopyCosts
from streamrag.errors import ConfigurationError


@dataclass(slots=True)
class CopyClock:
    """The two copy engines of a device in virtual time, one for each direction, each with a FIFO queue."""

    costs: CopyCosts
    num_layers: int
    """Layers of the model, because loads and the forward overlap layer by layer."""
    busy_out_s: float = 0.0
    busy_in_s: float = 0.0
    _out_free_s: float = field(default=0.0, init=False)
    """When the queue of copies out will be empty."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigurationError(f"num_layers={self.num_layers}: a model has at least one")

    def step_s(
        self, start_s: float, compute_s: float, num_saves: int = 0, num_held_saves: int = 0, num_loads: int = 0
    ) -> float:
        """Return the seconds of a step that starts at `start_s`, which is after the end of the previous step, with its
        waits for copies. Adds the copies to `busy_out_s` and `busy_in_s`.

        `num_saves` blocks are saved before its forward, `num_held_saves` beside it; see the module's drawing.
        """
        saves_s, held_s = self.costs.out_s(num_saves), self.costs.out_s(num_held_saves)
        loads_s = self.costs.in_s(num_loads)
        self.busy_out_s += saves_s + held_s
        self.busy_in_s += loads_s
        if not self.costs.is_overlapped:
            return saves_s + held_s + loads_s + compute_s
        # The held saves of the previous step must end first, because this step may overwrite their blocks.
        forward_s = max(start_s, self._out_free_s) + saves_s
        self._out_free_s = forward_s + held_s
        # Loads may go into the blocks of the must-saves, and the last layer waits for its own load.
        behind_loads_s = loads_s + compute_s / self.num_layers if num_loads else 0.0
        return forward_s + max(compute_s, behind_loads_s) - start_s
