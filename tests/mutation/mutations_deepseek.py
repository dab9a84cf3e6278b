"""Changes to `rebalance_experts` that a test must notice."""

FILE = "eplb_core/placement/deepseek.py"
TESTS = "tests/placement/test_deepseek.py"
DEFINITION = f"{TESTS}::test_answers_equal_the_definition"
GOLDEN = f"{TESTS}::test_answers_equal_deepseeks_own"
SUMS = f"{TESTS}::test_group_sums_round_as_torch_rounds"

MUTATIONS: list[tuple[str, ...]] = [
    (
        FILE,
        "        groups = nodes = 1\n",
        "        nodes = 1\n",
        f"{TESTS}::test_groups_that_do_not_divide_over_nodes_get_the_global_policy",
    ),
    (
        FILE,
        "or ranks % nodes or",
        "or",
        f"{TESTS}::test_numbers_that_do_not_fit_raise_with_all_of_them",
    ),
    (
        FILE,
        "    if slots < experts or experts == 0",
        "    if experts == 0",
        f"{TESTS}::test_numbers_that_do_not_fit_raise_with_all_of_them",
    ),
    (FILE, "    keys.sort(axis=1)", "    pass", DEFINITION),
    (
        FILE,
        "bits[layer, expert] >= _INFINITY_BITS)",
        "bits[layer, expert] > _INFINITY_BITS)",
        f"{TESTS}::test_load_that_is_no_count_raises_and_says_where",
        "rule 6",
    ),
    (
        FILE,
        " & (bits[layer, expert] != _SIGN_BIT)",
        "",
        f"{TESTS}::test_negative_zero_is_zero",
    ),
    (
        FILE,
        "(np.uint64(~(bits[layer, expert_at[i]] & ~_SIGN_BIT)) << _HALF)",
        "(np.uint64(~bits[layer, expert_at[i]]) << _HALF)",
        f"{TESTS}::test_negative_zero_is_zero",
    ),
    (FILE, "if groups > nodes:", "if groups > nodes + 1:", DEFINITION),
    (FILE, "row[expert] / np.float32(count_of[expert])", "row[expert] / np.float32(count_of[expert] + 1)", DEFINITION),
    (FILE, "replicas[item] = count_of[expert]", "replicas[item] = 1", DEFINITION),
    (FILE, "most = max(most, count_of[expert])", "most = max(most, count_of[expert] + 1)", DEFINITION),
    (
        FILE,
        "row[items[item]] / np.float32(count_of[items[item]])",
        "row[items[item]]",
        DEFINITION,
    ),
    (FILE, "pack_load[lightest] += as_float[0]", "pack_load[lightest] += np.rint(as_float[0])", GOLDEN),
    (FILE, "        if held[lightest] == capacity:", "        if held[lightest] == capacity + 1:", DEFINITION),
    (FILE, "heap[child + 1] < heap[child]", "heap[child + 1] > heap[child]", DEFINITION),
    (FILE, "_sum_in_lanes(values, partial, 8)", "_sum_in_lanes(values, partial, 4)", SUMS, "rule 5"),
    (FILE, "group_keys[at - 1] > key:", "group_keys[at - 1] < key:", DEFINITION),
    (FILE, "    power = 4\n", "    power = 5\n", SUMS),
    (FILE, "* (groups // nodes) + place_of[group]) * size", "* (groups // nodes)) * size", DEFINITION),
]
