"""Changes to transports, and to the checks that they pass, that a test must notice."""

from __future__ import annotations

BASE = "eplb_core/loading/transports/base.py"
BATCHES = "eplb_core/loading/transports/batches.py"
COPIES = "eplb_core/loading/transports/span_copies.py"
SHARED = "eplb_core/loading/transports/shared_memory.py"
EXCHANGE = "eplb_core/loading/transports/two_sided/exchange.py"
PROCESSES = "eplb_core/loading/transports/processes.py"
GLOO = "eplb_core/loading/transports/two_sided/torch_distributed.py"
NIXL = "eplb_core/loading/transports/nixl.py"
FAULTY = "eplb_core/loading/transports/faulty.py"
CHECKS = "eplb_core/testing/transports.py"
STRATEGIES = "eplb_core/testing/strategies.py"
T_BASE = "tests/loading/transports/test_base.py"
T_SHARED = "tests/loading/transports/test_shared_memory.py"
T_GLOO = "tests/loading/transports/two_sided/test_torch_distributed.py"
T_FAULTY = "tests/loading/transports/test_faulty.py"
T_ENGINES = "tests/loading/transports/test_engines_answers.py"
T_CHECKS = "tests/testing/test_transports.py"
T_STRATEGIES = "tests/testing/test_strategies.py"
REFUSED = f"{T_BASE}::test_a_refused_batch_names_value_operation_and_rank"
AGAIN = f"{T_BASE}::test_connecting_again_reaches_a_peer_anew_only_if_reads_from_it_were_lost"
LIES = f"{T_CHECKS}::test_a_transport_that_does_not_keep_its_word_fails"
LET_GO = f"{T_ENGINES}::test_nixl_is_let_go_when_the_last_read_of_a_closed_transport_is_over"
HONEST = f"{T_CHECKS}::test_an_honest_transport_passes_all_checks_within_one_process"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    # refusals
    (BATCHES, "if nbytes < 0 or region < 0 or region >= len(size):", "if nbytes < 0:", REFUSED),
    (BATCHES, " and nbytes <= size[region] - offset", "", REFUSED),
    (BATCHES, "    if lengths[0] > max_batch:\n", "    if False:\n", REFUSED),
    (BATCHES, "if nbytes < 0 or region < 0", "if region < 0", REFUSED),
    (BATCHES, "is_full and nbytes[i] != 0", "is_full", f"{T_BASE}::test_empty_operations_are_left_out"),
    (
        BASE,
        "        if found != (kind, _FORMAT):\n",
        "        if found[0] != kind:\n",
        f"{T_BASE}::test_blobs_that_are_none_are_refused_with_the_rank",
    ),
    # epochs
    (
        BASE,
        "former.identity == peer.identity and peer.epoch + lost <= former.epoch",
        "former.identity == peer.identity and peer.epoch + lost == former.epoch",
        f"{T_SHARED}::test_an_older_blob_of_the_same_exporter_is_ignored",
    ),
    (BASE, "        if self._blob and tuple(regions) == self._regions:\n", "        if False:\n", HONEST),
    # ends
    (
        BASE,
        "        if self._end is not None:\n            return\n",
        "",
        f"{T_BASE}::test_an_end_is_final_whatever_comes_later",
    ),
    (
        BASE,
        "                status = DRAINED\n",
        "                pass\n",
        f"{T_BASE}::test_what_was_given_up_on_drains_or_is_done",
    ),
    (
        BASE,
        "                status = Status(ReadState.LOST_PEER, self.lost)\n",
        "                pass\n",
        f"{T_BASE}::test_reads_of_a_peer_that_is_let_go_are_lost",
    ),
    (BASE, "            self.poll(left)\n", "            pass\n", f"{T_BASE}::test_tickets_that_ended_are_not_kept"),
    # portions
    (
        COPIES,
        'side="right")), first + most_spans)',
        'side="right")), first + most_spans + 1)',
        f"{T_BASE}::test_portions_are_the_same_bytes_within_the_limits",
    ),
    (
        BATCHES,
        "    nbytes = np.minimum(spans.nbytes[of] - offset, piece)\n",
        "    nbytes = np.full_like(of, piece)\n",
        f"{T_BASE}::test_portions_are_the_same_bytes_within_the_limits",
    ),
    # shared memory
    (
        PROCESSES,
        "        self._is_gone = started(pid) != start  #",
        "        self._is_gone = False  #",
        f"{T_SHARED}::test_blobs_that_name_what_is_not_there_are_refused",
    ),
    (
        SHARED,
        'if (about.st_dev, about.st_ino) != (file["device"], file["inode"]) or about.st_size < end:',
        "if about.st_size < end:",
        f"{T_SHARED}::test_blobs_that_name_what_is_not_there_are_refused",
    ),
    (
        SHARED,
        "                if moved != expected:\n",
        "                if False:\n",
        f"{T_SHARED}::test_memory_that_cannot_be_read_fails_the_read_and_says_so",
    ),
    (
        SHARED,
        '        if mode[3] == "s" and inode != "0":',
        '        if inode != "0":',
        f"{T_SHARED}::test_shared_regions_are_found_by_their_address",
    ),
    (
        SHARED,
        "region.address - mapping.start + mapping.offset",
        "region.address - mapping.start + 1",
        f"{T_SHARED}::test_shared_regions_are_found_by_their_address",
    ),
    # gloo
    (
        EXCHANGE,
        "request[1] != self.identity or request[2] != memory.epoch",
        "request[1] != self.identity",
        f"{T_GLOO}::test_memory_that_was_exported_anew_fails_reads_by_old_blobs",
    ),
    (
        EXCHANGE,
        '                end.say_bye("it has closed its transport")\n',
        "                pass\n",
        f"{T_GLOO}::test_a_peer_that_closed_is_lost",
    ),
    (
        GLOO,
        'peer.extra.get("rank") != peer.rank or',
        "",
        f"{T_GLOO}::test_a_blob_belongs_to_its_rank_in_the_group",
    ),
    (
        EXCHANGE,
        "            if not self.status.state.is_end and not self.unwanted:\n",
        "            if True:\n",
        f"{T_GLOO}::test_conforms[reads_of_a_stopped_peer_are_as_the_caps_say]",
    ),
    # faults
    (FAULTY, "            if draw < share:\n", "            if draw < 0.5:\n", T_FAULTY),
    (
        FAULTY,
        "            self._check(rank, batch)\n",
        "            pass\n",
        f"{T_FAULTY}::test_what_the_inner_transport_refuses_is_refused_under_every_fault",
    ),
    (
        FAULTY,
        '        if ticket.fault == "late" and not ticket.given_up:\n',
        "        if False:\n",
        f"{T_FAULTY}::test_a_late_read_writes_between_abandoned_and_drained",
        "rule 7",
    ),
    (
        FAULTY,
        "        self.disconnect(ticket.rank)\n",
        "",
        f"{T_FAULTY}::test_a_lost_rank_is_gone_until_it_is_connected_again",
    ),
    # an end while bytes are on their last way
    (
        EXCHANGE,
        "        self.jobs.put(ticket)\n",
        "        self.jobs.put(ticket)\n        ticket.finish(Status(ReadState.LOST_PEER, self.dead))\n",
        f"{T_GLOO}::test_a_read_from_a_peer_that_leaves_does_not_end_while_bytes_go_to_its_destination",
    ),
    # the checks themselves
    (
        CHECKS,
        '                _equal(contents(tensor), expected[i], f"region {i} after {count} operations of each read")\n',
        "                pass\n",
        LIES,
    ),
    (CHECKS, '    _equal(contents(tensor), mark, "late bytes in a destination that was given back")\n', "", LIES),
    (CHECKS, '    raise AssertionError(f"{what} must raise TransportError")\n', "", LIES),
    (
        CHECKS,
        '        _expect(w.peers[1].call(export_again) == blob, "equal regions must give an equal blob")\n',
        "",
        LIES,
    ),
    # strategies
    (
        STRATEGIES,
        "for expert in range(experts) if pairs or expert not in mine]",
        "for expert in range(experts)]",
        f"{T_STRATEGIES}::test_layouts_have_pairs_only_where_counting_forces_them",
    ),
    # agents of closed transports
    (
        NIXL,
        "        if not self._pending:\n            self._let_go()\n",
        "        if True:\n            self._let_go()\n",
        LET_GO,
    ),
    (NIXL, "            for ticket in list(self._pending):\n                self.poll(ticket)\n", "", LET_GO),
    (NIXL, "        self._agent = None\n", "", LET_GO),
    (
        NIXL,
        "        with self._looking:  #",
        "        if True:  #",
        f"{T_ENGINES}::test_nixl_is_asked_by_one_thread_at_a_time",
    ),
    (
        NIXL,
        "        while self._pending and threading.main_thread().is_alive():\n",
        "        while self._pending:\n",
        f"{T_ENGINES}::test_a_process_ends_though_a_read_of_a_closed_transport_may_still_write",
    ),
    # connections that ended
    (BASE, "peer.epoch + lost <= former.epoch", "peer.epoch <= former.epoch", AGAIN),
    (BASE, "            if ticket.status.state is not ReadState.DONE:\n", "            if True:\n", AGAIN),
    (
        BASE,
        "            self._lost.add(rank)\n            raise\n",
        "            raise\n",
        f"{T_BASE}::test_a_read_that_did_not_begin_counts_as_lost",
    ),
]
