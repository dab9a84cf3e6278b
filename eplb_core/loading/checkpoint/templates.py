"""How checkpoints name the experts' tensors, and where in an `ExpertStore` each belongs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from eplb_core._arrays import check_names
from eplb_core._text import quoted
from eplb_core.errors import CheckpointError


class Part(NamedTuple):
    """Where a checkpoint tensor of one expert goes: one of `blocks` equal blocks along `axis` of a row."""

    tensor: str
    """Name in the store."""
    block: int
    blocks: int
    axis: int


class ExpertName(NamedTuple):
    """What a checkpoint tensor's name says."""

    layer: int
    """Layer id of the model."""
    expert: int | None
    """Expert of the checkpoint; None = the tensor has all of them, `[E, ...]`."""
    shared: bool
    """`expert` counts the shared ones."""
    part: Part


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointTemplate:
    """The names of one family of checkpoints.

    Example:
        >>> name = TEMPLATES["deepseek_v3"].parse("model.layers.3.mlp.experts.17.up_proj.weight_scale_inv")
        >>> name.layer, name.expert, name.part
        (3, 17, Part(tensor='w13_scale', block=1, blocks=2, axis=0))
    """

    family: str
    """How messages call it."""
    expert: str
    """Pattern of a name, with groups `layer`, `part`, and `expert` unless tensors hold all experts."""
    parts: Mapping[str, Part]
    """By the name's end."""
    shared: str | None = None
    """Pattern of a shared expert's name, with groups `layer` and `part`: the only one, or all of them in one."""
    claims: str = r"\.experts\."
    """Pattern of names that are an expert's; one that nothing matches is an error, not somebody else's tensor."""

    def knows(self, name: str) -> bool:
        """Whether a name is an expert's, by this template."""
        match = re.fullmatch(self.expert, name)
        return match is not None and match["part"] in self.parts

    def parse(self, name: str) -> ExpertName | None:
        """Read a name; None = no expert's tensor.

        Raises:
            CheckpointError: The name is an expert's, and this template does not know it.
        """
        match, shared = re.fullmatch(self.expert, name), False
        if match is None and self.shared is not None:
            match, shared = re.fullmatch(self.shared, name), True
        part = None if match is None else self.parts.get(match["part"])
        if match is None or part is None:
            if match is not None or re.search(self.claims, name):
                fits = [other.family for other in TEMPLATES.values() if other is not self and other.knows(name)]
                mend = f"pass template={fits[0]!r}, which does" if fits else "pass a CheckpointTemplate that has it"
                raise CheckpointError(
                    f"{quoted(name)} is an expert's tensor that template {self.family!r} does not know; {mend}, or "
                    "name it in `ignore`",
                    tensor=name,
                )
            return None
        expert = match.groupdict().get("expert")
        return ExpertName(int(match["layer"]), 0 if shared else None if expert is None else int(expert), shared, part)


# Suffix of a projection's tensor -> suffix of the store's name, axis along which gate and up lie in one tensor.
# Layouts that keep the output features last (GPTQ, AWQ) have them side by side.
_SUFFIXES: dict[str, tuple[str, Literal[0, 1]]] = {
    "weight": ("", 0),
    "bias": ("_bias", 0),
    "weight_scale_inv": ("_scale", 0),
    "weight_scale": ("_scale", 0),
    "weight_scale_2": ("_scale_2", 0),
    "input_scale": ("_input_scale", 0),
    "weight_packed": ("_packed", 0),
    "weight_zero_point": ("_zero_point", 0),
    "qweight": ("_qweight", 1),
    "qzeros": ("_qzeros", 1),
    "scales": ("_scales", 1),
}


def projections(gate: str, up: str, down: str) -> dict[str, Part]:
    """Parts of an expert with three projections: gate and up are the blocks of `w13`, down is `w2`."""
    parts = {}
    for suffix, (end, axis) in _SUFFIXES.items():
        parts[f"{gate}.{suffix}"] = Part(f"w13{end}", 0, 2, axis)
        parts[f"{up}.{suffix}"] = Part(f"w13{end}", 1, 2, axis)
        parts[f"{down}.{suffix}"] = Part(f"w2{end}", 0, 1, 0)
    return parts


_LAYER = r"(?:.*\.)?layers\.(?P<layer>\d+)\."
_EXPERT = r"experts\.(?P<expert>\d+)\.(?P<part>.+)"
_PROJECTIONS = projections("gate_proj", "up_proj", "down_proj")
_SHARED = _LAYER + r"mlp\.shared_experts\.(?P<part>.+)"

TEMPLATES = {
    template.family: template
    for template in (
        CheckpointTemplate("deepseek_v3", _LAYER + r"mlp\." + _EXPERT, _PROJECTIONS, shared=_SHARED),
        CheckpointTemplate("qwen3_moe", _LAYER + r"mlp\." + _EXPERT, _PROJECTIONS),
        CheckpointTemplate("glm4_moe", _LAYER + r"mlp\." + _EXPERT, _PROJECTIONS, shared=_SHARED),
        CheckpointTemplate("mixtral", _LAYER + r"block_sparse_moe\." + _EXPERT, projections("w1", "w3", "w2")),
        # All experts in one tensor, gate and up interleaved: rows are taken as they are.
        CheckpointTemplate(
            "gpt_oss",
            _LAYER + r"mlp\.experts\.(?P<part>.+)",
            {
                f"{ours}{end}": Part(f"{theirs}{store_end}", 0, 1, 0)
                for ours, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2"))
                for end, store_end in (("", ""), ("_bias", "_bias"), ("_blocks", "_blocks"), ("_scales", "_scales"))
            },
        ),
    )
}
"""By family."""


class Names(NamedTuple):
    """How a checkpoint's names become those of the stores."""

    template: CheckpointTemplate
    rename: Mapping[str, str]
    ignore: tuple[str, ...]

    def parse(self, name: str) -> ExpertName | None:
        """Read a name as the template does, with the store's own name of the tensor; None = nothing to load."""
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return None
        parsed = self.template.parse(name)
        if parsed is None or parsed.part.tensor not in self.rename:
            return parsed
        return parsed._replace(part=parsed.part._replace(tensor=self.stored(parsed.part)))

    def stored(self, part: Part) -> str:
        """The stores' name of a tensor."""
        return self.rename.get(part.tensor, part.tensor)


def check_naming(template: str | CheckpointTemplate, rename: Mapping[str, str] | None, ignore: Iterable[str]) -> Names:
    """The three arguments that say what tensors are called, checked: a family's name, or a template of the caller's."""
    found: object = TEMPLATES.get(template) if isinstance(template, str) else template
    if not isinstance(found, CheckpointTemplate):
        raise ValueError(
            f"`template` (={quoted(template, 80)}) must be a CheckpointTemplate or one of {', '.join(TEMPLATES)}"
        )
    given: object = {} if rename is None else rename
    if not isinstance(given, Mapping):
        raise TypeError(f"`rename` (={quoted(rename, 80)}) must be a dict of names")
    return Names(found, dict(given), check_names(ignore, "ignore"))
