"""One pool of GPUs, many roles: who holds which GPU when, decided by a calendar.

Read `planner.py` first: one pure function, called by the live loop and by the simulator.

    config.py, clock.py, calendar.py, checks.py   what the operator writes, and the windows it means in UTC
    state.py, actions.py, history.py              what the planner sees and answers
    goals.py, handover.py, lifecycle.py, placement.py, admission.py   the parts of a plan
    planner.py                                    plan(now, timeline, config, observed, history) -> Plan
    ledger.py, staleness.py                       where every GPU-second went, and which night work nobody can use
    simulate.py, world.py, trace.py               what-if: the same planner on simulated GPUs
    overrides.py, lease.py                        what operators add by hand, and who may act
    tables.py, charts.py, page.py, verbs.py       what people see

Instants and durations are integer microseconds (`clock.Micros`); sizes are GPUs unless they say replicas.
"""
