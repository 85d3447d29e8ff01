"""A best-fit search under a fake clock: the real decision code, and trials that a space answers."""

import itertools
import random
import statistics
from dataclasses import dataclass, field

from benchmarks.best_fit_spaces import UNTIMED, Process, Terrain
from msgspec.structs import replace as replace_fields

from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.search.best.answer import answer_of
from trainfast_runner.search.best.decide import COLD_ROLES, BestDecision, BestState, decide
from trainfast_runner.search.best.question import lever_point
from trainfast_runner.search.best_journal import BestAnswer, BestLine, BestQuestion, ColdRun, ProcessReady, Space, Trial

MAX_DECISIONS = 1000
COLD_WARMUP = 3
SWITCH_S = 0.3
"""Seconds to turn the warm knobs to a candidate's, where none were recorded."""


@dataclass
class Replayed:
    """One replayed search. `leader` was chosen by trials alone, `answer` after the runs in fresh processes.

    Seconds are of the fake clock.
    """

    leader: int | None = None
    answer: int | None = None
    leader_s: float = 0.0
    seconds: float = 0.0
    starts: int = 0
    cold: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLD_ROLES, 0))
    best_answer: BestAnswer | None = None
    stopped_because: str = ""
    lines: list[BestLine] = field(default_factory=list)


class FakeConductor:
    """Does what is decided, as the conductor of a search does, in no time. `lines` is the journal so far."""

    def __init__(
        self, terrain: Terrain, question: BestQuestion, seed: int, lines: list[BestLine] | None = None
    ) -> None:
        self.terrain, self.seed = terrain, random.Random(seed)
        self.lines: list[BestLine] = lines if lines is not None else [question, terrain.space]
        self.spent_s = sum(line.seconds for line in self.lines if isinstance(line, Trial | ColdRun))
        self._process: Process | None = None
        self.run_id: str | None = None
        self.latest: BestState | None = None

    def run(self, most_decisions: int = MAX_DECISIONS) -> Replayed:
        """Conduct to the end, or for so many decisions, after which everything of this process is forgotten."""
        replayed = Replayed(lines=self.lines)
        for _ in range(most_decisions):
            decision = self.next()
            if decision.step.action == "end":
                break
            if decision.step.action == "trial":
                self.trial(decision)
                replayed.leader_s = self.spent_s
            else:
                self.cold_run(decision)
        else:
            return replayed
        assert self.latest is not None
        replayed.stopped_because = decision.step.why
        replayed.leader, replayed.seconds = self.latest.leader_number, self.spent_s
        replayed.best_answer = answer_of(self.latest)
        replayed.answer = replayed.best_answer.best_number if replayed.best_answer is not None else None
        replayed.starts = sum(isinstance(line, ProcessReady) for line in self.lines)
        for line in self.lines:
            if isinstance(line, ColdRun):
                replayed.cold[line.role] += 1
        assert replayed.leader is None or replayed.answer == self.latest.cold.answer_number
        return replayed

    def next(self) -> BestDecision:
        """Decide the next step."""
        self.latest = BestState(self.lines, self.spent_s, self.run_id)
        return decide(self.latest)

    def trial(self, decision: BestDecision) -> None:
        """Try a setting in the process that waits, or in a new one."""
        number = decision.step.candidate_number
        assert number is not None
        candidate = self.terrain.space.candidates[number]
        process = None if decision.needs_new_process else self._process
        warm = process is not None
        if process is None:
            self._process = process = self.terrain.process(number, self.seed)
            self.run_id, start_s = f"visit-{len(self.lines)}", self._process.start_s
            self.lines.append(ProcessReady(run_id=self.run_id, process_knobs=candidate.process_knobs, start_s=start_s))
            self.spent_s += start_s
        assert self.run_id is not None
        began_s = self.spent_s
        if warm:
            # The first switch to a candidate may have been recorded.
            self.spent_s += process.switches_s.get(number, SWITCH_S)
        steps = process.steps(number)
        self.spent_s += sum(next(steps) for _ in range(UNTIMED)) / 1000
        taken: list[float] = []
        while (verdict := decision.step_rule.judge(taken)) == "more":
            taken.append(next(steps))
        self.spent_s += sum(taken) / 1000
        self.lines.append(
            Trial(
                candidate_number=number,
                run_id=self.run_id,
                outcome="slow" if verdict == "slow" else "measured",
                warm=warm,
                samples_per_step=candidate.samples_per_step,
                step_ms=taken,
                peak_allocated_bytes=candidate.predicted_bytes,
                seconds=self.spent_s - began_s,
                repeats=decision.step.repeats,
                profile=self.terrain.profile(number),
            )
        )

    def cold_run(self, decision: BestDecision) -> None:
        """Run a setting in a fresh process."""
        step, number = decision.step, decision.step.candidate_number
        assert number is not None
        self._process, self.run_id = None, None
        candidate = self.terrain.space.candidates[number]
        process = self.terrain.process(number, self.seed, cold=True)
        taken = list(itertools.islice(process.steps(number), COLD_WARMUP + decision.step_rule.min_steps))
        seconds = process.start_s + sum(taken) / 1000
        self.spent_s += seconds
        run_id = f"run-{len(self.lines)}"
        self.lines.append(
            ColdRun(
                candidate_number=number,
                role=step.action,
                run_id=run_id,
                outcome="measured",
                knob=step.knob,
                samples_per_s=1000 * candidate.samples_per_step / statistics.median(taken[COLD_WARMUP:]),
                start_s=process.start_s,
                peak_allocated_bytes=candidate.predicted_bytes,
                seconds=seconds,
            )
        )


