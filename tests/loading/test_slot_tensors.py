"""Which tensors of a module are indexed by slot: every way to hold one, and every way to look like one."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from eplb_core import ExpertStore

S = 4

# ---- finding them in a module ----------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer as engines build it: parameters, a buffer, a plain attribute, settings, a submodule."""

    def __init__(self, slots: int, num_slots: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(slots, 4, 2))
        self.register_buffer("w13_scale", torch.ones(slots, 1))
        self.alpha = torch.ones(slots)
        self.same_alpha = self.alpha
        self.input_scale = torch.ones(num_slots, 2)
        self.limit = torch.tensor(7.0)
        self.one = torch.ones(1)
        self.placeholder = torch.zeros(0, 3)
        self.method = nn.Module()
        self.method.zero_points = nn.Parameter(torch.zeros(slots, 3, dtype=torch.int32), requires_grad=False)


NAMED: dict[str, Any] = {"by_slot": ["alpha", "method.*"], "whole": ["input_scale"]}


def test_every_kind_of_slot_tensor_is_found() -> None:
    """E2, E3: scales, zero points and derived products are found wherever a module keeps them."""
    store = ExpertStore.of_module(Experts(6, 288), 6, num_slots=288, **NAMED)
    assert store.names == ("w13", "w13_scale", "alpha", "method.zero_points")
    assert store.whole_names == ("input_scale",)
    assert store.slot_bytes == 32 + 4 + 4 + 12
    assert store.whole_addresses.shape == (288, 1)


def test_lists_and_dicts_of_slot_tensors_are_found() -> None:
    """E3: what is left behind when its slot moves belongs to another expert from then on."""
    module: Any = nn.Module()
    module.w = torch.zeros(6, 2)
    module.scales = {"up": torch.ones(6), "down": torch.ones(6, 3), "name": "per slot"}
    module.biases = [torch.zeros(6), None]
    names = ("w", "scales.up", "scales.down", "biases.0")
    assert ExpertStore.of_module(module, 6, by_slot=["w", "scales.*", "biases.*"]).names == names
    with pytest.raises(ValueError, match=r"lacks 'scales.up', which the module keeps by slot \(2 more\)"):
        ExpertStore({"w": module.w}).check_covers(module)


def test_rows_of_shared_experts_are_left_out() -> None:
    module = nn.Module()
    module.w = torch.zeros(4, 2)  # three slots and one shared
    module.scale = torch.zeros(8)  # six slots and each rank's shared one
    store = ExpertStore.of_module(module, 3, num_slots=6, num_shared=1, by_slot=["w"], whole=["scale"])
    assert (store.num_slots, store.addresses[0, 0]) == (3, module.w.data_ptr())
    assert store.whole_addresses.shape == (6, 1)


def test_a_tensor_of_unknown_length_is_named_at_registration() -> None:
    """E2: not at the first rebalance."""
    module = Experts(6, 288)
    module.lookup = torch.zeros(5, 2)
    module.other = torch.zeros(7)
    with pytest.raises(ValueError, match=r"'lookup' \(shape \[5, 2\]\) must have 6 slots or 288 rows .* \(1 more\)"):
        ExpertStore.of_module(module, 6, num_slots=288, **NAMED)
    with pytest.raises(ValueError, match=r"'input_scale' \(shape \[288, 2\]\) must have 6 slots as"):
        ExpertStore.of_module(module, 6, by_slot=["alpha", "method.*"], ignore=["lookup", "other"])
    store = ExpertStore.of_module(module, 6, num_slots=288, **NAMED | {"ignore": ["look*", "other", "method.*"]})
    assert store.names == ("w13", "w13_scale", "alpha")


def test_a_module_a_slot_is_told_to_give_lists() -> None:
    slots = [torch.nn.Linear(4, 3, bias=False) for _ in range(2)]
    with pytest.raises(ValueError, match=r"'0.weight' .* tensors of its own, give `ExpertStore` lists of S of them"):
        ExpertStore.of_module(torch.nn.ModuleList(slots), 2)
    assert ExpertStore({"weight": [slot.weight for slot in slots]}).row_bytes.tolist() == [48]


