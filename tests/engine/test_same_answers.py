"""One script on three machines: slots, blocks, and blocks on a backend that computes ahead.

Requests come, are cancelled, run out of time and of memory, and calls fail: each ends exactly once, and what it got is
what it gets alone.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from same_answers import SameAnswers, SameAnswersOfLocalLayers, SameAnswersOfStates
from thorough import sampled

pytestmark = pytest.mark.usefixtures("quiet")


for _machine in (SameAnswers, SameAnswersOfLocalLayers, SameAnswersOfStates):
    _machine.TestCase.settings = settings(max_examples=sampled(30), stateful_step_count=25, deadline=None)
TestSameAnswers = SameAnswers.TestCase
TestSameAnswersOfLocalLayers = SameAnswersOfLocalLayers.TestCase
TestSameAnswersOfStates = SameAnswersOfStates.TestCase
