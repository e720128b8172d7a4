"""The batch of each step, taken and decoded while the step before it trains.

    consumes    leased batches of the hub
    produces    packed batches, in order of their steps
    waits for   the hub, on a thread of its own while the learner trains

Invariants:
- At most one step is asked for ahead, and none with `schedule.max_staleness` = 0: there the next batch is sampled from
  the weights that are being made.
- A batch taken ahead is leased for its own step, so the staleness bound is checked against that.
- A loop that ends early leaves nothing to wait for: the thread is a daemon, and closing the hub's line ends its call.
"""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class BatchesAhead(Generic[Batch]):
    """Hands out the batch of each step.

    Args:
        take: Gets a step and a deadline in seconds; blocks and returns its batch.
        num_steps: Steps of the run; none after them is asked for.
        ahead: Whether the next step's batch may be asked for before the current one is committed.
        wait_s: Deadline of a batch that the learner waits for.
        train_s: The longest that a step may train; a batch asked for ahead may take so much longer.
    """

    def __init__(
        self, take: Callable[[int, float], Batch], *, num_steps: int, ahead: bool, wait_s: float, train_s: float
    ) -> None:
        self._take = take
        self._num_steps = num_steps
        self._ahead = ahead
        self._wait_s = wait_s
        self._train_s = train_s
        self._asked: tuple[int, Future[Batch]] | None = None

    def get(self, step: int, beside: Future[Any] | None = None) -> Batch:
        """Wait for the batch of `step`, and ask for the next one. Steps must be consecutive.

        Args:
            step: Its number.
            beside: Other work under way, without which no batch may come; ends the wait if it fails.

        Raises:
            HeadraceError: What taking it raised, or the work beside it.
        """
        if self._asked is None:
            batch = self._take(step, self._wait_s)
        else:
            asked, future = self._asked
            assert asked == step, f"step {step} is wanted, but {asked} was asked for"
            self._asked = None
            if beside is not None and beside in wait({future, beside}, return_when=FIRST_COMPLETED).done:
                beside.result()
            batch = future.result()
        if self._ahead and step + 1 < self._num_steps:
            self._asked = step + 1, self._ask(step + 1)
        return batch

    def _ask(self, step: int) -> Future[Batch]:
        future: Future[Batch] = Future()

        def work() -> None:
            try:
                future.set_result(self._take(step, self._wait_s + self._train_s))
            except BaseException as error:  # raised again where the batch is wanted
                future.set_exception(error)

        threading.Thread(target=work, name=f"batch of step {step}", daemon=True).start()
        return future
