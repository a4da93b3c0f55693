"""The bootstrap recipe on a few embedded images."""

import json
import shutil

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from frugalvit import (
    PatchSparseFormerBackbone,
    SparseFormerConfig,
    SparseFormerVisionModelWithProjection,
)
from frugalvit.common.macs import count_macs
from frugalvit.modeling.hosts import Anatomy, read_anatomy
from frugalvit.training import bootstrap
from frugalvit.training.components import side_by_side, students
from frugalvit.training.components.arguments import ArgumentParser
from frugalvit.training.components.token_alignment import TokenAlignment, distance_from_largest
from frugalvit.training.options.bootstrap import BootstrapRunArguments


SMALL = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"


def run(teacher, output_dir, *arguments, images=128, epochs=2):
    bootstrap.main(
        [
            *("--teacher", str(teacher), "--output", str(output_dir)),
            *("--train-split", f"train[:{images}]", "--eval-split", "test[:64]"),
            *("--recipe", "paper", "--batch-size", "32", "--config-overrides", SMALL, "--no-compare"),
            *(("--epochs", str(epochs)) if epochs else ()),
            *arguments,
        ]
    )
    return json.loads((output_dir / "results.json").read_text(encoding="utf-8"))


def weights(folder):
    return AutoModelForImageClassification.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module")
def first(teacher, tmp_path_factory):
    """The folder of the student that most tests look at."""
    folder = tmp_path_factory.mktemp("first") / "out"
    run(teacher, folder, "--learning-rate", "3e-3", images=512, epochs=4)
    return folder


def results_of(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_aligns_student_and_teacher_and_saves_a_complete_repository(first, class_names):
    results = results_of(first)
    early, late = results["epochs"][0], results["epochs"][-1]
    assert late["alignment"] > early["alignment"] + 0.05
    assert late["train_loss"] < early["train_loss"] - 0.05
    assert results["best"]["alignment"] == max(record["alignment"] for record in results["epochs"])
    assert {"accuracy", "teacher_accuracy", "images_per_second"} <= late.keys()
    names = {path.name for path in first.iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "modeling_sparseformer.py"} <= names
    card = (first / "README.md").read_text(encoding="utf-8")
    assert "bootstrapped from" in card and f"{results['best']['accuracy']:.2%}" in card
    assert "frugalvit bootstrap --teacher" in card
    student = AutoModelForImageClassification.from_pretrained(first)
    assert student.config.id2label == dict(enumerate(class_names))
    assert student.config.num_latent_tokens == 3
    assert student.sparseformer.latents.initial_rois.dtype == torch.float32


def test_tunes_the_middle_and_freezes_the_end(first, teacher):
    """Block 0 is left out, block 1 tuned, block 2 frozen."""
    before, after = weights(teacher), weights(first)

    def changed(ours, theirs):
        return not torch.equal(after[ours], before[theirs])

    assert changed("sparseformer.layers.0.mlp.fc1.weight", "vit.layers.1.mlp.fc1.weight")
    assert not changed("sparseformer.layers.1.mlp.fc1.weight", "vit.layers.2.mlp.fc1.weight")
    assert not changed("sparseformer.layernorm.weight", "vit.layernorm.weight")
    assert not changed("classifier.weight", "classifier.weight")


def test_aligns_tokens_on_request(first, teacher, tmp_path):
    options = ("--learning-rate", "3e-3", "--token-loss-weight", "2")
    losses = [epoch["train_loss"] for epoch in run(teacher, tmp_path / "out", *options, epochs=3)["epochs"]]
    # LayerNorm-ed tokens that have nothing to do with each other are at a distance of 2.
    assert losses[0] > results_of(first)["epochs"][0]["train_loss"] + 1
    assert losses[-1] < losses[0] - 0.3


def test_repeated_steps_ask_the_teacher_once(teacher, tmp_path, monkeypatch):
    asked, embed = [], Anatomy.embed

    def count(anatomy, pixel_values):
        asked.append(torch.is_inference_mode_enabled() and len(pixel_values))
        return embed(anatomy, pixel_values)

    monkeypatch.setattr(Anatomy, "embed", count)
    options = ("--token-loss-weight", "1", "--eval-batch-size", "64", "--learning-rate", "3e-3", "--repeats", "2")
    epochs = run(teacher, tmp_path / "out", *options)["epochs"]
    assert asked.count(32) == 2 * 4 and [epoch["step"] for epoch in epochs] == [8, 16]
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_schedule_is_a_warm_up_and_half_a_cosine(optimizer):
    """Inherited weights rest meanwhile."""
    pair = students.StudentArguments(teacher="t")
    config = students.SparseFormerForImageClassification.config_class(
        hidden_size=16, focusing_hidden_size=8, num_hidden_layers=2, num_latent_tokens=4, stem_channels=4
    )
    student = students.SparseFormerForImageClassification(config)
    tuned = students.freeze(student, pair, 3)
    schedule = students.ScheduleArguments(
        learning_rate=1.0, warmup_epochs=1, inherited_learning_rate=0.1, optimizer=optimizer
    )
    optimizer, scheduler = students.build_optimizer(student, tuned, schedule, steps_per_epoch=4, epochs=3)
    rates = []
    for _ in range(12):
        rates.append(sorted({group["lr"] for group in optimizer.param_groups}))
        optimizer.step()
        scheduler.step()
    assert [rate[-1] for rate in rates[:4]] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert [rate[0] for rate in rates[:4]] == [0, 0, 0, 0]
    assert rates[4] == pytest.approx([0.1, 1.0])
    # A line is as high in the middle, and nowhere else.
    assert rates[6] == pytest.approx([0.0853553, 0.853553])
    assert rates[8] == pytest.approx([0.05, 0.5])
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in student.parameters() if p.requires_grad}
    rois = student.sparseformer.latents.initial_rois
    assert all(
        group["weight_decay"] == 0 for group in optimizer.param_groups if any(p is rois for p in group["params"])
    )


@pytest.mark.parametrize(
    ("arguments", "trained_layers"),
    [
        (("--tune", "0"), []),
        (("--tune-all",), [0, 1]),
        (("--truncate", "0", "--tune", "2"), [0, 1]),
        (("--no-inherit-blocks",), [0, 1]),
    ],
    ids=["all frozen", "all tunable", "without truncation", "without inherited blocks"],
)
def test_the_ablations_choose_what_is_trained(teacher, arguments, trained_layers):
    argv = ["--teacher", str(teacher), "--config-overrides", SMALL, *arguments]
    (pair,) = ArgumentParser([students.StudentArguments], "test", "").parse(argv)
    model = AutoModelForImageClassification.from_pretrained(teacher)
    teacher_format = students.ImageFormat.from_processor(AutoImageProcessor.from_pretrained(teacher))
    students.apply_recipe([pair], (224, 224))
    student = students.build_student(pair, read_anatomy(model), teacher_format)
    students.freeze(student, pair, 3)
    trained = [
        number
        for number, layer in enumerate(student.sparseformer.layers)
        if all(parameter.requires_grad for parameter in layer.parameters())
    ]
    assert trained == trained_layers
    assert not student.classifier.weight.requires_grad
    assert student.sparseformer.layernorm.weight.requires_grad == ("--no-inherit-blocks" in arguments)


def test_distills_with_labels_at_another_size(teacher, tmp_path):
    """Class distributions instead of embeddings, a cross-entropy added, and a student that sees more pixels."""
    results = run(
        teacher,
        tmp_path / "out",
        *("--loss", "kl", "--temperature", "5", "--label-loss-weight", "0.5", "--image-size", "48"),
        epochs=1,
    )
    assert results["epochs"][0]["train_loss"] > 0
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert student.config.image_size == 48
    processor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert processor["size"] == {"height": 48, "width": 48}


def test_continues_with_more_tokens_at_the_lower_rate(first, teacher, tmp_path):
    options = ("--student", str(first), "--num-latent-tokens", "9")
    results = run(teacher, tmp_path / "out", *options, images=32, epochs=None)
    assert results["arguments"]["learning_rate"] == 5e-5
    assert (results["arguments"]["warmup_epochs"], len(results["epochs"])) == (0, 5)
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert student.config.num_latent_tokens == len(student.sparseformer.latents.initial_rois) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--student", "{teacher}"), "no SparseFormer"),
        (("--tune", "7"), "7 blocks"),
        (("--config-overrides", "stem_chanels=8"), "no 'stem_chanels'"),
        (("--truncate", "3"), "`truncate`"),
    ],
)
def test_bad_input_is_one_clear_error(teacher, tmp_path, arguments, message):
    arguments = [argument.format(teacher=teacher) for argument in arguments]
    with pytest.raises(ValueError, match=message):
        run(teacher, tmp_path / "out", *arguments, epochs=1)
    assert not (tmp_path / "out" / "model.safetensors").exists()


TOWER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
IMAGES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def save_clip(folder):
    text = {**TOWER, "num_hidden_layers": 1, "vocab_size": 30}
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).save_pretrained(folder)
    CLIPImageProcessor(**IMAGES).save_pretrained(folder)
    return str(folder)


def test_bootstraps_the_image_side_of_a_clip_from_images_alone(tmp_path):
    torch.manual_seed(0)
    name = save_clip(tmp_path / "teacher")
    results = run(name, tmp_path / "out", "--learning-rate", "3e-3", images=256, epochs=2)
    first, last = results["epochs"][0], results["epochs"][-1]
    assert last["alignment"] > first["alignment"] and "accuracy" not in last
    student = SparseFormerVisionModelWithProjection.from_pretrained(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "mean cosine with the teacher's embeddings" in card
    projection = CLIPModel.from_pretrained(tmp_path / "teacher").visual_projection
    assert torch.equal(student.visual_projection.weight, projection.weight)
    # More tokens, from where it stands.
    more = ("--student", str(tmp_path / "out"), "--num-latent-tokens", "5")
    run(name, tmp_path / "more", *more, images=32, epochs=1)
    student = SparseFormerVisionModelWithProjection.from_pretrained(tmp_path / "more")
    assert student.config.num_latent_tokens == 5


def test_an_embedding_has_no_classes_to_compare(first, tmp_path):
    name = save_clip(tmp_path / "clip")
    for options in (("--loss", "kl"), ("--label-loss-weight", "1")):
        with pytest.raises(ValueError, match="compare classes, and .* is no classifier"):
            run(name, tmp_path / "out", *options)
        AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="gives embeddings 32 wide and --teacher 24"):
        bootstrap.main(["--teacher", name, "--student", str(first), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("open_clip:ViT-B-32", "has no weights; give open_clip:MODEL:PRETRAINED"),
        ("open_clip:local-dir:nowhere", "Cannot load the open_clip model 'local-dir:nowhere'"),
    ],
)
def test_open_clip_models_that_cannot_be_loaded(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(name, tmp_path / "out")


def resolve(argv, size):
    groups = [students.StudentArguments, bootstrap.AlignmentArguments, students.ScheduleArguments]
    argv = ["--teacher", "t", "--output", "o", *argv]
    arguments = ArgumentParser([*groups, BootstrapRunArguments], "test", "").parse(argv)
    students.apply_recipe(arguments, size)
    return {name: value for group in arguments for name, value in vars(group).items()}


@pytest.mark.parametrize(
    ("argv", "size", "expected"),
    [
        ([], (32, 32), {"recipe": "small", "learning_rate": 6e-3, "epochs": 20, "batch_size": 64, "repeats": 2}),
        ([], (96, 96), {"recipe": "small", "truncate": 1, "crop_scale": [0.8, 1.0], "token_loss_weight": 4}),
        ([], (384, 384), {"recipe": "paper", "truncate": 1 / 3, "token_loss_weight": 0, "config_overrides": ""}),
        (["--recipe", "paper"], (32, 32), {"recipe": "paper", "warmup_epochs": 1, "config_overrides": ""}),
        (["--learning-rate", "1e-3", "--repeats", "1"], (32, 32), {"learning_rate": 1e-3, "repeats": 1}),
        (["--teacher-cache", "c"], (32, 32), {"recipe": "small", "token_loss_weight": 0}),
        (["--student", "s"], (32, 32), {"recipe": "paper", "learning_rate": 5e-5, "epochs": 5, "warmup_epochs": 0}),
        (["--student", "s", "--recipe", "small"], (32, 32), {"learning_rate": 1.5e-3, "epochs": 5}),
    ],
)
def test_the_recipe_fits_the_images_and_what_is_given_goes_before(argv, size, expected):
    resolved = resolve(argv, size)
    assert {name: resolved[name] for name in expected} == expected


def test_given_configuration_goes_before_the_recipes():
    given = "stem_channels=8,hidden_act=gelu,pooled_class_tokens=[0,1]"
    name, *recipes_own = bootstrap.RECIPES["small"]["config_overrides"].split(",")
    overrides = resolve(["--config-overrides", given], (32, 32))["config_overrides"]
    assert name == "stem_channels=48"
    values = students.read_values("config_overrides", overrides)
    assert values.pop("stem_channels") == 8 and values.pop("hidden_act") == "gelu"
    assert values.pop("pooled_class_tokens") == [0, 1]
    assert [f"{name}={value}" for name, value in values.items()] == recipes_own
    # What is recorded gives the same when it is read again.
    assert resolve(["--config-overrides", overrides], (32, 32))["config_overrides"] == overrides


def test_says_what_it_does_and_ends_with_both_side_by_side(teacher, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(side_by_side, "LIMIT", 0.1)
    arguments = {"images": 64, "epochs": 1}
    options = ("--recipe", "small", "--compare", "true")
    results = run(teacher, tmp_path / "out", *options, **arguments)
    model = AutoModelForImageClassification.from_pretrained(teacher)
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    rows, best = results["comparison"], results["best"]
    assert [row["parameters"] for row in rows] == [model.num_parameters(), student.num_parameters()]
    assert [row["tokens"] for row in rows] == [17, 4]
    assert [row["macs"] for row in rows] == [count_macs(either, 32).macs_with_attention for either in (model, student)]
    assert [row["accuracy"] for row in rows] == [best["teacher_accuracy"], best["accuracy"]]
    assert all(row["images/s, 1"] > 0 and row["images/s, 32"] > 0 for row in rows)

    assert "images/s, 32" in capsys.readouterr().out

    # What is finished is compared again.
    speeds = [{"images/s, 1": 10.0, "images/s, 32": 20.0}, {"images/s, 1": 5.0, "images/s, 32": 30.0}]
    for student_speeds, warns in ((speeds[1], True), ({"images/s, 1": 11.0, "images/s, 32": 30.0}, False)):
        AcceleratorState._reset_state(True)
        monkeypatch.setattr(side_by_side, "compare_speeds", lambda *_, last=student_speeds: [speeds[0], last])
        again = run(teacher, tmp_path / "out", *options, **arguments)
        assert again["comparison"][1]["images/s, 1"] == student_speeds["images/s, 1"]
        warning = "Warning: the student is not faster than its teacher, 0.50 times its images/s in batches of 1. Fewer"
        assert (warning in capsys.readouterr().out) == warns


def test_a_comparison_of_what_has_no_classes_and_of_other_pixels(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(side_by_side, "LIMIT", 0.1)
    name = save_clip(tmp_path / "clip")
    results = run(name, tmp_path / "out", "--compare", "true", "--image-size", "48", images=64, epochs=1)
    teacher, student = results["comparison"]
    assert teacher["alignment"] is None and student["alignment"] == results["best"]["alignment"]
    clip = CLIPModel.from_pretrained(tmp_path / "clip")
    of_images = [*clip.vision_model.parameters(), *clip.visual_projection.parameters()]
    assert teacher["parameters"] == sum(parameter.numel() for parameter in of_images)
    assert student["macs"] > 0 and "48 x 48 pixels" in capsys.readouterr().out


def test_a_teacher_whose_image_processor_makes_other_images_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    SiglipVisionModel(SiglipVisionConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(tmp_path / "teacher")
    SiglipImageProcessor(size={"height": 48, "width": 48}).save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match="its image processor makes, images of 48 x 48"):
        bootstrap.main(["--teacher", str(tmp_path / "teacher"), "--output", str(tmp_path / "out")])
    AcceleratorState._reset_state(True)


def test_a_compiled_teacher_says_the_same(teacher, tmp_path):
    """Also to those who watch its blocks."""
    options = ("--token-loss-weight", "1", "--max-grad-norm", "0")
    expected = run(teacher, tmp_path / "plain", *options, epochs=1)["epochs"][0]
    counters.clear()
    compiled = run(teacher, tmp_path / "compiled", *options, "--compile-teacher", epochs=1)["epochs"][0]
    for name in ("train_loss", "alignment", "teacher_accuracy"):
        assert compiled[name] == pytest.approx(expected[name], rel=1e-4)
    assert counters["stats"]["unique_graphs"] > 0


def inherited(teacher, output_dir, *arguments, epochs=2):
    bootstrap.main(
        [
            *("--teacher", str(teacher), "--output", str(output_dir), "--focusing", "inherited"),
            *("--train-split", "train[:128]", "--eval-split", "test[:64]", "--batch-size", "32", "--no-compare"),
            *("--num-latent-tokens", "16", "--epochs", str(epochs)),
            *arguments,
        ]
    )
    AcceleratorState._reset_state(True)
    return json.loads((output_dir / "results.json").read_text(encoding="utf-8"))


LEARNED = ("--placement", "content", "--placement-rule", "learned")


def test_an_inherited_start_trains_all_but_cells_and_classifier(teacher, tmp_path):
    results = inherited(teacher, tmp_path / "out", *LEARNED)
    assert results["arguments"]["recipe"] == "inherited"
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    model = AutoModelForImageClassification.from_pretrained(teacher)
    start = type(student).from_teacher(model, 16, focusing="inherited", placement="content", placement_rule="learned")
    before, after = start.state_dict(), student.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"sparseformer.latents.initial_rois", "classifier.weight", "classifier.bias"}
    # All blocks are there, and as many rates as there are kinds of weights.
    assert len(student.sparseformer.layers) == model.config.num_hidden_layers


MAPS = ("--dense-loss-weight", "1", "--dense-layers", "-1", "-2", "--elastic-token-counts", "4", "16")


def test_maps_are_aligned(teacher, tmp_path):
    """Maps are aligned at every count of tokens."""
    without, dense = (
        inherited(teacher, tmp_path / name, *given, "--learning-rate", "5e-3", epochs=3)["epochs"]
        for name, given in {"without": MAPS[-3:], "dense": MAPS}.items()
    )
    distances = [
        with_maps["train_loss"] - alone["train_loss"] for with_maps, alone in zip(dense, without, strict=True)
    ]
    assert distances[0] > distances[-1] > 0


def test_attention_is_cached_beside_embeddings_for_all_placements(teacher, tmp_path):
    cache, losses = ("--teacher-cache", str(tmp_path / "cache")), {}
    runs = {"without": LEARNED, "first": (*LEARNED, *cache), "grid": cache, "second": (*LEARNED, *cache)}
    for name, options in runs.items():
        losses[name] = inherited(teacher, tmp_path / name, *options)["epochs"][-1]["train_loss"]
    assert losses["second"] == losses["first"] == pytest.approx(losses["without"], rel=1e-5)


def test_maps_are_cached_in_half_precision(teacher, tmp_path):
    """Maps from the cache train as those that are put into it; the teacher is asked once."""
    cache, losses = ("--teacher-cache", str(tmp_path / "cache")), {}
    for name, options in {"without": (), "first": cache, "second": cache}.items():
        losses[name] = inherited(teacher, tmp_path / name, *MAPS, *options)["epochs"][-1]["train_loss"]
    assert losses["second"] == losses["first"] == pytest.approx(losses["without"], rel=1e-3)
    maps = np.load(tmp_path / "cache" / "epoch-00000-maps.npy")
    width = AutoConfig.from_pretrained(teacher).hidden_size
    assert maps.dtype.itemsize == 2 and maps.shape[1] == 2 * width * 16 and maps.any(1).all()
    with pytest.raises(ValueError, match="holds embeddings for other maps"):
        inherited(teacher, tmp_path / "other", *MAPS, "--dense-layers", "-1", *cache)


def test_upsamplers_learn_with_the_tokens_and_go_on(teacher, tmp_path, monkeypatch):
    """The student is a backbone, whose maps are nearer to its teacher's for its upsampler; it stays one when it goes
    on, here from a tag on the hub."""
    maps, counts = ("--dense-loss-weight", "1"), ("--elastic-token-counts", "4", "16")
    upsampler = ("--upsampler-hidden-size", "16")
    with pytest.raises(ValueError, match="nothing aligns; give --dense-loss-weight"):
        inherited(teacher, tmp_path / "out", *counts, *upsampler)
    losses = {
        name: inherited(teacher, tmp_path / name, *maps, *counts, *options, "--learning-rate", "5e-3", epochs=3)
        for name, options in {"plain": (), "out": upsampler}.items()
    }
    plain, upsampled = (found["epochs"][-1]["train_loss"] for found in losses.values())
    assert upsampled < plain
    student = PatchSparseFormerBackbone.from_pretrained(tmp_path / "out")
    assert type(student).__name__ in student.config.architectures
    [trained] = student.feature_maps.upsamplers.values()
    assert trained.out_proj.weight.any()
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ".feature_maps" in card and "last_hidden_state" not in card
    repository, commit = tmp_path / "models--someone--student", "1" * 40
    shutil.copytree(tmp_path / "out", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    options = ("--student", "someone/student@v1", "--epochs", "1")
    run(teacher, tmp_path / "on", *maps, *options, "--recipe", "inherited", "--config-overrides", "", epochs=None)
    [gone_on] = PatchSparseFormerBackbone.from_pretrained(tmp_path / "on").feature_maps.upsamplers.values()
    assert gone_on.out_proj.weight.any() and not torch.equal(gone_on.out_proj.weight, trained.out_proj.weight)


def elastic(teacher, output_dir, *arguments, **options):
    counts = ("--elastic-token-counts", "16", "4", "9", "6", "12")
    return inherited(teacher, output_dir, *counts, "--learning-rate", "5e-3", *arguments, **options)


def test_one_student_for_several_counts_of_tokens(teacher, tmp_path, monkeypatch):
    """The smallest gains, too, and the evaluation, the card and the comparison have all."""
    monkeypatch.setattr(side_by_side, "LIMIT", 0.0)
    results = elastic(teacher, tmp_path / "out", "--compare", epochs=6)
    assert [row["model"] for row in results["comparison"]] == ["teacher", *["student"] * 5]
    macs = [row["macs"] for row in results["comparison"][1:]]
    assert macs == sorted(macs) and len({*macs}) == 5
    first, last = results["epochs"][0], results["epochs"][-1]
    counts = [4, 6, 9, 12, 16]
    for count in counts:
        assert last[f"alignment_{count}"] > first[f"alignment_{count}"]
        assert f"accuracy_{count}" in last
    assert last["alignment"] == pytest.approx(sum(last[f"alignment_{count}"] for count in counts) / 5)
    assert last["accuracy"] == last["accuracy_16"]
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert student.config.elastic_token_counts == counts
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "with 4, 6, 9, 12, 16 latent tokens and [CLS], of which a call chooses" in card
    assert "| num_tokens |" in card and "\n| 12 |" in card
    other = inherited(teacher, tmp_path / "alone", "--learning-rate", "5e-3", epochs=6)["epochs"][-1]
    # What trains for one count alone is worse at others.
    alone = AutoModelForImageClassification.from_pretrained(tmp_path / "alone")
    images = torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        embeddings = [model.base_model(images, num_tokens=4).pooler_output for model in (student, alone)]
        expected = AutoModelForImageClassification.from_pretrained(teacher).vit(images).last_hidden_state[:, 0]
    ours, theirs = (torch.cosine_similarity(found, expected).mean() for found in embeddings)
    assert ours > theirs and other["alignment"] > 0


def test_an_existing_student_learns_other_counts(teacher, tmp_path):
    inherited(teacher, tmp_path / "one", epochs=1)
    arguments = ("--student", str(tmp_path / "one"), "--elastic-token-counts", "4", "16")
    results = inherited(teacher, tmp_path / "more", *arguments, epochs=1)
    assert {"alignment_4", "alignment_16"} <= results["best"].keys()
    # Whose counts are kept by what goes on from it.
    again = inherited(teacher, tmp_path / "again", "--student", str(tmp_path / "more"), epochs=1)
    assert {"alignment_4", "alignment_16"} <= again["best"].keys()


def test_smaller_counts_may_learn_from_the_tokens_of_the_largest(teacher, tmp_path):
    """The nearer theirs are then, in every layer."""

    def distance(folder):
        student = AutoModelForImageClassification.from_pretrained(folder).base_model
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            few, many = (student(images, num_tokens=count, **TokenAlignment.arguments) for count in (4, 16))
        return distance_from_largest(few, many, student.config.num_prefix_tokens)

    faster = ("--inherited-learning-rate", "1")
    elastic(teacher, tmp_path / "without", *faster, epochs=2)
    elastic(teacher, tmp_path / "with", *faster, "--elastic-loss-weight", "10", epochs=2)
    assert distance(tmp_path / "with") < 0.9 * distance(tmp_path / "without")
    with pytest.raises(ValueError, match="the student has one; give --elastic-token-counts"):
        inherited(teacher, tmp_path / "one", "--elastic-loss-weight", "1", epochs=1)
    AcceleratorState._reset_state(True)


def test_counts_are_chosen_by_a_sandwich_rule():
    config = SparseFormerConfig(num_latent_tokens=49, elastic_token_counts=[9, 16, 25, 36, 49])
    chosen = [students.token_counts_to_train(config, f"0-{step}") for step in range(50)]
    assert all(len({*counts}) == 4 and (counts[0], counts[-1]) == (49, 9) for counts in chosen)
    assert {count for counts in chosen for count in counts} == {9, 16, 25, 36, 49}
    assert chosen == [students.token_counts_to_train(config, f"0-{step}") for step in range(50)]
    config.elastic_token_counts = [9, 49]
    assert students.token_counts_to_train(config, "") == [49, 9]
    config.elastic_token_counts = None
    assert students.token_counts_to_train(config, "") == [49]


def test_the_inherited_rate_is_there_from_the_first_step(teacher):
    argv = ["--teacher", str(teacher), "--focusing", "inherited", *LEARNED]
    argv += ["--learning-rate", "1.0", "--warmup-epochs", "1"]
    groups = [students.StudentArguments, students.ScheduleArguments]
    pair, schedule = ArgumentParser(groups, "test", "").parse(argv)
    students.apply_recipe([pair, schedule], (32, 32))
    model = AutoModelForImageClassification.from_pretrained(teacher)
    student = students.SparseFormerForImageClassification.from_teacher(
        model, 16, focusing="inherited", placement="content", placement_rule="learned"
    )
    tuned = students.freeze(student, pair, 3)
    optimizer, _ = students.build_optimizer(student, tuned, schedule, steps_per_epoch=4, epochs=3)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    base = student.sparseformer
    assert rates[id(base.placement.forecast.head.weight)] == pytest.approx(0.25)
    assert rates[id(base.layers[0].mlp.fc1.weight)] == pytest.approx(0.005)
    assert id(base.latents.initial_rois) not in rates


def test_no_group_of_the_optimizer_is_empty(teacher):
    """DeepSpeed would drop it. Here all that learns is inherited."""
    model = AutoModelForImageClassification.from_pretrained(teacher)
    student = students.SparseFormerForImageClassification.from_teacher(model, 16, focusing="inherited")
    schedule = students.ScheduleArguments(learning_rate=1.0, warmup_epochs=1, inherited_learning_rate=0.1)
    optimizer, _ = students.build_optimizer(student, {*student.parameters()}, schedule, steps_per_epoch=4, epochs=3)
    assert len(optimizer.param_groups) == 2 and all(group["params"] for group in optimizer.param_groups)
