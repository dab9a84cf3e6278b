"""Rules of the adapters for engines, each with a change that a test must notice."""

_POLICY, _MAPS, _PLUGIN = (f"eplb_core/adapters/vllm{name}.py" for name in ("_policy", "_maps", ""))
_SGLANG, _SGLANG_MAPS = "eplb_core/adapters/sglang.py", "eplb_core/adapters/sglang_maps.py"
_ASCEND, _HOOKING = "eplb_core/adapters/vllm_ascend_policy.py", "eplb_core/adapters/_hooking.py"
_T = "tests/adapters/test_"

MUTATIONS = [
    # vLLM's policy
    (_POLICY, "        current=current,\n", "        current=None,\n", f"{_T}vllm_policy.py"),
    (_POLICY, "        active_ranks=active,\n", "        active_ranks=None,\n", f"{_T}vllm_policy.py"),
    (
        _POLICY,
        "        live = fill_empty(live, load, ranks)\n",
        "        return None\n",
        f"{_T}vllm_policy.py::test_ranks_that_just_came_are_filled_and_the_others_mostly_stay",
    ),
    (
        _POLICY,
        "        return None  # ids of nobody, or an expert that nobody holds: placed anew\n",
        "        raise\n",
        f"{_T}vllm_policy.py::test_an_old_map_that_is_no_layout_is_not_started_from",
    ),
    (_POLICY, "num_groups > 1 and num_groups % nodes == 0", "num_groups % nodes == 0 and False", f"{_T}vllm_policy.py"),
    (_POLICY, "            each[here[here >= 0]] = -1.0\n", "            pass\n", f"{_T}vllm_policy.py"),
    (_POLICY, "        min_gain=options.min_gain,\n", "", f"{_T}vllm_policy.py::test_options_reach_the_placement"),
    (_POLICY, "        left[row[found], at[found]] = False\n", "", f"{_T}vllm_policy.py"),
    # vLLM's maps
    (_MAPS, "own and backend in SENDERS_MAP", "own", f"{_T}vllm_maps.py"),
    (
        _MAPS,
        "if rank is not None:\n        return repeated",
        "if rank != 1:\n        return repeated",
        f"{_T}vllm_maps.py",
    ),
    (_MAPS, "rank=turn, width", "rank=0, width", f"{_T}vllm_maps.py"),
    (_MAPS, '"amin")', '"amax")', f"{_T}vllm_maps.py"),
    (_MAPS, 'kind="stable")[count[0] :]', 'kind="stable")[::-1][: len(row) - count[0]]', f"{_T}vllm_maps.py"),
    # vLLM's plug-in
    (
        _PLUGIN,
        "        if trouble:\n",
        "        if False:\n",
        f"{_T}vllm.py::test_a_function_of_another_signature_leaves_its_part_to_the_engine",
    ),
    (
        _PLUGIN,
        'if not _hooking.asked_for("vllm") or _active:',
        "if _active:",
        f"{_T}vllm.py::test_registering_acts_once_and_only_when_asked",
        "rule 11",
    ),
    (
        _PLUGIN,
        "        module.DefaultEplbPolicy = policy\n",
        "        pass\n",
        f"{_T}vllm.py::test_the_policy_stands_wherever_vllm_has_its_own",
    ),
    (
        _PLUGIN,
        "        if state.policy is not active.policy:\n",
        "        if False:\n",
        f"{_T}vllm.py::test_a_policy_that_vllm_did_not_take_is_named",
    ),
    (
        _PLUGIN,
        "        vllm_maps.fold_window(window[:, layer], row, after[layer])\n",
        "        pass\n",
        f"{_T}vllm.py::test_counts_of_a_window_stay_with_their_experts",
    ),
    (
        _PLUGIN,
        "        _committing.reset(token)\n",
        "        pass\n",
        f"{_T}vllm.py::test_tables_are_this_rank_s_after_start_and_after_every_commit",
    ),
    # what both plug-ins share
    (_HOOKING, "if part not in off", "if part", f"{_T}hooking.py"),
    (_HOOKING, "        if name not in known:\n", "        if False:\n", f"{_T}hooking.py"),
    (
        _HOOKING,
        "            return engine_own(*args, **kwargs)\n",
        "            raise\n",
        f"{_T}hooking.py::test_an_error_is_logged_once_and_the_engine_answers",
        "rule 11",
    ),
    (_HOOKING, "    if message not in _logged:\n", "    if True:\n", f"{_T}hooking.py"),
    # SGLang
    (_SGLANG_MAPS, "if live is None or tuple(live.shape)", "if True or tuple(live.shape)", f"{_T}sglang_maps.py"),
    (_SGLANG_MAPS, "(number > 0) & (number < count)", "(number > 0)", f"{_T}sglang_maps.py"),
    (_SGLANG_MAPS, "by_node = ~chosen &", "by_node =", f"{_T}sglang_maps.py"),
    (_SGLANG_MAPS, "torch.where(topk_ids < 0, topk_ids, slots)", "slots", f"{_T}sglang_maps.py"),
    (_SGLANG_MAPS, "torch.where(ids < 0, ids, slots).view", "slots.view", f"{_T}sglang_maps.py"),
    (
        _SGLANG_MAPS,
        "for layer in layers if 0 <= layer <",
        "for layer in range(9) if 0 <= layer <",
        f"{_T}sglang_maps.py",
    ),
    (
        _SGLANG,
        '        if algorithm.startswith("elasticity"):\n',
        "        if False:\n",
        f"{_T}sglang.py::test_algorithms_for_dead_ranks_are_the_engine_s",
    ),
    (
        _SGLANG,
        "            narrowed=rank is not None,\n",
        "            narrowed=False,\n",
        "tests/adapters/test_sglang.py::test_a_table_at_start_is_drawn_from_narrowed_lists",
    ),
    # vllm-ascend
    (
        _ASCEND,
        "    broken: BoolArray = twice | missing | moved\n",
        "    broken: BoolArray = missing | moved\n",
        f"{_T}vllm_ascend_policy.py",
    ),
    (
        _ASCEND,
        "    broken: BoolArray = twice | missing | moved\n",
        "    broken: BoolArray = twice | missing\n",
        f"{_T}vllm_ascend_policy.py",
    ),
    (_ASCEND, "np.argsort(-gain", "np.argsort(gain", f"{_T}vllm_ascend_policy.py"),
]
