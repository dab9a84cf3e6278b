"""Changes to replays, and to what is made and drawn for them, that a test must notice."""

from __future__ import annotations

REPLAY = "eplb_core/simulation/replay.py"
RESULT = "eplb_core/simulation/result.py"
POLICIES = "eplb_core/simulation/policies.py"
SOURCES = "eplb_core/simulation/load/sources.py"
LINKS = "eplb_core/simulation/links.py"
HARDWARE = "eplb_core/simulation/hardware.py"
COMPARE = "eplb_core/simulation/compare.py"
WORDS = "eplb_core/simulation/words.py"
GENERATOR = "eplb_core/simulation/load/generator.py"
HTML = "eplb_core/simulation/html.py"
PLOTS = "eplb_core/simulation/plots.py"
TEST_REPLAY = "tests/simulation/test_replay.py"
TEST_DISPATCH = "tests/simulation/test_dispatch.py"
TEST_SOURCES = "tests/simulation/load/test_sources.py"
TEST_COSTS = "tests/simulation/test_costs.py"
TEST_COMPARE = "tests/simulation/test_compare.py"
TEST_GENERATOR = "tests/simulation/load/test_generator.py"
TEST_HTML = "tests/simulation/test_html.py"
TEST_PLOTS = "tests/simulation/test_plots.py"

