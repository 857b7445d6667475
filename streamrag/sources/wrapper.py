"""A base of sources that change the events of another source."""

from streamrag.core import Progress, Source, Startable, part_name


class SourceWrapper:
    """A base of a source that changes the events of `source`, which it starts and closes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """The source's name, with the wrapper's: its events come at other times, or others come."""
        return f"{type(self).__name__}({part_name(self._source)})"

    async def start(self, progress: Progress) -> None:
        """Start the source, if it is one that must be."""
        if isinstance(self._source, Startable):
            await self._source.start(progress)

    async def aclose(self) -> None:
        """Close the wrapped source, if it can be started and closed."""
        if isinstance(self._source, Startable):
            await self._source.aclose()
