"""Which class serves which architecture: one line for each in ARCHITECTURES (how to add one: families/__init__.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from twostep.checkpoint.architectures import take_architecture
from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.directory import stored_dtype
from twostep.checkpoint.embedding_format import MATRYOSHKA_KEYS
from twostep.checkpoint.fields import Fields
from twostep.checkpoint.kv_scheme import read_kv_scheme
from twostep.checkpoint.quantization import QUANTIZATION_KEYS, read_quantization
from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.families.deepseek import DeepseekV2, DeepseekV3
from twostep.model.families.falcon import Falcon
from twostep.model.families.gemma import Gemma, Gemma2, Gemma3
from twostep.model.families.gpt2 import Gpt2
from twostep.model.families.gpt_neox import GptNeox
from twostep.model.families.gpt_oss import GptOss
from twostep.model.families.llama import Llama, Mistral
from twostep.model.families.mixtral import Mixtral
from twostep.model.families.olmo2 import Olmo2
from twostep.model.families.opt import Opt
from twostep.model.families.phi3 import Phi3
from twostep.model.families.qwen import Qwen2, Qwen3
from twostep.model.families.qwen3_next import Qwen3Next
from twostep.model.families.qwen_moe import Qwen2Moe, Qwen3Moe
from twostep.model.families.sharding import ModelPart
from twostep.model.families.starcoder2 import Starcoder2
from twostep.model.families.t5 import T5
from twostep.model.kernels.ops import Ops

# By what config.json calls it in `architectures`; twostep/checkpoint/architectures.py has the names for those who load nothing.
ARCHITECTURES: dict[str, type[Decoder]] = {
    "DeepseekV2ForCausalLM": DeepseekV2,
    "DeepseekV3ForCausalLM": DeepseekV3,
    "FalconForCausalLM": Falcon,
    "GPT2LMHeadModel": Gpt2,
    "GPTNeoXForCausalLM": GptNeox,
    "GptOssForCausalLM": GptOss,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "GemmaForCausalLM": Gemma,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "OPTForCausalLM": Opt,
    "Olmo2ForCausalLM": Olmo2,
    "Phi3ForCausalLM": Phi3,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen2MoeForCausalLM": Qwen2Moe,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Starcoder2ForCausalLM": Starcoder2,
    "T5ForConditionalGeneration": T5,
}
_DTYPES = ("bfloat16", "float16", "float32")


def parse_config(model_dir: Path, architecture: str = "") -> ModelConfig:
    """Reads config.json, in the layouts of transformers 4 and 5. A missing key has the value transformers gives it. `architecture`: in
    place of what it says itself.

    Raises SetupError, naming the file and the key, for a missing or broken file, an architecture, a quantization, an activation or rope
    type that is not supported, and for any unknown key whose value could change the result.
    """
    path = model_dir / "config.json"
    fields = Fields(path, read_config(model_dir, architecture))
    kind = ARCHITECTURES[take_architecture(fields)]
    quantization = read_quantization(model_dir, fields.whole)
    for key in (*QUANTIZATION_KEYS, *MATRYOSHKA_KEYS):
        fields.take(key, None)
    # Some models for embeddings are decoders whose tokens see all others.
    fields.expect("is_causal", True, default=True)
    kv_scheme = read_kv_scheme(model_dir, fields.whole)
    config = replace(kind.parse(fields, _dtype(fields, model_dir)), quantization=quantization, kv_scheme=kv_scheme)
    fields.refuse_rest()
    return config


def decoder_class(config: ModelConfig) -> type[Decoder]:
    return next(kind for kind in ARCHITECTURES.values() if kind.architecture == config.architecture)


def build_model(config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu", part: ModelPart | None = None) -> Decoder:
    """Makes a model with uninitialized weights, or one rank's `part` of it (then `config` is that rank's)."""
    return decoder_class(config)(config, dtype, ops, device, part)


def _dtype(fields: Fields, model_dir: Path) -> str:
    old = fields.take("torch_dtype", None)
    dtype = fields.take("dtype", None) or old
    if dtype is None:
        return stored_dtype(model_dir)
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        fields.refuse("dtype", dtype, "supported are " + ", ".join(_DTYPES))
    return str(dtype)