HELD_OUT = f"{TEST_REPLAY}::test_no_window_is_scored_on_a_layout_that_was_made_from_it"
PLAIN = f"{TEST_REPLAY}::test_the_replay_agrees_with_plain_python"
SAME_WINDOWS = f"{TEST_REPLAY}::test_several_intervals_can_be_scored_on_the_same_windows"
TIMES = f"{TEST_COSTS}::test_times_agree_with_plain_python"
PAUSES = f"{TEST_COSTS}::test_pauses_bytes_and_memory_of_a_move"
BY_HAND = f"{TEST_COSTS}::test_links_agree_with_plain_python"
TOKENS = f"{TEST_DISPATCH}::test_rank_loads_equal_a_replay_token_by_token"
ANY_SIZE = f"{TEST_SOURCES}::test_a_stream_in_blocks_of_any_size_replays_as_the_whole"
RESUMED = f"{TEST_COMPARE}::test_a_sweep_goes_on_where_it_ended"
MOVES = f"{TEST_PLOTS}::test_moves_come_from_holders_and_go_where_experts_are_new"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # replays: the policy sees what it is scored on; all that is over; the fullest rank whatever its speed
    (REPLAY, "        past.append(block.load)\n", "", HELD_OUT),
    (REPLAY, "joined(past)[-seen:]", "joined(past)", HELD_OUT),
    (REPLAY, "self.tops.append((ranks / speed).max(axis=2))", "self.tops.append(ranks.max(axis=2))", PLAIN),
    (REPLAY, "self.means.append(ranks.sum(axis=2) / speed.sum())", "self.means.append(ranks.mean(axis=2))", PLAIN),
    (REPLAY, "        self.dispatcher.renew(new, windows)\n", "", PLAIN),
    (REPLAY, "top[scored:].sum()", "top.sum()", PLAIN),
    (REPLAY, "if scored >= windows:", "if scored > windows:", TEST_REPLAY),
    (RESULT, "self.rebalance_windows >= self.scored_from", "self.rebalance_windows >= 0", SAME_WINDOWS),
    (RESULT, "self.step_s[self.scored_from :].sum(axis=1)", "self.step_s.sum(axis=1)", SAME_WINDOWS),
    # times
    (REPLAY, "np.minimum(slots, self.passes, out=slots)", "np.minimum(slots, 1.0, out=slots)", TIMES),
    (REPLAY, "step = (work / speed).max(axis=2)", "step = work.max(axis=2)", TIMES),
    (REPLAY, "step / self.passes + model.layer_s", "(step + model.layer_s) / self.passes", TIMES),
    (REPLAY, "step += (ranks * self.exchange_s).max(axis=2)", "step += (ranks * self.exchange_s).mean(axis=2)", TIMES),
    (REPLAY, "lost += model.stall * float(", "lost += float(", PAUSES),
    (REPLAY, "model.install_s * changed + model.rebalance_s", "model.install_s * changed", PAUSES),
    (REPLAY, "        if not changed:\n            return 0.0\n", "", PAUSES),
    (
        REPLAY,
        "-(-self.num_slots // self.topology.num_ranks)",
        "self.num_slots // self.topology.num_ranks",
        f"{TEST_COSTS}::test_memory_is_that_of_the_rank_with_most_redundant_experts",
    ),
    (
        HARDWARE,
        "near = (node_size - 1)",
        "near = node_size",
        f"{TEST_COSTS}::test_all_to_all_counts_the_tokens_that_come_over_each_link",
    ),
    (
        HARDWARE,
        "hardware.operations * reached",
        "hardware.operations",
        f"{TEST_COSTS}::test_own_numbers_and_what_is_reached_of_them",
    ),
    # links: copies within a rank; holders on the node; empty slots
    (LINKS, "own & (before != after)", "own", BY_HAND),
    (LINKS, "    gets &= ~had\n", "", BY_HAND),
    (LINKS, "    gets[:, :, experts] = False\n", "", BY_HAND),
    (LINKS, "np.any(had[:, members], axis=1", "np.any(had, axis=1", BY_HAND),
    (LINKS, "counts[layers] = _count", "counts[: len(layers)] = _count", BY_HAND),
    # dispatch: the rank on which a token lies; its table; shares of what was seen
    (POLICIES, "if self.table is not None and block.by_source is not None:", "if False:", TOKENS),
    (
        SOURCES,
        "starts = -(-np.arange(ranks + 1) * self.window_tokens // ranks)",
        "starts = np.arange(ranks + 1) * (self.window_tokens // ranks)",
        TOKENS,
    ),
    (
        POLICIES,
        "self.shares = eplb_core.replica_shares(layout, seen)",
        "self.shares = eplb_core.replica_shares(layout, seen[-1])",
        f"{TEST_DISPATCH}::test_weighted_shares_are_solved_for_the_windows_that_were_seen",
    ),
    (
        POLICIES,
        "return np.stack([eplb_core.replica_shares(self.layout, window) for window in load])",
        "return np.stack([eplb_core.replica_shares(self.layout, load[0]) for window in load])",
        f"{TEST_DISPATCH}::test_solved_shares_are_solved_for_each_window_as_it_comes",
    ),
    # policies
    (
        POLICIES,
        "        return done[0]\n",
        "        return place(windows, live)\n",
        f"{TEST_COSTS}::test_once_places_once_and_stays",
    ),
    (
        POLICIES,
        "return live.replace(placed.layout, verdict.layers)",
        "return placed.layout",
        f"{TEST_COSTS}::test_gated_moves_the_layers_that_pay_alone",
    ),
    # sources
    (SOURCES, "if count == size:", "if count:", ANY_SIZE),
    (
        SOURCES,
        "take = min(count, shape[0] - first)",
        "take = count",
        f"{TEST_SOURCES}::test_a_file_that_is_read_bit_by_bit_replays_as_the_whole",
    ),
    (
        SOURCES,
        "len(raw) < size * take",
        "len(raw) < size",
        f"{TEST_SOURCES}::test_files_that_hold_something_else_are_refused",
    ),
    (
        SOURCES,
        "        reader = _read(path, key, count)\n        next(reader)\n",
        "        reader = _read(path, key, count)\n",
        f"{TEST_SOURCES}::test_a_file_that_is_read_bit_by_bit_replays_as_the_whole",
    ),
    # comparisons and sweeps: which to take; rows of another trace or topology
    (
        WORDS,
        "key=lambda sim: (sim.total_transfers, -sim.total_balancedness)",
        "key=lambda sim: -sim.total_balancedness",
        f"{TEST_COMPARE}::test_without_a_cost_fewer_transfers_win_within_a_hundredth_of_balance",
    ),
    (WORDS, "if saved < WORTH:", "if saved < 0:", f"{TEST_COMPARE}::test_a_gain_that_nobody_would_notice_is_called_so"),
    (
        WORDS,
        "least = min(sim.total_s for",
        "least = min(sim.pass_s for",
        f"{TEST_COMPARE}::test_with_a_cost_pauses_count",
    ),
    (COMPARE, "+ load.tobytes()", "", RESUMED),
    (COMPARE, "{value.rank_speed.tolist()}", "", RESUMED),
    (COMPARE, "if path is not None and path.exists():", "if False:", RESUMED),
    (
        COMPARE,
        "{**scored, **options, **point}",
        "{**options, **point}",
        f"{TEST_COMPARE}::test_a_sweep_is_simulate_for_each_combination_in_order",
    ),
    # generated load: what kinds of traffic share; how uneven layers are
    (
        GENERATOR,
        "_MODEL, _DOMAIN, _PHASE, _LENGTH, _WINDOW = 0.2, 0.5,",
        "_MODEL, _DOMAIN, _PHASE, _LENGTH, _WINDOW = 0.4, 0.3,",
        f"{TEST_GENERATOR}::test_kinds_of_traffic_are_as_alike_as_recorded",
    ),
    (
        GENERATOR,
        "sigma = _percentile(workload.sigma, factors.quantile)",
        "sigma = _percentile(workload.sigma, np.full_like(factors.quantile, 0.5))",
        f"{TEST_GENERATOR}::test_layers_are_as_uneven_as_recorded",
    ),
    (
        GENERATOR,
        "steady.argmax(axis=1), sigma",
        "normal.argmin(axis=1), sigma",
        f"{TEST_GENERATOR}::test_kinds_of_traffic_are_as_alike_as_recorded",
    ),
    (
        GENERATOR,
        "part * share + (1.0 - part)",
        "(1.0 - part) * share + part",
        f"{TEST_GENERATOR}::test_traffic_passes_over_where_it_blends",
    ),
    # pages and pictures
    (HTML, '.replace("<", "\\\\u003c")', "", f"{TEST_HTML}::test_the_page_loads_nothing_and_keeps_foreign_text_text"),
    (
        HTML,
        '"TITLE": escape(title)',
        '"TITLE": title',
        f"{TEST_HTML}::test_the_page_loads_nothing_and_keeps_foreign_text_text",
    ),
    (
        HTML,
        "np.where(known, values, 0.0)",
        "np.where(known, values, 1.0)",
        f"{TEST_HTML}::test_what_a_screen_cannot_show_is_averaged",
    ),
    (PLOTS, "source = min(near or holders", "source = min(holders", MOVES),
    (PLOTS, "- had - {-1}", "- {-1}", MOVES),
    (
        "eplb_core/_html.py",
        "if expert >= 0 and int((mine == expert).sum()) > 1:",
        "if False:",
        f"{TEST_HTML}::test_a_layout_shades_replicas_and_marks_pairs_on_a_rank",
    ),
    (
        "eplb_core/cli/plan_words.py",
        "if bound < _LOW_BOUND:",
        "if bound > _LOW_BOUND:",
        "tests/cli/test_main.py::test_plan_says_in_words_what_it_found",
    ),
    # sweep: what is kept is told apart by the text of an array, which leaves numbers out
    (
        COMPARE,
        '    if hasattr(value, "tolist"):',
        "    if isinstance(value, np.ndarray):",
        f"{TEST_COMPARE}::test_settings_are_told_apart_by_what_they_hold",
    ),
    (
        COMPARE,
        "    if isinstance(value, (list, tuple)):\n",
        "    if False:\n",
        f"{TEST_COMPARE}::test_settings_are_told_apart_by_what_they_hold",
    ),
]
