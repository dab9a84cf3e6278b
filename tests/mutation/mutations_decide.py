"""Changes to decisions, budgets, forecasts and elastic helpers that a test must notice."""

from __future__ import annotations

INTERPRETED = True

COSTS = "eplb_core/placement/worth/costs.py"
DECIDE = "eplb_core/placement/worth/decide.py"
TIMES = "eplb_core/placement/worth/pass_time.py"
REPORT = "eplb_core/placement/worth/report.py"
ELASTIC = "eplb_core/placement/elastic.py"
FORECAST = "eplb_core/placement/forecast.py"
BACKTEST = "eplb_core/simulation/backtest.py"
BUDGET = "eplb_core/placement/worth/slots.py"
SPEND = "eplb_core/placement/spend.py"
TEST_COSTS = "tests/placement/worth/test_costs.py"
TEST_DECIDE = "tests/placement/worth/test_decide.py"
TEST_REPORT = "tests/placement/worth/test_report.py"
TEST_ELASTIC = "tests/placement/test_elastic.py"
TEST_FORECAST = "tests/placement/test_forecast.py"
TEST_BACKTEST = "tests/simulation/test_backtest.py"
TEST_BUDGET = "tests/placement/worth/test_slots.py"
TEST_SPEND = "tests/placement/test_spend.py"

