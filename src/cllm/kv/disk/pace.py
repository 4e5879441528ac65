"""How fast is written: at full speed, or, while answers are generated, in bursts with long pauses between them.

Copying and summing up take time of a core, and who computes an answer has all cores at work on every token. A steady
trickle would make every token a little later; a burst now and then delays one of some hundreds, and no other. So what
a burst took is waited for many times over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SLICE_BYTES = 4 << 20
"""Written with one call."""

GENTLE_SLICE_BYTES = 4 << 20
"""While answers are generated: some milliseconds."""

GENTLE_SHARE = 0.005
"""Of the time of a core that writing takes while answers are generated."""

SHORTEST_REST_S, LONGEST_REST_S = 0.001, 2.0
LOOK_S = 0.05
"""How often one who rests looks whether there is a reason to."""


class Pace:
    def __init__(
        self,
        rate: float | None,
        *,
        sleep: Callable[[float], None],
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        """`rate`: most bytes per second, on average; None: as fast as the disk takes them."""
        self.hurried = False
        """Somebody waits until all is written."""
        self._answering: set[int] = set()
        self._rate = rate
        self._sleep = sleep
        self._worked = worked
        self._worked_s = 0.0

    @property
    def gentle(self) -> bool:
        """Answers are generated meanwhile."""
        return bool(self._answering) and not self.hurried

    def note(self, who: object, *, answering: bool) -> None:
        """One of those who have something written generates answers, or does not any more. From any thread."""
        (self._answering.add if answering else self._answering.discard)(id(who))

    def begin(self) -> None:
        """What this thread did before is paid for."""
        self._worked_s = self._worked()

    def rest(self, count: int) -> float:
        """After `count` bytes; how long that was."""
        now = self._worked()
        took, self._worked_s = now - self._worked_s, now
        pause = rested = count / self._rate if self._rate is not None else 0.0
        if pause:
            self._sleep(pause)
        wanted = min(max(took / GENTLE_SHARE, SHORTEST_REST_S), LONGEST_REST_S)
        while rested < wanted and self.gentle:
            pause = min(LOOK_S, wanted - rested)
            self._sleep(pause)
            rested += pause
        return rested
