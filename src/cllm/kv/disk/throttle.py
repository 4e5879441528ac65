"""How fast to write: at full speed, or, while sequences run, in bursts with long pauses.

Copying and checksumming take time on a core, and generation uses all cores for every token. A steady trickle would
delay every token a little; an occasional burst delays one in some hundreds. So after each burst the writer pauses for
many times as long as it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable

THROTTLED_SHARE = 0.005
"""The share of a core that writing takes while sequences run."""

SHORTEST_REST_S, LONGEST_REST_S = 0.001, 2.0
LOOK_S = 0.05
"""How often a pause is checked for a reason to end."""


class Throttle:
    def __init__(
        self,
        *,
        sleep: Callable[[float], None],
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self.suspended = False
        """Somebody waits for the queue to be written: write at full speed."""
        self._answering: set[int] = set()
        self._sleep = sleep
        self._worked = worked
        self._worked_s = 0.0

    @property
    def active(self) -> bool:
        """Whether writing is throttled: sequences run."""
        return bool(self._answering) and not self.suspended

    def note(self, who: object, *, answering: bool) -> None:
        """`who` (a manager's tier) runs sequences now, or no longer. From any thread."""
        (self._answering.add if answering else self._answering.discard)(id(who))

    def begin(self) -> None:
        """Start measuring this thread's CPU time."""
        self._worked_s = self._worked()

    def rest(self) -> float:
        """Pause for as long as the work since the last pause demands; returns for how long."""
        now = self._worked()
        took, self._worked_s = now - self._worked_s, now
        rested = 0.0
        wanted = min(max(took / THROTTLED_SHARE, SHORTEST_REST_S), LONGEST_REST_S)
        while rested < wanted and self.active:
            pause = min(LOOK_S, wanted - rested)
            self._sleep(pause)
            rested += pause
        return rested
