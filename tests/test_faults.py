"""The table of benchmarks.faults, one case of some kinds: kill -9, damage, flipped bits, a signal."""

from benchmarks import faults


def test_nothing_is_lost_and_nothing_is_silent(long):
    outcomes = faults.run(short=True, seed=0)
    assert len(outcomes) >= 4
    assert [outcome for outcome in outcomes if not outcome.good] == []
