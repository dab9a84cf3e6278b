"""Changes to the Balancer's rule that a test must notice; tried with compilation."""

from __future__ import annotations

BALANCER = "eplb_core/balancer/balancer.py"
DECIDE = "eplb_core/balancer/decide.py"
MEMORY = "eplb_core/balancer/memory.py"
ACCOUNT = "eplb_core/balancer/account.py"
STATE = "eplb_core/balancer/state.py"
TEST = "tests/balancer/test_balancer.py::test_"
PRICE = f"{TEST}the_price_falls_with_the_age_of_a_regime"
LITTLE = f"{TEST}a_layer_that_gains_little_stays"
AS_PLACE = f"{TEST}it_answers_as_place_does_for_the_windows_in_memory"
BACK = f"{TEST}traffic_that_comes_back_is_known_again"
TURNS = f"{TEST}layers_in_turn_get_the_answers_of_a_rank_that_never_asked_before[3]"
AGAINST = f"{TEST}traffic_against_which_no_move_helps_costs_few_transfers_and_is_no_worse_than_staying"
DIFFERS = f"{TEST}any_window_that_differs_shows_in_the_digest"
MADE = f"{TEST}what_it_was_made_with_shows_in_the_digest"
RESTART = f"{TEST}a_rank_that_restarts_goes_on_as_the_others"
PAID = f"{TEST}what_moves_have_brought_is_part_of_the_state"
REFUSED = f"{TEST}a_wrong_state_is_refused_and_costs_none"
COPY = f"{TEST}a_state_is_a_copy"

MUTATIONS = [
    (DECIDE, "max(2 * memory.age, _SHORTEST_LIFE)", "max(memory.age, _SHORTEST_LIFE)", PRICE),
    (DECIDE, "_SHORTEST_LIFE, _LONGEST_LIFE = 32, 64", "_SHORTEST_LIFE, _LONGEST_LIFE = 32, 128", PRICE),
    (DECIDE, "return move_cost / _FIRST_LIFE", "return move_cost", AS_PLACE),
    # the gate
    (DECIDE, "_MIN_GAIN = 0.002", "_MIN_GAIN = 0.0", LITTLE, "rule 6"),
    (DECIDE, "_MIN_GAIN = 0.002", "_MIN_GAIN = 0.1", LITTLE),
    # a change that is not seen, traffic that is not known again, and all of the past for new traffic
    (MEMORY, "_CHANGES = ((2, 3.0), (4, 2.6))", "_CHANGES = ((2, 30.0), (4, 26.0))", BACK),
    (MEMORY, "_BACK, _BLOCK, _STEP = 1.5, 8, 4", "_BACK, _BLOCK, _STEP = 0.0, 8, 4", BACK),
    # answers that depend on when a rank was asked
    (BALANCER, "(asked, memory.start, until[n], kinds[n]", "(asked, memory.start, kinds[n]", TURNS, "rule 5"),
    (ACCOUNT, "self.units < -self._most_loss(move_cost)", "self.units < -(1 << 60)", AGAINST),
    # digests that say less than what decides
    (MEMORY, "hashlib.sha256(self.chain + window.tobytes())", "hashlib.sha256(window.tobytes())", DIFFERS, "rule 5"),
    (BALANCER, 'known = "nothing" if self._memory is None else self._memory.digest', 'known = "nothing"', DIFFERS),
    (BALANCER, "self._topology.rank_speed.tolist(), self._move_cost))", "self._topology.rank_speed.tolist()))", MADE),
    (BALANCER, 'paid = "nothing" if self._account is None else self._account.digest', 'paid = "nothing"', PAID),
    # a state that lacks or shares what decides
    (STATE, '"distance", "past", ', '"distance", ', RESTART),
    (STATE, 'if _digest(state) != state["digest"]:', "if False:", REFUSED),
    (STATE, "value.copy() if isinstance(value, (np.ndarray, list)) else value", "value", COPY),
]
