"""Changes to what fills slots (resolver, stores, checkpoints) that a test must notice."""

from __future__ import annotations

LOADING = "eplb_core/loading"
TEST_RESOLVER = "tests/loading/test_resolver.py"
TEST_STORE = "tests/loading/test_store.py"
TEST_SLOTS = "tests/loading/test_slot_tensors.py"
TEST_CHECKPOINT = "tests/loading/checkpoint/test_load.py"

# (file, text before, text after, test that must fail[, rule])
MUTATIONS = [
    # one replica of those on a rank
    (
        f"{LOADING}/resolver.py",
        "(*rows, *table[expert])",
        "(rows[0],)",
        f"{TEST_RESOLVER}::test_second_replica_on_the_same_rank_is_loaded",
        "rule 2",
    ),
    # slots of other ranks
    (
        f"{LOADING}/resolver.py",
        "[start : start + self.layout.slots_per_rank]",
        "[start:]",
        f"{TEST_RESOLVER}::test_slots_of_new_ranks_never_reach_the_shared_row_of_an_old_rank",
        "rule 3",
    ),
    # scales kept as plain attributes stay behind
    (
        f"{LOADING}/modules.py",
        'yield from list(object.__getattribute__(value, "__dict__").items())',
        "yield from ()",
        f"{TEST_SLOTS}::test_what_is_certain_is_found_however_it_is_held_and_what_is_not_is_refused",
        "rule 9",
    ),
    # a length that fits is proof enough
    (
        f"{LOADING}/slot_tensors.py",
        "held.tensor.ndim >= 3 and",
        "",
        f"{TEST_SLOTS}::test_a_router_s_bias_is_never_permuted",
        "rule 9",
    ),
    # a loader that wrote nothing, or one expert twice, is believed
    (
        f"{LOADING}/verify/weights.py",
        "        if expert.shape[1] == layout.num_slots:\n            doubt",
        "        if False:\n            doubt",
        "tests/loading/verify/test_weights.py::test_zeros_are_found_without_a_reference_and_are_none",
        "rule 4",
    ),
    # rows may overlap
    (
        f"{LOADING}/store.py",
        "        self._check_overlaps()\n",
        "",
        f"{TEST_STORE}::test_what_cannot_move_is_refused_by_name",
    ),
    # one slot of several is written
    (
        f"{LOADING}/checkpoint/plan.py",
        "tensor_row(tensor, slot)) for slot in slots)",
        "tensor_row(tensor, slot)) for slot in slots[:1])",
        f"{TEST_CHECKPOINT}::test_every_slot_gets_its_expert_second_replicas_too",
        "rule 3",
    ),
    # writes before the plan is complete
    (
        f"{LOADING}/checkpoint/load.py",
        "    plan.check_complete()\n",
        "",
        f"{TEST_CHECKPOINT}::test_a_missing_expert_is_named_with_every_slot_that_would_stay_empty",
    ),
]
