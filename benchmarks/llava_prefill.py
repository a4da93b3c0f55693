"""Savings of a LLaVA with fewer image tokens before its first word: multiply-accumulates, key-value cache, time.

    python benchmarks/llava_prefill.py

Counted for the language model of LLaVA-1.5-7B, and timed on a language model and vision towers that are scaled down:
CLIP's with 576 tokens (336 pixels) and 256 (224 pixels), SparseFormers with 127, 63 and 48. Writes
llava_prefill.json.
"""

import argparse
import functools

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from frugalvit import SparseFormerVisionModel, swap_vision_tower
from frugalvit.common.command_line import CommandParser
from frugalvit.common.speed import median_seconds
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


# Image tokens with the strategy "default"; CLIP's towers by their pixels.
CLIP_PIXELS = {576: 336, 256: 224}
SPARSEFORMER_TOKENS = (127, 63, 48)
SEVEN_BILLION = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
TOWER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4}
IMAGE = 999


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=40, help="tokens of text beside the image (default: 40)")
    parser.add_argument("--repeats", type=int, default=15, help="measurements, the median counts (default: 15)")
    add_results_argument(parser)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    models = {tokens: make_llava(tokens) for tokens in (*CLIP_PIXELS, *SPARSEFORMER_TOKENS)}
    seconds = time_first_token(models, arguments.words, arguments.repeats)
    rows = []
    for tokens in models:
        for strategy in ("default", "full"):
            length = tokens + (strategy == "full") + arguments.words
            config = LlamaConfig(**SEVEN_BILLION)
            macs = count_prefill_macs(config, length)
            row = {
                "vision tower": "CLIP" if tokens in CLIP_PIXELS else "SparseFormer",
                "strategy": strategy,
                "image tokens": tokens + (strategy == "full"),
                "7B: prefill macs": macs,
                # Two bytes a number, keys and values.
                "7B: cache bytes": 2 * 2 * config.num_hidden_layers * length * config.hidden_size,
            }
            row["small: seconds to first token"] = seconds[tokens] if strategy == "default" else None
            rows.append(row)
    print(format_table(rows))
    write_table(
        arguments.results_dir / "llava_prefill.json",
        {"words": arguments.words, "small": {"language model": SMALL, "vision tower": TOWER}},
        rows,
        seconds=f"median of {arguments.repeats}, one image, vision tower included, float32",
    )


def make_llava(tokens: int) -> LlavaForConditionalGeneration:
    """A small LLaVA that makes as many tokens of an image."""
    vision = CLIPVisionConfig(image_size=CLIP_PIXELS.get(tokens, 224), patch_size=14, **TOWER)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SMALL), image_token_index=IMAGE)
    llava = LlavaForConditionalGeneration(config).eval()
    if tokens in CLIP_PIXELS:
        return llava
    return swap_vision_tower(llava, SparseFormerVisionModel.from_teacher(llava.model.vision_tower, tokens))


def time_first_token(models: dict[int, LlavaForConditionalGeneration], words: int, repeats: int) -> dict[int, float]:
    """Median seconds until each model's first token; models take turns."""
    calls = {}
    for tokens, model in models.items():
        size = model.config.vision_config.image_size
        calls[tokens] = functools.partial(
            model,
            input_ids=torch.tensor([[IMAGE] * tokens + [1] * words]),
            pixel_values=torch.randn(1, 3, size, size),
            logits_to_keep=1,
        )
    return median_seconds(calls, repeats)


def count_prefill_macs(config: LlamaConfig, length: int) -> int:
    """Multiply-accumulates of a language model that reads `length` tokens and gives the logits of the last."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
        inputs = {
            "input_ids": torch.zeros(1, length, dtype=torch.long),
            "position_ids": torch.zeros(1, length, dtype=torch.long),
            # A whole mask, as what makes one of two dimensions looks at its values.
            "attention_mask": torch.zeros(1, 1, length, length),
        }
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, logits_to_keep=1, use_cache=False)
    return counter.get_total_flops() // 2


if __name__ == "__main__":
    main()
