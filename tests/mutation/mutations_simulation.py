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
        "self.shares = _solved(layout, seen)",
        "self.shares = _solved(layout, seen[-1])",
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
    (
        f"{SIMULATION}/words.py",
        "moving = sim.transfers.sum(axis=1) > 0",
        "moving = sim.transfers.sum(axis=1) >= 0",
        f"{TESTS}/test_compare.py::test_only_rebalances_that_move_something_are_counted",
    ),
    (
        f"{SIMULATION}/advice/advise.py",
        "chosen_on=_judged(sim, first, half)",
        "chosen_on=_judged(sim, first, len(sim.step_s))",
        f"{TESTS}/advice/test_advise.py::test_the_choice_has_not_seen_the_windows_that_judge_it",
    ),
    (
        "eplb_core/placement/worth/decision.py",
        "half = len(load) // 2",
        "half = 0",
        f"{TESTS}/test_decisions.py::test_plan_report_replay_and_sweep_agree_on_what_one_placement_saves",
    ),
    (
        "eplb_core/cli/plan.py",
        "place(trace.load[:half], topology",
        "place(trace.load, topology",
        f"{TESTS}/test_decisions.py::test_plan_report_replay_and_sweep_agree_on_what_one_placement_saves",
    ),
]
