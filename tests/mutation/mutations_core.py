"""Changes to topology, layout, loads and metrics that a test must notice."""

from __future__ import annotations

INTERPRETED = True

LAYOUT = "eplb_core/layout.py"
METRICS = "eplb_core/metrics.py"
T_LAYOUT = "tests/test_layout.py"
T_METRICS = "tests/test_metrics.py"
MISSING = f"{T_LAYOUT}::test_a_map_without_one_expert_is_refused"
INVERSES = f"{T_LAYOUT}::test_all_maps_are_inverses_of_the_one_array"
DIGEST = f"{T_LAYOUT}::test_digest_is_of_the_stated_bytes"
NO_LOAD = f"{T_METRICS}::test_layers_without_load_count_in_no_average"
TRANSFERS = f"{T_METRICS}::test_transfers_are_experts_that_a_rank_did_not_hold"
SUMS = f"{T_METRICS}::test_shares_are_fractions_that_sum_to_one"

MUTATIONS: list[tuple[str, ...]] = [
    (LAYOUT, "if layers and counts.min() == 0:", "if False:", MISSING, "rule 1"),
    (LAYOUT, "np.argsort(key,", "np.argsort(-key,", INVERSES, "rule 4"),
    (LAYOUT, '"<i8").tobytes()', '"<i4").tobytes()', DIGEST, "rule 5"),
    (METRICS, "each[known].mean()", "np.nan_to_num(each).mean()", NO_LOAD, "rule 6"),
    (METRICS, "_holds(new) & ~", "_holds(new) ^ ", TRANSFERS),
    (METRICS, "np.abs(total - 1.0)", "(total - 1.0)", SUMS),
]
