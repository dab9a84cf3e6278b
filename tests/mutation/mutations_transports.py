"""Changes to transports, to the checks that they pass, and to the reference engine, each with a test that must fail."""

from __future__ import annotations

HERE = "eplb_core/loading/transports"
EXCHANGE = f"{HERE}/two_sided/exchange.py"
CHECKS = "eplb_core/testing/transports.py"
TESTS = "tests/loading/transports"
LATE = f"{TESTS}/test_faulty.py::test_a_late_read_writes_between_abandoned_and_drained"
DRAINS = f"{TESTS}/test_base.py::test_what_was_given_up_on_drains_or_is_done"
OUTSIDE = f"{TESTS}/test_base.py::test_a_refused_batch_names_value_operation_and_rank"
STOPPED = f"{TESTS}/test_conformance.py::test_conforms[gloo-reads_of_a_stopped_peer_are_as_the_caps_say]"
LIES = "tests/testing/test_transports.py::test_a_transport_that_does_not_keep_its_word_fails"
PARCEL = "tests/benchmarks/test_engine.py::test_a_parcel_carries_each_row_to_its_slot_and_its_answer_home"

MUTATIONS: list[tuple[str, ...]] = [
    (f"{HERE}/faulty.py", 'if ticket.fault == "late" and not ticket.given_up:', "if False:", LATE, "rule 7"),
    (f"{HERE}/base.py", "status = DRAINED", "pass", DRAINS, "rule 7"),
    (EXCHANGE, "not self.status.state.is_end and not self.unwanted", "True", STOPPED, "rule 7"),
    (f"{HERE}/batches.py", " and nbytes <= size[region] - offset", "", OUTSIDE),
    (CHECKS, '_equal(contents(tensor), mark, "late bytes', '(tensor, mark, "late bytes', LIES),
    ("benchmarks/engine/exchange.py", "to * self.room + before", "to * self.room", PARCEL),
]
