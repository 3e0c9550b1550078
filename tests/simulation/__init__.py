"""A deterministic simulation of the embedded runtime: one seed, one world, one history, one verdict.

    determinism   pins trio's scheduler and every source of chance; the trace and its digest
    options       what a world is made of, drawn from its seed; faults can be switched off one by one
    clock         a wall clock that jumps, and can make its reader fail
    history       what was asked and answered, seen and pushed, in the order in which it happened
    programs      what the instances are to do
    callers       who uses the runtime: workers, feeders, operators, watchers
    chaos         who breaks it: kills, crashes, outages, jumps
    world         puts them together and runs the lives of a runtime, one after the other
    snapshots     what is in the store between two lives
    checks        the model of the promises, over history and snapshots; its parts are in check_*
    mutants       bugs planted on purpose, which the checks must find
    runner        runs worlds by seed

``python -m tests.simulation --help`` runs them by hand.
"""
