import tests.engine.mutants as M
sel=[m for m in M.MUTANTS if m.module.startswith(("streamrag.engine.rules","streamrag.engine.walk","streamrag.engine.memory","streamrag.engine.planning")) or "put off" in m.name]
if __name__=="__main__":
    for m in sel:
        if m.test: print(M.is_caught_by_test(m), m.name, flush=True)
        else: print(M.seeds_to_catch(m), m.name, flush=True)
