"""Who hangs: told from entries and processes, without a clock."""

from __future__ import annotations

from pathlib import Path

from parsim.execute.processes.heartbeat import (
    PATIENCE,
    TOGETHER,
    Beat,
    Doing,
    Hang,
    ProcessState,
    Pulse,
    RankWatch,
    create_beats,
    read_beats,
)

LIMIT_S = 30.0
WORKS = Beat(doing=Doing.WORKING, count=7, step=3, text="training")
WAITS = Beat(doing=Doing.WAITING, count=9, step=3, text="training")


def seconds_until_noticed(
    beats: list[Beat], letters: str, *, cpu_per_s: float = 0.0, most_s: float = 10_000.0, poll_s: float = 0.5
) -> tuple[float, Hang] | None:
    """Ranks whose entries never change; each uses so much of a core."""
    watch = RankWatch(limit_s=LIMIT_S, nproc=len(beats))
    now_s = 0.0
    while now_s < most_s:
        states = [ProcessState(letter=letter, cpu_s=cpu_per_s * now_s) for letter in letters]
        if found := watch.look(beats, states, now_s):
            return now_s, found
        now_s += poll_s
    return None


def test_stopped_ranks_are_named_after_the_limit_even_if_all_are() -> None:
    noticed = seconds_until_noticed([WORKS, WAITS], "ST")
    assert noticed is not None
    assert LIMIT_S < noticed[0] <= LIMIT_S + 1
    both = seconds_until_noticed([WAITS, WAITS], "TT")
    assert both is not None
    assert both[1].ranks == (0, 1)
    assert "have been stopped for 30 s" in both[1].text


def test_a_zombie_that_nobody_can_reap_is_named_whatever_it_did_last() -> None:
    """One thread of it waits in the driver of a lost GPU, so the launcher learns of no exit status."""
    prepares = Beat(doing=Doing.PREPARING, count=1, step=3, text="scoring")
    for last in (WORKS, WAITS, prepares):
        noticed = seconds_until_noticed([WAITS, last], "SZ")
        assert noticed is not None
        assert LIMIT_S < noticed[0] <= LIMIT_S + 1
        assert noticed[1].ranks == (1,)
        assert "has ended but for a thread" in noticed[1].text


def test_ranks_whose_stops_fell_on_both_sides_of_a_look_are_named_together() -> None:
    watch = RankWatch(limit_s=LIMIT_S, nproc=3)
    found, now_s = None, 0.0
    while found is None:
        letters = "TSS" if now_s <= 0.5 else "TTS"  # rank 1 is stopped just after the second look
        found = watch.look([WAITS] * 3, [ProcessState(letter=letter, cpu_s=0.0) for letter in letters], now_s)
        now_s += 0.5
    assert found.ranks == (0, 1)


def test_a_rank_that_does_nothing_is_blamed_and_not_those_that_wait_for_it() -> None:
    noticed = seconds_until_noticed([WAITS, WORKS, WAITS], "SSS")
    assert noticed is not None
    assert noticed[1].ranks == (1,)
    assert LIMIT_S < noticed[0] <= LIMIT_S + 1
    assert "in step 3 (training): it hangs" in noticed[1].text


def test_a_rank_that_computes_has_more_time() -> None:
    noticed = seconds_until_noticed([WORKS, WAITS], "RS", cpu_per_s=0.5)
    assert noticed is not None
    assert noticed[0] > PATIENCE * LIMIT_S
    assert "computes without end" in noticed[1].text


def test_ranks_that_all_wait_hang_together() -> None:
    noticed = seconds_until_noticed([WAITS, WAITS], "SS")
    assert noticed is not None
    assert noticed[0] > TOGETHER * LIMIT_S
    assert noticed[1].ranks == (0, 1)


def test_those_who_wait_for_one_that_works_are_never_blamed() -> None:
    watch = RankWatch(limit_s=LIMIT_S, nproc=2)
    idle = [ProcessState(letter="S", cpu_s=0.0)] * 2
    for now_s in range(5_000):
        assert watch.look([Beat(doing=Doing.WORKING, count=now_s, step=1, text="scoring"), WAITS], idle, float(now_s)) is None


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
    assert not Pulse().is_watched
