"""What is known of each family of models: what absent keys mean, which layers slide, which keep a latent, which are served no more.

``families.json`` holds the class defaults of the configuration classes (Hugging Face transformers 5.19), by ``model_type``: what a key means when the file
leaves it out. The tables here hold what is no default: how layers alternate, and the families whose code stores something else than their keys say
(vLLM 0.32, transformers 5.19).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any


def names(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


# model_type -> the family whose keys and defaults it shares
SAME_AS = {
    "kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "pangu_ultra_moe": "deepseek_v3", "kimi_vl": "deepseek_v3", "deepseek_mtp": "deepseek_v3", "AXK1": "axk1",
    "RefinedWeb": "falcon", "RefinedWebModel": "falcon", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text", "mllama": "mllama_text_model", "glm4v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "glm_ocr": "glm_ocr_text",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "ernie4_5_vl_moe": "ernie4_5_vl_moe_text", "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text", "hunyuan_vl": "hunyuan_vl_text", "aria": "aria_text", "paddleocr_vl": "paddleocr_vl_text",
    "mimo_v2": "mimo_v2_flash", "step3p7": "step3p5", "qwen2_audio": "qwen2", "qwen2_audio_encoder": "qwen2", "mimo": "qwen2", "mt5": "t5", "t5_gemma_module": "t5_gemma_module",
    "llava": "llama", "llava_next": "llama", "vipllava": "llama", "video_llava": "llama", "llava_onevision": "qwen2", "paligemma": "gemma", "internvl": "qwen2",
    "mistral3": "mistral", "idefics2": "mistral", "idefics3": "llama", "smolvlm": "llama", "phi4mm": "phi3", "phi3_v": "phi3", "phi3small": "phi3",
    "ministral_text": "ministral", "minimax_text_01": "minimax_text_01", "lfm2_vl": "lfm2", "aya_vision": "cohere2", "cohere2_vision": "cohere2",
}  # fmt: skip

# Files without a model_type, whose class says what they are.
OF_CLASS = {"LongcatFlashForCausalLM": "longcat_flash", "LongcatFlashNgramForCausalLM": "longcat_flash"}

# They read their whole input at once: nothing is kept from one step to the next.
ENCODERS = names("""bert roberta xlm-roberta xlm-roberta-xl roberta-prelayernorm camembert electra deberta deberta-v2 distilbert albert mpnet modernbert nomic_bert new gte
    big_bird roformer rembert ernie data2vec-text megatron-bert xmod nezha longformer clip siglip vit colpali colmodernvbert jina_bert""")

# Keys under which a file of several modalities keeps its text model, in the order tried.
INSIDE = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config", "language_model_config", "decoder", "decoder_config")

# Families that are no class of transformers. One KV head for each query head where the file states none: their code has no grouped heads.
MULTI_HEAD = names("""baichuan qwen internlm aquila gpt_neox gptj gpt2 opt bloom mpt codegen jais telechat persimmon xverse deepseek orion cpm gpt_neo xglm biogpt fuyu
    stablelm_epoch minicpm grok-1 skywork mixformer-sequential btlm gpt_refact decilm""")

# Every n-th layer keeps all tokens, the others a window: (the key that may say n, n where it does not).
EVERY_NTH_FULL = {
    "gemma2": ("", 2), "vaultgemma": ("", 2), "t5_gemma_module": ("", 2), "gemma3_text": ("sliding_window_pattern", 6), "gemma4_text": ("", 6),
    "gemma4_unified_text": ("", 6), "gemma3n_text": ("", 5), "cohere2": ("sliding_window_pattern", 4), "olmo3": ("", 4),
    "exaone4": ("sliding_window_pattern", 4), "exaone_moe": ("sliding_window_pattern", 4), "afmoe": ("global_attn_every_n_layers", 4), "gpt_oss": ("", 2),
}  # fmt: skip
FIRST_OF_FOUR_FULL = frozenset({"cwm", "granite_swa", "granitemoe_swa"})
# Window switched on by a flag of its own, and then only from the layer max_window_layers on.
FLAGGED = names("qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text dots1 smollm3 doge")
# A window in the file means that every layer slides.
ALL_SLIDE = names(
    "mistral mixtral phi3 phimoe starcoder2 ministral ministral3 phi4_multimodal minimax minimax_m2 qwen3_omni_moe_text nemotron_h step3p5 apertus llama granite granitemoe zamba2 mistral4 olmo2"
)
# A window in the file means nothing without a list of layers.
FULL_WITHOUT_LIST = names("laguna mellum")
LATENT = names(
    """deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash kimi_linear axk1 youtu mistral4 bailing_hybrid bailing_moe_v3 sarvam_mla"""
)
# Their code keeps K and V of every head, though a latent could be kept.
EXPANDED = frozenset({"minicpm3"})
# vLLM's code of these takes no notice of layers that slide beside full ones.
ALL_KEPT_BY_VLLM = frozenset({"qwen2_moe"})
# No member of these has attention or an MLP: vLLM caches no prefixes of them.
STATES_ONLY = frozenset({"mamba", "mamba2", "falcon_mamba"})
TWO_CACHES_A_LAYER = frozenset({"longcat_flash"})

# Families that keep something which no number here describes: refused, with what is not known.
UNMODELLED = {
    "deepseek_v4": "compressed caches of several rates per layer", "deepseek_v41": "compressed caches of several rates per layer", "rwkv": "a state of its own",
    "rwkv5": "a state of its own", "rwkv6": "a state of its own", "xlstm": "a state of its own", "zaya": "convolution states beside its attention",
    "inkling_text": "convolution states beside its attention", "inkling_mm_model": "convolution states beside its attention", "qwen4_exp_text": "several states and an indexer",
    "qwen4_exp": "several states and an indexer", "glm5_next": "an indexer of its own", "glm5_next_text": "an indexer of its own", "hy_v4": "an indexer of its own",
    "minimax_m3": "a block-sparse indexer", "minimax_m3_vl": "a block-sparse indexer", "minimax_m3_vl_text": "a block-sparse indexer", "dots3_note": "latents of another width in its window layers", "blt": "byte patches", "voxtral_realtime": "a cache of its audio encoder beside its own",
    "moshi": "a second decoder's cache", "diffusion_gemma": "a canvas of tokens beside its cache", "diffusion_gemma_text": "a canvas of tokens beside its cache",
    "iquestloopcoder": "a cache for each of its loops", "ouro": "a cache for each of its loops", "hrm_text": "a cache for each of its cycles",
    "phi4flash": "states, windows and one cache that half of its layers share", "jetmoe": "heads chosen by a router",
}  # fmt: skip

# Architectures that vLLM 0.32 serves no more, with the last version that did.
GONE_FROM_VLLM = {
    "MotifForCausalLM": "0.10.2", "Phi3SmallForCausalLM": "0.9.2", "Phi4FlashForCausalLM": "0.10.2", "Phi4MultimodalForCausalLM": "0.12.0", "JAISLMHeadModel": "0.22.0",
    "InternLM2VEForCausalLM": "0.23.0", "QWenLMHeadModel": "0.23.0", "QwenVLForConditionalGeneration": "0.23.0", "InternLMForCausalLM": "0.23.0",
    "MllamaForConditionalGeneration": "0.10.2", "XverseForCausalLM": "0.23.0", "Dots1ForCausalLM": "0.23.0", "BambaForCausalLM": "0.23.0", "MiniMaxForCausalLM": "0.23.0",
    "MiniMaxText01ForCausalLM": "0.23.0", "MiniMaxM1ForCausalLM": "0.23.0", "MiniMaxVL01ForConditionalGeneration": "0.23.0", "BaiChuanForCausalLM": "0.23.0",
    "BaichuanForCausalLM": "0.23.0", "AquilaModel": "0.24.0", "AquilaForCausalLM": "0.24.0", "Grok1ModelForCausalLM": "0.24.0", "Grok1ForCausalLM": "0.24.0",
    "AyaVisionForConditionalGeneration": "0.24.0", "TeleChatForCausalLM": "0.25.0", "PersimmonForCausalLM": "0.25.0", "FuyuForCausalLM": "0.25.0", "Plamo2ForCausalLM": "0.26.0",
    "ArcticForCausalLM": "0.28.0", "ChameleonForConditionalGeneration": "0.28.0", "MPTForCausalLM": "0.28.0", "MptForCausalLM": "0.28.0", "RWForCausalLM": "0.28.0",
    "StableLMEpochForCausalLM": "0.28.0", "OuroForCausalLM": "0.26.0", "HCXVisionForCausalLM": "0.28.0", "TarsierForConditionalGeneration": "0.24.0",
    "Tarsier2ForConditionalGeneration": "0.23.0", "MantisForConditionalGeneration": "0.24.0", "CheersForConditionalGeneration": "0.28.0", "GritLM": "0.28.0",
}  # fmt: skip
# Neither vLLM 0.32's own code nor its Transformers backend runs these: it was asked.
UNSERVED = frozenset({"codegen", "diffllama", "gpt_neo", "recurrent_gemma"})
# Of those that are gone, the ones that 0.32 hands to the Transformers backend: their classes in transformers 5.19 dispatch their attention.
BY_TRANSFORMERS = frozenset({"PersimmonForCausalLM", "Phi4MultimodalForCausalLM", "Dots1ForCausalLM", "FuyuForCausalLM", "ChameleonForConditionalGeneration",
    "AyaVisionForConditionalGeneration"})  # fmt: skip


@cache
def _class_defaults() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(resources.files("pytest_kvcache.capacity").joinpath("families.json").read_text(encoding="utf-8"))
    return found


def family_of(model_type: str) -> str:
    """Return the family whose keys and defaults a ``model_type`` has (itself, mostly)."""
    return SAME_AS.get(model_type, model_type)


def class_defaults(family: str) -> Mapping[str, Any]:
    """Return what absent keys of a family mean; empty for a family that is not known."""
    return _class_defaults().get(family, {})


def is_known(family: str) -> bool:
    """Whether the family's rules are known: its class defaults, or that it is one of the older families without grouped heads."""
    return family in _class_defaults() or family in MULTI_HEAD or family in OTHERS_KNOWN


# Known by their own published code, with every width in the file.
OTHERS_KNOWN = names("""minimax_text_01 minimax_m1 nemotron-nas deci plamo2 plamo3 bailing_moe bailing_moe_v2 bailing_hybrid bailing_moe_v3 openelm internlm2 internlm3 exaone
    hunyuan step3_text step3_vl step1 solar orion arctic sarvam_moe sarvam_mla telechat2 telechat3 phi-msft hunyuan_moe minicpm4 minicpmv minicpmo
    param2moe nanbeige pangu_embedded""")
