"""An engine whose steps wait for the test, so that things happen to a request at a known moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from foredraft.engine.engine import Engine
from foredraft.plan import StepPlan, StepResult

WAIT_SECONDS = 20.0


class HeldSteps:
    """Each step waits before its forward until `let` allows it. plans: of all steps that came so far, the one that
    waits included."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self._num_allowed = 0
        self._is_free = False
        self._changed = threading.Condition()

    def let(self, num_steps: int) -> None:
        """Allow that many more steps, and wait until the engine stands before the next one."""
        with self._changed:
            count = len(self.plans) + num_steps
            self._num_allowed += num_steps
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self.plans) >= count, WAIT_SECONDS), "there was no such step"

    def let_one_go(self) -> None:
        """Allow the step that waits, whether or not another one follows."""
        with self._changed:
            self._num_allowed += 1
            self._changed.notify_all()

    def wait_for_step(self) -> None:
        """Wait until a first step stands there."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.plans) > 0, WAIT_SECONDS), "there was no step"

    def free(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._is_free = True
            self._changed.notify_all()

    def hold(self, plan: StepPlan) -> None:
        """Called in the engine's thread."""
        with self._changed:
            self.plans.append(plan)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_free or self._num_allowed > 0, WAIT_SECONDS)
            self._num_allowed = max(self._num_allowed - 1, 0)


@contextmanager
def held_steps(engine: Engine) -> Iterator[HeldSteps]:
    """Hold the steps of an engine that is idle, until the block ends."""
    execute, held = engine.runner.execute, HeldSteps()

    def waiting(plan: StepPlan) -> StepResult:
        held.hold(plan)
        return execute(plan)

    engine.runner.execute = waiting  # type: ignore[method-assign]
    try:
        yield held
    finally:
        held.free()
        engine.runner.execute = execute  # type: ignore[method-assign]
