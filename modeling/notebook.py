"""Notebook for a SparseFormer's hub repository. The hub has buttons that open `notebook.ipynb` in Colab and Kaggle."""

import json
from pathlib import Path

from .hub import TASKS, HubModel, auto_class, code_examples


PICTURE = "http://images.cocodataset.org/val2017/000000039769.jpg"
INTRODUCTION = """# {}

First steps: load the model, run it, choose its number of tokens, and draw their regions of interest. Install
`pip install -U transformers torchvision matplotlib`."""
IMAGE = f"""import torch
from transformers.image_utils import load_image

image = load_image("{PICTURE}")  # a path or URL
inputs = processor(image, return_tensors="pt")
image"""
PREDICT = {
    "image-classification": """with torch.inference_mode():
    scores = model(**inputs).logits[0].softmax(-1)
for index in scores.argsort(descending=True)[:5].tolist():
    print(f"{scores[index]:6.1%}  {model.config.id2label[index]}")""",
    "image-feature-extraction": """with torch.inference_mode():
    outputs = model(**inputs)
{name: tuple(outputs[name].shape) for name in outputs}""",
}
CHOOSE = """import time

for count in model.config.trained_token_counts:
    start = time.perf_counter()
    with torch.inference_mode():
        model(**inputs, num_tokens=count)
    print(f"{count:4} tokens: {1000 * (time.perf_counter() - start):.1f} ms")"""
DRAW = """import matplotlib.pyplot as plt

with torch.inference_mode():
    rois = model(**inputs, output_rois=True).rois[-1][0]
view = inputs["pixel_values"][0]
height, width = view.shape[1:]
axes = plt.figure().gca()
axes.imshow(((view - view.min()) / (view.max() - view.min())).permute(1, 2, 0))
for left, top, right, bottom in (rois * torch.tensor([width, height, width, height])).tolist():
    axes.add_patch(plt.Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="orange"))
axes.axis("off");"""


def write_notebook(model: HubModel, folder: str | Path, name: str):
    """Write `notebook.ipynb` to a folder if `model` is a SparseFormer classifier or vision model.

    Args:
        name (`str`): Hub id or folder from which the notebook loads the model.
    """
    task = TASKS[auto_class(model)]
    if task not in PREDICT or "rois" not in getattr(model.config, "keys_to_ignore_at_inference", ()):
        return
    load, *_ = code_examples(model)
    codes = [load.replace("path/or/id", name), IMAGE, PREDICT[task], CHOOSE, DRAW]
    cells = [{"cell_type": "markdown", "source": INTRODUCTION.format(type(model).__name__)}]
    cells += [{"cell_type": "code", "source": code, "execution_count": None, "outputs": []} for code in codes]
    cells = [cell | {"id": f"cell-{number}", "metadata": {}} for number, cell in enumerate(cells)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    Path(folder, "notebook.ipynb").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
