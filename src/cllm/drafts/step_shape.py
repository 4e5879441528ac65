"""How much longer a step with many rows takes than one with few, learnt from the steps themselves.

    seconds = pace x shape[rows]

The pace follows everything that changes from moment to moment (other programs, longer contexts); the shape is what
remains: how much longer many rows take than one. It is measured, and interpolated between measurements. Without any, it
is a guess, so that a first draft is tried. Old measurements are dropped, so that one bad moment does not count forever.

The scheduler's `StepCosts` cannot stand in for it, nor the other way round: those are seconds for a promise, so they
rise at once with a slow step and fall slowly, one number for 8 to 15 rows. Here two numbers of rows are compared, so a
slow moment must change neither, and each number of rows counts by itself.
"""

from __future__ import annotations

MOST_ROWS = 192
EXPECTED_ROW = 0.2
"""What another row takes, relative to the first, until it is measured."""

_PACE_WEIGHT, _SHAPE_WEIGHT = 0.2, 0.2
_LARGEST_SURPRISE = 1.5
_REACH = 3
_KNOWN_FOR = 128
_FORGET_AFTER = 2048
_REFRESH_EVERY = 64


class StepShape:
    def __init__(self) -> None:
        self.changes = 0
        """How often `of` was rebuilt."""
        self._pace = 0.0
        self._steps = 0
        self._measured: dict[int, tuple[float, int]] = {}
        """Rows -> their shape, and the step when it was last measured."""
        self.most_rows = 0
        """How far to trust `of`: up to three times what was measured; beyond that it is a guess."""
        self._rebuild()

    def of(self, rows: int) -> float:
        """The relative time of a step of `rows` rows, at most `MOST_ROWS`."""
        return self._shape[rows]

    def knows(self, rows: int) -> bool:
        """Whether a step of `rows` rows was measured recently."""
        known = self._measured.get(rows)
        return known is not None and self._steps - known[1] < _KNOWN_FOR

    def observe(self, rows: int, seconds: float) -> None:
        if rows > MOST_ROWS or seconds <= 0.0:
            return
        self._steps += 1
        if self._pace == 0.0:
            self._pace = seconds / self._shape[rows]
        known = self._measured.get(rows)
        shape = seconds / self._pace
        if known is not None:
            # A surprise changes the pace before the shape.
            surprise = min(max(shape / known[0], 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
            self._pace *= 1.0 + _PACE_WEIGHT * (surprise - 1.0)
            shape = known[0] * (1.0 + _SHAPE_WEIGHT * (surprise - 1.0))
            self._shape[rows] = shape
        self._measured[rows] = (shape, self._steps)
        if known is None or self._steps % _REFRESH_EVERY == 0:
            self._rebuild()

    def _rebuild(self) -> None:
        """The whole shape, from the measurements."""
        self.changes += 1
        oldest = self._steps - _FORGET_AFTER
        self._measured = {rows: known for rows, known in self._measured.items() if known[1] >= oldest}
        points = sorted((rows, known[0]) for rows, known in self._measured.items())
        if not points:
            points = [(1, 1.0)]
        shape = [points[0][1] * _expected(rows) / _expected(points[0][0]) for rows in range(points[0][0] + 1)]
        for rows, value in points[1:]:
            before, last = len(shape) - 1, shape[-1]
            shape += [last + (value - last) * (each - before) / (rows - before) for each in range(before + 1, rows + 1)]
        self.most_rows = min(_REACH * points[-1][0], MOST_ROWS)
        slope = _slope(points)
        last, end = shape[-1], len(shape) - 1
        shape += [last + slope * (rows - end) for rows in range(end + 1, MOST_ROWS + 1)]
        self._shape = shape


def _expected(rows: int) -> float:
    return 1.0 + EXPECTED_ROW * (rows - 1)


def _slope(points: list[tuple[int, float]]) -> float:
    """What each row beyond the largest measurement takes: as much as those of its upper half."""
    rows, value = points[-1]
    for other, known in reversed(points[:-1]):
        if 2 * other <= rows or rows - other >= 8:
            return max((value - known) / (rows - other), 0.0)
    return value * EXPECTED_ROW / _expected(rows)
