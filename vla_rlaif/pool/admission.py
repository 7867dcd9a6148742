"""Jobs: admitted only if they fit before the boundary that would take their GPUs, else queued with an ETA."""

from vla_rlaif.pool.actions import Reject
from vla_rlaif.pool.clock import Micros, format_duration
from vla_rlaif.pool.draft import Draft
from vla_rlaif.pool.handover import acquire, keeps_minimum
from vla_rlaif.pool.lifecycle import drain
from vla_rlaif.pool.placement import pack, scatter
from vla_rlaif.pool.state import Gpu, Job, Replica


def admit_jobs(draft: Draft, role: str) -> None:
    """Start what fits, make room for what fits but has no GPUs yet, and answer the rest."""
    waiting = [job for job in draft.observed.jobs if job.role == role]
    if not waiting:
        return
    running = sum(
        len(r.gpus) for r in (*draft.coming[role].values(), *draft.active[role].values()) if r.job is not None
    )
    for job in sorted(waiting, key=lambda j: (j.submitted, j.name)):
        needed = running + job.num_gpus
        end = draft.outlook.until(role, needed, draft.outlook.first)
        is_whole = job.num_gpus % draft.config.roles[role].gpus_per_replica == 0
        if not is_whole or draft.wants.want[role] < needed or draft.now + _span(draft, job) > end:
            _answer(draft, job, needed)
            continue
        running = needed
        gpus = _place(draft, job)
        if gpus is not None:
            acquire(draft, role, gpus, job=job.name)
        else:
            _make_room(draft, job)


def _span(draft: Draft, job: Job) -> Micros:
    """From the acquisition to the end of an orderly release."""
    leads = draft.leads
    return leads.scaled(leads.into[job.role] + leads.out[job.role]) + job.min_runtime


def _place(draft: Draft, job: Job) -> tuple[Gpu, ...] | None:
    if not job.one_node:
        return scatter(draft.free, job.num_gpus)
    return pack(draft.free, job.num_gpus, node_size=job.num_gpus, one_node=True)


def _answer(draft: Draft, job: Job, needed: int) -> None:
    outlook, size = draft.outlook, draft.config.roles[job.role].gpus_per_replica
    is_whole = job.num_gpus % size == 0
    largest, eta = 0, None
    for index in range(outlook.first, len(outlook.timeline.intervals) if is_whole else 0):
        share = outlook.goals(index)[job.role]
        largest = max(largest, share)
        start = max(outlook.start(index), draft.now)
        fits = index > outlook.first and share >= needed
        if fits and start + _span(draft, job) <= outlook.until(job.role, needed, index):
            eta = start
            break
    if job.is_answered and job.eta == eta:
        return
    if eta is not None:
        reason = f"{format_duration(_span(draft, job))} with {job.num_gpus} GPUs fit from {draft.when(eta)}"
    elif not is_whole:
        reason = f"asks for {job.num_gpus} GPUs, replicas of {job.role} have {size}"
    elif largest < needed:
        reason = f"needs {needed} GPUs of {job.role}, which holds {largest} at most in the coming week"
    else:
        reason = f"no window of the coming week is {format_duration(_span(draft, job))} long"
    draft.actions.append(Reject(job=job.name, eta=eta, answer=job.answers, reason=reason))


def _make_room(draft: Draft, job: Job) -> None:
    """Drain standing replicas of the job's role, on one node if it must be one, and keep what is free there."""
    standing = [r for r in draft.active[job.role].values() if r.job is None and r.name not in draft.handled]
    draft.reserved[job.role] = draft.reserved.get(job.role, 0) + job.num_gpus
    if not job.one_node:
        missing = job.num_gpus - sum(len(r.gpus) for r in draft.leaving[job.role].values())
        for node, slots in draft.free.items():  # what is free is kept for the job until the rest comes
            kept = min(max(missing, 0), len(slots))
            draft.free[node], missing = slots[kept:], missing - kept
        _drain_for(draft, job, standing, missing)
        return
    plans: list[tuple[int, str, list[Replica]]] = []
    for node in draft.observed.nodes:
        on_node = [r for r in standing if {g.node for g in r.gpus} == {node.name}]
        soon = sum(g.node == node.name for rs in draft.leaving.values() for r in rs.values() for g in r.gpus)
        missing = job.num_gpus - len(draft.free[node.name]) - soon
        if sum(len(r.gpus) for r in on_node) >= missing:
            plans.append((max(missing, 0), node.name, on_node))
    if not plans:
        draft.say(f"job {job.name} waits: no node can give it {job.num_gpus} GPUs of {job.role}")
        return
    missing, name, on_node = min(plans, key=lambda plan: plan[:2])
    draft.say(f"job {job.name} gets {name}")
    draft.free[name] = []
    _drain_for(draft, job, on_node, missing)


def _drain_for(draft: Draft, job: Job, candidates: list[Replica], missing: int) -> None:
    for replica in sorted(candidates, key=lambda r: (len(r.gpus), r.name)):
        if missing <= 0:
            return
        if keeps_minimum(draft, job.role, replica):
            drain(draft, replica, f"room for job {job.name}")
            missing -= len(replica.gpus)
