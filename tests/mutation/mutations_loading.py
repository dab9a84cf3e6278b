"""Changes to `eplb_core/loading` that a test must notice."""

from __future__ import annotations

RESOLVER = "eplb_core/loading/resolver.py"
STORE = "eplb_core/loading/store.py"
TEST_RESOLVER = "tests/loading/test_resolver.py"
TEST_STORE = "tests/loading/test_store.py"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # the first local replica only
    (
        RESOLVER,
        "table[expert] = (*rows, *table[expert])",
        "table[expert] = (rows[0],)",
        f"{TEST_RESOLVER}::test_second_replica_on_the_same_rank_is_loaded",
    ),
    # no range filter
    (
        RESOLVER,
        "[start : start + self.layout.slots_per_rank]",
        "[start:]",
        f"{TEST_RESOLVER}::test_slots_of_new_ranks_never_reach_the_shared_row_of_an_old_rank",
    ),
    # shared experts filtered to the rank that owns the slot after the routed ones
    (
        RESOLVER,
        "for j in range(self.num_shared):",
        "for j in range(self.num_shared if self.rank == 0 else 0):",
        f"{TEST_RESOLVER}::test_shared_experts_are_on_every_rank_in_both_conventions",
    ),
    # one shared row for all ranks in the convention that has one for each
    (
        RESOLVER,
        'if self.shared == "per_rank" else 1',
        'if self.shared == "global" else 1',
        f"{TEST_RESOLVER}::test_shared_experts_are_on_every_rank_in_both_conventions",
    ),
    # an empty slot is an expert
    (
        RESOLVER,
        "    table.pop(-1, None)\n",
        "",
        f"{TEST_RESOLVER}::test_empty_slots_belong_to_nobody",
    ),
    # a negative layer counts from the end
    (
        RESOLVER,
        "row = self._row_of_layer.get(operator.index(layer))",
        "row = self._row_of_layer.get(operator.index(layer) % max(1, len(self._row_of_layer)))",
        f"{TEST_RESOLVER}::test_ids_out_of_range_raise",
    ),
    # layers beyond the map are drafts without being declared
    (
        RESOLVER,
        "row = self._row_of_layer.get(operator.index(layer))",
        "row = self._row_of_layer.get(operator.index(layer), -1 if layer > 0 else None)",
        f"{TEST_RESOLVER}::test_a_draft_layer_that_nobody_declared_raises",
    ),
    # rows may overlap
    (
        STORE,
        "        self._check_overlaps()\n",
        "",
        f"{TEST_STORE}::test_what_cannot_move_is_refused_by_name",
    ),
    # rows may have holes
    (
        STORE,
        "if stride != expected:",
        "if stride < expected:",
        f"{TEST_STORE}::test_what_cannot_move_is_refused_by_name",
    ),
    # only parameters are found
    (
        STORE,
        "{**part._parameters, **part._buffers, **vars(part)}",
        "{**part._parameters}",
        f"{TEST_STORE}::test_every_kind_of_slot_tensor_is_found",
    ),
    # unknown lengths pass
    (
        STORE,
        "    if unknown:\n",
        "    if not unknown:\n        return found\n    if not found.tensors:\n",
        f"{TEST_STORE}::test_a_tensor_of_unknown_length_is_named_at_registration",
    ),
]
