"""Changes to the layout record and the weight host that a test must notice."""

from __future__ import annotations

RECORD = "eplb_core/loading/record/record.py"
STATE = "eplb_core/loading/record/state.py"
FOLLOW = "eplb_core/loading/record/follow.py"
RANK_LOADER = "eplb_core/loading/checkpoint/rank.py"
REQUESTS = "eplb_core/loading/record/keeper.py"
WIRE = "eplb_core/loading/record/wire.py"
PATH = "eplb_core/loading/record/socket_path.py"
SERVER = "eplb_core/loading/record/server.py"
CLIENT = "eplb_core/loading/record/client.py"
AGREE = "eplb_core/loading/record/agree.py"
FILE = "eplb_core/loading/record/file.py"
MEMORY = "eplb_core/loading/sharing/memory.py"
MODULES = "eplb_core/loading/modules.py"
HOST = "eplb_core/loading/sharing/host.py"
ATTACH = "eplb_core/loading/sharing/attach.py"
TEST_RECORD = "tests/loading/record/test_record.py"
TEST_SERVER = "tests/loading/record/test_server.py"
TEST_AGREE = "tests/loading/record/test_agree.py"
TEST_HOST = "tests/loading/sharing/test_host.py"
TEST_VERSIONS = "tests/loading/record/test_two_versions.py"
TEST_FOLLOW = "tests/loading/record/test_follow.py"
TEST_RANK_LOADER = "tests/loading/checkpoint/test_rank.py"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # an engine that dies in a move leaves a clean record
    (
        RECORD,
        'self._set(dirty=f"{move} was pending when the engine left")',
        "pass",
        f"{TEST_RECORD}::test_an_engine_that_leaves_during_its_move_leaves_a_dirty_record",
        "rule 7",
    ),
    # anybody's leaving ends the move
    (
        RECORD,
        "if move is not None and move.engine == engine:\n            self._end_move()",
        "if move is not None:\n            self._end_move()",
        f"{TEST_RECORD}::test_a_second_engine_that_leaves_during_a_move_leaves_it_pending",
    ),
    # a dirty record lets engines move
    (
        RECORD,
        "if state.dirty:\n            reason = self._dirty_reason()\n        elif not is_among(engine, state.engines)",
        "if not is_among(engine, state.engines)",
        f"{TEST_RECORD}::test_an_engine_that_leaves_during_its_move_leaves_a_dirty_record",
    ),
    # a dirty record is read
    (
        RECORD,
        "if self._state.dirty:\n            return self._refused(self._dirty_reason())\n        if self._state.pending",
        "if self._state.pending",
        f"{TEST_RECORD}::test_an_engine_that_leaves_during_its_move_leaves_a_dirty_record",
    ),
    # who is not attached moves
    (
        RECORD,
        "elif not is_among(engine, state.engines):",
        "elif not engine:",
        f"{TEST_RECORD}::test_a_move_that_cannot_be_is_refused_and_changes_nothing",
    ),
    # any version may begin
    (
        RECORD,
        "elif not is_int(version) or version != state.version:",
        "elif not is_int(version):",
        f"{TEST_RECORD}::test_a_second_engine_pauses_moves_and_takes_over_from_the_current_version",
    ),
    # true is version 1
    (
        STATE,
        "return isinstance(value, (int, np.integer)) and not isinstance(value, bool)",
        "return isinstance(value, (int, np.integer))",
        f"{TEST_RECORD}::test_a_move_that_cannot_be_is_refused_and_changes_nothing",
    ),
    # a layer twice
    (
        STATE,
        " or len(set(layers)) < len(layers)",
        "",
        f"{TEST_RECORD}::test_a_move_that_cannot_be_is_refused_and_changes_nothing",
    ),
    # engines that do not follow do not count
    (
        RECORD,
        "elif state.num_non_followers:",
        "elif state.num_non_followers > 10**9:",
        f"{TEST_RECORD}::test_who_cannot_be_seen_to_leave_or_follow_is_served_and_ends_all_moves",
    ),
    # an engine moves under others
    (
        RECORD,
        "others = [name for name in state.engines if name != engine and name not in state.followers]",
        "others: list[str] = []",
        f"{TEST_RECORD}::test_a_second_engine_pauses_moves_and_takes_over_from_the_current_version",
    ),
    # to wait is decided before to refuse
    (
        RECORD,
        'if unreadable is not None and unreadable.status == "refused":',
        "if unreadable is not None:",
        f"{TEST_RECORD}::test_a_reason_to_refuse_is_decided_before_a_reason_to_wait",
    ),
    # a second begin of the same engine replaces the first
    (
        RECORD,
        "elif self._is_other_move(engine, rows, version):",
        "elif state.pending is not None and not state.pending.engine:",
        f"{TEST_RECORD}::test_a_second_begin_of_the_same_engine_is_refused_and_the_first_stays",
    ),
    # the version stays
    (
        RECORD,
        "self._set(layout=new, version=self._state.version + 1)",
        "self._set(layout=new)",
        f"{TEST_RECORD}::test_a_commit_stores_the_rows_and_counts_one_version",
    ),
    # rows in order of layer instead of the order given
    (
        RECORD,
        "p2l[list(moved)] = given",
        "p2l[sorted(moved)] = given",
        f"{TEST_RECORD}::test_a_commit_stores_the_rows_and_counts_one_version",
    ),
    # a commit of some of the layers
    (
        RECORD,
        "set(rows) != set(move.layers)",
        "not set(rows) & set(move.layers)",
        f"{TEST_RECORD}::test_a_malformed_commit_is_refused_and_leaves_the_move_pending",
    ),
    # anybody commits
    (
        RECORD,
        "if move is None or not is_among(engine, (move.engine,)):",
        "if move is None:",
        f"{TEST_RECORD}::test_only_the_engine_that_began_ends_the_move",
    ),
    # the digest is not compared
    (
        RECORD,
        "if digest is not None and not is_among(digest, (state.digest,)):",
        "if digest is not None and version != state.version:",
        f"{TEST_RECORD}::test_the_digest_decides_and_not_the_version",
    ),
    # engines that say nothing are served moved weights
    (
        RECORD,
        "if digest is None and state.version > 0:",
        "if digest is None and state.version > 1:",
        f"{TEST_RECORD}::test_an_engine_without_a_digest_is_refused_once_experts_have_moved",
    ),
    # weights are served during a move
    (
        RECORD,
        "        if unreadable is not None:\n            return unreadable\n        if digest is None or",
        "        if digest is None or",
        f"{TEST_RECORD}::test_another_engines_move_is_busy_and_names_engine_layers_and_version",
    ),
    # an attached engine that says no digest counts as following
    (
        RECORD,
        "if digest is None or not is_among(engine, state.engines):",
        "if not is_among(engine, state.engines):",
        f"{TEST_RECORD}::test_who_cannot_be_seen_to_leave_or_follow_is_served_and_ends_all_moves",
    ),
    # names are kept without end
    (
        RECORD,
        "if len(names) < NAMES_KEPT and name not in names:",
        "if name not in names:",
        f"{TEST_RECORD}::test_many_non_followers_are_counted_and_few_are_kept_by_name",
    ),
    # after a restart former engines are forgotten
    (
        RECORD,
        "for engine in state.engines:\n            record._add",
        "for engine in ():\n            record._add",
        f"{TEST_RECORD}::test_a_restarted_keeper_counts_former_engines_as_non_followers",
    ),
    # after a restart a pending move is forgotten
    (
        RECORD,
        "if state.pending is not None and not state.asking and not state.dirty:\n            record._set",
        "if state.dirty:\n            record._set",
        f"{TEST_RECORD}::test_a_move_that_was_pending_when_the_keeper_died_is_in_doubt",
    ),
    # two engines of one name are one
    (
        REQUESTS,
        "engine = next(name for name in names if name not in before.engines)",
        "pass",
        f"{TEST_SERVER}::test_an_engine_that_restarts_under_its_name_is_a_second_engine",
    ),
    # the end of a connection is not a detach
    (
        REQUESTS,
        "self.record.detach(session.engine)",
        "pass",
        f"{TEST_SERVER}::test_a_process_killed_between_moves_leaves_a_clean_record",
    ),
    # nothing is logged
    (
        REQUESTS,
        "if self.record.state.dirty != was_dirty:",
        "if self.record.state.dirty != was_dirty and was_dirty:",
        f"{TEST_SERVER}::test_a_process_killed_after_begin_leaves_a_dirty_record",
    ),
    # a promise that is not on disk is given
    (REQUESTS, "record.revert(before)", "pass", f"{TEST_SERVER}::test_what_cannot_be_written_down_is_not_promised"),
    # begin is answered before it is on disk
    (
        REQUESTS,
        "reply = self._promised(reply, before)\n        move = record",
        "move = record",
        f"{TEST_SERVER}::test_a_move_is_on_disk_before_begin_is_answered",
    ),
    # messages of any length are taken
    (
        WIRE,
        "if length > limit:",
        "if length > 1 << 31:",
        f"{TEST_SERVER}::test_an_endless_message_ends_its_connection_alone",
    ),
    # any protocol will do
    (
        WIRE,
        'message.get("protocol") != PROTOCOL or',
        "False or",
        f"{TEST_SERVER}::test_a_malformed_message_is_answered_and_the_connection_stays",
    ),
    # deep brackets stop the server
    (
        WIRE,
        "except (ValueError, RecursionError) as error:  # Unicode",
        "except ValueError as error:  # Unicode",
        f"{TEST_SERVER}::test_a_malformed_message_is_answered_and_the_connection_stays",
    ),
    # a map under another digest is believed
    (
        WIRE,
        'if layout.digest != message.get("digest"):',
        "if not layout.digest:",
        f"{TEST_SERVER}::test_a_keeper_says_when_it_does_not_know",
    ),
    # the socket is for all
    (
        PATH,
        "os.chmod(self.path, 0o600)",
        "os.chmod(self.path, 0o666)",
        f"{TEST_SERVER}::test_the_socket_is_for_this_user_alone",
    ),
    # two servers at one path
    (
        PATH,
        "fcntl.flock(self._lock, fcntl.LOCK_EX",
        "fcntl.flock(self._lock, fcntl.LOCK_SH",
        f"{TEST_SERVER}::test_a_second_server_on_the_path_is_an_error_and_the_first_stays",
    ),
    # ... or with one state file
    (
        PATH,
        "fcntl.flock(lock, fcntl.LOCK_EX",
        "fcntl.flock(lock, fcntl.LOCK_SH",
        f"{TEST_SERVER}::test_two_servers_cannot_keep_their_records_in_one_file",
    ),
    # somebody's file is removed
    (
        PATH,
        "if not stat.S_ISSOCK(os.lstat(self.path).st_mode):",
        "if stat.S_ISDIR(os.lstat(self.path).st_mode):",
        f"{TEST_SERVER}::test_a_path_where_something_else_lives_is_left_alone",
    ),
    # somebody's socket is used
    (
        PATH,
        "uid = os.lstat(path).st_uid\n    if uid not in (os.geteuid(), 0):",
        "uid = os.lstat(path).st_uid\n    if uid < 0:",
        f"{TEST_SERVER}::test_a_socket_of_somebody_else_is_neither_used_nor_removed",
    ),
    # anybody may connect
    (
        PATH,
        "uid = _CREDENTIALS.unpack(raw)[1]",
        "uid = 0 * _CREDENTIALS.unpack(raw)[1]",
        f"{TEST_SERVER}::test_a_peer_of_another_user_is_told_from_this_one",
    ),
    # connections without end
    (
        SERVER,
        "if len(self._connections) >= self._most and not",
        "if len(self._connections) >= 10**9 and not",
        f"{TEST_SERVER}::test_too_many_connections_are_closed_and_cost_nothing",
    ),
    # a crowd that idles keeps engines out
    (
        SERVER,
        "and not self._drop_idle():\n            accepted",
        "and True:\n            accepted",
        f"{TEST_SERVER}::test_a_crowd_that_idles_keeps_no_engine_out",
    ),
    # an engine goes for another
    (
        SERVER,
        "if connection.session.engine is None and",
        "if",
        f"{TEST_SERVER}::test_too_many_connections_are_closed_and_cost_nothing",
    ),
    # who waits for news goes
    (
        SERVER,
        " and connection.watch is None:",
        ":",
        f"{TEST_SERVER}::test_too_many_connections_are_closed_and_cost_nothing",
    ),
    # who came first goes first
    (
        SERVER,
        "        self._connections[connection.socket] = self._connections.pop(connection.socket)\n",
        "",
        f"{TEST_SERVER}::test_who_speaks_now_and_then_outlasts_a_crowd_that_does_not",
    ),
    # who looks is lost with its place
    (
        CLIENT,
        "            anew = self._looks and limit is not None",
        "            anew = False",
        f"{TEST_SERVER}::test_a_crowd_that_idles_keeps_no_engine_out",
    ),
    # nobody at the keeper hears of another protocol, or hears of nothing else
    (
        REQUESTS,
        "            if isinstance(error, OtherProtocolError) and str(error) not in",
        "            if False and str(error) not in",
        f"{TEST_VERSIONS}::test_two_installations_work_together_or_say_why_not",
    ),
    (
        REQUESTS,
        " and len(self._foreign) < 8:",
        ":",
        f"{TEST_SERVER}::test_one_line_tells_of_clients_of_another_protocol_and_no_crowd_fills_the_log",
    ),
    # a refusal does not say which version to install
    (
        WIRE,
        "protocol {protocol} of eplb_core {version}; this",
        "protocol {protocol}; this",
        f"{TEST_VERSIONS}::test_two_installations_work_together_or_say_why_not",
    ),
    # ranks of two versions start
    (
        AGREE,
        "        _check_versions(told)\n",
        "",
        f"{TEST_VERSIONS}::test_two_installations_work_together_or_say_why_not",
    ),
    # who has left comes back
    (
        CLIENT,
        "if anew and not self._leaves:",
        "if anew:",
        f"{TEST_SERVER}::test_who_is_closed_while_it_asks_does_not_come_back",
    ),
    # a follower does not hear that its keeper has gone
    (
        CLIENT,
        "            anew = self._looks and limit is not None",
        "            anew = self._looks",
        f"{TEST_SERVER}::test_only_who_looks_goes_on_with_another_keeper",
    ),
    # an engine takes another keeper for its own
    (
        CLIENT,
        "            anew = self._looks and limit is not None",
        "            anew = limit is not None",
        f"{TEST_SERVER}::test_only_who_looks_goes_on_with_another_keeper",
    ),
    # a crowd takes the descriptors that the record's file needs
    (
        SERVER,
        "min(MAX_CONNECTIONS, soft // 2)",
        "MAX_CONNECTIONS",
        f"{TEST_SERVER}::test_a_crowd_beyond_the_descriptors_keeps_nobody_from_moving",
    ),
    # connections leave no descriptor to the record's file
    (
        SERVER,
        "len(self._connections)) - SPARE)",
        "len(self._connections)))",
        f"{TEST_SERVER}::test_a_crowd_beyond_the_descriptors_keeps_nobody_from_moving",
    ),
    # a server without a thread keeps its path
    (
        SERVER,
        "            self._loop.end()\n            self._place.release()\n            raise",
        "            raise",
        f"{TEST_SERVER}::test_a_server_whose_thread_cannot_start_leaves_its_path",
    ),
    # what did not go out at once is forgotten
    (
        SERVER,
        "            connection.out = connection.out[sent:]\n",
        "            connection.out = connection.out[len(connection.out) :]\n",
        f"{TEST_SERVER}::test_a_client_that_reads_late_gets_every_reply_whole",
    ),
    # a flood of requests is read without end
    (
        SERVER,
        "        if connection.queued:\n            return\n",
        "",
        f"{TEST_SERVER}::test_a_slow_client_blocks_nobody_and_is_read_no_further",
    ),
    # a fault ends the server
    (
        SERVER,
        "except Exception:",
        "except KeyError:",
        f"{TEST_SERVER}::test_a_fault_of_the_server_costs_the_one_who_met_it",
    ),
    # a forked child speaks for its parent
    (
        CLIENT,
        "if self._process != os.getpid():  # before the lock",
        "if not self._process:  # before the lock",
        f"{TEST_SERVER}::test_a_client_is_not_used_from_a_forked_child",
    ),
    # a lost server raises on the worker
    (
        CLIENT,
        "except EplbError as error:  # RecordLostError, SocketOwnerError",
        "except SocketOwnerError as error:",
        f"{TEST_SERVER}::test_a_server_that_goes_ends_moves_and_says_so",
    ),
    # a clean record after the memory was lost
    (
        FILE,
        "if not memory and not record.state.dirty:",
        "if not record:",
        f"{TEST_SERVER}::test_a_keeper_says_when_it_does_not_know",
    ),
    # memory that was loaded anew keeps the old version
    (
        FILE,
        "if memory and memory != former:",
        "if not former:",
        f"{TEST_SERVER}::test_a_keeper_says_when_it_does_not_know",
    ),
    # a rank fails alone
    (AGREE, "    if failed:\n", "    if len(failed) == len(found):\n", f"{TEST_AGREE}::test_ranks_fail_together"),
    # nobody waits for a move
    (
        AGREE,
        "pending = _where(found, lambda each: bool(each.pending))",
        "pending = _where(found, lambda each: False)",
        f"{TEST_AGREE}::test_a_move_of_another_engine_is_waited_for",
    ),
    # each rank by its own watch
    (
        AGREE,
        "if max(each.waited for each in found) < deadline:",
        "if min(each.waited for each in found) < deadline:",
        f"{TEST_AGREE}::test_ranks_fail_together",
        "rule 5",
    ),
    # versions are not compared
    (
        AGREE,
        "(each.version, each.digest) != (first.version, first.digest)",
        "each.digest != first.digest",
        f"{TEST_AGREE}::test_ranks_fail_together",
    ),
    # digests are not compared
    (
        AGREE,
        "lambda each: (each.version, each.digest) != (first.version, first.digest))",
        "lambda each: each.version != first.version)",
        f"{TEST_AGREE}::test_ranks_fail_together",
    ),
    # ranks without a record start beside moved weights
    (
        AGREE,
        "each.record and each.version > 0",
        "each.record and each.version > 9",
        f"{TEST_AGREE}::test_ranks_fail_together",
    ),
    # moves stay on where some rank keeps no record
    (AGREE, "client.refuse_moves(f", "str(f", f"{TEST_AGREE}::test_one_rank_without_a_record_turns_moves_off"),
    # an engine without balancing adopts
    (
        AGREE,
        "lambda each: each.own != each.digest and not each.adopts",
        "lambda each: False",
        f"{TEST_AGREE}::test_ranks_fail_together",
    ),
    # shapes are not compared
    (
        AGREE,
        "lambda each: each.shape != each.record_shape",
        "lambda each: False",
        f"{TEST_AGREE}::test_ranks_fail_together",
    ),
    # a field of the configuration is not compared
    (
        HOST,
        "for name in sorted({*self._config, *config}):",
        'for name in sorted({*self._config, *config} - {"seed"}):',
        f"{TEST_HOST}::test_a_difference_in_any_field_is_refused_and_named",
    ),
    # 1 is true
    (
        HOST,
        "if mine != theirs or (name in self._config) != (name in config):",
        "if self._config.get(name) != config.get(name) or (name in self._config) != (name in config):",
        f"{TEST_HOST}::test_values_that_look_alike_are_not_the_same",
    ),
    # None and nothing are the same
    (
        HOST,
        "if mine != theirs or (name in self._config) != (name in config):",
        "if mine != theirs:",
        f"{TEST_HOST}::test_a_difference_in_any_field_is_refused_and_named",
    ),
    # the rank is not compared
    (
        HOST,
        "if name in frame and frame[name] != value:",
        'if name != "ep_rank" and name in frame and frame[name] != value:',
        f"{TEST_HOST}::test_the_host_of_another_rank_is_refused",
    ),
    # loads before it knows whether the path is free
    (
        HOST,
        "        place = SocketPlace(path, state_file)\n",
        "        load(layout, rank)\n        place = SocketPlace(path, state_file)\n",
        f"{TEST_HOST}::test_a_second_host_fails_before_it_loads",
    ),
    # tensors that nobody fills stay on the meta device
    (
        ATTACH,
        "if tensor.is_meta and name not in mapped]",
        "if False]",
        f"{TEST_HOST}::test_a_module_that_does_not_fit_stays_as_it_was",
    ),
    # a dict takes tensors of another shape
    (
        ATTACH,
        "(value.shape, value.dtype) != (tensor.shape, tensor.dtype)",
        "value.dtype != tensor.dtype",
        f"{TEST_HOST}::test_a_dict_receives_what_it_names",
    ),
    # an engine may cut the memory
    (
        MEMORY,
        "fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)",
        "pass",
        f"{TEST_HOST}::test_no_engine_can_cut_the_memory_of_the_others",
    ),
    # each tensor gets a span of its own
    (
        MEMORY,
        "key = storage.data_ptr() or -1 - len(keys)",
        "key = -1 - len(keys)",
        f"{TEST_HOST}::test_views_of_one_storage_share_one_span_and_odd_kinds_come_back",
    ),
    # whole storages are shared
    (
        MEMORY,
        "low // 16 * 16, high - low // 16 * 16)",
        "0, high)",
        f"{TEST_HOST}::test_views_of_one_storage_share_one_span_and_odd_kinds_come_back",
    ),
    # a description may point outside
    (
        MEMORY,
        "if not (start >= 0 and nbytes >= 0 and start + nbytes <= whole.numel()):",
        "if not (start >= 0 and nbytes >= 0):",
        f"{TEST_HOST}::test_a_description_that_does_not_fit_is_refused",
    ),
    # ties are cut
    (
        MODULES,
        "made[id(old)] = parameter",
        "pass",
        f"{TEST_HOST}::test_a_module_on_the_meta_device_is_filled_with_all_that_the_host_computes_with",
    ),
    # plain attributes are left out
    (
        MODULES,
        "if isinstance(value, torch.Tensor):\n",
        "if isinstance(value, torch.nn.Parameter):\n",
        f"{TEST_HOST}::test_a_module_on_the_meta_device_is_filled_with_all_that_the_host_computes_with",
    ),
    # parameters lose what the engine hung on them
    (
        MODULES,
        "parameter.__dict__.update(vars(old) if isinstance(old, torch.nn.Parameter) else {})",
        "pass",
        f"{TEST_HOST}::test_a_module_on_the_meta_device_is_filled_with_all_that_the_host_computes_with",
    ),
    # temporary buffers come into the state dict
    (
        MODULES,
        'persistent=kind == "buffer"',
        "persistent=True",
        f"{TEST_HOST}::test_a_module_on_the_meta_device_is_filled_with_all_that_the_host_computes_with",
    ),
    # ---- engines that follow
    # a move begins before followers have stopped
    (
        RECORD,
        "        if awaited:\n",
        "        if not awaited:\n",
        f"{TEST_RECORD}::test_a_move_begins_only_when_every_follower_holds",
    ),
    # what was held for one move counts for the next
    (
        RECORD,
        "self._set(pending=None, asking=False, holding=())",
        "self._set(pending=None, asking=False)",
        f"{TEST_RECORD}::test_followers_hold_for_each_move_anew",
    ),
    # an answer that comes late counts for the next move
    (
        RECORD,
        "if not is_int(move) or move != state.begun:",
        "if not is_int(move):",
        f"{TEST_RECORD}::test_followers_hold_for_each_move_anew",
    ),
    # a follower of another version holds
    (
        RECORD,
        "if not is_int(version) or version != asked.version:",
        "if not is_int(version):",
        f"{TEST_RECORD}::test_only_who_is_asked_holds",
    ),
    # a move that was only asked for makes the record dirty
    (
        RECORD,
        "            if not state.asking:\n",
        "            if True:\n",
        f"{TEST_RECORD}::test_a_mover_that_dies_before_all_hold_has_written_nothing",
    ),
    # a move that had begun does not, if it was asked for before
    (
        RECORD,
        "        self._set(asking=False)\n        return self._ok()",
        "        return self._ok()",
        f"{TEST_RECORD}::test_a_mover_that_dies_after_all_hold_leaves_a_dirty_record",
    ),
    # a dead follower is waited for
    (
        RECORD,
        "self._set(engines=engines, followers=followers, holding=holding)",
        "self._set(engines=engines, holding=holding)",
        f"{TEST_RECORD}::test_a_follower_that_dies_is_not_waited_for",
    ),
    # an engine follows by another layout
    (
        RECORD,
        "if not is_among(digest, (state.digest,)):\n            return",
        "if digest is None:\n            return",
        f"{TEST_RECORD}::test_who_is_on_another_layout_does_not_follow",
    ),
    # an engine follows from the middle of a move on
    (
        RECORD,
        "            )\n        if state.pending is not None:\n            return self._busy",
        "            )\n        if state.version < 0:\n            return self._busy",
        f"{TEST_RECORD}::test_following_begins_between_moves",
    ),
    # a move that is only asked for is committed
    (
        RECORD,
        "if self._state.asking:\n            return self._refused",
        "if self._state.dirty:\n            return self._refused",
        f"{TEST_RECORD}::test_a_move_begins_only_when_every_follower_holds",
    ),
    # other layers than those asked for begin
    (
        RECORD,
        "return not state.asking or state.pending != (engine, rows, version)",
        "return not state.asking",
        f"{TEST_RECORD}::test_only_the_same_request_asks_again",
    ),
    # an engine that was cut off has gone
    (
        REQUESTS,
        "            self.record.lose(session.engine)\n",
        "            self.record.detach(session.engine)\n",
        f"{TEST_SERVER}::test_an_engine_that_the_server_cuts_off_may_still_read",
    ),
    # an engine that gave its keeper up has gone
    (
        CLIENT,
        "            self._silent = connection or self._silent\n",
        "            connection.close()\n",
        f"{TEST_SERVER}::test_an_engine_that_gave_a_stopped_keeper_up_is_still_there_and_its_move_is_not",
    ),
    # a forked child ends its parent's presence
    (
        CLIENT,
        "if self._process != os.getpid():  # whoever",
        "if not self._process:  # whoever",
        f"{TEST_SERVER}::test_a_forked_child_that_closes_the_client_leaves_the_parent_present",
    ),
    # a begin that was not heard of stays pending
    (
        CLIENT,
        "                except TimeoutError as error:\n                    self._undo(undo if sent else None)\n",
        "                except TimeoutError as error:\n",
        f"{TEST_SERVER}::test_an_engine_that_gave_a_stopped_keeper_up_is_still_there_and_its_move_is_not",
    ),
    # a move that followers did not answer stays asked for
    (
        CLIENT,
        "            if asked:\n                self.abort(rows)\n",
        "            pass\n",
        f"{TEST_FOLLOW}::test_a_move_that_is_not_answered_is_taken_back",
    ),
    # ranks wait for ever where one is dirty
    (
        FOLLOW,
        "    if troubled:\n",
        "    if not found:\n",
        f"{TEST_FOLLOW}::test_ranks_that_have_stopped_do_the_same",
    ),
    # ranks go on while one of them is not there yet
    (
        FOLLOW,
        "if any(look.moving for look in found):",
        "if all(look.moving for look in found):",
        f"{TEST_FOLLOW}::test_ranks_that_have_stopped_do_the_same",
    ),
    # records that differ are not noticed
    (
        FOLLOW,
        "look[:2] != first[:2])",
        "look[:1] < first[:1])",
        f"{TEST_FOLLOW}::test_records_that_differ_after_a_move_stop_all_ranks",
    ),
    # the tables stay behind
    (
        FOLLOW,
        "self._tables.install(self._layout, layers=list(rows))",
        "pass",
        f"{TEST_FOLLOW}::test_a_standby_switches_with_the_engine_that_moves_and_takes_over",
        "rule 4",
    ),
    # tables that raise leave a rank behind
    (
        FOLLOW,
        "        self._agreement.post(self._word())  # if what comes now raises, ranks are in step all the same\n"
        "        if self._tables is not None and rows:\n"
        "            self._tables.install(self._layout, layers=list(rows))\n",
        "        if self._tables is not None and rows:\n"
        "            self._tables.install(self._layout, layers=list(rows))\n"
        "        self._agreement.post(self._word())\n",
        f"{TEST_FOLLOW}::test_tables_that_raise_leave_the_ranks_in_step",
    ),
    # the next move begins from a version that the follower has left
    (
        FOLLOW,
        "self._layout, self.version, self._client.adopted = layout, state.version, state.version",
        "self._layout, self.version = layout, state.version",
        f"{TEST_FOLLOW}::test_a_standby_switches_with_the_engine_that_moves_and_takes_over",
    ),
    # both halves are as large as the whole
    (
        RANK_LOADER,
        "shape[min(part.axis, len(shape) - 1)] *= part.blocks",
        "shape[min(part.axis, len(shape) - 1)] *= 1",
        f"{TEST_RANK_LOADER}::test_every_slot_of_the_rank_holds_its_expert",
    ),
]
