"""The turns of a script: which batches, forward passes and times are its training's, and which an evaluation's.

A batch counts once its forward pass has reached a backward pass. The time between two backward passes is cut into
turns: in each one the script draws from one iterator only. The training's turn is that of the iterator it trains
on; the others are evaluations.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any

REMEMBERED_LOADERS = 16
"""DataLoaders that are known to be trained on: a script may make one for each epoch."""


class Source:
    """An iterator that gives batches. Nothing of the script is kept alive."""

    def __init__(self, iterator: Any, loader: Any) -> None:
        """`loader` is the same object for all iterators of one DataLoader."""
        self.iterator, self.loader = _reference(iterator), _reference(loader)
        self.knobs: tuple[int, bool] | None = None
        """Workers and pinned memory of its DataLoader."""
        self.sizes: list[int] = []
        """Samples of the batches given that no backward has reached."""
        self.ahead: int | None = None
        """Batches that are drawn ahead of the one that trains; None until the first draw after a backward."""
        self.is_reached = False
        """True if a backward has reached one of its batches."""
        self.ended = False

    def is_open(self) -> bool:
        """True if the script may draw from the iterator again."""
        return not self.ended and self.iterator() is not None

    def begin_draw(self) -> None:
        """Note that the next batch is asked for."""
        if self.ended:
            # The iterator of persistent workers begins anew.
            self.ended, self.ahead, self.is_reached = False, None, False
            self.sizes.clear()
        if self.is_reached and self.ahead is None:
            self.ahead = len(self.sizes)

    def reach(self) -> int:
        """Take the batches that a backward has reached, and return their samples.

        Of several batches drawn before the first backward it takes one: the others were drawn ahead.
        """
        is_one_by_one = self.ahead is None or self.ended
        taken = 1 if is_one_by_one else max(0, len(self.sizes) - (self.ahead or 0))
        self.is_reached = True
        samples = sum(self.sizes[:taken])
        del self.sizes[:taken]
        return samples


class Turn:
    """A time of draws from one source, or of none."""

    # Class attributes are the defaults: two turns are made in each step.
    draws = waited_ns = 0
    forward_ns: int | None = None
    rows = 0
    """Leading dimensions of the model's inputs in forward passes with gradients."""
    evaluation_ns = 0
    """Start of an evaluation that draws no batches; 0 without one."""
    is_without_gradients = False
    """True if a forward pass without gradients was seen."""

    def __init__(self, source: Source | None, begun_ns: int) -> None:
        self.source = source
        self.begun_ns = self.ended_ns = begun_ns
        """Start, and the end of the last draw or the start of the last forward pass of an evaluation."""


