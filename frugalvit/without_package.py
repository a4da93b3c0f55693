"""Loads a folder by its own code. `validation.py` runs this text in a process in which frugalvit cannot be imported.

Arguments: folder, the class that loads it (an Auto class, or `module.Class` in the folder), file of inputs, file for
outputs.
"""

import importlib.abc
import sys


class Blocker(importlib.abc.MetaPathFinder):
    """A finder that makes imports fail as if frugalvit were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "frugalvit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def outputs_of(model, inputs: dict) -> dict:
    """Compute a model's outputs, as named tensors, from images, and from texts if it reads these."""
    if not hasattr(model, "get_image_features"):
        outputs = model(pixel_values=inputs["pixel_values"])
        names = ("logits", "image_embeds", "last_hidden_state")
        maps = {f"feature_maps.{index}": each for index, each in enumerate(getattr(outputs, "feature_maps", ()))}
        return {name: outputs[name] for name in names if getattr(outputs, name, None) is not None} | maps
    features = {"image_features": model.get_image_features(inputs["pixel_values"]).pooler_output}
    if hasattr(model, "get_text_features"):
        features["text_features"] = model.get_text_features(inputs["input_ids"]).pooler_output
    return {name: value if hasattr(value, "shape") else value[0] for name, value in features.items()}


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker())

    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder, loader, inputs, outputs = sys.argv[1:]
    if hasattr(transformers, loader):
        model = getattr(transformers, loader).from_pretrained(folder, trust_remote_code=True)
    else:
        model = get_class_from_dynamic_module(loader, folder).from_pretrained(folder)
    with torch.inference_mode():
        computed = outputs_of(model.eval(), load_file(inputs))
    save_file({name: value.float().contiguous() for name, value in computed.items()}, outputs)