def test_a_store_that_lacks_a_slot_tensor_of_the_module_is_refused() -> None:
    """E3: weights that move without their scales."""
    module = Experts(6, 288)
    store = ExpertStore({"w13": module.w13, "alpha": module.alpha}, whole={"input_scale": module.input_scale})
    with pytest.raises(ValueError, match=r"lacks 'w13_scale', which the module keeps by slot \(1 more\)"):
        store.check_covers(module, num_slots=288)
    store.check_covers(module, num_slots=288, ignore=["w13_scale", "method.*"])
    ExpertStore.of_module(module, 6, num_slots=288, **NAMED).check_covers(module, num_slots=288)


# ---- every way to hold one -------------------------------------------------------------------------------------------


@dataclass
class Scales:
    up: torch.Tensor
    more: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Slotted:
    __slots__ = ("_hidden", "up")

    def __init__(self, up: torch.Tensor) -> None:
        self.up = up


class Private:
    __slots__ = ("__up",)

    def __init__(self, up: torch.Tensor) -> None:
        self.__up = up


class Mute:
    """As a model of pydantic that was not built yet: it raises what `getattr` does not expect."""

    __slots__ = ("__weakref__", "up")

    def __init__(self, up: torch.Tensor) -> None:
        self.up = up

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Pair(NamedTuple):
    up: torch.Tensor
    down: torch.Tensor


class Strange(list[torch.Tensor]):
    """Its fields are not its own, and it is not to be iterated."""

    _fields = ("up", "down")

    def __iter__(self) -> Any:
        raise RuntimeError


class StrangeDict(dict[str, torch.Tensor]):
    """The same."""

    __iter__ = items = keys = Strange.__iter__


