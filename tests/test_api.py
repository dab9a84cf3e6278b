"""The package's own face: one table of names, imported when first used."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

import eplb_core
from tests.processes import python

SOURCE = Path(eplb_core.__file__)
NEED_TORCH = {
    *("CheckpointError", "ExpertStore", "fingerprints", "load_checkpoint", "rebalance_experts"),
    "TorchDistributed",
    *("DispatchTables", "LayerTables", "LoadCounter", "topk_to_slots"),
    *("HostBackup", "Migrator", "MigratorStatus", "Target", "move_experts"),
    *("WeightHost", "attach_weights"),
}
WORDS = {"Locality": ("none", "group", "first_copy"), "PlacementDispatch": ("even", "weighted")}
OTHER_NAMES = {"retire_ranks": "plan_removal"}
MODULES = vars(eplb_core)["_MODULES"]


def test_the_table_and_the_stub_have_the_same_names() -> None:
    typed = {
        alias.name: f"{node.module}."[len("eplb_core.") :].rstrip(".")
        for node in ast.parse(SOURCE.with_suffix(".pyi").read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.name == alias.asname
    }
    assert typed.pop("__version__") == "_version"
    for name, module in MODULES.items():
        assert typed.pop(name) == module.rpartition(".")[0]
    assert typed == vars(eplb_core)["_HOME_OF"]


@pytest.mark.parametrize("name", sorted({*eplb_core.__all__} - {*WORDS}))
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    if name in NEED_TORCH:
        pytest.importorskip("torch", reason="its module works on tensors")
    value = getattr(eplb_core, name)
    assert value.__name__ == OTHER_NAMES.get(name, name)
    assert len(value.__doc__) > 20
    assert name in dir(eplb_core)


@pytest.mark.parametrize("name", WORDS)
def test_the_words_of_an_option_are_a_type(name: str) -> None:
    assert get_args(getattr(eplb_core, name)) == WORDS[name]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_for_users_are_reached_by_one_name(name: str) -> None:
    module = getattr(eplb_core, name)
    assert module.__name__ == f"eplb_core.{MODULES[name]}"
    assert name in dir(eplb_core)


@pytest.mark.parametrize("name", eplb_core.transports.__all__)
def test_every_transport_is_under_its_module(name: str) -> None:
    if name in NEED_TORCH:
        pytest.importorskip("torch", reason="its module works on tensors")
    value = getattr(eplb_core.transports, name)
    assert (value.__name__, vars(eplb_core.transports)[name]) == (name, value)
    assert name in dir(eplb_core.transports)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """To a type checker, too: it would call the comments below unused if any name were right."""
    with pytest.raises(AttributeError, match="module 'eplb_core' has no attribute 'balance'"):
        eplb_core.balance  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'eplb_core\.loading\.transports' has no attribute 'Smoke'"):
        eplb_core.transports.Smoke  # type: ignore[attr-defined]  # noqa: B018


IMPORTED = "print(sorted({'torch', 'numba', 'numpy', 'scipy'} & set(sys.modules)))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (IMPORTED, "[]"),
        (
            "layout = eplb_core.ExpertLayout.trivial(1, 4, num_slots=4, topology=eplb_core.Topology(2))\n"
            "eplb_core.mean_balancedness(eplb_core.rank_load(layout, [[1, 2, 3, 4]])), layout.digest\n" + IMPORTED,
            "['numpy']",
        ),
        ("eplb_core.place\nprint('torch' in sys.modules)", "False"),
        (
            "sys.modules['torch'] = None\neplb_core.place\n"
            "try: eplb_core.Migrator\nexcept ModuleNotFoundError as error: print(error)",
            "`Migrator` needs torch: pip install 'eplb-core[torch]'",
        ),
    ],
    ids=["import", "layouts and metrics", "placement", "torch is missing"],
)
def test_what_is_not_used_is_not_imported(code: str, said: str) -> None:
    assert python(f"import sys, eplb_core\n{code}").stdout == f"{said}\n"
