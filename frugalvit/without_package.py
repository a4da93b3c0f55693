"""Run a model with the code in its folder. `publish.py` starts this file in a process that cannot import frugalvit.

Arguments: the folder, the class that loads the model (an Auto class, or `module.Class` in the folder), the file of
inputs and the file of outputs.
"""

import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers.dynamic_module_utils import get_class_from_dynamic_module


@torch.inference_mode()
def outputs_of(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's output tensors with the keys "0", "1" and so on. For a CLIP, the outputs are the embeddings of
    the images and the embeddings of the texts."""
    if hasattr(model, "get_image_features"):
        outputs = [model.get_image_features(inputs["pixel_values"]).pooler_output]
        if hasattr(model, "get_text_features"):
            outputs.append(model.get_text_features(inputs["input_ids"]).pooler_output)
    else:
        outputs = dict(model(inputs["pixel_values"]))
    return {str(number): tensor.float().contiguous() for number, tensor in enumerate(tree_leaves(outputs))}


if __name__ == "__main__":
    # None in `sys.modules` makes `import frugalvit` fail.
    sys.modules["frugalvit"] = None
    folder, loader, file, output = sys.argv[1:]
    if hasattr(transformers, loader):
        model = getattr(transformers, loader).from_pretrained(folder, trust_remote_code=True)
    else:
        model = get_class_from_dynamic_module(loader, folder).from_pretrained(folder)
    save_file(outputs_of(model.eval(), load_file(file)), output)
