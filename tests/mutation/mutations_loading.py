"""Changes to `eplb_core/loading` that a test must notice."""

from __future__ import annotations

RESOLVER = "eplb_core/loading/resolver.py"
FINGERPRINT = "eplb_core/loading/verify/fingerprint.py"
VERIFY = "eplb_core/loading/verify/weights.py"
PLAN = "eplb_core/loading/checkpoint/plan.py"
CHECKPOINT = "eplb_core/loading/checkpoint/load.py"
TEMPLATES = "eplb_core/loading/checkpoint/templates.py"
SGLANG = "eplb_core/adapters/sglang/plugin.py"
STORE = "eplb_core/loading/store.py"
TEST_RESOLVER = "tests/loading/test_resolver.py"
TEST_FINGERPRINT = "tests/loading/verify/test_fingerprint.py"
TEST_VERIFY = "tests/loading/verify/test_weights.py"
TEST_CHECKPOINT = "tests/loading/checkpoint/test_load.py"
TEST_SGLANG = "tests/adapters/sglang/test_plugin.py"
TEST_STORE = "tests/loading/test_store.py"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # the first local replica only
    (
        RESOLVER,
        "table[expert] = (*rows, *table[expert])",
        "table[expert] = (rows[0],)",
        f"{TEST_RESOLVER}::test_second_replica_on_the_same_rank_is_loaded",
        "rule 2",
    ),
    # no range filter
    (
        RESOLVER,
        "[start : start + self.layout.slots_per_rank]",
        "[start:]",
        f"{TEST_RESOLVER}::test_slots_of_new_ranks_never_reach_the_shared_row_of_an_old_rank",
        "rule 3",
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
        'row = self._row_of_layer.get(_index(layer, "layer"))',
        "row = self._row_of_layer.get(operator.index(layer) % max(1, len(self._row_of_layer)))",
        f"{TEST_RESOLVER}::test_ids_out_of_range_raise",
    ),
    # layers beyond the map are drafts without being declared
    (
        RESOLVER,
        'row = self._row_of_layer.get(_index(layer, "layer"))',
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
        "eplb_core/loading/modules.py",
        "            if isinstance(value, torch.Tensor):\n",
        "            if False:\n",
        f"{TEST_STORE}::test_every_kind_of_slot_tensor_is_found",
        "rule 9",
    ),
    # unknown lengths pass
    (
        STORE,
        "    if unknown:\n",
        "    if not unknown:\n        return found\n    if not found.tensors:\n",
        f"{TEST_STORE}::test_a_tensor_of_unknown_length_is_named_at_registration",
    ),
    # lanes have no place: lines that exchange halves are equal
    (
        FINGERPRINT,
        "np.uint64(2 * (lane_start + lane) + 1)",
        "np.uint64(1)",
        f"{TEST_FINGERPRINT}::test_exchanged_bytes_words_and_lines_change_the_print",
    ),
    # lines have no place
    (
        FINGERPRINT,
        "key, part = keys[line], words",
        "key, part = keys[0], words",
        f"{TEST_FINGERPRINT}::test_exchanged_bytes_words_and_lines_change_the_print",
    ),
    # the end of an odd row is not read
    (
        FINGERPRINT,
        "padded[: len(data)] = data",
        "padded[: len(data) // 4 * 4] = data[: len(data) // 4 * 4]",
        f"{TEST_FINGERPRINT}::test_every_flipped_bit_changes_the_print",
    ),
    # small rows are skipped by most samples
    (
        FINGERPRINT,
        "range(offset % min(step, chunks), chunks, step)",
        "range(offset % step, chunks, step)",
        f"{TEST_FINGERPRINT}::test_samples_read_each_chunk_once_in_turn",
    ),
    # a slot is its own reference
    (
        VERIFY,
        "if 2 * votes[winner] > len(group) else UNKNOWN",
        "if votes[winner] > 0 else UNKNOWN",
        f"{TEST_VERIFY}::test_a_stale_replica_is_found_without_a_reference",
    ),
    # an unloaded slot has a voice
    (
        VERIFY,
        "new = np.flatnonzero(self.written & (self.expert >= 0))",
        "new = np.flatnonzero(self.expert >= 0)",
        f"{TEST_VERIFY}::test_a_slot_that_was_never_written_is_unloaded_and_no_reference",
    ),
    # an unloaded slot that looks right is right
    (
        VERIFY,
        "held & (~self.written | wrong.any(axis=1))",
        "held & wrong.any(axis=1)",
        f"{TEST_VERIFY}::test_a_slot_that_the_loader_skipped_is_unloaded_whatever_it_holds",
    ),
    # only the first tensor counts
    (
        VERIFY,
        "held & (~self.written | wrong.any(axis=1))",
        "held & (~self.written | wrong[:, 0])",
        f"{TEST_VERIFY}::test_a_tensor_that_stayed_behind_is_found_and_named",
        "rule 9",
    ),
    # one slot of several is written
    (
        PLAN,
        "store.tensor_row(tensor, slot), index) for slot in slots)",
        "store.tensor_row(tensor, slot), index) for slot in slots[:1])",
        f"{TEST_CHECKPOINT}::test_every_slot_gets_its_expert_second_replicas_too",
        "rule 3",
    ),
    # fused tensors are taken in the order of experts
    (
        CHECKPOINT,
        "file.get_slice(name)[copy.row]",
        "file.get_slice(name)[0]",
        f"{TEST_CHECKPOINT}::test_fused_tensors_are_gathered_by_slot",
    ),
    # writes before the plan is complete
    (
        CHECKPOINT,
        "    plan.check_complete()\n",
        "",
        f"{TEST_CHECKPOINT}::test_a_missing_expert_is_named_with_every_slot_that_would_stay_empty",
    ),
    # gate and up change places
    (
        PLAN,
        "row.narrow(axis, part.block * size, size)",
        "row.narrow(axis, (part.blocks - 1 - part.block) * size, size)",
        f"{TEST_CHECKPOINT}::test_every_slot_gets_its_expert_second_replicas_too",
    ),
    # an empty slot counts as written
    (
        PLAN,
        "(self.missing == 0) & (self.expert >= 0)",
        "self.missing == 0",
        f"{TEST_CHECKPOINT}::test_any_layout_is_filled_and_empty_slots_are_left_alone",
    ),
    # names that look like an expert's are skipped in silence
    (
        TEMPLATES,
        "if match is not None or re.search(self.claims, name):",
        "if match is not None:",
        "tests/loading/checkpoint/test_templates.py::test_an_expert_s_tensor_that_the_template_does_not_know_is_named",
    ),
    # the plug-in does not filter: new ranks' slots reach the shared row
    (
        SGLANG,
        "if start <= slot < start + layer._num_local_routed]",
        "if start <= slot]",
        f"{TEST_SGLANG}::test_a_loader_is_told_its_own_rank_s_slots_alone",
        "rule 3",
    ),
    # the plug-in keeps answering from a layout that moves have changed
    (
        SGLANG,
        "known[0] is layout_map and known[1] == version",
        "known[0] is layout_map",
        f"{TEST_SGLANG}::test_a_layout_that_moves_changed_is_read_anew",
        "rule 4",
    ),
    # the plug-in acts without being asked for
    (
        SGLANG,
        '    if not hooking.asked_for("sglang") or _registered:\n        return\n',
        "",
        f"{TEST_SGLANG}::test_an_installed_plug_in_does_nothing_unless_asked_for",
        "rule 11",
    ),
    # ids out of range fall back to the engine, which counts from the end
    (
        SGLANG,
        "    except IndexError:\n        raise\n",
        "",
        f"{TEST_SGLANG}::test_ids_out_of_range_raise",
    ),
]
