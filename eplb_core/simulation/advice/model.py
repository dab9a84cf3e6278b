"""What a model's Hugging Face config says of its experts: sizes, how many, how many per token, bytes of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eplb_core._text import plain, quoted
from eplb_core.errors import FileFormatError
from eplb_core.files.reading import PathLike, check_path, read_json

# The names of one number in the configs of different models; the first that is there is taken. DeepSeek, GLM and Kimi
# say n_routed_experts; Qwen and OLMoE num_experts; Mixtral, GPT-OSS and Llama 4 num_local_experts.
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
# Where a config has both, intermediate_size is that of the layers without experts.
_INNER = ("moe_intermediate_size", "intermediate_size")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k")

_TYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}
# Bytes of a weight by quantization, with the scales of its groups: MXFP4 has a byte for 32 weights, NVFP4 for 16.
_METHOD_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 0.5 + 1.0 / 32, "nvfp4": 0.5 + 1.0 / 16}


@dataclass(frozen=True, slots=True)
class ModelExperts:
    """The experts of a model. Immutable."""

    name: str
    """What the config calls the model."""
    hidden_size: int
    """Values of a token."""
    intermediate_size: int
    """Values between an expert's matrices, of which there are three."""
    num_experts: int
    """Logical experts of a layer, without shared ones."""
    top_k: int
    """Experts of a token."""
    weight_bytes: float
    """Bytes of a weight, with the scales of its group."""
    weights: str
    """What the weights are: "bfloat16", "fp8"."""
    num_layers: int
    """Layers with experts."""

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert of one layer."""
        return 3.0 * self.hidden_size * self.intermediate_size * self.weight_bytes

    @property
    def text(self) -> str:
        """One line."""
        return (
            f"{self.name}: {self.num_layers} layers of {self.num_experts} experts, top-{self.top_k}, "
            f"{self.hidden_size} x {self.intermediate_size} in {self.weights}"
        )


def read_model(config: PathLike | Mapping[str, Any], *, weight_bytes: float | None = None) -> ModelExperts:
    """Read the sizes of a model's experts from its config.

    Args:
        config: Path of a Hugging Face config.json, or what it holds. Configs of models that also see or hear hold the
            part that counts under `text_config`.
        weight_bytes: Bytes of a weight, instead of what the config says.

    Returns:
        What it says of the experts.

    Raises:
        FileFormatError: It names no experts, or a number is missing or no number; the text lists the names looked for.

    Example:
        >>> config = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        ...           "num_hidden_layers": 48, "torch_dtype": "bfloat16", "model_type": "qwen3_moe"}
        >>> read_model(config).text
        'qwen3_moe: 48 layers of 128 experts, top-8, 2048 x 768 in bfloat16'
    """
    if isinstance(config, Mapping):
        source, found = "`model`", config
    else:
        source = plain(check_path(config, "model"))
        found = read_json(source)
    if not isinstance(found, Mapping):
        raise _bad(source, f"expected a Hugging Face config, a JSON object, found {quoted(found, 40)}")
    part = found
    for inside in ("text_config", "llm_config", "language_config"):
        if isinstance(found.get(inside), Mapping) and not any(name in found for name in _EXPERTS):
            part = {**{key: found[key] for key in ("quantization_config",) if key in found}, **found[inside]}
            break
    reader = _Reader(source, part)
    experts = reader.whole(_EXPERTS, "a model with experts")
    top_k = reader.whole(_TOP_K, "experts of a token")
    if top_k > experts:
        raise _bad(source, f"expected at most {experts} experts of a token, as many as a layer has, found {top_k}")
    layers = _moe_layers(part, reader.whole(("num_hidden_layers", "num_layers", "n_layer"), "layers"))
    size, weights = (weight_bytes, f"{weight_bytes:g} bytes a weight") if weight_bytes else _weights(source, part)
    if layers < 1:
        raise _bad(source, "expected layers with experts, found none among those that it describes")
    return ModelExperts(
        name=plain(str(found.get("model_type") or part.get("model_type") or "the model"), 40),
        hidden_size=reader.whole(("hidden_size", "d_model"), "values of a token"),
        intermediate_size=reader.whole(_INNER, "values inside of an expert"),
        num_experts=experts,
        top_k=top_k,
        weight_bytes=size,
        weights=weights,
        num_layers=layers,
    )


class _Reader:
    """Numbers of a config by any of their names."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self.source, self.config = source, config

    def whole(self, names: tuple[str, ...], what: str) -> int:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list) and value and all(each == value[0] for each in value):
                value = value[0]  # a number for each layer, all alike
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 20:
                raise _bad(self.source, f"`{name}` (={quoted(value, 40)}) must be a whole number of 1 or more")
            return value
        raise _bad(self.source, f"expected {what} as one of {', '.join(names)}, found none of these names")


def _moe_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts, by the rules of the models that mix them with others."""
    named = config.get("moe_layers")
    if isinstance(named, list):  # Llama 4
        return len(named)
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, list):  # one flag for each layer
        return sum(1 for each in frequency if each)

    def number(name: str, default: int) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and value >= 0 else default

    first = number("first_k_dense_replace", 0)
    every = max(number("decoder_sparse_step", 1), 1)
    between = max(number("interleave_moe_layer_step", 1), 1)
    period, offset = max(number("expert_layer_period", 1), 1), number("expert_layer_offset", 0)
    dense = config.get("mlp_only_layers")
    dense = dense if isinstance(dense, list | tuple) else ()
    step = max(frequency, 1) if isinstance(frequency, int) else 1
    return sum(
        1
        for layer in range(layers)
        if layer >= first
        and layer % step == 0
        and layer not in dense
        and (layer + 1) % every == 0
        and (layer + 1) % between == 0
        and layer % period == offset % period
    )


def _weights(source: str, config: Mapping[str, Any]) -> tuple[float, str]:
    """Bytes of an expert's weight, and what it is."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method", "")).lower()
        scheme = str(quantization.get("quant_algo", method)).lower()  # modelopt says which of its own
        for name in (method, scheme):
            if name in _METHOD_BYTES:
                return _METHOD_BYTES[name], name
        bits = quantization.get("bits")
        groups = quantization.get("config_groups")
        if isinstance(groups, Mapping) and groups:
            first = next(iter(groups.values()))
            weights = first.get("weights") if isinstance(first, Mapping) else None
            bits = weights.get("num_bits") if isinstance(weights, Mapping) else bits
        if isinstance(bits, int) and 1 <= bits <= 16:
            return bits / 8.0, f"{bits} bits by {plain(method, 30)}, scales left out"
        raise _bad(
            source,
            f"`quantization_config` (={quoted(method, 40)}) does not say how many bytes a weight has; give --dtype "
            "(`weight_bytes`)",
        )
    named = config.get("torch_dtype") or config.get("dtype")
    if isinstance(named, str) and named.removeprefix("torch.") in _TYPE_BYTES:
        kind = named.removeprefix("torch.")
        return _TYPE_BYTES[kind], kind
    raise _bad(
        source,
        "expected torch_dtype, dtype or quantization_config to say how many bytes a weight has, found "
        f"{quoted(named, 40)}; give --dtype (`weight_bytes`)",
    )


def _bad(source: str, text: str) -> FileFormatError:
    return FileFormatError(f"{source}: {text}", path=source)
