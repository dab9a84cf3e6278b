"""Changes to topology, layout, metrics and what they take in that a test must notice."""

from __future__ import annotations

INTERPRETED = True

TOPOLOGY = "eplb_core/topology.py"
LAYOUT = "eplb_core/layout.py"
METRICS = "eplb_core/metrics.py"
ARRAYS = "eplb_core/_arrays.py"
INIT = "eplb_core/__init__.py"
TEST_TOPOLOGY = "tests/test_topology.py"
TEST_LAYOUT = "tests/test_layout.py"
TEST_METRICS = "tests/test_metrics.py"
TEST_ARRAYS = "tests/test_arrays.py"

NUMBERS = f"{TEST_TOPOLOGY}::test_numbers_that_do_not_fit_raise_with_all_of_them"
INVERSES = f"{TEST_LAYOUT}::test_all_maps_are_inverses_of_the_one_array"
FRAMES = f"{TEST_LAYOUT}::test_layouts_of_another_frame_are_not_compared"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # topology
    (TOPOLOGY, "            if ranks % nodes:\n", "            if False:\n", NUMBERS),
    (
        TOPOLOGY,
        "np.arange(ranks, dtype=np.int64) // (ranks // nodes)",
        "np.arange(ranks, dtype=np.int64) % nodes",
        TEST_TOPOLOGY,
    ),
    (TOPOLOGY, "if node_of.min() < 0 or not present.all():", "if node_of.min() < 0:", NUMBERS),
    (TOPOLOGY, "bad = ~((speed > 0) & (speed < np.inf))", "bad = ~(speed >= 0)", NUMBERS),
    (
        TOPOLOGY,
        "            and bool(np.array_equal(self.rank_speed, other.rank_speed))\n",
        "",
        f"{TEST_TOPOLOGY}::test_a_topology_is_what_its_arrays_say",
    ),
    (
        TOPOLOGY,
        'set_field(self, "_rank_to_node", read_only(node_of))',
        'set_field(self, "_rank_to_node", node_of)',
        f"{TEST_TOPOLOGY}::test_a_topology_does_not_change",
    ),
    # layout: derived maps
    (LAYOUT, 'np.argsort(key, axis=1, kind="stable")', 'np.argsort(-key, axis=1, kind="stable")', INVERSES, "rule 4"),
    (LAYOUT, " + (slots - counts.sum(axis=1))[:, None]", "", INVERSES, "rule 4"),
    (
        LAYOUT,
        "if num_experts < 2**15 else p2l",
        "if num_experts < 2**17 else p2l",
        f"{TEST_LAYOUT}::test_more_experts_than_two_bytes_can_say_are_inverted_too",
    ),
    (
        LAYOUT,
        '        check_id(expert, "expert", self.num_experts)\n',
        "",
        f"{TEST_LAYOUT}::test_ids_out_of_range_are_no_ids_from_the_end",
    ),
    # layout: the digest
    (
        LAYOUT,
        'dtype="<i8").tobytes()',
        'dtype="<i4").tobytes()',
        f"{TEST_LAYOUT}::test_digest_is_of_the_stated_bytes",
        "rule 5",
    ),
    # layout: what is none
    (
        LAYOUT,
        "p2l.min() < -1 or p2l.max() >= num_experts",
        "p2l.max() >= num_experts",
        f"{TEST_LAYOUT}::test_ids_that_are_no_expert_are_refused",
        "rule 1",
    ),
    (
        LAYOUT,
        "    if layers and counts.min() == 0:\n",
        "    if False:\n",
        f"{TEST_LAYOUT}::test_a_map_without_one_expert_is_refused",
        "rule 1",
    ),
    (
        LAYOUT,
        "if slots % topology.num_ranks or slots == 0:",
        "if slots == 0:",
        f"{TEST_LAYOUT}::test_other_shapes_and_kinds_are_refused",
    ),
    (
        LAYOUT,
        "    if slots < num_experts:\n",
        "    if False:\n",
        f"{TEST_LAYOUT}::test_fewer_slots_than_experts_have_no_layout",
    ),
    # layout: sizes
    (
        LAYOUT,
        " < num_slots % num_ranks)",
        " >= num_ranks - num_slots % num_ranks)",
        f"{TEST_LAYOUT}::test_slots_of_ranks_differ_by_one_at_most",
    ),
    (
        LAYOUT,
        'return -check_int(num_experts, "num_experts", 1) %',
        'return check_int(num_experts, "num_experts", 1) %',
        f"{TEST_LAYOUT}::test_the_fewest_redundant_experts_are_minus_experts_modulo_ranks",
    ),
    # layout: others from one
    (
        LAYOUT,
        "        p2l = self._p2l.copy()\n",
        "        p2l = other._p2l.copy()\n",
        f"{TEST_LAYOUT}::test_replace_takes_whole_rows",
    ),
    (
        LAYOUT,
        "        if len(lost):\n",
        "        if False:\n",
        f"{TEST_LAYOUT}::test_a_rank_with_the_only_slot_of_an_expert_cannot_leave",
        "rule 1",
    ),
    (
        LAYOUT,
        "        if len(np.unique(named)) < len(named):\n",
        "        if False:\n",
        f"{TEST_LAYOUT}::test_ranks_that_are_none_are_refused",
    ),
    (LAYOUT, "            if mine != theirs:\n", "            if False:\n", FRAMES),
    (LAYOUT, "        if self.topology != other.topology:\n", "        if False:\n", FRAMES),
    # metrics
    (
        METRICS,
        "mean_over_top(load.mean(axis=-1), ",
        "mean_over_top(load.mean(axis=0), ",
        f"{TEST_METRICS}::test_balancedness_is_over_ranks_and_not_over_layers",
    ),
    (
        METRICS,
        "float(each[known].mean())",
        "float(np.nan_to_num(each).mean())",
        f"{TEST_METRICS}::test_layers_without_load_count_in_no_average",
        "rule 6",
    ),
    (
        METRICS,
        "received = _holds(new) & ~_holds(old)",
        "received = _holds(new) ^ _holds(old)",
        f"{TEST_METRICS}::test_transfers_are_experts_that_a_rank_did_not_hold",
    ),
    (
        METRICS,
        "        fraction = np.where(p2l >= 0, fraction, 0.0)\n",
        "",
        f"{TEST_METRICS}::test_shares_say_what_each_slot_takes",
    ),
    (
        METRICS,
        "    bad = ~((load >= 0) & (load < np.inf))\n",
        "    bad = load < 0\n",
        f"{TEST_METRICS}::test_loads_that_are_none_are_refused",
    ),
    # what comes in
    (
        ARRAYS,
        "if load.size and not (load.min() >= 0.0 and load.max() < np.inf):",
        "if load.size and load.min() < 0.0:",
        f"{TEST_ARRAYS}::test_load_that_is_no_count_raises_and_says_where",
        "rule 6",
    ),
    (
        ARRAYS,
        "np.issubdtype(array.dtype, np.signedinteger)",
        "np.issubdtype(array.dtype, np.integer)",
        f"{TEST_ARRAYS}::test_ids_are_copied_and_signed",
    ),
    (ARRAYS, 'order="C", copy=True)', 'order="C", copy=False)', f"{TEST_ARRAYS}::test_ids_are_copied_and_signed"),
    (ARRAYS, "    array.flags.writeable = False\n", "", f"{TEST_ARRAYS}::test_what_others_hold_cannot_be_written"),
    (
        ARRAYS,
        "if isinstance(value, bool) or not isinstance(value, (int, np.integer)):",
        "if not isinstance(value, (int, np.integer)):",
        f"{TEST_ARRAYS}::test_integers_are_integers",
    ),
    (
        ARRAYS,
        "    if not np.isfinite(number):\n",
        "    if False:\n",
        f"{TEST_ARRAYS}::test_numbers_are_finite_and_in_range",
    ),
    # the package
    (
        INIT,
        "    from eplb_core.metrics import transfers as transfers\n",
        "",
        "tests/test_api.py::test_table_and_imports_for_type_checkers_have_the_same_names",
    ),
    (
        INIT,
        "_HOME_OF = {",
        "import numpy\n\n_HOME_OF = {",
        "tests/test_api.py::test_importing_brings_neither_torch_nor_the_compiler",
    ),
    # metrics: rounding, overflow, and shares of other windows
    (
        METRICS,
        "    return np.minimum(each, 1.0, out=each)\n",
        "    return each\n",
        f"{TEST_METRICS}::test_balancedness_is_at_most_1_however_the_mean_rounds",
    ),
    (
        METRICS,
        "    if not most * load.size < np.inf:\n",
        "    if False:\n",
        f"{TEST_METRICS}::test_balancedness_is_at_most_1_however_the_mean_rounds",
    ),
    (
        METRICS,
        " or fraction.shape[:-2] not in windows:",
        ":",
        f"{TEST_METRICS}::test_loads_that_do_not_fit_the_layout_raise_with_both_shapes",
    ),
]
