"""Adapters: one change for each rule that they carry, and the ones that would hurt most."""

A, T = "eplb_core/adapters/", "tests/adapters/"
PLUGIN, TEST_PLUGIN = f"{A}vllm/plugin.py", f"{T}vllm/test_plugin.py"
HOOKING, TEST_HOOKING = f"{A}hooking.py", f"{T}test_hooking.py"
RECORD, TEST_RECORD = f"{A}sglang/record.py", f"{T}sglang/test_record.py"
FELL_BACK = f"{TEST_HOOKING}::test_where_one_rank_fell_back_all_take_the_engine_s_and_the_line_names_it"
SPEAKS_FIRST = f"{TEST_HOOKING}::test_a_rank_whose_answer_raises_says_so_first_and_leaves_no_other_waiting"

MUTATIONS = [
    (
        f"{A}vllm_ascend_policy.py",
        "            if worse.size:",
        "            if False:",
        f"{T}test_vllm_ascend_policy.py::test_no_layer_is_worse_than_before_on_what_the_windows_sum_to",
    ),
    (
        PLUGIN,
        'not hooking.asked_for("vllm") or',
        "",
        f"{TEST_PLUGIN}::test_registering_acts_once_and_only_when_asked",
        "rule 11",
    ),
    (HOOKING, "            return engine_own(", "            raise\n            engine_own(", TEST_HOOKING, "rule 11"),
    (HOOKING, "attempt(engine_own, digest_of)", "attempt(lambda: answer, digest_of)", FELL_BACK, "rule 4"),
    (HOOKING, "if error is None and _are_equal(told):", "if _are_equal(told):", SPEAKS_FIRST),
    (
        f"{A}vllm/policy.py",
        "        current=current,\n",
        "        current=None,\n",
        f"{T}vllm/test_policy.py",
        "rule 6",
    ),
    (
        f"{A}vllm/communicator.py",
        "            self._given_up = tickets\n",
        "",
        f"{T}vllm/test_communicator.py::test_nothing_is_read_while_a_read_that_was_given_up_on_may_still_write_to_the_buffer",
        "rule 7",
    ),
    (
        f"{A}sglang/moves.py",
        "            tables=self.rows,\n",
        "",
        f"{T}sglang/test_moves.py::test_a_rebalance_moves_weights_and_all_maps_in_place_and_counts_its_transfers",
        "rule 9",
    ),
    (
        f"{A}sglang/moves.py",
        'told = self._agreement.gather(b"moved" if moved else b"")',
        'told = [b"moved" if moved else b""]',
        f"{T}sglang/test_moves.py::test_experts_that_lie_elsewhere_after_an_update_end_the_moves_and_later_updates_are_the_engine_s",
    ),
    (
        RECORD,
        "            _adopt(metadata, layout, model_config)\n",
        "            pass\n",
        f"{TEST_RECORD}::test_an_engine_that_starts_after_moves_adopts_the_layout_and_is_served",
    ),
    (
        f"{A}sglang/daemon.py",
        "        if reason:\n",
        "        if False:\n",
        f"{TEST_RECORD}::test_an_engine_without_the_plug_in_is_refused_once_experts_have_moved",
    ),
    (
        RECORD,
        'if reply.status != "ok" or reply.digest != digest:',
        "if False:",
        f"{TEST_RECORD}::test_a_move_that_could_not_be_recorded_is_the_last",
    ),
    (
        f"{A}sglang/maps.py",
        'check_load(counts, "tokens_per_expert", (3,), outer="pass")',
        "counts.astype(np.int64)",
        f"{T}sglang/test_maps.py::test_counts_that_are_none_are_refused_before_passes_are_added_up",
        "rule 6",
    ),
    (
        f"{A}vllm/commits.py",
        "kept.tensor is live and not live.is_inference() and kept.version == live._version",
        "kept.tensor is live",
        f"{T}vllm/test_commits.py::test_a_map_that_others_wrote_is_not_taken_for_the_one_committed",
    ),
    (f"{A}vllm_ascend_policy.py", "twice | missing | moved", "missing | moved", f"{T}test_vllm_ascend_policy.py"),
]