class Turns:
    """The turns since the last backward pass, and the sums of the step's training turns."""

    def __init__(self) -> None:
        self._sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()
        self._trained: deque[Callable[[], Any]] = deque(maxlen=REMEMBERED_LOADERS)
        """References to the loaders that are trained on."""
        self._turns = [Turn(None, monotonic_ns())]
        self.training: Source | None = None
        """The source that the last backward reached."""
        self.batch_size: int | None = None
        """Samples of the first batch that was trained on; None before, and if they cannot be counted."""
        self.loader_knobs: tuple[int, bool] | None = None
        """Workers and pinned memory of the DataLoader that is trained on; of the first one before; None without one."""
        self.evaluated_ns = 0
        """Time of all evaluations that were followed by a backward."""
        self.in_backward = False
        self.in_training = False
        """True if the last forward pass had gradients and was in training mode; False before the first."""
        self.begin_step()

    def begin_step(self) -> None:
        """Begin the sums of a step."""
        self.data_ns: int | None = None
        """Time that the step waited for batches; None if it asked for none."""
        self.forward_ns: int | None = None
        """Time of its forward passes on a CPU; None if none was seen."""
        self.samples = self.rows = 0
        """Samples of its batches, and leading dimensions of its model's inputs."""
        self.step_evaluated_ns = 0
        """Time of evaluations since the last step."""
        self.has_backward = False

    def begin_draw(self, iterator: Any, loader: Any, now_ns: int) -> Turn:
        """Note that the script asks `iterator` for a batch, and return the turn that this belongs to."""
        turn = self._turns[-1]
        source = turn.source
        if source is None or source.iterator() is not iterator:
            source = self._sources.get(iterator)
            if source is None:
                source = self._sources[iterator] = Source(iterator, loader)
            turn = self._begin_turn(source, now_ns)
        source.begin_draw()
        return turn

    def end_draw(self, turn: Turn, begun_ns: int, size: int | None, knobs: tuple[int, bool] | None) -> None:
        """Add the batch that the draw gave, by its samples; `size` is None at the iterator's end."""
        turn.ended_ns = monotonic_ns()
        assert turn.source is not None
        if size is None:
            turn.source.ended = True
            return
        turn.draws += 1
        turn.waited_ns += turn.ended_ns - begun_ns
        turn.source.sizes.append(size)
        turn.source.knobs = knobs
        self.loader_knobs = self.loader_knobs or knobs

    def add_forward(self, rows: int, is_training: bool, now_ns: int) -> None:
        """Note a forward pass with gradients."""
        self.in_training = is_training
        turn = self._turns[-1]
        # An evaluation may come between the draw of a batch and its forward pass.
        if turn.evaluation_ns or (turn.source is not None and turn.source.ended):
            turn = self._begin_turn(None, now_ns)
        turn.rows += rows

    def add_evaluation(self, now_ns: int, is_training: bool) -> None:
        """Note a forward pass without gradients: in evaluation mode and without a batch it evaluates."""
        self.in_training = False
        turn = self._turns[-1]
        turn.is_without_gradients = True
        if is_training or (turn.source is not None and not turn.source.ended):
            return
        if not turn.evaluation_ns:
            turn = self._begin_turn(None, now_ns)
            turn.evaluation_ns = now_ns
        turn.ended_ns = now_ns

    def add_forward_time(self, taken_ns: int) -> None:
        """Add the time of a forward pass with gradients."""
        turn = self._turns[-1]
        turn.forward_ns = (turn.forward_ns or 0) + taken_ns

    def reach_backward(self, step_begun_ns: int) -> None:
        """Add the training's turns since the last backward, which has just ended, to the step."""
        self.has_backward = True
        before, last = self._turns[0], self._turns[-1]
        if len(self._turns) == 2 and last.source is self.training is not None and not before.evaluation_ns:
            training = [last]  # nearly every step, so this path is short
        else:
            training = self._training_turns()
            evaluated_ns = self._evaluated_ns(training, step_begun_ns)
            self.step_evaluated_ns += evaluated_ns
            self.evaluated_ns += evaluated_ns
        reached = {id(source): source for source in [turn.source for turn in training] or [self.training] if source}
        if self._is_new_attempt(reached.values()):
            self.batch_size, self.samples, self.rows = None, 0, 0
        for turn in self._turns:
            if turn.evaluation_ns or (turn.source is not None and turn not in training):
                continue
            self.rows += turn.rows
            if turn.forward_ns is not None:
                self.forward_ns = (self.forward_ns or 0) + turn.forward_ns
            if turn.draws:
                self.data_ns = (self.data_ns or 0) + turn.waited_ns
        for source in reached.values():
            if source is not self.training and not self._is_trained(source):
                self._trained.append(source.loader)
            if self.batch_size is None and source.sizes:
                self.batch_size, self.loader_knobs = source.sizes[0] or None, source.knobs
            self.training = source
            self.samples += source.reach()
        self._turns = [Turn(None, monotonic_ns())]

    def _is_new_attempt(self, reached: Iterable[Source]) -> bool:
        """True if an iterator has gone midway and all loaders are new: the script tries another batch size."""
        training = self.training
        if training is None or training.ended or training.iterator() is not None:
            return False
        return not any(source is training or self._is_trained(source) for source in reached)

    @property
    def is_evaluating(self) -> bool:
        """True if the script evaluates now, as far as known."""
        turn = self._turns[-1]
        if turn.source is None:
            return bool(turn.evaluation_ns)
        return bool(self._trained) and not turn.rows and not self._is_trained(turn.source)

    def all_evaluated_ns(self) -> int:
        """Time of all evaluations, those after the last backward too."""
        training = [turn for turn in self._turns if self._is_trained(turn.source)]
        return self.evaluated_ns + self._evaluated_ns(training, 0)

    def _begin_turn(self, source: Source | None, now_ns: int) -> Turn:
        # Without draws of its own an evaluation ends where the next turn begins; else after its last draw.
        before = self._turns[-1]
        if source is not None or before.evaluation_ns:
            before.ended_ns = now_ns
        turn = Turn(source, now_ns)
        self._turns.append(turn)
        return turn

    def _evaluated_ns(self, training: list[Turn], step_begun_ns: int) -> int:
        """The time of the turns that are evaluations, from `step_begun_ns` on."""
        return sum(
            max(0, turn.ended_ns - max(turn.evaluation_ns or turn.begun_ns, step_begun_ns))
            for turn in self._turns
            # An epoch's end, a draw that gives no batch, begins no evaluation.
            if turn.evaluation_ns or (turn.draws and turn not in training)
        )

    def _is_trained(self, source: Source | None) -> bool:
        loader = None if source is None else source.loader()
        return loader is not None and any(trained() is loader for trained in self._trained)

    def _training_turns(self) -> list[Turn]:
        """The turns of the sources that a backward has just reached; empty if no batch was drawn.

        A source of a loader that is trained on is likelier than a new one, one that goes on likelier than one that has
        ended. With it go those that gave as many batches: a script may draw from two at once.
        """
        ranked = [
            ((self._is_trained(turn.source), turn.source.is_open()), turn)
            for turn in self._turns
            if turn.source is not None
        ]
        if not ranked:
            return []
        best = max(rank for rank, _ in ranked)
        likeliest = [turn for rank, turn in ranked if rank == best]
        is_known, last = best[0], likeliest[-1]
        return [
            turn
            for (_, is_open), turn in ranked
            if (is_known and turn in likeliest)
            or turn is last
            or (is_open and turn.draws == last.draws and not turn.is_without_gradients)
        ]


def _reference(thing: Any) -> Callable[[], Any]:
    """A weak reference; a strong one to what allows no other, such as a list of batches."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing
