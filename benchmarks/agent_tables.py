"""Measure a ViT that is trained jointly with an agent CNN, on CIFAR-10. Each command writes one table.

    python benchmarks/agent_tables.py joint   # ViT alone, agent alone, joint training, training with shared weights
    python benchmarks/agent_tables.py hints   # joint training without the hint of one block (figure 1)
    python benchmarks/agent_tables.py agents  # two other agent architectures, and a ViT that trains alone with SAM
    python benchmarks/agent_tables.py longer  # four rows of the table "joint", trained for 40 epochs
    python benchmarks/agent_tables.py directions  # smaller hint weights and SAM radii than in other tables
    python benchmarks/agent_tables.py gradients   # gradients of the loss terms: norms and a cosine

All rows have these settings, unless the name of a row gives another value:

- Architecture: 64 patches, width 72, 4 blocks. The ViT has [CLS] and 9 heads. The agent's kernels have 9 positions.
- Budget: 4,000 images, 6 epochs, batches of 32.
- Optimizer, initialization and loss weights are those of the reference implementation. In rows with impulse
  initialization, weights outside attention are initialized as in Transformers. The reference implementation draws
  the weights of the patch projection with a standard deviation of 1. With such large weights, tokens would hardly
  depend on their positions.
- Training images are padded by reflection. Accuracy is measured after the last epoch.

The row "joint, no hint, no divergence" is the control. Its ViT and its agent are trained in one run, but no loss
term connects them. Their dropout is the same as in other joint rows. A ViT that trains alone has dropout at the same
places as Transformers' ViT.
Finished runs under --runs-dir are reused, so an interrupted command can be repeated. Seeds can run in parallel. The
output is agent_TABLE.json. Models of the paper's sizes are trained by recipes, see
`frugalvit joint --config joint-small`.
"""

import itertools
import statistics
from pathlib import Path

import torch
from transformers import ViTImageProcessor

from frugalvit import BootstrappedViTForImageClassification
from frugalvit.training import joint, train
from frugalvit.training.arguments import run_program
from frugalvit.training.data import class_names, load_images
from frugalvit.training.preprocessing import decode_image
from shared import budget_settings, last_accuracies, parse_table, run_row, spread, wanted_rows, write_table


BLOCKS = 4
SIZES = f"patch_size=4,hidden_size=72,num_hidden_layers={BLOCKS},intermediate_size=288"
VIT = f"image_size=32,{SIZES},num_attention_heads=9"
# `branch_dropout` is 0, because the committed results were measured without branch dropout.
AGENT = f"{SIZES},num_positions=9,branch_dropout=0"
IMPULSE = {"initialization": "impulse", "initialization_options": "value_init=mimetic"}
TRANSFORMERS = {"initialization": "default"}
# Models that train alone have the same augmentation as joint rows: no mixup and no label smoothing.
ALONE = {
    "weight_decay": 0.05,
    "randaugment_layers": 0,
    "mixup": 0,
    "label_smoothing_factor": 0,
    "crop_size": 32,
    "max_grad_norm": 0,
    "initialization": "reference",
}
VIT_ALONE = ALONE | {
    "model_type": "vit",
    "config_overrides": f"{VIT},hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1,layer_norm_eps=1e-5",
}
AGENT_ALONE = ALONE | {"model_type": "agent_cnn", "config_overrides": f"image_size=32,{AGENT}"}
# SAM runs without gradient clipping. The reference implementation sets a clipping norm, but its SAM code ignores it.
SAM = {"sam_rho": 0.1}
PAIR = {"vit": VIT, "agent": AGENT, "padding_mode": "reflect"}
JOINT, SHARED = (PAIR | {"variant": f"{name}-small"} for name in ("joint", "shared"))
NO_HINT = {"config_overrides": "hint_weight=0"}
CONTROL = {"config_overrides": "hint_weight=0,divergence_weight=0"}
# Training module and arguments of each row, by table and row name. Rows with the same name share their runs.
TABLES = {
    "joint": {
        "ViT alone": (train, VIT_ALONE),
        "ViT alone, clipped at 0.1": (train, VIT_ALONE | {"max_grad_norm": 0.1}),
        "ViT alone, Transformers' start": (train, VIT_ALONE | TRANSFORMERS),
        "ViT alone, impulse": (train, VIT_ALONE | IMPULSE),
        "agent alone": (train, AGENT_ALONE),
        "joint, no hint, no divergence": (joint, JOINT | CONTROL),
        "joint": (joint, JOINT),
        "joint, clipped at 0.1": (joint, JOINT | {"vit_max_grad_norm": 0.1}),
        "joint, no hint": (joint, JOINT | NO_HINT),
        "joint, Transformers' start": (joint, JOINT | TRANSFORMERS),
        "shared": (joint, SHARED),
        "shared, no hint": (joint, SHARED | NO_HINT),
        "joint, impulse, no hint": (joint, JOINT | IMPULSE | NO_HINT),
    },
    "hints": {
        "joint": (joint, JOINT),
        **{
            f"joint, no hint at depth {block / BLOCKS:g}": (joint, JOINT | {"without_hint_at": block / BLOCKS})
            for block in range(1, BLOCKS + 1)
        },
        "joint, no hint": (joint, JOINT | NO_HINT),
    },
    "agents": {
        "joint": (joint, JOINT),
        # The output of the stem has 4 x 4 positions. The output of the first block has 2 x 2 positions.
        "joint, res-like agent": (joint, JOINT | {"agent": f"{AGENT},stem=res,downsample_after=[0]"}),
        "joint, Agent-B": (joint, JOINT | {"agent": f"{SIZES},num_positions=6,norm_position=after"}),
        "ViT alone": (train, VIT_ALONE),
        "ViT alone, SAM": (train, VIT_ALONE | SAM),
    },
    # In short trainings, hints and SAM lower the accuracy. The table "directions" has weaker hints and weaker SAM.
    "directions": {
        "joint, no hint": (joint, JOINT | NO_HINT),
        **{f"joint, hints of weight {w}": (joint, JOINT | {"config_overrides": f"hint_weight={w}"}) for w in (0.1, 1)},
        **{f"ViT alone, SAM of {rho}": (train, VIT_ALONE | SAM | {"sam_rho": rho}) for rho in (0.01, 0.05)},
    },
    "longer": {
        "ViT alone": (train, VIT_ALONE),
        "joint, no hint, no divergence": (joint, JOINT | CONTROL),
        "joint, no hint": (joint, JOINT | NO_HINT),
        "joint": (joint, JOINT),
    },
}
# Rows of the table "gradients": the trained model of the row "joint", and untrained models. `STARTS` maps the row
# names of untrained models to values of `--initialization`.
STARTS = {"fresh, Transformers' start": "default", "fresh, reference's start": "reference"}
GRADIENTS = ("trained", *STARTS)


def main():
    arguments = parse_table(__doc__, [*TABLES, "gradients"], 4000, "runs/agent_tables")
    file, rows = arguments.results_dir / f"agent_{arguments.table}.json", []
    table = TABLES.get(arguments.table, GRADIENTS)
    names = wanted_rows(arguments, table)
    if arguments.table == "gradients":
        write_table(file, budget_settings(arguments), gradients(arguments, names))
        return

    for name in names:
        results = [run(arguments, name, *table[name], seed)[1] for seed in arguments.seeds]
        row = {"row": name, **last_accuracies(results)}
        if "eval_agent_accuracy" in results[0]:
            values = [result["eval_agent_accuracy"] for result in results]
            row |= {"agent": statistics.mean(values), "agent_spread": spread(values), "agent_accuracies": values}
        rows.append(row)
        write_table(file, budget_settings(arguments), rows)


def run(arguments, name: str, training, row: dict, seed: int) -> tuple[Path, dict]:
    return run_row(arguments, training, name, seed, {"per_device_train_batch_size": 32} | row)


def gradients(arguments, names: list[str]) -> list[dict]:
    """Measure the gradients of the weighted loss terms for a jointly trained ViT, on 512 training images."""
    images = load_images(arguments.dataset, "train[:512]")
    labels = torch.tensor(images["label"][:])
    decoded = [decode_image(record["image"], index) for index, record in enumerate(images)]
    image_processor = ViTImageProcessor(size={"height": 32, "width": 32})
    inputs = {"pixel_values": image_processor(decoded, return_tensors="pt")["pixel_values"], "labels": labels}
    measured = {}
    for seed, name in itertools.product(arguments.seeds, names):
        if name == "trained":
            folder, _ = run(arguments, "joint", *TABLES["joint"]["joint"], seed)
            model = BootstrappedViTForImageClassification.from_pretrained(folder)
        else:
            torch.manual_seed(seed)
            pair = joint.TwinArguments(JOINT["variant"], VIT, AGENT, initialization=STARTS[name])
            model = joint.build_twins(pair, class_names(images))
        measured.setdefault(name, []).append(gradient_lengths(model, inputs))
    return [
        {"ViT": name}
        | {column: statistics.mean(each[column] for each in values) for column in values[0]}
        | {f"{column}_values": [each[column] for each in values] for column in values[0]}
        for name, values in measured.items()
    ]


def gradient_lengths(
    model: BootstrappedViTForImageClassification, inputs: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return the norm of each loss term's gradient with respect to the ViT's parameters. Also return the cosine
    between the hint gradient and the sum of the other gradients, and the root mean square of the embedded tokens."""
    outputs = model.eval()(**inputs, output_hidden_states=True)
    losses = outputs.losses
    parameters = list(model.vit.parameters())

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    vectors = {name: gradient(losses[name].sum()) for name in ("classification", "divergence", "hints")}
    others = vectors["classification"] + vectors["divergence"]
    lengths = {name: vector.norm().item() for name, vector in vectors.items()}
    return lengths | {
        "hints_by_classification": lengths["hints"] / lengths["classification"],
        "cosine_of_hints": torch.cosine_similarity(vectors["hints"], others, dim=0).item(),
        "rms_of_tokens": outputs.hidden_states[0].detach().square().mean().sqrt().item(),
    }


if __name__ == "__main__":
    raise SystemExit(run_program(main, "agent_tables.py"))
