"""Changes to what moves experts that a test must notice."""

from __future__ import annotations

INTERPRETED = True

PLAN = "eplb_core/loading/pull_plan.py"
STEPS = "eplb_core/loading/moves/steps.py"
COPIES = "eplb_core/loading/install/copies.py"
INSTALL = "eplb_core/loading/install/installer.py"
PULL = "eplb_core/loading/moves/pull.py"
RUN = "eplb_core/loading/moves/run.py"
MIGRATOR = "eplb_core/loading/moves/migrator.py"
PASSES = "eplb_core/loading/moves/passes.py"
JOINING = "eplb_core/loading/moves/joining.py"
SHARES = "eplb_core/loading/tables.py"
MOVER = "eplb_core/loading/moves/mover.py"
MOVE_RECORD = "eplb_core/loading/moves/recorder.py"
AGREEMENT = "eplb_core/loading/agreement.py"
BACKUP = "eplb_core/loading/moves/backup.py"
STAGED = "eplb_core/loading/moves/stage.py"
TEST_PLAN = "tests/loading/test_pull_plan.py"
TEST_STEPS = "tests/loading/moves/test_steps.py"
TEST_INSTALL = "tests/loading/install/test_installer.py"
TEST_MOVER = "tests/loading/moves/test_mover.py"
TEST_MIGRATOR = "tests/loading/moves/test_migrator.py"
TEST_STOPS = "tests/loading/moves/test_migrator_interruptions.py"
TEST_FAULTS = "tests/loading/moves/test_migrator_faults.py"
TEST_AGREEMENT = "tests/loading/test_agreement.py"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # limits of links hold for the placement and not for the reads
    (
        PLAN,
        "if sender >= 0 and readable[sender]:",
        "if sender >= 0 and readable[sender] and layer < 0:",
        f"{TEST_PLAN}::test_reads_come_from_the_senders_that_were_booked_so_limits_of_links_hold",
    ),
    (
        PLAN,
        "        for told in (True, False):",
        "        for told in (False, True):",
        f"{TEST_PLAN}::test_reads_whose_sender_is_settled_leave_others_what_room_there_is",
    ),
    (
        PLAN,
        "if sender >= 0 and readable[sender]:",
        "if sender >= 0:",
        f"{TEST_PLAN}::test_a_sender_that_cannot_be_read_counts_for_nothing",
    ),
    # a connection that ended unseen ends every migration
    (
        PULL,
        "            self._lost_peers.add(peer)\n            raise\n",
        "            raise\n",
        f"{TEST_STOPS}::test_a_connection_that_ended_unseen_costs_one_migration_and_not_all",
    ),
    # a slot that keeps its id but was never loaded stays garbage
    (
        PLAN,
        "if expert >= 0 and old[slot] == expert and loaded[slot]:",
        "if expert >= 0 and old[slot] == expert:",
        f"{TEST_PLAN}::test_avoided_ranks_and_unloaded_slots_are_no_source",
    ),
    # the second of two new replicas is read again
    (
        PLAN,
        "elif filled[expert] >= reader * per_rank:",
        "elif filled[expert] >= len(old):",
        f"{TEST_PLAN}::test_the_second_of_two_new_replicas_on_a_rank_is_filled_from_the_first",
    ),
    # far holders are as good as near ones
    (
        PLAN,
        "better = best < 0 or (best_far and not far)",
        "better = best < 0",
        f"{TEST_PLAN}::test_reads_of_one_expert_are_spread_over_its_holders",
    ),
    # dead ranks are read from
    (
        PLAN,
        "if holder == last or not readable[holder]:",
        "if holder == last:",
        f"{TEST_PLAN}::test_a_read_goes_past_a_holder_that_is_left_out",
    ),
    # the first holder serves all
    (
        PLAN,
        "better = load[holder] < best_load or (load[holder] == best_load and turn < best_turn)",
        "better = turn < best_turn",
        f"{TEST_PLAN}::test_reads_of_one_expert_are_spread_over_its_holders",
    ),
    # reads that have no choice come too late
    (
        PLAN,
        "order[count[need_choices[k]]] = k",
        "order[k] = k",
        f"{TEST_PLAN}::test_reads_with_one_choice_are_placed_before_those_with_several",
    ),
    # a copy from a slot that is itself written over, though another one stays
    (
        PLAN,
        "if where < 0 or (new[other] == expert and new[where] != expert):",
        "if where < 0:",
        f"{TEST_PLAN}::test_a_copy_inside_the_rank_prefers_a_slot_that_stays",
    ),
    # all ties go to the same rank
    (
        PLAN,
        "first = layer % ranks",
        "first = 0",
        f"{TEST_PLAN}::test_ties_are_broken_from_another_rank_on_each_layer",
    ),
    # a step loses the last copy of an expert
    (
        STEPS,
        "copies[row[slot]] > 1):",
        "copies[row[slot]] >= 1):",
        f"{TEST_STEPS}::test_any_capacity_reaches_the_target_through_valid_layouts",
        "rule 1",
    ),
    # a step needs more staging than there is
    (
        STEPS,
        "while used[rank] < capacity and",
        "while used[rank] <= capacity and",
        f"{TEST_STEPS}::test_any_capacity_reaches_the_target_through_valid_layouts",
    ),
    # a circle of slots loses one
    (
        COPIES,
        "count = _add(copies, count, spare, place)",
        "count = _add(copies, count, first, place)",
        f"{TEST_INSTALL}::test_copies_in_order_are_as_if_made_at_once",
    ),
    # the second replica gets what the slot held before
    (
        INSTALL,
        "            source[slot] = source[source_slot[slot] % slots]\n",
        "            source[slot] = source_slot[slot] % slots\n",
        f"{TEST_INSTALL}::test_an_install_leaves_every_slot_with_its_expert",
        "rule 2",
    ),
    # rows of whole tensors stay behind
    (
        INSTALL,
        "if self.stores[0].whole_names:",
        "if not self.stores:",
        f"{TEST_INSTALL}::test_an_install_leaves_every_slot_with_its_expert",
        "rule 9",
    ),
    # staging is used again while a read that was given up on may write to it
    (
        PULL,
        "return not self.transport.poll(ticket).state.is_end",
        "return self.transport.poll(ticket).state is ReadState.PENDING",
        f"{TEST_MIGRATOR}::test_a_rank_that_never_becomes_ready_ends_it_by_the_deadline",
        "rule 7",
    ),
    # a read that is refused keeps its staging for ever
    (
        PULL,
        "        tickets = pull.tickets\n        self.release(pull)\n",
        "        tickets = pull.tickets\n",
        f"{TEST_MIGRATOR}::test_a_read_that_is_refused_keeps_no_staging",
    ),
    # staging that waits for its install is read into
    (
        PULL,
        "            while row < len(taken) and taken[row]:",
        "            while row < len(taken) and False:",
        f"{TEST_MIGRATOR}::test_slots_from_the_backup_wait_in_staging_that_no_early_read_gets",
    ),
    # the next layer waits for the one before
    (
        RUN,
        "        return self.puller.begin_early(run.steps[index])\n",
        "        return None\n",
        f"{TEST_MIGRATOR}::test_the_next_layer_is_read_while_ranks_agree_on_the_one_before_if_staging_has_room",
    ),
    # the next part of a layer does not wait for the one before
    (
        RUN,
        "run.steps[index].layer == run.steps[index - 1].layer:",
        "run.steps[index].layer < 0:",
        f"{TEST_MIGRATOR}::test_the_next_part_of_a_layer_is_not_read_early_though_staging_has_room",
    ),
    # what was read early in vain keeps its staging
    (
        RUN,
        "                self.puller.give_up(early)\n",
        "                pass\n",
        f"{TEST_MIGRATOR}::test_a_layer_that_was_read_early_in_vain_is_given_up_with_its_migration",
    ),
    # the backup of before a reload goes on
    (
        RUN,
        "self._backup = self._backup if backup is None else backup",
        "self._backup = self._backup",
        f"{TEST_FAULTS}::test_after_a_reload_the_new_backup_gives_the_new_weights",
    ),
    # a tensor in two layers is moved twice
    (
        JOINING,
        "    _check_apart(stores, staging)\n",
        "",
        f"{TEST_FAULTS}::test_layers_that_were_registered_twice_are_refused",
    ),
    # a transport that exports another's memory is read with, and no other (the first alone writes to freed memory)
    (
        PULL,
        "        if self.transport.export(self._regions) != self._blob:\n",
        "        if self.transport.export(self._regions) == self._blob:\n",
        f"{TEST_FAULTS}::test_a_transport_that_lost_the_registration_of_staging_moves_nothing",
    ),
    # tables of another layout are taken
    (
        JOINING,
        "    if isinstance(held, ExpertLayout) and held != layout:\n",
        "    if False:\n",
        f"{TEST_FAULTS}::test_tables_stores_and_layout_are_resized_together_or_not_at_all",
    ),
    # shares that sum to anything are installed
    (
        SHARES,
        "if abs(sums[expert] - 1.0) > _ROUNDING:",
        "if abs(sums[expert] - 1.0) > 5.0:",
        f"{TEST_MIGRATOR}::test_shares_that_do_not_fit_are_refused_before_anything_moves",
    ),
    # a pass of a Migrator that waits for nothing makes no collective
    (
        PASSES,
        "        if self._lost or self._stopped:\n            return ()\n",
        "        if self._lost or self._stopped or self.idle:\n            return ()\n",
        f"{TEST_FAULTS}::test_a_pass_makes_one_collective_in_one_order_whatever_happens",
        "rule 10",
    ),
    # peers with other tensors are taken
    (
        JOINING,
        "if hello.facts.get(what) != value:",
        "if not hello.facts:",
        f"{TEST_MOVER}::test_ranks_that_do_not_fit_are_refused_before_a_byte_moves",
    ),
    # a layer is read again while a peer has not installed it
    (
        RUN,
        "needed = 2 * index if index and run.steps[index - 1].layer == step.layer else 0",
        "needed = 0",
        f"{TEST_STOPS}::test_a_layer_is_not_read_again_before_every_rank_has_installed_it",
        "rule 7",
    ),
    # ranks that began do not abort
    (
        RUN,
        "            self.recorder.abort(step)\n",
        "",
        f"{TEST_MIGRATOR}::test_a_busy_record_ends_this_migration_and_a_refusing_one_all",
    ),
    # a failed rank goes on telling how far it is
    (
        RUN,
        "if self.trouble is None and not self.ended:\n            self.word",
        "if not self.ended:\n            self.word",
        f"{TEST_MIGRATOR}::test_a_rank_that_has_failed_says_so_whatever_its_workers_do_next",
    ),
    # ranks with different targets go on
    (
        PASSES,
        "if run.lowest + value != words.BITS:",
        "if run.lowest + value < 0:",
        f"{TEST_MIGRATOR}::test_ranks_with_different_targets_move_nothing",
    ),
    # weights change and tables do not
    (
        PASSES,
        "        if self._tables is not None:\n",
        "        if self._tables is None:\n",
        f"{TEST_MIGRATOR}::test_rows_that_change_are_installed_one_a_pass_in_order",
        "rule 4",
    ),
    # no deadline
    (
        PASSES,
        "if run.trouble is None and not run.ended and time.monotonic() - run.since > self._deadline:",
        "if False:",
        f"{TEST_MIGRATOR}::test_a_rank_that_was_never_started_stops_the_others_by_the_deadline_and_none_moves_alone",
    ),
    # a rank that was never in a migration later starts one under its number
    (
        PASSES,
        "                self._number = failure.migration\n",
        "",
        f"{TEST_MIGRATOR}::test_a_rank_that_was_never_started_stops_the_others_by_the_deadline_and_none_moves_alone",
    ),
    # a rank that never was in a migration does not hear how it ended, or that it was the last one
    (
        PASSES,
        'self._last = Ending(failure.cause, f"rank {failure.rank} gave up: {failure.cause}", failure.rank, 0, 0)',
        "pass",
        f"{TEST_MIGRATOR}::test_a_rank_that_was_never_started_stops_the_others_by_the_deadline_and_none_moves_alone",
    ),
    (
        PASSES,
        "if failure.cause in FOR_GOOD and not self._off:",
        "if False:",
        f"{TEST_STOPS}::test_a_record_that_failed_after_the_end_of_its_migration_turns_moves_off",
    ),
    # what an install raises in a pause keeps the others waiting
    (
        MIGRATOR,
        "                raised = raised or error\n            if self._run is None:",
        "                raise error\n            if self._run is None:",
        f"{TEST_STOPS}::test_a_callback_that_raises_in_a_pause_is_heard_at_the_end_and_holds_nobody_up",
    ),
    (
        MOVE_RECORD,
        "except Exception as error:  # the other ranks wait",
        "except ZeroDivisionError as error:  # the other ranks wait",
        f"{TEST_MIGRATOR}::test_a_record_that_raises_after_an_install_ends_all_moves",
    ),
    (
        MOVER,
        'except Exception as error:\n        trouble = Trouble("failed"',
        'except ZeroDivisionError as error:\n        trouble = Trouble("failed"',
        f"{TEST_MOVER}::test_tables_that_raise_end_the_move_on_all_ranks_and_the_layer_is_recorded",
    ),
    # refused is not for good
    (
        PASSES,
        'FOR_GOOD = ("refused", "record")',
        'FOR_GOOD = ("record",)',
        f"{TEST_MIGRATOR}::test_a_busy_record_ends_this_migration_and_a_refusing_one_all",
    ),
    # a pause leaves the migration running
    (
        MIGRATOR,
        '            self._end(self._run, "paused", "the engine paused it", None)',
        "            pass",
        f"{TEST_STOPS}::test_a_pause_drops_what_is_staged_and_ends_the_migration",
    ),
    # who missed the last install does not catch up
    (
        MIGRATOR,
        "if (run.number, run.installed + 1) == most and run.staged > run.installed:",
        "if run.staged < 0:",
        f"{TEST_STOPS}::test_a_rank_that_missed_the_last_agreement_catches_up_when_they_rejoin",
    ),
    # a rank in doubt serves on
    (
        PASSES,
        "words.word(run.number, words.MOVING, 2 * run.installed + 1):",
        "words.word(run.number, words.MOVING, 2 * run.installed + 2):",
        f"{TEST_STOPS}::test_a_rank_that_missed_the_last_agreement_catches_up_when_they_rejoin",
    ),
    # ranks install though one could not read
    (
        MOVER,
        "        if failures or pull is None:\n            if trouble is None:",
        "        if pull is None:\n            if trouble is None:",
        f"{TEST_MOVER}::test_a_read_that_fails_ends_the_move_on_every_rank_between_two_layers",
        "rule 7",
    ),
    # the largest word instead of the smallest
    (
        AGREEMENT,
        "dist.ReduceOp.MIN",
        "dist.ReduceOp.MAX",
        f"{TEST_AGREEMENT}::test_the_minimum_comes_one_pass_later_and_nothing_on_the_first",
    ),
    # files of an earlier save stay, and stand in for newer ones
    (
        BACKUP,
        "                    file.unlink(missing_ok=True)",
        "                    pass",
        "tests/loading/moves/test_backup.py::test_files_of_an_earlier_save_by_more_ranks_give_nothing",
    ),
    # a file that was cut is taken for whole
    (
        BACKUP,
        "            if there != size:",
        "            if there is None:",
        "tests/loading/moves/test_backup.py::test_a_file_that_is_not_whole_is_named",
    ),
    # another version's steps are taken for one's own
    (
        "eplb_core/loading/moves/joining.py",
        '        "version of eplb_core": __version__,',
        '        "version of eplb_core": "",',
        "tests/loading/record/test_two_versions.py::test_the_version_is_told",
    ),
    # a node's backup lacks what its ranks do not hold
    (
        BACKUP,
        "            far.append(expert)",
        "            pass",
        "tests/loading/moves/test_backup.py::test_a_folder_a_node_holds_every_expert_of_all_nodes",
    ),
    # torn bytes are installed
    (
        STAGED,
        "    if len(bad):\n",
        "    if len(bad) > 1000:\n",
        f"{TEST_MIGRATOR}::test_bytes_that_were_torn_on_the_way_are_not_installed",
        "rule 7",
    ),
    # copies on ranks that are gone count on the way
    (
        STEPS,
        "        if not readable[slot]:\n",
        "        if row[slot] < -1:\n",
        f"{TEST_STEPS}::test_the_last_copy_that_can_be_read_is_not_overwritten_before_it_is_read",
    ),
    # a target may take the last copy from the ranks that live
    (
        STEPS,
        "if copies[0, expert] > 0 and copies[1, expert] == 0:",
        "if copies[0, expert] > 0 and copies[1, expert] < 0:",
        f"{TEST_STEPS}::test_copies_on_ranks_that_are_gone_count_for_nothing_on_the_way",
    ),
    # a rank whose callback raised hands in no word
    (
        PASSES,
        "            self._post()\n",
        "            pass\n        self._post()\n",
        f"{TEST_MIGRATOR}::test_a_callback_that_raises_leaves_the_rank_in_step_with_the_others",
        "rule 10",
    ),
    # the number of steps is this rank's own
    (
        RUN,
        "return len(self.steps) if self.phase == words.MOVING else 0",
        "return len(self.steps)",
        f"{TEST_MIGRATOR}::test_the_number_of_steps_is_the_same_on_a_rank_that_has_no_plan",
        "rule 5",
    ),
    # what a pause installs is not known to `rejoin`
    (
        MIGRATOR,
        "            except AgreementError as error:\n                self._lose(error)\n                raise\n",
        "            except AgreementError:\n                raise\n",
        f"{TEST_STOPS}::test_a_rank_that_missed_an_install_in_a_pause_catches_up_too",
    ),
    # a commit that failed after the end of its migration is forgotten
    (
        RUN,
        "            self._unrecorded = why  # the run may be over already\n",
        "",
        f"{TEST_STOPS}::test_a_record_that_failed_after_the_end_of_its_migration_turns_moves_off",
    ),
    # a migration is announced beside the one before
    (
        PASSES,
        "            self._mover.submit(lambda: self._work.announce(run))\n",
        "            self._work.announce(run)\n",
        f"{TEST_STOPS}::test_a_migration_is_not_announced_while_the_one_before_is_being_settled",
    ),
    # a transport that raises leaves reads and staging behind
    (
        PULL,
        "        except BaseException as error:\n            self.give_up(pull)\n",
        "        except BaseException as error:\n",
        f"{TEST_MIGRATOR}::test_a_transport_that_raises_keeps_no_staging",
    ),
    # words are where the engine's weights are
    (
        "eplb_core/loading/agreement.py",
        'torch.zeros(1, dtype=torch.int64, device="cpu")',
        "torch.zeros(1, dtype=torch.int64)",
        f"{TEST_MIGRATOR}::test_what_stays_on_the_host_does_so_whatever_device_the_engine_made_its_default",
    ),
    # engines that build in inference mode cannot move
    (
        RUN,
        "    @torch.inference_mode()  # staging may have been made in it, and takes no write from outside then\n",
        "",
        f"{TEST_MIGRATOR}::test_staging_that_was_made_in_inference_mode_takes_what_the_worker_writes",
    ),
    # the other ranks wait for one whose transport raised
    (
        PULL,
        "        except RAISED as error:  # the other ranks wait for a word\n",
        "        except EplbError as error:\n",
        f"{TEST_MOVER}::test_whatever_a_transport_raises_every_rank_hears_of_it",
    ),
    (
        MOVER,
        "        if isinstance(error, RAISED):",
        "        if isinstance(error, Exception):",
        f"{TEST_MOVER}::test_whatever_a_transport_raises_every_rank_hears_of_it",
    ),
    # reads go on when one of them raised
    (
        PULL,
        "        except BaseException:\n            self.give_up(pull)\n            raise\n        return True\n",
        "        except BaseException:\n            raise\n        return True\n",
        "tests/loading/moves/test_backup.py::test_staging_outlives_a_save_whose_transport_raised_while_a_read_may_still_write",
        "rule 7",
    ),
    # experts of ranks that are gone are in no backup
    (
        BACKUP,
        "row = np.where(is_there, layout.physical_to_logical_map[layer], -1)",
        "row = layout.physical_to_logical_map[layer]",
        "tests/loading/moves/test_backup.py::test_ranks_that_live_save_every_expert_without_those_that_are_gone",
    ),
    (
        BACKUP,
        "mates = [other for other in members if nodes[other] == nodes[rank]]",
        "mates = np.flatnonzero(nodes == nodes[rank]).tolist()",
        "tests/loading/moves/test_backup.py::test_ranks_that_live_save_every_expert_without_those_that_are_gone",
    ),
    # staging is kept for ever
    (
        PULL,
        "            _WRITTEN.discard(self)\n",
        "            pass\n",
        f"{TEST_MOVER}::test_staging_is_kept_until_the_last_read_that_was_given_up_on_has_ended",
    ),
    # a transport is asked by a thread that does not use it
    (
        PULL,
        "            if other.transport is transport:",
        "            if True:",
        f"{TEST_MOVER}::test_staging_is_kept_until_the_last_read_that_was_given_up_on_has_ended",
    ),
    # allocations are exported as one
    (
        JOINING,
        "            begins |= np.diff(storages, prepend=storages[:1]) != 0\n",
        "",
        f"{TEST_MOVER}::test_allocations_that_follow_each_other_in_memory_are_exported_one_by_one",
    ),
    # a bad argument pauses the ranks
    (
        MIGRATOR,
        '        seconds = check_real(deadline, "deadline", at_least=0.0, at_most=1e9)\n        if not (self._stopped',
        "        seconds = deadline\n        if not (self._stopped",
        f"{TEST_STOPS}::test_a_bad_deadline_stops_nothing",
    ),
    # weights move that the tables cannot follow
    (
        MOVER,
        "    why = lacks_room(tables, new.replica_count[rows])\n",
        '    why = ""\n',
        f"{TEST_MOVER}::test_tables_that_cannot_hold_the_target_are_refused_before_anything_moves",
        "rule 4",
    ),
    (
        MOVER,
        "        why = lacks_room_on_the_way(tables, step)\n",
        '        why = ""\n',
        f"{TEST_MOVER}::test_tables_that_cannot_hold_a_row_on_the_way_end_the_move_before_that_layer",
        "rule 4",
    ),
    (
        RUN,
        "        why = lacks_room_on_the_way(self._tables, step)\n",
        '        why = ""\n',
        f"{TEST_MIGRATOR}::test_a_row_on_the_way_that_the_tables_cannot_hold_is_refused_before_anything_moves",
        "rule 4",
    ),
    # staging goes with the last one who knows of it
    (
        PULL,
        "            _WRITTEN.add(self)\n",
        "            pass\n",
        f"{TEST_MOVER}::test_staging_outlives_a_move_whose_agreement_failed_while_a_read_may_still_write",
        "rule 7",
    ),
    # batches are as large as they come
    (
        PULL,
        "        most = self.transport.caps.max_batch\n",
        "        most = len(nbytes)\n",
        f"{TEST_MIGRATOR}::test_reads_are_split_into_batches_that_the_transport_takes",
    ),
]