class StagedConductor(FakeConductor):
    """A conductor whose space is of stages: what is not around the baseline or a leader is ruled out so far."""

    def __init__(self, terrain: Terrain, question: BestQuestion, seed: int) -> None:
        self.around = [terrain.space.baseline_number]
        self.whole = terrain.space
        super().__init__(terrain, question, seed, [question, self._stage()])

    def next(self) -> BestDecision:
        """Let the space grow around a new leader, and decide the next step."""
        decision = super().next()
        assert self.latest is not None
        if (center := self.latest.next_center) is None:
            return decision
        self.around.append(center)
        self.lines.append(self._stage())
        return super().next()

    def _stage(self) -> Space:
        points = [lever_point(one.knobs) for one in self.whole.candidates]
        candidates = [
            one
            if one.excluded_as
            or any(sum(points[near][name] != point[name] for name in point) < 2 for near in self.around)
            else replace_fields(one, excluded_as="not_tried", reason="in a later stage")
            for one, point in zip(self.whole.candidates, points, strict=True)
        ]
        return replace_fields(self.whole, candidates=candidates, around=[*self.around])


def question(
    name: str, space: Space, objective: str = "samples_per_s", for_steps: int | None = None, budget_s: float = 1e9
) -> BestQuestion:
    """The question that a space is searched for."""
    baseline = space.candidates[space.baseline_number]
    vary = {knob: list(dict.fromkeys(one.knobs[knob] for one in space.candidates)) for knob in baseline.knobs}
    return BestQuestion(
        preset=name,
        title=name,
        model={"family": name},
        data={},
        knobs=dict(baseline.knobs),
        overrides=[],
        search_id=name,
        key=name,
        vary=vary,
        global_batch=baseline.samples_per_step,
        objective=objective,
        for_steps=for_steps,
        budget_s=budget_s,
        device="cuda" if "GPU" in name else "cpu",
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )


def replay(
    terrain: Terrain, seed: int, search_question: BestQuestion | None = None, *, in_stages: bool = False
) -> Replayed:
    """Search a space once, at once or in stages, where a lever that saves memory is tried only if it has to be."""
    asked = search_question or question(terrain.name, terrain.space)
    if in_stages:
        return StagedConductor(terrain, replace_fields(asked, is_default_vary=True), seed).run()
    return FakeConductor(terrain, asked, seed).run()


def leader_within(terrain: Terrain, seed: int, seconds: float) -> tuple[int | None, FakeConductor]:
    """The leader after these seconds of trials, without the runs that confirm, and the conductor."""
    conductor, leader = FakeConductor(terrain, question(terrain.name, terrain.space), seed), None
    while True:
        decision = conductor.next()
        if conductor.latest is not None and conductor.spent_s <= seconds:
            leader = conductor.latest.leader_number
        if decision.step.action != "trial" or conductor.spent_s > seconds:
            return leader, conductor
        conductor.trial(decision)