class Method:
    """As engines' quantization methods: it keeps what post-processing made."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def apply(self) -> torch.Tensor:
        return self.scale


class Lazy:
    """What an engine gives for a mapping: `keys` and items, and no iterator."""

    def __init__(self, make: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._made = make()

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._made[key]


def nested(held: Any, times: int) -> Any:
    return nested([held], times - 1) if times else held


def closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def cached(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    call = functools.lru_cache(lambda: [tensor])
    call()
    return lambda: call()[0]


def attached(tensor: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(()))
    parameter.scale = tensor  # type: ignore[attr-defined]
    return parameter


def with_property(tensor: torch.Tensor) -> nn.Module:
    class Hides(nn.Module):
        scale = property(lambda self: tensor)

    return Hides()


def hooked(tensor: torch.Tensor) -> nn.Module:
    module = nn.Identity()
    module.register_forward_hook(lambda *args: tensor[0])
    return module


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tuple": lambda t: (1, t),
    "a tuple of tuples": lambda t: ((t,),),
    "a list in a dict": lambda t: {"a": [t]},
    "a named tuple": lambda t: Pair(t, torch.zeros(())),
    "a list that says what it likes": lambda t: Strange([t]),
    "a dict that says what it likes": lambda t: StrangeDict(a=t),
    "lists in lists": lambda t: nested(t, 100),
    "a set": lambda t: {t},
    "a deque": lambda t: deque([t]),
    "a namespace": lambda t: SimpleNamespace(up=t),
    "a dataclass": lambda t: Scales(torch.zeros(()), {"down": [t]}),
    "slots of a class": Slotted,
    "a private slot of a class": Private,
    "an object": Method,
    "an object that answers nothing": Mute,
    "a bound method": lambda t: Method(t).apply,
    "a method of the tensor": lambda t: t.copy_,
    "a closure": closure,
    "a partial": lambda t: functools.partial(torch.add, t),
    "a default": lambda t: lambda given=t: given,
    "a cache": cached,
    "a lazy mapping": lambda t: Lazy(lambda: {"a": t}),
    "a parameter's attribute": attached,
    "a property": with_property,
    "a hook": hooked,
    "a submodule's list": lambda t: nn.ModuleDict({"a": with_list(t)}),
}


def with_list(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    vars(module)["held"] = [tensor]
    return module


def experts(held: Any = None) -> Any:
    """Weights of four slots, and something beside them."""
    module: Any = nn.Module()
    module.w13_weight = nn.Parameter(torch.zeros(S, 6, 5))
    module.beside = held
    return module


@pytest.mark.parametrize("way", WAYS)
def test_what_is_certain_is_found_however_it_is_held_and_what_is_not_is_refused(way: str) -> None:
    large, small = torch.zeros(S, 3, 2), torch.zeros(S)
    module = experts(WAYS[way](large))
    if way == "a set":  # without an order there is no name that is the same on all ranks
        with pytest.raises(ValueError, match=r"'beside.<set>' .* name it in `by_slot`"):
            ExpertStore.of_module(module, S)
    else:
        store = ExpertStore.of_module(module, S)
        assert len(store.names) == 2
        assert large.data_ptr() in store.addresses[0]
        store.check_covers(module)
    with pytest.raises(ValueError, match=r"lacks '[^']*', which the module keeps by slot"):
        ExpertStore({"w13_weight": module.w13_weight}).check_covers(module)
    with pytest.raises(ValueError, match=r"\(shape \[4\]\) (has as many rows|is in a set).* in `by_slot` .* `ignore`"):
        ExpertStore.of_module(experts(WAYS[way](small)), S)


def test_a_module_that_is_not_registered_is_refused_until_it_is_named() -> None:
    inner = experts()
    for held in ([inner], (inner,), SimpleNamespace(a=inner), lambda: inner):
        module = experts(held)
        with pytest.raises(ValueError, match=r"w13_weight' .* in a module that this one has not registered"):
            ExpertStore.of_module(module, S)
        assert ExpertStore.of_module(module, S, ignore=["beside*"]).names == ("w13_weight",)
        assert ExpertStore.of_module(module, S, by_slot=["beside*"]).addresses[0, 1] == inner.w13_weight.data_ptr()


def test_what_contains_the_module_is_not_looked_into() -> None:
    """Engines keep a list of all layers, and layers refer to their model."""
    module, model = experts(), nn.ModuleList([experts()])
    model.append(module)
    module.beside = [model, weakref.ref(model), model.forward]
    assert ExpertStore.of_module(module, S).names == ("w13_weight",)


@pytest.mark.parametrize("held", [lambda: np.zeros(S), lambda: [np.zeros((S, 2))]])
def test_rows_that_nothing_can_move_are_refused(held: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="is a numpy array with a row for each slot"):
        ExpertStore.of_module(experts(held()), S)
    assert ExpertStore.of_module(experts([np.zeros(5), torch.zeros(S, 3, 1).numpy()[0]]), S).names == ("w13_weight",)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'beside' is torch.sparse_coo"):
        ExpertStore.of_module(experts(torch.eye(S).to_sparse()), S)


# ---- engines' layers of experts --------------------------------------------------------------------------------------

P = 2 * S
W = {"w13_weight": [S, 8, 6], "w2_weight": [S, 6, 4]}
FAMILIES: dict[str, dict[str, list[int]]] = {
    "unquantized": W,
    "vLLM's biases": W | {"w13_bias": [S, 8], "w2_bias": [S, 6]},
    "SGLang's biases": W | {"w13_weight_bias": [S, 8], "w2_weight_bias": [S, 6]},
    "fp8 per tensor": W | {"w13_weight_scale": [S, 2], "w2_weight_scale": [S], "w13_input_scale": [S]},
    "fp8 per tensor, processed": W | {"w13_weight_scale": [S], "w2_weight_scale": [S], "w13_input_scale": []},
    "fp8 per block": W | {"w13_weight_scale_inv": [S, 2, 2], "w2_weight_scale_inv": [S, 2, 1]},
    "fp8, int8 per channel": W | {"w13_weight_scale": [S, 8, 1], "w2_weight_scale": [S, 6, 1]},
    "online int8": W | {"w13_scale": [S, 8], "w2_scale": [S, 6]},
    "packed, act order": {"w13_weight_packed": [S, 2, 8], "w13_weight_scale": [S, 1, 8], "w13_weight_shape": [S, 2]}
    | {"w13_weight_g_idx": [S, 16], "w13_g_idx_sort_indices": [S, 16]},
    "awq, gptq": {"w13_qweight": [S, 2, 8], "w13_scales": [S, 1, 8], "w13_qzeros": [S, 1, 2], "w13_g_idx": [S, 0]},
    "mxfp4": W | {"w13_weight_scale": [S, 8, 2], "w2_weight_scale": [S, 6, 2], "w13_bias": [S, 8]},
    "nvfp4": {"w13_weight_packed": [S, 8, 3], "w13_weight_scale": [S, 8, 2], "w13_weight_global_scale": [S, 2]}
    | {"w13_input_global_scale": [S, 2]},
    "nvfp4 of modelopt": W
    | {"w13_weight_scale_2": [S, 2], "w13_blockscale_swizzled": [S, 8, 2]}
    | {"w13_input_scale": [P, 2], "w2_input_scale": [P]},  # whole on every rank
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_engines_are_found_whole_and_their_maps_are_refused(family: str) -> None:
    """As vLLM's and SGLang's quantizations make them; tests/engines has the engines' own."""
    module: Any = nn.Module()
    for name, shape in FAMILIES[family].items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))
    store = ExpertStore.of_module(module, S, num_slots=P)
    assert {*store.names, *store.whole_names} == {
        name for name, shape in FAMILIES[family].items() if 0 < np.prod(shape) > 1
    }
    assert set(store.whole_names) == {name for name, shape in FAMILIES[family].items() if shape[:1] == [P]}
    for name, length in (
        ("_expert_map", P),
        ("expert_local_to_global", S),
        ("e_score_correction_bias", P),
        ("g1_alphas", S),
    ):
        module.register_buffer(name, torch.zeros(length, dtype=torch.int32), persistent=False)
        with pytest.raises(ValueError, match=name):
            ExpertStore.of_module(module, S, num_slots=P)
        assert ExpertStore.of_module(module, S, num_slots=P, ignore=[name]).names == store.names
        delattr(module, name)


