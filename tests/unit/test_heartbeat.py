"""Who hangs: told from entries and processes, without a clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsim.execute.processes.heartbeat import (
    PATIENCE,
    TOGETHER,
    Beat,
    Doing,
    ProcessState,
    Pulse,
    RankWatch,
    create_beats,
    read_beats,
)

LIMIT_S = 30.0
WORKS = Beat(doing=Doing.WORKING, count=7, step=3, text="training")
WAITS = Beat(doing=Doing.WAITING, count=9, step=3, text="training")


PREPARES = Beat(doing=Doing.PREPARING, count=1, step=3, text="scoring")
LONG_S = 10_000.0


@pytest.mark.parametrize(
    ("beats", "letters", "cpu_per_s", "after_s", "before_s", "ranks", "text"),
    [
        pytest.param([WORKS, WAITS], "ST", 0, LIMIT_S, LIMIT_S + 1, (1,), "has been stopped for 30 s", id="stopped"),
        pytest.param([WAITS, WAITS], "TT", 0, LIMIT_S, LIMIT_S + 1, (0, 1), "have been stopped for 30 s", id="all stopped"),
        # a zombie that nobody can reap, of which one thread waits in the driver of a lost GPU: whatever it did last
        pytest.param([WAITS, WORKS], "SZ", 0, LIMIT_S, LIMIT_S + 1, (1,), "has ended but for a thread", id="zombie, worked"),
        pytest.param([WAITS, WAITS], "SZ", 0, LIMIT_S, LIMIT_S + 1, (1,), "has ended but for a thread", id="zombie, waited"),
        pytest.param([WAITS, PREPARES], "SZ", 0, LIMIT_S, LIMIT_S + 1, (1,), "has ended but for", id="zombie, prepared"),
        # who does nothing is blamed, and not those that wait for it
        pytest.param([WAITS, WORKS, WAITS], "SSS", 0, LIMIT_S, LIMIT_S + 1, (1,), "step 3 (training): it hangs", id="idle"),
        pytest.param([WORKS, WAITS], "RS", 0.5, PATIENCE * LIMIT_S, LONG_S, (0,), "computes without end", id="computes"),
        pytest.param([WAITS, WAITS], "SS", 0, TOGETHER * LIMIT_S, LONG_S, (0, 1), "waited for one another", id="all wait"),
    ],
)
def test_who_hangs_is_named_once_it_is_sure(
    beats: list[Beat], letters: str, cpu_per_s: float, after_s: float, before_s: float, ranks: tuple[int, ...], text: str
) -> None:
    """The ranks' entries never change; each uses so much of a core."""
    watch = RankWatch(limit_s=LIMIT_S, nproc=len(beats))
    now_s, hang = 0.0, None
    while hang is None and now_s < LONG_S:
        states = [ProcessState(letter=letter, cpu_s=cpu_per_s * now_s) for letter in letters]
        hang = watch.look(beats, states, now_s)
        now_s += 0.5
    assert hang is not None
    assert after_s < now_s - 0.5 <= before_s
    assert (hang.ranks, text in hang.text) == (ranks, True), hang.text


def test_ranks_whose_stops_fell_on_both_sides_of_a_look_are_named_together() -> None:
    watch = RankWatch(limit_s=LIMIT_S, nproc=3)
    found, now_s = None, 0.0
    while found is None:
        letters = "TSS" if now_s <= 0.5 else "TTS"  # rank 1 is stopped just after the second look
        found = watch.look([WAITS] * 3, [ProcessState(letter=letter, cpu_s=0.0) for letter in letters], now_s)
        now_s += 0.5
    assert found.ranks == (0, 1)


def test_those_who_wait_for_one_that_works_are_never_blamed() -> None:
    watch = RankWatch(limit_s=LIMIT_S, nproc=2)
    idle = [ProcessState(letter="S", cpu_s=0.0)] * 2
    for now_s in range(5_000):
        assert watch.look([Beat(doing=Doing.WORKING, count=now_s, step=1, text="scoring"), WAITS], idle, float(now_s)) is None


def test_a_rank_that_computed_before_it_hung_is_named_as_soon_as_one_that_did_not() -> None:
    """It was seen running once after its last beat, as where connections are made and one of them never answers."""
    found = []
    for beats in ([WAITS, WAITS], [WORKS, WAITS]):
        watch = RankWatch(limit_s=LIMIT_S, nproc=2)
        now_s, hang = 0.0, None
        while hang is None and now_s < LONG_S:
            letter, cpu_s = ("R", now_s) if 1 < now_s < 5 else ("S", min(now_s, 5))
            hang = watch.look(beats, [ProcessState(letter=letter, cpu_s=cpu_s)] * 2, now_s)
            now_s += 0.5
        found.append(now_s)
    assert TOGETHER * LIMIT_S < found[0] <= TOGETHER * LIMIT_S + 1
    assert LIMIT_S < found[1] <= 2 * LIMIT_S + 5


def test_a_launcher_that_was_stopped_itself_blames_nobody() -> None:
    watch = RankWatch(limit_s=LIMIT_S, nproc=1)
    states = [ProcessState(letter="S", cpu_s=0.0)]
    assert watch.look([WORKS], states, 0.0) is None
    assert watch.look([WORKS], states, 3600.0) is None


def test_entries_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "beats"
    create_beats(path, 2)
    pulse = Pulse(path, 1)
    pulse.begin(Doing.WORKING, "scoring " * 20, step=12)
    with pulse.waiting():
        assert read_beats(path, 2)[1].doing is Doing.WAITING
    first, second = read_beats(path, 2)
    assert (first.doing, first.count) == (Doing.NOTHING, 0)
    assert (second.doing, second.count, second.step) == (Doing.WORKING, 3, 12)
    assert second.text.startswith("scoring scoring")


def test_a_rank_that_waits_for_those_of_other_guards_does_not_hang() -> None:
    waits = Beat(doing=Doing.WAITING, count=5, step=7, text="")
    states = [ProcessState(letter="S", cpu_s=1.0)]
    looks = [float(second) for second in range(10_000)]
    alone, all_of_them = (RankWatch(limit_s=3.0, nproc=1, sees_all=sees_all) for sees_all in (False, True))
    assert not any(alone.look([waits], states, now_s) for now_s in looks)
    assert any(all_of_them.look([waits], states, now_s) for now_s in looks)
