"""Changes to the layout record and the weight host that a test must notice."""

from __future__ import annotations

RECORD, SHARING = "eplb_core/loading/record", "eplb_core/loading/sharing"
TEST_RECORD = "tests/loading/record/test_record.py"
TEST_SERVER = "tests/loading/record/test_server.py"
TEST_KEEPER = "tests/loading/record/test_keeper.py"
TEST_AGREE = "tests/loading/record/test_agree.py"
TEST_FOLLOW = "tests/loading/record/test_follow.py"
TEST_HOST = "tests/loading/sharing/test_host.py"
TEST_DESCRIPTORS = "tests/loading/record/test_descriptors.py"
INJECTED = "tests/loading/record/test_injected.py::test_random_faults_never_make_a_living_engine_gone"

# (file, text before, text after, test that must fail[, rule])
MUTATIONS = [
    # an engine that dies in a move leaves a clean record
    (
        f"{RECORD}/record.py",
        'self._set(dirty=f"{move} was pending when the engine left")',
        "pass",
        f"{TEST_RECORD}::test_an_engine_that_leaves_during_its_move_leaves_a_dirty_record",
        "rule 7",
    ),
    # a move begins before followers have stopped
    (
        f"{RECORD}/record.py",
        "        if awaited:\n",
        "        if not awaited:\n",
        f"{TEST_RECORD}::test_a_move_begins_only_when_every_follower_holds",
    ),
    # an answer that comes late counts for the next move
    (
        f"{RECORD}/record.py",
        "or move != state.begun:",
        "or move < 0:",
        f"{TEST_RECORD}::test_followers_hold_for_each_move_anew",
    ),
    # a promise that is not on disk is given
    (
        f"{RECORD}/keeper.py",
        "record.revert(before)",
        "pass",
        f"{TEST_KEEPER}::test_what_cannot_be_written_down_is_not_promised",
    ),
    # an engine that was cut off counts as gone
    (
        f"{RECORD}/keeper.py",
        "record.lose(engine)",
        "record.detach(engine)",
        f"{TEST_SERVER}::test_an_engine_that_the_server_cuts_off_may_still_read",
    ),
    # a crowd takes an engine's place
    (
        f"{RECORD}/server.py",
        "if connection.session.engine is None and",
        "if",
        f"{TEST_SERVER}::test_too_many_connections_are_closed_and_cost_nothing",
    ),
    # an engine that gave its keeper up counts as gone
    (
        f"{RECORD}/client.py",
        "self._silent = connection or self._silent",
        "connection.close()",
        f"{TEST_SERVER}::test_an_engine_that_gave_a_stopped_keeper_up_is_still_there_and_its_move_is_not",
    ),
    # a keeper takes an error of its own for the end of an engine
    (
        f"{RECORD}/server.py",
        "gone = not dropped and has_ended(connection.sock)",
        "gone = not dropped",
        INJECTED,
        "rule 7",
    ),
    # an engine whose call failed leaves, and serves on
    (
        f"{RECORD}/client.py",
        "leaves=self._looks or has_ended(self._socket))",
        "leaves=True)",
        INJECTED,
        "rule 7",
    ),
    # an engine is cut off because its weights' descriptors cannot be sent now
    (
        f"{RECORD}/server.py",
        "if not connection.fds or has_ended(connection.sock):",
        "if True:",
        f"{TEST_DESCRIPTORS}::test_an_engine_whose_descriptors_cannot_be_sent_is_still_there_and_may_ask_again",
    ),
    # a rank without a descriptor leaves the others waiting
    (
        f"{RECORD}/client.py",
        'found, end = RecordLostError(f"{self.path} cannot be reached: {error}", path=self.path), start',
        "raise",
        f"{TEST_DESCRIPTORS}::test_a_client_without_a_descriptor_says_so_and_does_not_raise",
    ),
    # anybody may read, and another user's lock passes for a server
    (f"{RECORD}/file.py", "mode=0o600", "mode=0o666", f"{TEST_DESCRIPTORS}::test_a_state_file_is_for_this_user_alone"),
    (
        f"{RECORD}/socket_path.py",
        "                check_owner(each)\n",
        "                pass\n",
        f"{TEST_DESCRIPTORS}::test_nothing_of_another_user_is_taken_for_a_server_or_its_record",
    ),
    # each rank decides by its own watch
    (
        f"{RECORD}/agree.py",
        "max(each.waited",
        "min(each.waited",
        f"{TEST_AGREE}::test_ranks_fail_together",
        "rule 5",
    ),
    # the tables stay behind
    (
        f"{RECORD}/follow.py",
        "self._tables.install(self._layout, layers=list(rows))",
        "pass",
        f"{TEST_FOLLOW}::test_a_standby_switches_with_the_engine_that_moves_and_takes_over",
        "rule 4",
    ),
    # ranks go on while one of them is not there yet
    (
        f"{RECORD}/follow.py",
        "any(look.moving",
        "all(look.moving",
        f"{TEST_FOLLOW}::test_ranks_that_have_stopped_do_the_same",
    ),
    # 1 is true
    (
        f"{SHARING}/host.py",
        "if mine != theirs:",
        "if self._config.get(name) != config.get(name):",
        f"{TEST_HOST}::test_values_that_look_alike_are_not_the_same",
    ),
    # an engine may cut the memory of the others
    (
        f"{SHARING}/memory.py",
        "fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)",
        "pass",
        f"{TEST_HOST}::test_no_engine_can_cut_the_memory_of_the_others",
    ),
]
