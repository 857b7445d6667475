"""The time of copying KV blocks between a device and host memory."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from streamrag.errors import ConfigurationError

CopyPoint: TypeAlias = tuple[int, float]
"""A number of blocks, and the seconds to copy them at once."""


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """The seconds to copy blocks out to host memory and back in. Ranks copy their shares in parallel.

    Linear between the points, and extrapolated beyond the last. Below the first point the line goes down to the
    latency, which is the first segment's value at zero blocks, at least 0.

    :raises ConfigurationError: there are no points, they do not ascend, or more blocks take less time.
    """

    out_points: tuple[CopyPoint, ...]
    in_points: tuple[CopyPoint, ...]
    block_bytes: int
    """Bytes of one block on one device; with tensor parallelism, of one rank's share."""
    is_overlapped: bool
    """Whether the device computes while copies run: true on CUDA, false on a CPU."""

    def __post_init__(self) -> None:
        _check_points("out_points", self.out_points)
        _check_points("in_points", self.in_points)
        if self.block_bytes <= 0:
            raise ConfigurationError(f"block_bytes={self.block_bytes}: must be positive")

    def out_s(self, num_blocks: int) -> float:
        """Return the seconds to copy `num_blocks` blocks from the device to the host."""
        return _interpolate(self.out_points, num_blocks)

    def in_s(self, num_blocks: int) -> float:
        """Return the seconds to copy `num_blocks` blocks from the host to the device."""
        return _interpolate(self.in_points, num_blocks)


def linear_copies(
    block_bytes: int, bytes_per_s: float, latency_s: float = 0.0, *, is_overlapped: bool = True
) -> CopyCosts:
    """Return the costs of copies that take a latency and the time of their bytes; `bytes_per_s` must be over 0."""
    if bytes_per_s <= 0:
        raise ConfigurationError(f"bytes_per_s={bytes_per_s:g}: must be positive")
    points = tuple((num, latency_s + num * block_bytes / bytes_per_s) for num in (1, 2))
    return CopyCosts(points, points, block_bytes, is_overlapped)


def _check_points(name: str, points: Sequence[CopyPoint]) -> None:
    """Raise ConfigurationError unless there are points, their blocks ascend from 1, and their seconds never fall."""
    blocks, seconds = [num for num, _ in points], [copy_s for _, copy_s in points]
    if not blocks or blocks[0] < 1 or any(a >= b for a, b in pairwise(blocks)):
        raise ConfigurationError(f"{name}: must be one or more, of ascending numbers of blocks from 1 on; got {blocks}")
    if not seconds[0] >= 0 or not all(a <= b for a, b in pairwise(seconds)):
        raise ConfigurationError(f"{name}: more blocks must not take less time; got {seconds} s")


def _interpolate(points: Sequence[CopyPoint], num_blocks: int) -> float:
    """Return the seconds on the lines that `CopyCosts` describes; 0 without blocks, proportional with one point."""
    if num_blocks <= 0:
        return 0.0
    first_num, first_s = points[0]
    if len(points) == 1:
        return first_s * num_blocks / first_num
    right = min(max(bisect_left(points, (num_blocks,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope_s = (y1 - y0) / (x1 - x0)
    if num_blocks < first_num:
        latency_s = max(first_s - slope_s * first_num, 0.0)
        return latency_s + (first_s - latency_s) * num_blocks / first_num
    return y0 + slope_s * (num_blocks - x0)
