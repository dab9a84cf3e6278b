"""Changes to the reference engine that a test must notice."""

from __future__ import annotations

EXCHANGE = "benchmarks/engine/exchange.py"
FORWARD = "benchmarks/engine/forward.py"
MODEL = "benchmarks/engine/model.py"
REQUESTS = "benchmarks/engine/requests.py"
WEIGHTS = "benchmarks/engine/weights.py"
ENGINE = "benchmarks/engine/engine.py"
TEST = "tests/benchmarks/test_engine.py"
LOST = f"{TEST}::test_requests_of_a_lost_rank_keep_their_tokens_and_start_anew_elsewhere"
PARCEL = f"{TEST}::test_a_parcel_carries_each_row_to_its_slot_and_its_answer_home"

MUTATIONS = [
    # weights: second replicas too
    (
        WEIGHTS,
        "            for slot in resolver.local_slots(layer, expert):\n",
        "            for slot in resolver.local_slots(layer, expert)[:1]:\n",
        f"{TEST}::test_a_checkpoint_and_the_seed_it_was_made_from_fill_slots_alike",
    ),
    # grouped products: where a slot's rows end
    (
        FORWARD,
        "device=x.device), right=True)",
        "device=x.device), right=False)",
        f"{TEST}::test_grouped_products_equal_a_loop_over_slots",
    ),
    (
        FORWARD,
        "torch.where((key < slots)[:, None], answers, 0.0)",
        "torch.where((key <= slots)[:, None], answers + 1.0, 0.0)",
        f"{TEST}::test_grouped_products_equal_a_loop_over_slots",
    ),
    # exact arithmetic
    (
        MODEL,
        "    return torch.round(UNIT * wide / root)",
        "    return (UNIT * wide / root + torch.rand(1))",
        f"{TEST}::test_a_row_of_a_batch_is_computed_as_it_is_alone",
    ),
    # exchange
    (EXCHANGE, "torch.where(pair >= 0, flat[first].int(), -1)", "flat[first].int()", PARCEL),
    (EXCHANGE, "torch.where((place < len(answers))[:, None], found, 0)", "found", PARCEL),
    (EXCHANGE, "to * self.room + before", "to * self.room", PARCEL),
    # requests: nothing lost
    (REQUESTS, "                self.again.append(request)\n", "", LOST),
    (REQUESTS, "                request.position = 0\n", "", LOST),
    # the guide's links
    (
        ENGINE,
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\n",
        "tests/test_guide.py::test_links_of_the_guide_lead_to_the_lines_they_name",
    ),
]
