"""Rules of the adapters for engines, each with a change that a test must notice."""

_POLICY, _MAPS, _PLUGIN = (f"eplb_core/adapters/vllm/{name}.py" for name in ("policy", "maps", "plugin"))
_SGLANG, _SGLANG_MAPS = "eplb_core/adapters/sglang/plugin.py", "eplb_core/adapters/sglang/maps.py"
_ASCEND, _HOOKING = "eplb_core/adapters/vllm_ascend_policy.py", "eplb_core/adapters/hooking.py"
_MOVES, _REBALANCE = "eplb_core/adapters/sglang/moves.py", "eplb_core/adapters/sglang/rebalance.py"
_COMMUNICATOR = "eplb_core/adapters/vllm/communicator.py"
_RECORD, _FORMATS = "eplb_core/adapters/sglang/record.py", "eplb_core/files/formats.py"
_T = "tests/adapters/"

MUTATIONS = [
    # vLLM's policy
    (_POLICY, "        current=current,\n", "        current=None,\n", f"{_T}vllm/test_policy.py"),
    (_POLICY, "        active_ranks=active,\n", "        active_ranks=None,\n", f"{_T}vllm/test_policy.py"),
    (
        _POLICY,
        "        live = fill_empty(live, load, ranks)\n",
        "        return None\n",
        f"{_T}vllm/test_policy.py::test_ranks_that_just_came_are_filled_and_the_others_mostly_stay",
    ),
    (
        _POLICY,
        "        return None  # ids of nobody, or an expert that nobody holds: placed anew\n",
        "        raise\n",
        f"{_T}vllm/test_policy.py::test_an_old_map_that_is_no_layout_is_not_started_from",
    ),
    (
        _POLICY,
        "num_groups > 1 and num_groups % nodes == 0",
        "num_groups % nodes == 0 and False",
        f"{_T}vllm/test_policy.py",
    ),
    (_POLICY, "            each[here[here >= 0]] = -1.0\n", "            pass\n", f"{_T}vllm/test_policy.py"),
    (_POLICY, "        min_gain=options.min_gain,\n", "", f"{_T}vllm/test_policy.py::test_options_reach_the_placement"),
    (_POLICY, "        left[row[found], at[found]] = False\n", "", f"{_T}vllm/test_policy.py"),
    # vLLM's maps
    (_MAPS, "own and backend in SENDERS_MAP", "own", f"{_T}vllm/test_maps.py"),
    (
        _MAPS,
        "if rank is not None:\n        return repeated",
        "if rank != 1:\n        return repeated",
        f"{_T}vllm/test_maps.py",
    ),
    (_MAPS, "rank=turn, width", "rank=0, width", f"{_T}vllm/test_maps.py"),
    (_MAPS, '"amin")', '"amax")', f"{_T}vllm/test_maps.py"),
    (_MAPS, 'kind="stable")[count[0] :]', 'kind="stable")[::-1][: len(row) - count[0]]', f"{_T}vllm/test_maps.py"),
    # vLLM's plug-in
    (
        _PLUGIN,
        "        if trouble:\n",
        "        if False:\n",
        f"{_T}vllm/test_plugin.py::test_a_function_of_another_signature_leaves_its_part_to_the_engine",
    ),
    (
        _PLUGIN,
        'if not hooking.asked_for("vllm") or _active:',
        "if _active:",
        f"{_T}vllm/test_plugin.py::test_registering_acts_once_and_only_when_asked",
        "rule 11",
    ),
    (
        _PLUGIN,
        "        module.DefaultEplbPolicy = policy\n",
        "        pass\n",
        f"{_T}vllm/test_plugin.py::test_the_policy_stands_wherever_vllm_has_its_own",
    ),
    (
        _PLUGIN,
        "        if state.policy is not active.policy:\n",
        "        if False:\n",
        f"{_T}vllm/test_plugin.py::test_a_policy_that_vllm_did_not_take_is_named",
    ),
    (
        _PLUGIN,
        "        vllm_maps.fold_window(window[:, layer], row, after[layer])\n",
        "        pass\n",
        f"{_T}vllm/test_plugin.py::test_counts_of_a_window_stay_with_their_experts",
    ),
    (
        _PLUGIN,
        "        _committing.reset(token)\n",
        "        pass\n",
        f"{_T}vllm/test_plugin.py::test_tables_are_this_rank_s_after_start_and_after_every_commit",
    ),
    # what both plug-ins share
    (_HOOKING, "if part not in off", "if part", f"{_T}test_hooking.py"),
    (_HOOKING, "        if name not in known:\n", "        if False:\n", f"{_T}test_hooking.py"),
    (
        _HOOKING,
        "            return engine_own(*args, **kwargs)\n",
        "            raise\n",
        f"{_T}test_hooking.py::test_an_error_is_logged_once_and_the_engine_answers",
        "rule 11",
    ),
    (_HOOKING, "    if message not in _logged:\n", "    if True:\n", f"{_T}test_hooking.py"),
    # SGLang
    (_SGLANG_MAPS, "if live is None or tuple(live.shape)", "if True or tuple(live.shape)", f"{_T}sglang/test_maps.py"),
    (_SGLANG_MAPS, "(number > 0) & (number < count)", "(number > 0)", f"{_T}sglang/test_maps.py"),
    (_SGLANG_MAPS, "by_node = ~chosen &", "by_node =", f"{_T}sglang/test_maps.py"),
    (_SGLANG_MAPS, "torch.where(topk_ids < 0, topk_ids, slots)", "slots", f"{_T}sglang/test_maps.py"),
    (_SGLANG_MAPS, "torch.where(ids < 0, ids, slots).view", "slots.view", f"{_T}sglang/test_maps.py"),
    (
        _SGLANG_MAPS,
        "for layer in layers if 0 <= layer <",
        "for layer in range(9) if 0 <= layer <",
        f"{_T}sglang/test_maps.py",
    ),
    (
        _SGLANG,
        '        if algorithm.startswith("elasticity") or _sglang.bypassed.get():\n',
        "        if _sglang.bypassed.get():\n",
        f"{_T}sglang/test_plugin.py::test_algorithms_for_dead_ranks_are_the_engine_s",
    ),
    (
        _SGLANG,
        '        if algorithm.startswith("elasticity") or _sglang.bypassed.get():\n',
        '        if algorithm.startswith("elasticity"):\n',
        f"{_T}sglang/test_plugin.py::test_an_algorithm_that_ranks_have_not_agreed_on_is_the_engine_s",
    ),
    (
        _SGLANG,
        "            narrowed=rank is not None,\n",
        "            narrowed=False,\n",
        "tests/adapters/sglang/test_plugin.py::test_a_table_at_start_is_drawn_from_narrowed_lists",
    ),
    # one answer on all ranks
    (
        _HOOKING,
        "_try(engine_own, digest_of)\n",
        "_try(lambda: answer, digest_of)\n",
        f"{_T}test_hooking.py::test_where_one_rank_fell_back_all_take_the_engine_s_and_the_line_names_it",
    ),
    (
        _HOOKING,
        "    return otherwise()\n",
        "    return answer\n",
        f"{_T}test_hooking.py::test_where_the_engine_s_own_answers_differ_too_nothing_changes",
    ),
    (
        _HOOKING,
        "    kept = [said.digest for said in told if not said.failure] or digests\n",
        "    kept = digests\n",
        f"{_T}test_hooking.py::test_where_one_rank_fell_back_all_take_the_engine_s_and_the_line_names_it",
    ),
    (
        _PLUGIN,
        "            group = group_of(num_ranks) if still else None\n",
        "            group = None\n",
        f"{_T}vllm/test_plugin.py::test_where_the_policy_fails_on_one_rank_all_ranks_take_the_engine_s",
    ),
    (
        _PLUGIN,
        "            group = group_of(num_ranks) if still else None\n",
        "            group = group_of(num_ranks)\n",
        f"{_T}vllm/test_plugin.py::test_ranks_that_come_or_go_are_not_compared",
    ),
    (
        _PLUGIN,
        "        if sender.rank is None:  # all",
        "        if False:  # all",
        f"{_T}vllm/test_plugin.py::test_where_equal_tables_fail_on_one_rank_all_ranks_write_the_engine_s",
    ),
    (
        _REBALANCE,
        "        token = _sglang.bypassed.set(True)\n",
        "        token = _sglang.bypassed.set(False)\n",
        f"{_T}sglang/test_rebalance.py::test_where_one_rank_places_otherwise_all_take_sglang_s_own_map",
    ),
    (
        _REBALANCE,
        "    if broadcast_over_world or not _gather_works():\n",
        "    if not _gather_works():\n",
        f"{_T}sglang/test_rebalance.py::test_where_one_rank_places_otherwise_all_take_sglang_s_own_map",
    ),
    # SGLang's moves
    (
        _MOVES,
        "            tables=self.rows,\n",
        "",
        f"{_T}sglang/test_moves.py::test_a_rebalance_moves_weights_and_all_maps_in_place_and_counts_its_transfers",
    ),
    (
        _MOVES,
        "        self._aimed = target.physical_to_logical_map, table.numpy()[self._layers]\n",
        "",
        f"{_T}sglang/test_moves.py::test_rows_of_the_target_have_sglang_s_picks_which_follow_from_the_layers_before",
    ),
    (
        _MOVES,
        "            vllm_maps.fold_window(window[:, layer], before, live.physical_to_logical_map[layer])\n",
        "            pass\n",
        f"{_T}sglang/test_moves.py::test_counts_of_the_window_stay_with_their_experts_when_a_layer_moves",
    ),
    (
        _MOVES,
        "        yield from self._passes()  # of one that the engine forgot\n",
        "",
        f"{_T}sglang/test_moves.py::test_an_engine_that_forgot_a_migration_goes_on_with_it",
    ),
    (
        _MOVES,
        'FOR_THE_ENGINE = ("failed", "plan", ',
        'FOR_THE_ENGINE = ("failed", ',
        f"{_T}sglang/test_moves.py::test_an_error_on_one_rank_ends_it_on_all_and_leaves_the_next_rebalance_to_the_engine",
    ),
    (
        _MOVES,
        '        told = self._agreement.gather(b"moved" if moved else b"")\n',
        '        told = [b"moved" if moved else b""]\n',
        f"{_T}sglang/test_moves.py::test_experts_that_lie_in_other_tensors_after_an_update_end_the_moves_on_all_ranks",
    ),
    (
        _MOVES,
        "            self.migrator.pause()\n",
        "            pass\n",
        f"{_T}sglang/test_moves.py::test_weights_that_the_engine_writes_meanwhile_pause_a_migration",
    ),
    (
        _MOVES,
        "        return [self._layers[row] for row in layers]\n",
        "        return [int(row) for row in layers]\n",
        f"{_T}sglang/test_moves.py::test_moves_are_recorded_by_the_model_s_own_layers",
    ),
    (
        _REBALANCE,
        "        if self._trouble is not None:\n            raise self._trouble\n",
        "",
        f"{_T}sglang/test_rebalance.py::test_what_cannot_be_looked_up_ends_the_migration_and_not_this_rank_alone",
    ),
    (
        _REBALANCE,
        "    if moves.off:\n",
        "    if False:\n",
        f"{_T}sglang/test_rebalance.py::test_without_moves_or_when_they_are_over_or_switched_off_the_engine_rebalances",
    ),
    (
        _REBALANCE,
        "        finally:\n            _unless_over(moves, moves.after_weights)\n",
        "        finally:\n            pass\n",
        f"{_T}sglang/test_rebalance.py::test_no_rank_moves_an_expert_while_the_engine_writes_weights",
    ),
    # one rank alone that fails
    (
        _HOOKING,
        "    told = gather(said)\n    if error is not None:\n",
        "    if error is not None:\n        raise error\n    told = gather(said)\n    if error is not None:\n",
        f"{_T}test_hooking.py::test_a_rank_whose_answer_raises_says_so_first_and_leaves_no_other_waiting",
    ),
    (
        _HOOKING,
        "    if error is None and _are_equal(told):\n",
        "    if _are_equal(told):\n",
        f"{_T}test_hooking.py::test_a_rank_whose_answer_raises_says_so_first_and_leaves_no_other_waiting",
    ),
    (
        _COMMUNICATOR,
        "        except Exception:\n            self._barrier(False)\n            raise\n",
        "        except Exception:\n            raise\n",
        f"{_T}vllm/test_communicator.py::test_a_read_that_does_not_end_is_given_up_on_by_name",
    ),
    (
        _COMMUNICATOR,
        "            self._given_up = tickets\n",
        "",
        f"{_T}vllm/test_communicator.py::test_nothing_is_read_while_a_read_that_was_given_up_on_may_still_write_to_the_buffer",
        "rule 7",
    ),
    (
        _COMMUNICATOR,
        "        if not self._barrier(True):\n",
        "        if self._barrier(True) is None:\n",
        f"{_T}vllm/test_communicator.py::test_a_peer_that_is_gone_is_named",
    ),
    (
        _COMMUNICATOR,
        "            if trouble:\n",
        "            if False:\n",
        f"{_T}vllm/test_communicator.py::test_a_rank_that_cannot_be_registered_is_named_on_the_others_which_do_not_wait_for_it",
    ),
    (
        _PLUGIN,
        "            if each != told[0] or each.failure:\n",
        "            if False:\n",
        f"{_T}vllm/test_plugin.py::test_a_rank_that_cannot_write_equal_tables_leaves_all_ranks_the_engine_s",
    ),
    (
        _PLUGIN,
        "mismatch(_find(state_module, _ADD_MODEL[0]), *",
        "mismatch(state_module.EplbState.add_model, *",
        f"{_T}vllm/test_plugin.py::test_an_engine_without_the_state_s_class_keeps_what_needs_it",
    ),
    (
        _REBALANCE,
        '        moves.close(f"{type(error).__name__}: {error}")\n',
        "        raise\n",
        f"{_T}sglang/test_rebalance.py::test_moves_that_cannot_be_paused_or_resumed_are_over_and_the_update_is_not",
    ),
    (
        _REBALANCE,
        "    reason = sglang_record.barred() or _why_not(",
        "    reason = _why_not(",
        f"{_T}sglang/test_rebalance.py::test_a_model_that_cannot_be_registered_is_left_to_the_engine_with_one_line",
    ),
    (
        _REBALANCE,
        "        trouble=trouble,\n",
        "",
        f"{_T}sglang/test_rebalance.py::test_a_registered_model_says_what_is_in_effect",
    ),
    (
        _MOVES,
        "isinstance(error, MigrationError) or self.migrator.layout is before",
        "isinstance(error, MigrationError)",
        f"{_T}sglang/test_moves.py::test_an_install_of_weights_that_fails_on_one_rank_is_no_pass_to_go_on_with",
    ),
    (
        _SGLANG,
        'asked_for("sglang") or _registered:',
        'asked_for("sglang"):',
        f"{_T}sglang/test_plugin.py::test_hooks_are_registered_once",
    ),
    (
        _RECORD,
        "            trouble = error\n        else:\n",
        "            raise\n        else:\n",
        f"{_T}sglang/test_record.py::test_a_rank_that_cannot_adopt_says_so_before_it_raises",
    ),
    (
        _RECORD,
        "    if vars(daemon_class).get(_KEEPS):\n",
        "    if False:\n",
        f"{_T}sglang/test_record.py::test_a_daemon_keeps_one_record_however_often_it_is_asked_to",
    ),
    # SGLang's weight cache
    (
        _RECORD,
        "            _adopt(metadata, layout, model_config)\n",
        "            pass\n",
        f"{_T}sglang/test_record.py::test_an_engine_that_starts_after_moves_adopts_the_layout_and_is_served",
    ),
    (
        _RECORD,
        "        if reason:\n",
        "        if False:\n",
        f"{_T}sglang/test_record.py::test_an_engine_without_the_plug_in_is_refused_once_experts_have_moved",
    ),
    (
        _RECORD,
        '    if len({each.partition(",")[0] for each in told}) > 1 or trouble is not None:\n',
        "    if trouble is not None:\n",
        f"{_T}sglang/test_record.py::test_ranks_where_some_mapped_and_some_loaded_do_not_start",
    ),
    (
        _RECORD,
        "    if barred():\n",
        "    if False:\n",
        f"{_T}sglang/test_record.py::test_where_one_rank_has_no_record_no_rank_moves",
    ),
    (
        _RECORD,
        'request.get("type") == "fetch_state" and _fits(daemon.config, request):\n',
        'request.get("type") == "fetch_state":\n',
        f"{_T}sglang/test_record.py::test_an_engine_of_another_configuration_is_no_user_of_the_weights",
    ),
    (
        _MOVES,
        "        return self._failures == TRIES\n",
        "        return False\n",
        f"{_T}sglang/test_moves.py::test_reads_that_fail_are_tried_again_and_a_pause_of_all_passes_is_no_failure",
    ),
    (
        _RECORD,
        "        return {}\n    missing = move()\n",
        "    missing = move()\n",
        f"{_T}sglang/test_record.py::test_moves_of_the_engine_s_own_updater_are_begun_and_committed",
    ),
    (
        _RECORD,
        '    if reply.status != "ok" or reply.digest != digest:\n',
        "    if False:\n",
        f"{_T}sglang/test_record.py::test_a_move_that_could_not_be_recorded_is_the_last",
    ),
    (
        _RECORD,
        "            return trouble\n",
        "            break\n",
        f"{_T}sglang/test_record.py::test_a_daemon_of_another_signature_is_left_as_it_is",
    ),
    # inline JSON
    (
        _FORMATS,
        '    if path == INLINE and to != "sglang":\n',
        "    if False:\n",
        "tests/cli/test_main.py::test_convert_reads_and_writes_sglang_s_inline_json",
    ),
    # vllm-ascend
    (
        _ASCEND,
        "    broken: BoolArray = twice | missing | moved\n",
        "    broken: BoolArray = missing | moved\n",
        f"{_T}test_vllm_ascend_policy.py",
    ),
    (
        _ASCEND,
        "    broken: BoolArray = twice | missing | moved\n",
        "    broken: BoolArray = twice | missing\n",
        f"{_T}test_vllm_ascend_policy.py",
    ),
    (_ASCEND, "np.argsort(-gain", "np.argsort(gain", f"{_T}test_vllm_ascend_policy.py"),
]