def test_a_scale_that_all_slots_share_is_refused_until_it_is_left_out() -> None:
    module = experts()
    module.w13_input_scale = torch.ones(1).expand(S)
    with pytest.raises(ValueError, match=r"'w13_input_scale' repeats one row .*`ignore`"):
        ExpertStore.of_module(module, S)
    assert ExpertStore.of_module(module, S, ignore=["*_input_scale"]).names == ("w13_weight",)


# ---- every way to look like one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [None, 8, 16])
def test_a_router_s_bias_is_never_permuted(num_slots: int | None) -> None:
    """Experts are as many as slots of the rank, or of all ranks."""
    for length in {8, num_slots or 8}:
        module: Any = nn.Module()
        module.experts = nn.Module()
        module.experts.w13_weight = nn.Parameter(torch.zeros(8, 6, 5))
        module.experts.w13_scale = torch.zeros(8)
        module.gate = nn.Linear(3, length, bias=False)
        module.gate.e_score_correction_bias = nn.Parameter(torch.zeros(length))
        module.topk = SimpleNamespace(correction_bias=module.gate.e_score_correction_bias)
        with pytest.raises(ValueError, match=r"'gate.weight' .* \(1 more\); name it in `(by_slot|whole)`"):
            ExpertStore.of_module(module, 8, num_slots=num_slots)
        store = ExpertStore.of_module(module, 8, num_slots=num_slots, ignore=["gate.*"])
        assert (store.names, store.whole_names) == (("experts.w13_weight", "experts.w13_scale"), ())


def test_what_belongs_to_a_router_is_in_doubt_with_three_dimensions_and_below_an_experts_name() -> None:
    """`router_logits [S, a, b]` went with the slots, and so did `w_gate.weight` beside `w`."""
    for name, held in (
        ("router_logits", torch.zeros(S, 3, 3)),
        ("w_gate", nn.Linear(6, S)),
        ("w_gate", torch.zeros(S)),
    ):
        module = nn.Module()
        module.w = torch.zeros(S, 4, 6)
        setattr(module, name, held)
        with pytest.raises(ValueError, match=f"'{name}"):
            ExpertStore.of_module(module, S)
        assert ExpertStore.of_module(module, S, ignore=[f"{name}*"]).names == ("w",)
        assert len(ExpertStore.of_module(module, S, by_slot=[f"{name}*"]).names) > 1


