"""One pool of GPUs, many roles: who holds which GPU when, decided by a calendar.

Read `planner.py` first: one pure function, called by the live loop and by the simulator.

    config.py, times.py, clock.py, calendar.py, checks.py   what operators write, and the windows it means in UTC
    state.py, actions.py, history.py                        what the planner sees and answers
    planner.py                                              plan(now, timeline, config, observed, history) -> Plan
    draft.py, goals.py, handover.py, lifecycle.py, placement.py, admission.py   the parts of a plan
    ledger.py, accounts.py, staleness.py                    where every GPU-second went, and which work nobody can use
    simulate.py, world.py, physics.py, trace.py             what-if: the same planner on simulated GPUs
    live.py and what it imports                             the same planner on Ray
    store.py, lease.py                                      what outlives a scheduler, and who may act
    summary.py, tables.py, charts.py, page.py, verbs.py     what people see

Instants and durations are integer microseconds (`clock.Micros`); sizes are GPUs unless they say replicas.
"""
