#!/bin/sh
# What multiprocessing takes for the interpreter while an engine starts: see log.EngineLog.redirected.
exec "$STREAMRAG_SPAWN_PYTHON" -IS "${0%/*}/spawned_main.py" "$0" "$@" >>"$STREAMRAG_SPAWN_LOG" 2>&1
