"""Changes to `place` and its kernels that a test must notice."""

from __future__ import annotations

INTERPRETED = True

PLACE = "eplb_core/placement/place.py"
PROBLEM = "eplb_core/placement/problem.py"
FROM = "eplb_core/placement/from_current.py"
SEARCH = "eplb_core/placement/search/improve.py"
KERNELS = "eplb_core/placement/pack/block.py"
REFINE = "eplb_core/placement/pack/refine.py"
SOLVE = "eplb_core/placement/pack/layers.py"
GROUPS = "eplb_core/placement/pack/groups.py"
SCORE = "eplb_core/placement/score.py"
RELABEL = "eplb_core/placement/search/relabel.py"
TEST_PLACE = "tests/placement/test_place.py"
TEST_PROPERTIES = "tests/placement/test_place_properties.py"
TEST_KERNELS = "tests/placement/pack/test_block.py"
TEST_REFINE = "tests/placement/pack/test_refine.py"
TEST_GROUPS = "tests/placement/pack/test_groups.py"
TEST_SCORE = "tests/placement/test_score.py"
TEST_RELABEL = "tests/placement/search/test_relabel.py"

REFUSALS = f"{TEST_PLACE}::test_bad_arguments_raise_with_their_values"
SPREAD = f"{TEST_KERNELS}::test_spare_slots_spread_over_equal_shares"
COUNTS = f"{TEST_KERNELS}::test_replica_counts_follow_the_divisor_method"
PACKING = f"{TEST_KERNELS}::test_packing_fills_every_slot_without_pairs_and_keeps_shares_in_order"
BOOKS = f"{TEST_REFINE}::test_a_long_search_keeps_its_books_and_never_ends_worse"
BOUND = f"{TEST_SCORE}::test_no_layout_scores_above_the_bound"
FEWEST = f"{TEST_RELABEL}::test_no_exchange_of_ranks_would_move_less"
COVER = f"{TEST_PROPERTIES}::test_a_layout_covers_all_experts_without_pairs_and_fills_the_slots_it_should"
GROUPED = f"{TEST_PROPERTIES}::test_groups_are_where_the_locality_says"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # order: the last of equal loads first
    (
        KERNELS,
        "while j > 0 and load[order[j - 1]] < load[e]:",
        "while j > 0 and load[order[j - 1]] <= load[e]:",
        f"{TEST_KERNELS}::test_experts_are_ordered_as_sorted_orders_them",
        "rule 5",
    ),
    (
        KERNELS,
        "(j >= right or load[order[i]] >= load[order[j]])",
        "(j >= right or load[order[i]] > load[order[j]])",
        f"{TEST_KERNELS}::test_loads_that_crowd_into_one_bucket_are_ordered_too",
    ),
    # counts: equal shares go to an expert that has several already
    (KERNELS, "load[order[size]] >= heap[0]", "load[order[size]] > heap[0]", SPREAD),
    # counts: no limit on replicas
    (
        KERNELS,
        "share = load[e] / count[e] if count[e] < most else -1.0\n            i = 0\n",
        "share = load[e] / count[e]\n            i = 0\n",
        COUNTS,
    ),
    # counts: the share before the replica, not after it
    (
        KERNELS,
        "            size += 1\n            count[e] += 1\n            share = load[e] / count[e]",
        "            size += 1\n            count[e] += 1\n            share = load[e]",
        COUNTS,
    ),
    # packing: ranks that hold the expert stay in the tournament
    (
        KERNELS,
        "chosen[k] = r\n                _replay(tree, leaves + r, _FULL)\n",
        "chosen[k] = r\n                _replay(tree, leaves + r, key[r] if used + 1 < cap[r] else _FULL)\n",
        PACKING,
        "rule 2",
    ),
    # packing: loads do not count
    (
        KERNELS,
        "        more = (np.int64(value * scale) << bits) + leaves\n",
        "        more = leaves\n",
        f"{TEST_KERNELS}::test_the_largest_share_goes_to_the_least_loaded_rank",
    ),
    # packing: a layer without load
    (KERNELS, "/ max(total, _TINY)", "/ total", PACKING),
    # place: loads so small that fractions of them lose digits
    (
        PLACE,
        "np.where(np.abs(exponent) > _FAR, np.clip(exponent, 0, _FAR) - exponent, 0)",
        "0 * exponent",
        f"{TEST_PLACE}::test_units_of_load_and_speed_change_nothing",
    ),
    (
        PLACE,
        "np.maximum(-_FAR - shift - np.frexp(top)[1], 0)",
        "0",
        f"{TEST_PLACE}::test_a_window_of_faint_load_counts_as_much_as_the_others",
    ),
    (
        PROBLEM,
        "    np.ldexp(weights, 1 - np.frexp(weights.max())[1], out=weights)\n",
        "",
        f"{TEST_PLACE}::test_weights_of_any_size_only_count_relative_to_each_other",
    ),
    # place: effort goes into the search over windows, which more of it only continues
    (
        PLACE,
        "    further = len(windows) > 1 or problem.weighted\n",
        "    further = problem.pin == 0 and (len(windows) > 1 or problem.weighted)\n",
        f"{TEST_PROPERTIES}::test_more_effort_is_never_worse_over_windows",
    ),
    # place: a layer that fills fewer slots leaves the last ones empty, also in a row that is in place
    (
        FROM,
        "    settle(was, present, problem.capacity, problem.num_experts)\n",
        "",
        f"{TEST_PLACE}::test_a_layer_that_fills_fewer_slots_gives_up_the_last_of_each_rank",
    ),
    # making room: whatever is smallest, also where it is a second one
    (
        KERNELS,
        "if fill[t] < cap[t] and not holds(expert, t, stride, expert[i]):",
        "if fill[t] < cap[t]:",
        f"{TEST_KERNELS}::test_the_smallest_share_that_has_a_place_elsewhere_makes_room",
    ),
    # packing anywhere: pairs; the first copy not at home; no room kept for those still to come
    (KERNELS, "allowed and time < best and not holds(expert, r, stride, e)", "allowed and time < best", PACKING),
    (
        KERNELS,
        "allowed = node[r] == home[e] if pinned else room[node[r]] > 0",
        "allowed = room[node[r]] > 0 or pinned",
        GROUPED,
    ),
    (
        KERNELS,
        "allowed = node[r] == home[e] if pinned else room[node[r]] > 0",
        "allowed = node[r] == home[e] if pinned else True",
        GROUPED,
    ),
    # shares stay sorted
    (
        KERNELS,
        "    while i + 1 < end and share[i + 1] > value:\n",
        "    while i + 1 < end and share[i + 1] < value:\n",
        f"{TEST_KERNELS}::test_put_keeps_the_order_and_adds_the_load_up_anew",
    ),
    # search: rounding counts as a gain
    (
        REFINE,
        "_LESS = 1.0 - 2.0**-40",
        "_LESS = 1.0 + 2.0**-40",
        f"{TEST_REFINE}::test_exchanges_that_mirror_two_ranks_end",
    ),
    # search: a change that cancels on the fullest rank is taken for a gain
    (
        REFINE,
        "if change != 0.0 or s == full:",
        "if change != 0.0:",
        f"{TEST_REFINE}::test_two_changes_that_cancel_on_the_fullest_rank_are_no_gain",
    ),
    # search: the queue loses its order
    (
        REFINE,
        "_requeue(last, last, load[full] * pace[full], queue, queue_time)",
        "pass",
        f"{TEST_REFINE}::test_the_time_that_a_search_reports_is_that_of_the_fullest_rank",
    ),
    (
        REFINE,
        "    while k > 0 and queue_time[k - 1] > time:\n",
        "    while k > 0 and queue_time[k - 1] < time:\n",
        f"{TEST_REFINE}::test_the_queue_is_in_order_after_every_exchange",
    ),
    # search: a second replica on a rank; the last one at home leaves
    (REFINE, "return count[e] == 1 or not holds(expert, to, stride, e)", "return True", BOOKS, "rule 2"),
    (
        REFINE,
        "    if pinned and home[e] == node[source] and node[to] != node[source] and home_count[e] < 2:\n",
        "    if False:\n",
        BOOKS,
    ),
    # search: books of the replicas at home
    (REFINE, "    if home[gainer] == node[rank]:\n        home_count[gainer] += 1\n", "", BOOKS),
    # search: an expert loses its last slot
    (
        REFINE,
        "        if count[f] < 2 or (home[f] == node[full] and home_count[f] < 2):\n",
        "        if home[f] == node[full] and home_count[f] < 2:\n",
        BOOKS,
        "rule 1",
    ),
    # search: the first try stays, however bad
    (REFINE, "            _restore(num_experts, cap, stride, scratch)\n", "            pass\n", BOOKS),
    # search: no slot of the fullest rank changes hands
    (
        REFINE,
        "    if gainer < 0:\n        return False\n    _hand_over(full, best_place, gainer, cap, stride, scratch)\n",
        "    return False\n",
        f"{TEST_REFINE}::test_a_slot_of_the_fullest_rank_goes_to_a_lighter_expert",
    ),
    # search: labels decide
    (
        REFINE,
        "g = scratch.ints[ORDER, _draw(num_experts, work)]",
        "g = _draw(num_experts, work)",
        f"{TEST_PROPERTIES}::test_relabelled_experts_relabel_the_answer",
        "rule 5",
    ),
    # search: another generator
    (REFINE, "48271", "16807", f"{TEST_REFINE}::test_random_numbers_are_lehmers", "rule 5"),
    # blocks: ranks that are out take part
    (SOLVE, "if capacity[r] > 0 and node in (-1, rank_to_node[r]):", "if node in (-1, rank_to_node[r]):", COVER),
    # blocks: experts of other groups take part
    (SOLVE, "if node in (-1, group_home[e // group_size]):", "if True:", GROUPED),
    # blocks: the limit forgets the fast rank
    (
        SOLVE,
        "return float(max(total / whole, top / fastest))",
        "return float(max(total / whole, top))",
        f"{TEST_PROPERTIES}::test_balancedness_is_what_the_metrics_say_and_never_above_the_bound",
    ),
    # groups: the first assignment that comes
    (
        GROUPS,
        "            if worst < best:\n",
        "            if best == np.inf:\n",
        f"{TEST_GROUPS}::test_groups_go_where_no_assignment_is_better",
    ),
    (
        GROUPS,
        "        if left[n] <= 0:\n            continue\n",
        "",
        f"{TEST_GROUPS}::test_groups_go_where_no_assignment_is_better",
    ),
    # groups: a search that was cut short claims a proof
    (
        GROUPS,
        "return best if visits <= _MOST_VISITS else 0.0",
        "return best",
        f"{TEST_GROUPS}::test_a_search_that_is_cut_short_proves_nothing",
    ),
    # scores: ranks that are out count
    (
        SCORE,
        "                if capacity[r] > 0 and p2l[layer, p] >= 0:\n                    count",
        "                if p2l[layer, p] >= 0:\n                    count",
        f"{TEST_SCORE}::test_replicas_on_ranks_that_are_out_take_nothing",
    ),
    # scores: an expert with load and no slot is forgotten
    (
        SCORE,
        "if known > 0.0 and not lost else np.nan",
        "if known > 0.0 else np.nan",
        f"{TEST_SCORE}::test_replicas_on_ranks_that_are_out_take_nothing",
    ),
    # bound: too few slots allowed; the slowest rank instead of the fastest
    (
        SCORE,
        "    return need <= slots\n",
        "    return True\n",
        f"{TEST_SCORE}::test_shares_fit_where_each_expert_needs_few_enough_slots",
    ),
    (
        SCORE,
        "fastest = max(fastest, rank_speed[r])",
        "fastest = rank_speed[r]",
        f"{TEST_SCORE}::test_the_largest_share_may_be_on_the_fastest_rank",
    ),
    (SCORE, "                total += weights[t]\n", "                total += 0.5 * weights[t]\n", BOUND),
    # renaming: across nodes where groups bind them; speeds that differ
    (
        RELABEL,
        "and (across_nodes or links.node[r] == links.node[first])",
        "",
        f"{TEST_RELABEL}::test_nodes_keep_their_contents_where_groups_bind_them",
    ),
    (
        RELABEL,
        "and rank_speed[r] == rank_speed[first]",
        "",
        f"{TEST_RELABEL}::test_only_ranks_that_are_alike_exchange",
    ),
    (RELABEL, "u[match[j]] += delta", "u[match[j]] -= delta", FEWEST),
    # renaming: links that cost unequally count alike
    (
        RELABEL,
        "    unequal = links.cheapest < links.dearest and ranks <= _MOST_EXACT\n",
        "    unequal = False\n",
        f"{TEST_RELABEL}::test_no_exchange_of_ranks_would_cost_less",
    ),
    # renaming: a slot beyond the rank's capacity is kept
    (
        RELABEL,
        "keeps = s < slots and e >= 0 and holds[e] > 0",
        "keeps = e >= 0 and holds[e] > 0",
        f"{TEST_RELABEL}::test_a_rank_with_fewer_slots_keeps_its_last_one_empty",
    ),
    # place: a layer without load
    (
        PLACE,
        "            p2l[np.ix_(skip, open_slots)] = np.arange(open_slots.sum()) % experts\n",
        "            p2l[np.ix_(skip, open_slots)] = np.arange(open_slots.sum()) // 2 % experts\n",
        f"{TEST_PLACE}::test_layers_without_load_get_the_trivial_spread_and_no_balancedness",
        "rule 6",
    ),
    (
        PROBLEM,
        "    if count == 1 and weights[0] > 0.0:\n",
        "    if False:\n",
        f"{TEST_PLACE}::test_the_weight_of_the_only_window_changes_nothing",
    ),
    # place: limits
    (
        FROM,
        "    anew = ~stays if problem.pin else ~fits\n",
        "    anew = ~stays | (problem.pin > 0) if problem.pin else ~fits\n",
        f"{TEST_PLACE}::test_groups_bind_the_limit_of_transfers_too",
    ),
    # place: refusals
    (
        PROBLEM,
        "    if live < experts:\n",
        "    if False:\n",
        f"{TEST_PLACE}::test_too_few_live_slots_raise_with_the_numbers",
        "rule 1",
    ),
    (PROBLEM, "    if experts % groups:\n", "    if False:\n", REFUSALS),
    (PROBLEM, "    if fit.sum() < groups:\n", "    if False:\n", REFUSALS),
    (PROBLEM, '    check_word(locality, "locality", _PIN)\n', "    pass\n", REFUSALS),
    (PROBLEM, "        if mine != theirs:\n", "        if False:\n", REFUSALS),
    (
        SEARCH,
        "            others = others or (row[a] == e and a != p)\n",
        "            others = others or row[a] == e\n",
        f"{TEST_PLACE}::test_a_search_that_its_budget_ended_loses_no_expert",
    ),
    # place: draws from the global random state
    (
        PLACE,
        "    topology = problem.topology\n    solve_layers(",
        "    topology = problem.topology\n    np.random.random()\n    solve_layers(",
        "tests/placement/test_same_bytes.py::test_the_global_random_state_is_neither_read_nor_advanced",
        "rule 5",
    ),
    # an engine's names in the core
    (
        PLACE,
        "from eplb_core.topology import Topology\n",
        "from eplb_core.adapters.vllm.policy import Options\nfrom eplb_core.topology import Topology\n",
        "tests/test_api.py::test_imports_go_one_way",
        "rule 11",
    ),
]
