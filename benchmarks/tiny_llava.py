"""A tiny LLaVA to try `frugalvit swap` and `align-llava` on, made of what ships: the teacher on CIFAR-10 as its vision
tower, and the language model of `cifar10-sparseformer-llava`. Its projector and its language model learn to read the
tower's 64 patches, from questions about the images that come with frugalvit.

    python benchmarks/tiny_llava.py --output LLAVA
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import set_seed
from clip_tables import answer_accuracy, train_answers
from transformers import AutoModelForImageClassification, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from frugalvit import SparseFormerLlavaForConditionalGeneration, SparseFormerLlavaProcessor, checkpoint_path
from frugalvit.common.choices import SUBSET
from frugalvit.common.command_line import positive
from frugalvit.common.data import load_images
from frugalvit.common.loading import load_image_processor


# Images of the test split that say how good it is.
TEST_IMAGES = 500


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="LLAVA", help="new folder")
    parser.add_argument("--steps", type=positive, default=100, help="default: %(default)s")
    parser.add_argument("--images", type=positive, default=2000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args(argv)

    set_seed(arguments.seed)
    llava, processor = build()
    images = load_images(SUBSET, f"train[:{arguments.images}]")
    train_answers(llava, processor, images, arguments.output, arguments.steps, arguments.seed)
    found = answer_accuracy(llava, processor, load_images(SUBSET, f"test[:{min(arguments.images, TEST_IMAGES)}]"))
    print(f'Wrote {arguments.output}. Right answers to "what is this ?": {found["what is this"]:.1%}.')


def build() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The LLaVA and its processor; the projector is new."""
    vit = AutoModelForImageClassification.from_pretrained(checkpoint_path("cifar10-vit")).vit
    speaker = checkpoint_path("cifar10-sparseformer-llava")
    shipped = SparseFormerLlavaForConditionalGeneration.from_pretrained(speaker)
    tokenizer = SparseFormerLlavaProcessor.from_pretrained(speaker).tokenizer
    patches = (vit.config.image_size // vit.config.patch_size) ** 2
    config = LlavaConfig(
        vision_config=vit.config,
        text_config=shipped.config.text_config,
        image_token_index=shipped.config.image_token_index,
        image_seq_length=patches,
    )
    llava = LlavaForConditionalGeneration(config)
    # A classifier has no pooler, and a LLaVA does not read it.
    llava.model.vision_tower.load_state_dict(vit.state_dict(), strict=False)
    llava.model.vision_tower.requires_grad_(False)
    llava.model.language_model.load_state_dict(shipped.model.language_model.state_dict())
    with torch.no_grad():
        llava.lm_head.weight.copy_(shipped.lm_head.weight)
    processor = LlavaProcessor(
        load_image_processor(checkpoint_path("cifar10-vit"), False, "a classifier"),
        tokenizer,
        patch_size=vit.config.patch_size,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    return llava, processor


if __name__ == "__main__":
    main()
