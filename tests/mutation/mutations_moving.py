"""Changes to what moves experts that a test must notice; tried without compilation."""

from __future__ import annotations

INTERPRETED = True

PLAN = "eplb_core/loading/pull_plan.py"
STEPS = "eplb_core/loading/moves/steps.py"
PULL = "eplb_core/loading/moves/pull.py"
STAGE = "eplb_core/loading/moves/stage.py"
MOVER = "eplb_core/loading/moves/mover.py"
RUN = "eplb_core/loading/moves/run.py"
MIGRATOR = "eplb_core/loading/moves/migrator.py"
INSTALL = "eplb_core/loading/install/installer.py"
VERIFY = "eplb_core/loading/verify/weights.py"
TEST = "tests/loading/"
MOVES = "tests/loading/moves/"
INSTALLED = f"{TEST}install/test_installer.py::test_an_install_leaves_every_slot_with_its_expert"

# (file, text before, text after, test that must fail, rule of docs/architecture.md)
MUTATIONS = [
    # a step loses the last copy of an expert
    (
        STEPS,
        "copies[row[slot]] > 1)",
        "copies[row[slot]] >= 1)",
        f"{MOVES}test_steps.py::test_any_capacity_reaches_the_target_through_valid_layouts",
        "rule 1",
    ),
    # the second of two new replicas gets what its slot held before
    (INSTALL, "= source[local[slot]]", "= local[slot]  #", INSTALLED, "rule 2"),
    # a target of a function uses slots that a rank does not have
    (
        RUN,
        "self.puller.check_target(target.layout)",
        "self.puller",
        f"{MOVES}test_unequal_ranks.py::"
        "test_a_target_that_uses_a_missing_slot_is_refused_on_every_rank_and_costs_nothing",
        "rule 1",
    ),
    # weights change and tables do not
    (
        MIGRATOR,
        "if self._tables is not None:",
        "if self._tables is None:",
        f"{MOVES}test_migrator.py::test_rows_that_change_are_installed_one_a_pass_in_order",
        "rule 4",
    ),
    # the number of steps is this rank's own
    (
        RUN,
        "if self.phase == progress.MOVING else 0",
        "if self.steps else 0",
        f"{MOVES}test_migrator.py::test_the_number_of_steps_is_the_same_on_a_rank_that_has_no_plan",
        "rule 5",
    ),
    # staging is used again while an abandoned read may still write to it
    (
        PULL,
        "poll(ticket).state.is_end\n        except",
        "poll(ticket).state > 0\n        except",
        f"{MOVES}test_migrator.py::test_a_rank_that_never_becomes_ready_ends_it_by_the_deadline",
        "rule 7",
    ),
    # a layer is read again while a peer has not installed it
    (
        RUN,
        "needed = 2 * index if",
        "needed = 0 if",
        f"{MOVES}test_migrator_interruptions.py::test_a_layer_is_not_read_again_before_every_rank_has_installed_it",
        "rule 7",
    ),
    # torn bytes are installed
    (
        STAGE,
        "if len(bad):",
        "if len(bad) > 1000:",
        f"{MOVES}test_migrator.py::test_bytes_that_were_torn_on_the_way_are_not_installed",
        "rule 7",
    ),
    # ranks install though one could not read
    (
        MOVER,
        "if failures or staged is None:",
        "if staged is None:",
        f"{MOVES}test_mover.py::test_a_read_that_fails_ends_the_move_on_every_rank_between_two_layers",
        "rule 7",
    ),
    # rows of whole tensors stay behind
    (INSTALL, "if self.stores[0].whole_names:", "if not self.stores:", INSTALLED, "rule 9"),
    # a pass of an idle Migrator makes no collective
    (
        MIGRATOR,
        "if self._lost or self._stopped:",
        "if self._lost or self._stopped or self.idle:",
        f"{MOVES}test_migrator_faults.py::test_a_pass_makes_one_collective_in_one_order_whatever_happens",
        "rule 10",
    ),
    # ranks with different targets go on
    (
        MIGRATOR,
        "!= words.BITS:",
        "< 0:",
        f"{MOVES}test_migrator.py::test_ranks_with_different_targets_move_nothing",
    ),
    # a slot that keeps its id but was never loaded stays garbage
    (
        PLAN,
        "old[slot] == expert and loaded[slot]:",
        "old[slot] == expert:",
        f"{TEST}test_pull_plan.py::test_avoided_ranks_and_unloaded_slots_are_no_source",
    ),
    # dead ranks are read from
    (
        PLAN,
        "if holder == last or not readable[holder]:",
        "if holder == last:",
        f"{TEST}test_pull_plan.py::test_a_read_goes_past_a_holder_that_is_left_out",
    ),
    # a slot is its own reference
    (
        VERIFY,
        "if 2 * votes[winner] > len(group)",
        "if votes[winner] > 0",
        f"{TEST}verify/test_weights.py::test_a_stale_replica_is_found_without_a_reference",
    ),
]
