"""A base class for sources that change the events of another source."""

from streamrag.core import Progress, Source, Startable, part_name


class SourceWrapper:
    """A source that wraps `source`, and starts and closes it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """The wrapper's name with the source's: schedulers learn the timing of each wrapper separately."""
        return f"{type(self).__name__}({part_name(self._source)})"

    async def start(self, progress: Progress) -> None:
        """Start the wrapped source if it is `Startable`."""
        if isinstance(self._source, Startable):
            await self._source.start(progress)

    async def aclose(self) -> None:
        """Close the wrapped source if it is `Startable`."""
        if isinstance(self._source, Startable):
            await self._source.aclose()
