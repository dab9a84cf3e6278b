"""Changes to dispatch that a test must notice."""

from __future__ import annotations

INTERPRETED = True

HOST = "eplb_core/dispatch/host.py"
ROWS = "eplb_core/dispatch/rows.py"
SHARES = "eplb_core/dispatch/shares.py"
STATIC = "eplb_core/dispatch/static.py"
COUNTER = "eplb_core/dispatch/counter.py"
TABLES = "eplb_core/dispatch/tables.py"
T_TABLES = "tests/dispatch/test_tables.py"
PAIRS = "tests/dispatch/test_shares.py::test_slots_of_one_expert_on_one_rank_take_equal_parts"
ROOMS = "tests/test_imports.py::test_a_room_looks_into_none_beside_or_above_it"
ANEW = f"{T_TABLES}::test_installing_one_layer_equals_making_the_tables_anew"
DRAWS = "tests/dispatch/test_static.py::test_static_table_follows_the_standard_librarys_draws"
STAY = f"{T_TABLES}::test_addresses_shapes_and_types_stay"
NOTHING = f"{T_TABLES}::test_more_replicas_than_there_is_room_for_are_refused_before_anything_is_written"
EXACT = f"{T_TABLES}::test_entries_give_every_slot_its_share_exactly"
ORACLE = "tests/dispatch/test_ops.py::test_the_loop_on_the_host_does_what_the_oracle_does"
WIDE = "tests/dispatch/test_counter.py::test_a_window_counts_beyond_32_bits"
SPREAD = "tests/dispatch/test_ops.py::test_fake_loads_all_ranks_alike_when_all_take_part"

RESOLVER = "from eplb_core.loading.resolver import SlotResolver\n"
KEPT = "            self._p2l[layer] = p2l[layer]\n"

MUTATIONS: list[tuple[str, ...]] = [
    (SHARES, "new[k] / multiple[k]", "new[k]", PAIRS, "rule 2"),
    (STATIC, "from eplb_core.layout", f"{RESOLVER}from eplb_core.layout", ROOMS, "rule 3"),
    (TABLES, KEPT, "", ANEW, "rule 4"),
    (STATIC, "if prefer_same_node else np.zeros(ranks, dtype=np.int64)", "", DRAWS, "rule 5"),
    (TABLES, KEPT, f"{KEPT}            self._packed = self._packed.clone()\n", STAY, "rule 8"),
    (TABLES, "if len(rows) > 1:", "if False:", NOTHING, "rule 8"),
    (ROWS, "weights[rich] -= UNIT - weights[poor]", "weights[rich] = UNIT", EXACT),
    (COUNTER, "counts.to(torch.int64), 0)", "counts.to(torch.int32), 0)", WIDE),
    (TABLES, "first = self.rank * experts // ranks", "first = 0", SPREAD),
    (HOST, "+ 1] <= place[expert]", "+ 1] < place[expert]", ORACLE),
]
