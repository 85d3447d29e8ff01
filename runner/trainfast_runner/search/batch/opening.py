"""Open a batch search: an unfinished one of the same question, or a new one."""

from __future__ import annotations

import time
from pathlib import Path

from trainfast_runner.machine.cgroup import read_host_free_bytes
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.records.search_directories import is_conducted
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.batch_plan import BatchPlan
from trainfast_runner.search.journal.batch import BatchQuestion, read_batch_journal
from trainfast_runner.search.journal.lines import JournalWriter
from trainfast_runner.search.memory.limits import limits_of
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.search.question_key import key_of_question
from trainfast_runner.search.searches import BATCH_KIND, new_search, unfinished
from trainfast_runner.settings.set_by_searches import SET_BY_A_BATCH_SEARCH


def open_batch(batch_plan: BatchPlan, home: Home, options: BatchSearchOptions) -> Path:
    """Return the directory of the search this plan continues, or of a new one with its first line written."""
    home.create()
    plan = batch_plan.plan
    key = batch_key(plan)
    earlier = None if options.fresh else unfinished(home, key, BATCH_KIND)
    # The processes of a conducted search hold a part of the memory that was free when the search began.
    if earlier is not None and (is_conducted(earlier) or _limits_still_fit(plan, earlier)):
        return earlier
    directory = new_search(home, plan.spec.name)
    spec = plan.spec
    limits = limits_of(plan)
    journal = JournalWriter(directory)
    journal.write(
        BatchQuestion(
            search_id=directory.name,
            key=key,
            **spec.record_fields(),
            device=plan.device,
            world_size=plan.world_size,
            device_uuids=plan.device_uuids,
            limits_bytes=list(limits.by_rank),
            limit_words=limits.source,
            clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
        )
    )
    journal.close()
    return directory


def _limits_still_fit(plan: RunPlan, directory: Path) -> bool:
    """True if the free memory still covers the limits that the search began with: with less the machine would swap."""
    question = read_batch_journal(directory)[0]
    return (
        plan.device == "cuda"
        or not isinstance(question, BatchQuestion)
        or sum(question.limits_bytes) <= read_host_free_bytes()
    )


def batch_key(plan: RunPlan) -> str:
    """Return the key of a batch search: of model, data or script, knobs, devices and versions.

    All visible GPUs are in the key; the journal has those that the search took, the freest at its beginning.
    """
    visible: list[str | None] = []
    if plan.device == "cuda":
        visible = [gpu.uuid for gpu in detect_machine(plan.versions, plan.python or None).gpus]
    knobs = {name: value for name, value in plan.spec.knobs.items() if name not in SET_BY_A_BATCH_SEARCH}
    parts = (plan.spec.model, plan.spec.data, knobs, plan.device, visible, plan.python, plan.versions)
    return key_of_question(parts, plan)