GAIN = f"{TEST_DECIDE}::test_gain_is_the_difference_of_the_slowest_ranks_times"
WORTH = f"{TEST_DECIDE}::test_a_layer_moves_exactly_if_it_gains_and_pays_back"
WEIGHTED = f"{TEST_DECIDE}::test_weighted_dispatch_is_judged_by_the_best_shares_of_each_window"
DIED = f"{TEST_DECIDE}::test_an_expert_that_died_with_its_rank_moves_its_layer_whatever_that_costs"
OPTIMAL = f"{TEST_SPEND}::test_no_other_choice_within_the_budget_gains_more"
NOISE = f"{TEST_DECIDE}::test_noise_of_one_percent_moves_nothing"
PAYBACK = f"{TEST_DECIDE}::test_a_layer_that_does_not_pay_for_itself_is_not_paid_for_by_others"
RETIRE = f"{TEST_ELASTIC}::test_retiring_moves_exactly_what_only_the_leaving_ranks_hold"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # the time of a pass: not of the slowest rank, not by its speed, not by its own share
    (TIMES, "worst = max(worst, (token_s", "worst = min(worst, (token_s", GAIN),
    (TIMES, "+ expert_s * busy) / rank_speed[r])", "+ expert_s * busy))", GAIN),
    (TIMES, "mine = load[t, layer, e] / count[e]", "mine = load[t, layer, e]", GAIN),
    # an expert is read once a pass and no more often
    (TIMES, "busy += min(mine, passes)", "busy += mine", GAIN),
    (TIMES, "total += worst / passes", "total += worst", GAIN),
    (TIMES, "times += model.layer_s", "times += 0.0", GAIN),
    (TIMES, "times[lost] = np.inf", "times[lost] = 0.0", DIED),
    # shares: even ones in place of those given
    (
        TIMES,
        "if shares.shape[0] == 0:",
        "if shares.shape[0] >= 0:",
        f"{TEST_DECIDE}::test_shares_say_what_a_slot_takes",
    ),
    # weighted dispatch: tokens counted twice, or a window whose load is not divided by what balance it reaches
    (TIMES, "0.0 if solved else model.token_s", "model.token_s", WEIGHTED),
    (TIMES, "np.divide(even[window], balance[window],", "np.divide(even[window], 1.0,", WEIGHTED),
    # an expert that the rank holds crosses the wire, or one counted twice
    (
        TIMES,
        "if e < 0 or had[e] == mark:",
        "if e < 0:",
        f"{TEST_DECIDE}::test_transfers_are_counted_as_the_metric_counts_them",
    ),
    # the near holder is not preferred; one holder sends all
    (
        TIMES,
        "(close and not near)",
        "(not close and near)",
        f"{TEST_DECIDE}::test_a_transfer_comes_from_a_holder_on_its_node_if_there_is_one",
    ),
    (
        TIMES,
        "busy[1, holder[i]] < busy[1, source]",
        "busy[1, holder[i]] > busy[1, source]",
        f"{TEST_DECIDE}::test_holders_share_the_sending",
    ),
    # verdicts: any gain, no pay-back, the wrong way round
    (DECIDE, "elif not (saved > 0.0 and saved > least * time):", "elif not saved > 0.0:", NOISE, "rule 6"),
    (DECIDE, "elif horizon is not None and not saved * horizon", "elif horizon is None and not saved * 10", PAYBACK),
    (DECIDE, "gain, price = before - after,", "gain, price = after - before,", GAIN),
    (
        DECIDE,
        "float(move_s[layer]) * model.stall + model.install_s",
        "float(move_s[layer]) * model.stall",
        f"{TEST_DECIDE}::test_a_move_must_pay_back_what_it_costs_within_the_passes_that_the_layout_lived",
    ),
    (
        DECIDE,
        "elif stays[layer]:",
        "elif not stays[layer] and False:",
        f"{TEST_DECIDE}::test_frozen_layers_stay_until_they_thaw",
    ),
    (
        DECIDE,
        "elif not has_load[layer]:",
        "elif not changed[layer]:",
        f"{TEST_DECIDE}::test_a_layer_without_load_stays",
        "rule 6",
    ),
    (DECIDE, "if lost[layer]:", "if lost[layer] and not stays[layer]:", DIED),
    (DECIDE, "    if gone.any():", "    if gone.all():", DIED),
    (
        DECIDE,
        "whole = _add(price, pays) + model.rebalance_s",
        "whole = _add(price, pays)",
        f"{TEST_DECIDE}::test_a_cost_of_any_rebalance_must_be_paid_by_all_layers_together",
    ),
    # fits: negative times; columns that say nothing
    (
        COSTS,
        "if part is None or min(part) < 0.0:",
        "if part is None:",
        f"{TEST_COSTS}::test_no_time_is_negative_where_the_plain_answer_is",
    ),
    (
        COSTS,
        "if not left > _TELLS_APART * length:",
        "if not left > -1.0:",
        f"{TEST_COSTS}::test_fit_refuses_what_tells_nothing",
    ),
    # reports: judged on the windows that the placement was made from
    (
        REPORT,
        "train, test = (load[:half], load[half:])",
        "train, test = (load[:half], load[:half])",
        f"{TEST_REPORT}::test_a_gain_that_is_gone_in_the_windows_that_follow_is_no_gain",
    ),
    (
        REPORT,
        "np.minimum(load, passes)",
        "np.minimum(load, 0)",
        f"{TEST_REPORT}::test_activated_experts_bound_the_time_too",
    ),
    (
        REPORT,
        "key=lambda i: rows[i].num_slots)",
        "key=lambda i: -rows[i].num_slots)",
        f"{TEST_REPORT}::test_the_answer_names_the_fewest_slots_that_do_nearly_as_much",
    ),
    # elastic: more than needed moves; leaving ranks are emptied; the wrong ranks stay
    (ELASTIC, "        max_transfers=0,\n", "", RETIRE),
    (ELASTIC, "np.where(kept, current", "np.where(kept & False, current", RETIRE),
    (
        ELASTIC,
        "stay = np.flatnonzero(~leaving)",
        "stay = np.arange(int((~leaving).sum()))",
        f"{TEST_ELASTIC}::test_ranks_that_were_retired_can_be_dropped",
    ),
    (
        ELASTIC,
        "if live < experts:",
        "if live < 0:",
        f"{TEST_ELASTIC}::test_too_few_slots_are_said_with_their_numbers",
    ),
    (
        ELASTIC,
        "np.where(active, layout.physical",
        "np.where(active | True, layout.physical",
        f"{TEST_ELASTIC}::test_experts_that_died_are_named_and_get_a_slot",
    ),
    # forecasts
    (
        FORECAST,
        "weights[window] = weights[window + 1] * keep",
        "weights[window] = weights[window + 1]",
        f"{TEST_FORECAST}::test_recent_windows_weigh_more",
    ),
    (
        FORECAST,
        "slope *= 6.0 / (count",
        "slope *= 3.0 / (count",
        f"{TEST_FORECAST}::test_the_slope_is_that_of_least_squares",
    ),
    (
        FORECAST,
        "np.maximum(load + slope * (part * count), 0.0)",
        "load + slope * (part * count)",
        f"{TEST_FORECAST}::test_a_trend_goes_on_and_never_below_zero",
    ),
    (
        BACKTEST,
        "window_weights=ahead.weights,",
        "window_weights=None,\n            min_gain=1e9,",
        f"{TEST_BACKTEST}::test_placing_for_all_windows_is_the_policy_of_place",
    ),
    # budgets: gains that are none; the dearer of equals; what must be had is not first
    (SPEND, "if p > left or not gain[c, layer] > 0.0:", "if p > left:", OPTIMAL),
    (SPEND, "if p > left or not gain", "if p > left + 1 or not gain", OPTIMAL),
    (SPEND, "(whole < cost or (whole == cost and take < 0))", "(take < 0)", OPTIMAL),
    (
        SPEND,
        "(whole == cost and take < 0)",
        "(whole == cost and False)",
        f"{TEST_SPEND}::test_of_equal_layers_the_first_are_served",
    ),
    (
        SPEND,
        "all_else += 2.0 * value",
        "all_else += 0.0 * value",
        f"{TEST_SPEND}::test_what_must_be_had_comes_first",
    ),
    (
        BUDGET,
        "p2l[layer, :, : widths[c]] = row",
        "p2l[layer, :, width - widths[c] :] = row",
        f"{TEST_BUDGET}::test_slots_go_to_the_layers_that_need_them",
    ),
]
