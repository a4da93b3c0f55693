"""Try a SparseFormer in a checkout of the original LLaVA code base: with its builder, its prepare function and its
generation, on a small language model with random weights.

    git clone https://github.com/haotian-liu/LLaVA && python benchmarks/original_llava.py LLaVA

The code base pins Transformers 4.37 of 2024; these parts of it run with today's. One name of its builder is replaced.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from frugalvit import SparseFormerVisionModel, SparseFormerVisionTower
from frugalvit.common.command_line import CommandParser


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a clone of haotian-liu/LLaVA")
    parser.add_argument("--tokens", type=int, default=16, help="latent tokens (default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.checkout / "llava" / "model" / "llava_arch.py").is_file():
        parser.error(f"{arguments.checkout} is no clone of haotian-liu/LLaVA: it has no llava/model/llava_arch.py")
    sys.path.insert(0, str(arguments.checkout.resolve()))

    from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
    from llava.model.language_model.llava_llama import LlavaConfig, LlavaLlamaForCausalLM
    from llava.model.multimodal_encoder import builder

    builder.CLIPVisionTower = SparseFormerVisionTower
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        teacher = CLIPVisionModel(CLIPVisionConfig(image_size=64, patch_size=8, **SIZES))
        SparseFormerVisionModel.from_teacher(teacher, arguments.tokens).save_pretrained(folder)
        model = LlavaLlamaForCausalLM(LlavaConfig(vocab_size=100, **SIZES)).eval()
        model.get_model().initialize_vision_modules(
            SimpleNamespace(
                vision_tower=folder,
                mm_vision_select_layer=-2,
                mm_vision_select_feature="patch",
                pretrain_mm_mlp_adapter=None,
                mm_patch_merge_type="flat",
                mm_projector_type="mlp2x_gelu",
            )
        )
    tower = model.get_vision_tower()
    print(f"tower       {type(tower).__name__}, {tower.num_patches} tokens of width {tower.hidden_size}")

    images = torch.randn(2, 3, 64, 64)
    input_ids = torch.tensor([[1, IMAGE_TOKEN_INDEX, 5, 6], [1, 7, IMAGE_TOKEN_INDEX, 8]])
    with torch.no_grad():
        _, _, _, _, embeddings, labels = model.prepare_inputs_labels_for_multimodal(
            input_ids, None, None, None, input_ids.clone(), images
        )
        features = model.encode_images(images)
    expected = 3 + arguments.tokens
    assert embeddings.shape == (2, expected, SIZES["hidden_size"]), embeddings.shape
    torch.testing.assert_close(embeddings[0, 1 : 1 + arguments.tokens], features[0])
    assert (labels[0, 1 : 1 + arguments.tokens] == IGNORE_INDEX).all()
    print(f"prepared    {tuple(embeddings.shape)}: 3 words and {arguments.tokens} image tokens each")

    outputs = model(input_ids=input_ids, labels=input_ids.clone(), images=images)
    outputs.loss.backward()
    print(f"loss        {outputs.loss.item():.4f}, its gradient reaches the projector")
    assert all(parameter.grad is not None for parameter in model.get_model().mm_projector.parameters())
    generated = model.generate(input_ids, images=images, max_new_tokens=4, do_sample=False)
    print(f"generated   {generated.tolist()}")


if __name__ == "__main__":
    main()
