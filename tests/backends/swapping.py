"""A KV connector for a test on a real engine. It is made in the engine's own processes, from its name."""

import random

from streamrag.backends.host_connector import HostKVConnector
from streamrag.backends.host_wire import HostCopies


class ForgetfulConnector(HostKVConnector):
    """Loads every second block or so from the slot of another, and says nothing."""

    def start_load_kv(self, forward_context, **kwargs) -> None:  # type: ignore[no-untyped-def]
        copies = self._get_connector_metadata()
        assert isinstance(copies, HostCopies)
        rng = random.Random(len(copies.loads))
        loads = [(slot if rng.random() > 0.5 else slot // 2, block) for slot, block in copies.loads]
        self.bind_connector_metadata(HostCopies(copies.saves, loads, copies.held_saves))
        super().start_load_kv(forward_context, **kwargs)