def test_a_name_that_begins_with_a_weight_s_does_not_make_a_router_s_bias_a_slot_s() -> None:
    module: Any = nn.Module()
    module.experts_weight = torch.zeros(S, 3, 2)
    module.experts_bias = torch.zeros(S, 3)
    module.experts_score_correction_bias = torch.zeros(S)
    with pytest.raises(ValueError, match="'experts_score_correction_bias'"):
        ExpertStore.of_module(module, S)
    store = ExpertStore.of_module(module, S, ignore=["*_correction_bias"])
    assert store.names == ("experts_weight", "experts_bias")


def test_what_is_named_must_have_the_rows_and_one_meaning() -> None:
    for options, said in [
        ({"by_slot": ["beside"]}, r"'beside' \(shape \[9, 4\]\) must have 4 slots .*, not as dimension 1"),
        ({"whole": ["beside"], "num_slots": 8}, "must have 4 slots or 8 rows"),
        ({"whole": ["beside"]}, "`whole` needs `num_slots`"),
        ({"by_slot": ["b*"], "whole": ["beside"], "num_slots": 8}, "both name 'beside'"),
    ]:
        with pytest.raises(ValueError, match=said):
            ExpertStore.of_module(experts(torch.zeros(9, 4)), S, **options)  # type: ignore[arg-type]


def test_views_of_what_was_found_are_no_tensors_of_their_own() -> None:
    """They move with it: a transposed or flattened one, a half, the same bytes under another dtype or name."""
    module = experts()
    w = module.w13_weight.data
    module.beside = [w, w.mT, w[:, :3], w.view(S, -1), w.flatten(), w.view(torch.int32), w[:, 0, 0], w.permute(1, 0, 2)]
    module.beside += [w[1], w.numpy(), w.view(-1, 5)[3:9]]
    store = ExpertStore.of_module(module, S)
    assert store.names == ("w13_weight",)
    assert store.addresses[0, 0] == w.data_ptr()
    store.check_covers(module)


def test_a_view_that_is_met_first_does_not_stand_for_the_whole() -> None:
    module: Any = nn.Module()
    weights = torch.zeros(S, 6, 5)
    module.gate_half, module.flat, module.weights = weights[:, :3], weights.view(S, -1), weights
    assert ExpertStore.of_module(module, S).slot_bytes == 120


def test_views_of_other_rows_are_refused() -> None:
    """One slot's bytes would be another's too."""
    w = torch.zeros(S + 1, 3, 2)
    module: Any = nn.Module()
    module.w, module.shifted = w[:S], w[1:]
    with pytest.raises(ValueError, match="share bytes"):
        ExpertStore.of_module(module, S)


def test_a_square_that_was_transposed_is_a_view_and_not_the_weights() -> None:
    """Its first dimension fits by accident."""
    module: Any = nn.Module()
    weights = torch.zeros(S, S, 3)
    module.turned, module.weights = weights.transpose(0, 1), weights
    store = ExpertStore.of_module(module, S)
    assert store.names == ("weights",)


def test_rows_of_shared_experts_do_not_hide_a_tensor_that_the_store_lacks() -> None:
    module: Any = nn.Module()
    module.w, module.v = torch.zeros(S + 1, 3, 2), torch.zeros(S + 1, 3, 2)
    store = ExpertStore({"w": module.w[:S]})
    with pytest.raises(ValueError, match="lacks 'v'"):
        store.check_covers(module, num_shared=1)
    ExpertStore.of_module(module, S, num_shared=1).check_covers(module, num_shared=1)


def test_names_are_the_same_in_every_process_and_no_two_are_equal() -> None:
    module = experts({1: torch.zeros(S, 2, 2), "1": torch.ones(S, 2, 2), object(): torch.ones(S, 2, 3)})
    assert ExpertStore.of_module(module, S).names == ("w13_weight", "beside.1", "beside.1#2", "beside.<object>")
