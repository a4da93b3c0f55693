"""Measure Context Broadcasting (CB) on CIFAR-10. Each command writes one table.

    python benchmarks/context_broadcast_tables.py kinds          # CB, CB_S, gate and hybrid at the end of the MLP
    python benchmarks/context_broadcast_tables.py positions      # CB at other places in the MLP and after attention
    python benchmarks/context_broadcast_tables.py impulse        # CB with impulse initialization
    python benchmarks/context_broadcast_tables.py hierarchical   # CB in Swin, PVT and PVTv2
    python benchmarks/context_broadcast_tables.py local_vit      # CB in LocalViT, with convolutions instead of MLPs
    python benchmarks/context_broadcast_tables.py distillation   # CB with distillation (tables S1 and S2)
    python benchmarks/context_broadcast_tables.py inserted       # CB inserted into the shipped ViT, without training
    python benchmarks/context_broadcast_tables.py insertion      # CB inserted into the shipped ViT, with training
    python benchmarks/context_broadcast_tables.py sparseformer   # CB in the shipped SparseFormer, with training
    python benchmarks/context_broadcast_tables.py longer         # CB and CB_S with DeiT's training, 40 epochs
    python benchmarks/context_broadcast_tables.py speed          # cost of each kind in a ViT-S, 224 x 224 pixels

By default, a ViT has 64 patches, [CLS], width 96, 4 blocks and 4 heads, and is trained on 6,000 images for 6 epochs.
impulse_tables.py uses the same sizes. "inserted" and "speed" train nothing. After the last epoch, accuracy is
measured on test images, on test images with a quarter of each image hidden, and under an FGSM attack.
Entropy of attention is averaged over layers, heads and images. Finished runs under --runs-dir are reused, so an
interrupted command can be repeated. Seeds can run in parallel. The output is context_broadcast_TABLE.json.
`frugalvit train --config context-broadcast-small` and similar recipes have the paper's sizes and budgets.
"""

import copy
import statistics
from pathlib import Path
from typing import get_args

import datasets
import torch
from transformers import PreTrainedModel

import shared
from frugalvit import (
    ViTContextBroadcastConfig,
    ViTContextBroadcastForImageClassification,
    count_context_broadcast,
    count_macs,
    insert_context_broadcast,
)
from frugalvit.attention import measure_attention
from frugalvit.configuration.configuration_vit_context_broadcast import ContextBroadcastKind
from frugalvit.evaluation.classification import classification_accuracy
from frugalvit.speed import images_per_second
from frugalvit.training import train
from frugalvit.training.arguments import run_program
from frugalvit.training.loading import load_model
from frugalvit.training.preprocessing import decode_image
from local_vit import LocalViTConfig


VIT = "image_size=32,resize_size=null,patch_size=4,hidden_size=96,num_hidden_layers=4,num_attention_heads=4"
SWIN = "image_size=32,patch_size=4,embed_dim=48,depths=[2,2],num_heads=[2,4],window_size=4,drop_path_rate=0"
PVT = (
    "image_size=32,num_encoder_blocks=3,hidden_sizes=[32,64,128],depths=[2,2,2],num_attention_heads=[1,2,4],"
    "sequence_reduction_ratios=[2,1,1],patch_sizes=[4,2,2],strides=[4,2,2],mlp_ratios=[4,4,4],drop_path_rate=0"
)
PVT_V2 = (
    "image_size=32,num_encoder_blocks=3,hidden_sizes=[32,64,128],depths=[2,2,2],num_attention_heads=[1,2,4],"
    "sr_ratios=[2,1,1],patch_sizes=[3,3,3],strides=[2,2,2],mlp_ratios=[4,4,4],drop_path_rate=0"
)


def vit(kind: str | None, *positions: str, **options) -> dict:
    """Return arguments of `frugalvit train` for a ViT with Context Broadcasting, or without it if `kind` is None."""
    overrides = ["context_broadcast=" + ("null" if kind is None else kind)]
    if positions:
        overrides.append("context_broadcast_position=[" + ",".join(f'"{position}"' for position in positions) + "]")
    return {"model_type": "vit_context_broadcast", "config_overrides": ",".join([VIT, *overrides]), **options}


def host(model_type: str, overrides: str, kind: str | None) -> dict:
    """Return arguments of `frugalvit train` for a Transformers model. If `kind` is given, insert CB of this kind."""
    inserted = {"context_broadcast": kind} if kind else {}
    return {"model_type": model_type, "config_overrides": overrides, **inserted}


