"""Changes to dispatch that a test must notice."""

STATIC = "eplb_core/dispatch/static.py"
EVEN = "eplb_core/dispatch/even.py"
SHARES = "eplb_core/dispatch/shares.py"
ROWS = "eplb_core/dispatch/_rows.py"
TABLES = "eplb_core/dispatch/tables.py"
OPS = "eplb_core/dispatch/ops.py"
HOST = "eplb_core/dispatch/_host.py"
QUOTA = "eplb_core/dispatch/quota.py"
COUNTER = "eplb_core/dispatch/counter.py"

T_STATIC = "tests/dispatch/test_static.py"
T_EVEN = "tests/dispatch/test_even.py"
T_SHARES = "tests/dispatch/test_shares.py"
T_TABLES = "tests/dispatch/test_tables.py"
T_OPS = "tests/dispatch/test_ops.py"
T_QUOTA = "tests/dispatch/test_quota.py"
T_COUNTER = "tests/dispatch/test_counter.py"
GOLDEN = f"{T_STATIC}::test_static_tables_are_sglangs_bit_for_bit"
DRAWS = f"{T_STATIC}::test_static_table_follows_the_standard_librarys_draws"

MUTATIONS: list[tuple[str, ...]] = [
    # static tables
    (STATIC, "if 0 < on_node[node[rank]] < slots.size:", "if 0 < on_node[node[rank]]:", GOLDEN),
    (STATIC, "            if narrowed:\n", "            if False:\n", GOLDEN),
    (STATIC, "        limit += power\n", "", f"{T_STATIC}::test_many_replicas_take_the_rejecting_way_of_sampling"),
    (
        STATIC,
        "    limit, power = 21, 1",
        "    limit, power = 210, 1",
        f"{T_STATIC}::test_many_replicas_take_the_rejecting_way_of_sampling",
    ),
    (STATIC, "if prefer_same_node else np.zeros(ranks, dtype=np.int64)", "", DRAWS, "rule 5"),
    (
        STATIC,
        "start=layer * 61 % 1024,",
        "start=int(table[0, 0, 0]) % 999,",
        f"{T_TABLES}::test_installing_one_layer_equals_making_the_tables_anew",
    ),
    # even tables
    (
        EVEN,
        "quota, extras = num_ranks // count, num_ranks % count",
        "quota, extras = num_ranks, 0",
        f"{T_EVEN}::test_equal_senders_are_split_evenly_and_no_even_split_is_nearer",
    ),
    (
        EVEN,
        "                if reach > near:\n                    continue\n",
        "",
        f"{T_EVEN}::test_equal_senders_are_split_evenly_and_no_even_split_is_nearer",
    ),
    (
        EVEN,
        "            if filled[k] + weights[rank] > limit:\n                continue\n",
        "",
        f"{T_EVEN}::test_a_node_does_not_keep_more_than_its_part",
    ),
    (
        EVEN,
        "(i + entries - (rank + expert) % entries) % entries",
        "i",
        f"{T_EVEN}::test_first_tokens_of_eight_ranks_use_three_replicas_evenly",
    ),
    # shares
    # shares: as rounding leaves them
    (
        SHARES,
        "share = energy[k] / whole",
        "share = energy[k]",
        f"{T_SHARES}::test_no_share_is_above_one_where_the_level_is_rounded",
    ),
    (
        "eplb_core/loading/tables.py",
        "(array <= 1 + _ROUNDING)",
        "(array <= 1)",
        f"{T_SHARES}::test_a_share_that_rounding_puts_above_one_is_installed",
    ),
    (
        SHARES,
        "energy[k] = max(0.0, level * speed[rank_of[k]] - energy[k])",
        "energy[k] = level * speed[rank_of[k]] - energy[k]",
        f"{T_SHARES}::test_shares_reach_the_linear_programs_optimum",
    ),
    (
        SHARES,
        "(windows / (windows + SHRINK_WINDOWS))",
        "1.5",
        f"{T_SHARES}::test_equal_windows_go_part_of_the_way_to_their_optimum",
    ),
    (
        SHARES,
        "                width += speed[rank_of[k]]",
        "                width += 1.0",
        f"{T_SHARES}::test_slow_and_fast_ranks_finish_together",
    ),
    (
        SHARES,
        "shares[slot] = new[k] / multiple[k]",
        "shares[slot] = new[k]",
        f"{T_SHARES}::test_slots_of_one_expert_on_one_rank_take_equal_parts",
        "rule 2",
    ),
    # rows and tables
    (
        ROWS,
        "    if fault[0]:\n        return fault\n",
        "",
        f"{T_TABLES}::test_more_replicas_than_there_is_room_for_are_refused_before_anything_is_written",
        "rule 8",
    ),
    (
        ROWS,
        "        packed[2 * i] = packed[2 * i + 1] = thresholds[i] = -1\n",
        "        pass\n",
        f"{T_TABLES}::test_any_order_of_installs_ends_in_the_same_tables",
    ),
    (
        ROWS,
        "        weights[rich] -= UNIT - weights[poor]\n",
        "        weights[rich] = UNIT\n",
        f"{T_TABLES}::test_entries_give_every_slot_its_share_exactly",
    ),
    (
        ROWS,
        "until / total * UNIT",
        "until * UNIT",
        f"{T_TABLES}::test_shares_that_sum_to_a_little_less_than_one_count_relative_to_their_sum",
    ),
    (
        ROWS,
        "    while most > max(1, 2 * span):",
        "    while most > max(1, 4 * span):",
        f"{T_TABLES}::test_entries_give_every_slot_its_share_exactly",
    ),
    (
        ROWS,
        "                on_rank[slot] = n * width + k\n",
        "                on_rank[slot] = n * width\n",
        f"{T_TABLES}::test_the_solver_sees_every_expert_with_a_choice",
    ),
    (
        TABLES,
        "        if len(rows) > 1:  # a row",
        "        if False:  # a row",
        f"{T_TABLES}::test_more_replicas_than_there_is_room_for_are_refused_before_anything_is_written",
        "rule 8",
    ),
    (
        TABLES,
        "            self._p2l[layer] = p2l[layer]\n",
        "",
        f"{T_TABLES}::test_installing_one_layer_equals_making_the_tables_anew",
        "rule 4",
    ),
    (
        TABLES,
        "even.rank_filler(layout, rank)",
        "even.rank_filler(layout, 0)",
        f"{T_TABLES}::test_even_tables_are_the_ranks_part_of_the_even_dispatch_table",
    ),
    (
        TABLES,
        "words = [base, (rank * GOLDEN) & MASK,",
        "words = [base ^ rank, (rank * GOLDEN) & MASK,",
        f"{T_OPS}::test_each_token_is_computed_exactly_once_where_ranks_share_all_tokens",
    ),
    (
        TABLES,
        "words = [base, (rank * GOLDEN) & MASK,",
        "words = [base, 0,",
        f"{T_OPS}::test_one_token_a_rank_spreads_over_the_replicas",
    ),
    (
        TABLES,
        "+ layer * GOLDEN) & MASK)",
        "+ 0) & MASK)",
        f"{T_OPS}::test_batches_of_one_row_differ_by_layer_and_expert",
    ),
    # the operator
    (
        OPS,
        "    valid = (ids >= 0) & (ids < num_experts)\n",
        "    valid = ids < num_experts\n",
        f"{T_OPS}::test_masked_rows_stay_masked_and_are_not_counted",
    ),
    (
        OPS,
        "        valid, bad = valid & real, bad & real\n",
        "        pass\n",
        f"{T_OPS}::test_masked_rows_stay_masked_and_are_not_counted",
    ),
    (
        OPS,
        "        slot = slot | TAG\n",
        "        pass\n",
        f"{T_OPS}::test_debugging_tables_find_ids_that_are_mapped_twice",
    ),
    (
        OPS,
        "        draws[DRAWS] += 1\n",
        "        pass\n",
        f"{T_OPS}::test_one_loop_on_the_host_does_what_the_torch_path_does",
    ),
    (
        OPS,
        "_mix((setting[BASE_PHASE] + expert) & MASK)",
        "setting[BASE_PHASE]",
        f"{T_OPS}::test_one_loop_on_the_host_does_what_the_torch_path_does",
    ),
    (
        OPS,
        "u = row * GOLDEN + ",
        "u = row * 0x80000000 + ",
        f"{T_OPS}::test_one_loop_on_the_host_does_what_the_torch_path_does",
    ),
    (
        OPS,
        "            shared = torch.where(row < num_tokens.reshape(()), shared, -1)\n",
        "            pass\n",
        f"{T_OPS}::test_one_loop_on_the_host_does_what_the_torch_path_does",
    ),
    # the same in one loop over host memory
    (
        HOST,
        "if ids[row, column] < -1 or ids[row, column] >= num_experts:",
        "if ids[row, column] < -1 or ids[row, column] > num_experts:",
        f"{T_OPS}::test_an_id_that_is_no_expert_costs_no_count_and_no_draw",
    ),
    (
        HOST,
        "            if expert < 0 or row >= real:\n",
        "            if expert < 0:\n",
        f"{T_OPS}::test_masked_rows_stay_masked_and_are_not_counted",
    ),
    (
        HOST,
        "    tag = TAG if debug else 0\n",
        "    tag = 0\n",
        f"{T_OPS}::test_debugging_tables_find_ids_that_are_mapped_twice",
    ),
    (
        HOST,
        "        draws[DRAWS] += 1\n",
        "        pass\n",
        f"{T_OPS}::test_random_draws_anew_with_every_call_and_repeats_with_the_seed",
    ),
    (
        HOST,
        "u = row * GOLDEN + ",
        "u = row * 0x80000000 + ",
        f"{T_OPS}::test_an_expert_chosen_by_even_rows_only_still_uses_all_its_replicas",
    ),
    (
        HOST,
        "ids[row, column] if row < real else -1",
        "ids[row, column]",
        f"{T_OPS}::test_shared_columns_bypass_the_table_and_are_not_counted",
    ),
    (
        HOST,
        "counts = count.shape[0] > 0 and state[RECORDING] != 0",
        "counts = count.shape[0] > 0",
        f"{T_OPS}::test_one_loop_on_the_host_does_what_the_torch_path_does",
    ),
    (
        HOST,
        "                    u += own\n",
        "                    pass\n",
        f"{T_OPS}::test_one_loop_on_the_host_does_what_the_torch_path_does",
    ),
    # quotas
    (QUOTA, "before = count[:rank].sum(0)", "before = count[:0].sum(0)", f"{T_QUOTA}::test_totals_by_slot_are_exact"),
    (QUOTA, "STEPS = 32", "STEPS = 1", f"{T_QUOTA}::test_quotas_are_within_half_a_percent_of_the_optimum"),
    (
        QUOTA,
        "    load = _alone(used.to(torch.int64), on_rank)\n",
        "    load = 0 * _alone(used.to(torch.int64), on_rank)\n",
        f"{T_QUOTA}::test_fewest_counts_experts_without_a_choice_first",
    ),
    (
        OPS,
        "    batch.zero_()\n",
        "    pass\n",
        f"{T_QUOTA}::test_quota_counts_once_and_leaves_no_trace_in_the_next_batch",
    ),
    (
        OPS,
        "    if mode not in SOLVED_MODES:\n        _count(",
        "    if True:\n        _count(",
        f"{T_QUOTA}::test_quota_counts_once_and_leaves_no_trace_in_the_next_batch",
    ),
    # the counter
    (
        COUNTER,
        "torch.where(expert >= 0, counts.to(torch.int32), 0)",
        "counts.to(torch.int32)",
        f"{T_COUNTER}::test_counts_at_empty_slots_and_while_not_recording_are_left_out",
    ),
    (
        COUNTER,
        "        if layout is not self._layout:\n",
        "        if self._layout is None:\n",
        f"{T_COUNTER}::test_counts_by_slot_are_folded_by_the_layout_of_their_time",
    ),
    (
        COUNTER,
        "        self.count.index_fill_(1, state[WINDOW : WINDOW + 1].long(), 0)\n",
        "",
        f"{T_COUNTER}::test_snapshots_hold_the_last_finished_windows_oldest_first",
    ),
    (
        COUNTER,
        "torch.add(self._order, self.state[WINDOW], out=self._index)",
        "self._index.copy_(self._order)",
        f"{T_COUNTER}::test_snapshots_hold_the_last_finished_windows_oldest_first",
    ),
    (
        COUNTER,
        "self.device = torch.empty(shape, dtype=torch.int64",
        "self.device = torch.empty(shape, dtype=torch.int32",
        f"{T_COUNTER}::test_windows_whose_sum_exceeds_32_bits_are_summed_in_64",
    ),
    # an install makes new buffers in place of those that graphs hold
    (
        TABLES,
        "            self._p2l[layer] = p2l[layer]\n",
        "            self._p2l[layer] = p2l[layer]\n            self._packed = self._packed.clone()\n",
        f"{T_TABLES}::test_addresses_shapes_and_types_stay",
        "rule 8",
    ),
    # dispatch asks what is meant for loading
    (
        STATIC,
        "from eplb_core.layout import",
        "from eplb_core.loading.resolver import SlotResolver\nfrom eplb_core.layout import",
        "tests/test_api.py::test_imports_go_one_way",
        "rule 3",
    ),
    (COUNTER, "if counts.is_floating_point() or counts.is_complex():", "if False:", T_COUNTER),
]
