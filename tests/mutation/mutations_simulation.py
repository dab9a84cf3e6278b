"""Changes to replays, comparisons and sweeps that a test must notice."""

from __future__ import annotations

INTERPRETED = True

SIMULATION = "eplb_core/simulation"
TESTS = "tests/simulation"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    (
        f"{SIMULATION}/replay.py",
        "joined(past)[-seen:]",
        "joined(past)",
        f"{TESTS}/test_replay.py::test_no_window_is_scored_on_a_layout_that_was_made_from_it",
    ),
    (
        f"{SIMULATION}/replay.py",
        "top[scored:].sum()",
        "top.sum()",
        f"{TESTS}/test_replay.py::test_the_replay_agrees_with_plain_python",
    ),
    (
        f"{SIMULATION}/dispatch.py",
        "_solved(layout, seen)",
        "_solved(layout, seen[-1])",
        f"{TESTS}/test_dispatch.py::test_previous_shares_are_solved_for_the_windows_that_were_seen",
    ),
    (
        f"{SIMULATION}/hardware.py",
        "own & (before != after)",
        "own",
        f"{TESTS}/test_costs.py::test_links_agree_with_plain_python",
    ),
    (
        f"{SIMULATION}/sweep.py",
        "+ load.tobytes()",
        "",
        f"{TESTS}/test_compare.py::test_a_sweep_goes_on_where_it_ended",
    ),
]