def shipped(name: str, kind: str | None, **options) -> dict:
    """Return arguments of `frugalvit train` that continue the training of a shipped model."""
    inserted = {"context_broadcast": kind} if kind else {}
    return {"model": f"checkpoints/{name}", "learning_rate": 1e-4, **inserted, **options}


def distilled(kind: str | None) -> dict:
    """Return arguments of `frugalvit train` for a ViT that is distilled from the shipped ViT's predicted classes."""
    row = vit(kind, distill_from="checkpoints/cifar10-vit", distill_kind="hard")
    return row | {"config_overrides": f"{row['config_overrides']},use_distillation_token=true"}


def scaled(start: float) -> dict:
    row = vit("cb_s")
    return row | {"config_overrides": f"{row['config_overrides']},context_broadcast_scale_init={start}"}


# The recipe `context-broadcast-small` with two changes. First, batches have 128 images instead of 1,024. The learning
# rate stays 1e-3, eight times the value of DeiT's rule for batches of 128. Second, images are padded and cropped.
# DeiT's code also does this with images of 32 x 32 pixels. In DeiT's code, the padding is black. Here, the padding
# reflects the image.
DEIT = {
    "randaugment_layers": 2,
    # Magnitude 27 of 30 in torchvision corresponds to magnitude 9 of 10 in timm.
    "randaugment_magnitude": 27,
    "erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.1,
    "weight_decay": 0.05,
    "warmup_epochs": 5,
    "max_grad_norm": 0,
    "per_device_train_batch_size": 128,
}
# Default arguments of `frugalvit train`. The arguments of a row replace these values.
REDUCED = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 64,
    "weight_decay": 0.01,
    "warmup_epochs": 1,
    "randaugment_layers": 0,
    "mixup": 0,
}
IMPULSE = {"initialization": "impulse", "initialization_options": "value_init=mimetic"}
# Arguments of each row, by table and row name. Rows with the same name share their runs.
TABLES = {
    "kinds": {
        "none": vit(None),
        "cb at mlp_end": vit("cb"),
        # The paper does not state the initial scale of CB_S, so four values are compared.
        "cb_s at mlp_end": vit("cb_s"),
        "cb_s at mlp_end, scale from 0.1": scaled(0.1),
        "cb_s at mlp_end, scale from 0.5": scaled(0.5),
        "cb_s at mlp_end, scale from 1": scaled(1),
        "cb_gate at mlp_end": vit("cb_gate"),
        "cb_hybrid at mlp_end": vit("cb_hybrid"),
    },
    "positions": {
        "none": vit(None),
        "cb at mlp_front": vit("cb", "mlp_front"),
        "cb at mlp_mid": vit("cb", "mlp_mid"),
        "cb at mlp_end": vit("cb"),
        "cb at attention_end": vit("cb", "attention_end"),
        "cb at mlp_end and attention_end": vit("cb", "mlp_end", "attention_end"),
        **{
            f"{kind} at {' and '.join(places)}": vit(kind, *places)
            for places in (["mlp_front"], ["mlp_mid"], ["attention_end"], ["mlp_end", "attention_end"])
            for kind in ("cb_gate", "cb_hybrid")
        },
    },
    "impulse": {
        "impulse": vit(None, **IMPULSE),
        "impulse, cb at mlp_end": vit("cb", **IMPULSE),
        "impulse, cb_s at mlp_end": vit("cb_s", **IMPULSE),
    },
    "hierarchical": {
        "Swin": host("swin", SWIN, None),
        "Swin, cb": host("swin", SWIN, "cb"),
        "PVT": host("pvt", PVT, None),
        "PVT, cb": host("pvt", PVT, "cb"),
        "PVTv2": host("pvt_v2", PVT_V2, None),
        "PVTv2, cb": host("pvt_v2", PVT_V2, "cb"),
    },
    "local_vit": {
        "LocalViT": vit(None, model_type=LocalViTConfig.model_type),
        "LocalViT, cb": vit("cb", model_type=LocalViTConfig.model_type),
    },
    "distillation": {
        "none, distilled": distilled(None),
        "cb, distilled": distilled("cb"),
        "cb_s, distilled": distilled("cb_s"),
    },
    "insertion": {
        "ViT": shipped("cifar10-vit", None),
        "ViT, cb": shipped("cifar10-vit", "cb"),
        "ViT, cb, blended": shipped("cifar10-vit", "cb", context_broadcast_blend=True),
        "ViT, cb_s": shipped("cifar10-vit", "cb_s"),
        "ViT, cb_gate, blended": shipped("cifar10-vit", "cb_gate", context_broadcast_blend=True),
    },
    "sparseformer": {
        "SparseFormer": shipped("cifar10-sparseformer", None),
        "SparseFormer, cb": shipped("cifar10-sparseformer", "cb"),
        "SparseFormer, cb_s": shipped("cifar10-sparseformer", "cb_s"),
    },
    "longer": {"none": vit(None, **DEIT), "cb at mlp_end": vit("cb", **DEIT), "cb_s at mlp_end": vit("cb_s", **DEIT)},
}
INSERTED = ("none", *get_args(ContextBroadcastKind))
# Batch size and number of timed passes of the table "speed".
BATCH_SIZE = 8
ROUNDS = 40


def main():
    arguments = shared.parse_table(__doc__, [*TABLES, "inserted", "speed"], 6000, "runs/context_broadcast_tables")
    file = arguments.results_dir / f"context_broadcast_{arguments.table}.json"
    if arguments.table == "speed":
        settings = {"model": "vit-small-plain-224", "batch_size": BATCH_SIZE, "rounds": ROUNDS}
        shared.write_table(file, settings, measure_speed())
        return
    table, rows = TABLES.get(arguments.table, INSERTED), []
    names = shared.wanted_rows(arguments, table)
    test_images = shared.evaluation_images(arguments)
    if arguments.table == "inserted":
        shared.write_table(file, {}, inserted(names, test_images))
        return

    def measure_run(folder: Path) -> dict[str, float]:
        return measure(
            *load_model(folder, "image-classification", "cpu"), test_images, arguments.table != "hierarchical"
        )

    options = shared.describe_options(arguments, "dataset", "eval_dataset", "class_names")
    for name in names:
        folders = [shared.run_row(arguments, train, name, seed, REDUCED | table[name])[0] for seed in arguments.seeds]
        measured = [shared.measured_once(folder, measure_run, options) for folder in folders]
        row = {"row": name}
        for column in measured[0]:
            values = [each[column] for each in measured]
            row |= {
                column: statistics.mean(values),
                f"{column}_spread": shared.spread(values),
                f"{column}_values": values,
            }
        rows.append(row)
        shared.write_table(file, shared.budget_settings(arguments), rows)


def inserted(kinds: list[str], test_images: datasets.Dataset) -> list[dict]:
    rows = []
    for kind in kinds:
        model, image_processor = load_model("checkpoints/cifar10-vit", "image-classification", "cpu")
        if kind != "none":
            insert_context_broadcast(model, kind)
        rows.append({"row": kind, **measure(model, image_processor, test_images)})
    return rows


def measure_speed() -> list[dict]:
    config = ViTContextBroadcastConfig.from_variant("vit-small-plain-224")
    models = {"none": ViTContextBroadcastForImageClassification(config).eval()}
    for kind in get_args(ContextBroadcastKind):
        models[kind] = copy.deepcopy(models["none"])
        insert_context_broadcast(models[kind], kind)
    speeds = images_per_second(models, torch.randn(BATCH_SIZE, 3, 224, 224), ROUNDS)
    return [
        {
            "row": name,
            "images_per_second": speeds[name],
            "overhead": speeds["none"] / speeds[name] - 1,
            "macs": count_macs(model, 224).macs,
            "operations": count_context_broadcast(model, 224),
        }
        for name, model in models.items()
    ]


def measure(
    model: PreTrainedModel, image_processor, test_images: datasets.Dataset, attends_to_all: bool = True
) -> dict[str, float]:
    """Measure a model's accuracies and, if `attends_to_all`, the mean entropy of attention. `attends_to_all` is False
    for models with windowed or reduced attention, because their entropies are not comparable."""
    conditions = {"accuracy": {}, "occluded": {"occluded_share": 0.25}, "attacked": {"fgsm_eps": 1 / 255}}
    numbers = {
        column: classification_accuracy(model, image_processor, test_images, batch_size=250, **condition)["accuracy"]
        for column, condition in conditions.items()
    }
    if attends_to_all:
        first = test_images.select(range(min(256, len(test_images))))
        images = [decode_image(record["image"], index) for index, record in enumerate(first)]
        pixel_values = image_processor(images, return_tensors="pt")["pixel_values"]
        heads = [entropy for layer in measure_attention(model, [pixel_values]) for entropy in layer.entropy]
        numbers["entropy"] = statistics.mean(heads)
    return numbers


if __name__ == "__main__":
    torch.manual_seed(0)
    raise SystemExit(run_program(main, "context_broadcast_tables.py"))
