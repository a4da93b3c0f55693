"""Test bootstrapping on a few images by `frugalvit bootstrap`, by `bootstrap` and by `BootstrapTrainer`."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from trainings import STUDENT, TINY_STUDENT, Pairs, assert_equal, logged, run_command, values_of
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor
from vision_transformers import KINDS, save_kind

import frugalvit
from drawn import draw_classes
from frugalvit import (
    BootstrapArguments,
    BootstrapTrainer,
    PatchSparseFormerConfig,
    PatchSparseFormerForImageClassification,
    PatchSparseFormerVisionModel,
    SparseFormerForImageClassification,
    bootstrap,
)
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training import students
from frugalvit.training.bootstrap import PRESETS, make_parser, make_trainer
from frugalvit.training.data import load_images
from frugalvit.training.students import token_counts_to_train
from frugalvit.training.views import EvalView, as_images
from tiny import make_vit


run = functools.partial(run_command, "bootstrap")
PAPER = {"focusing": "paper", "preset": "paper", "config_overrides": TINY_STUDENT}
INHERITED = {"focusing": "inherited", "num_tokens": 16}
ONE_EPOCH = PAPER | {"per_device_train_batch_size": 16, "use_cpu": True, "num_train_epochs": 1}


@pytest.mark.parametrize(
    ("is_fast", "options", "expected"),
    [(True, {}, True), (False, {}, False), (False, {"bf16": True}, True), (True, {"bf16": False}, False)],
)
def test_fast_cpus_compute_in_bfloat16(monkeypatch, is_fast, options, expected):
    monkeypatch.setattr("frugalvit.training.bootstrap.bfloat16_is_fast", lambda: is_fast)
    args = BootstrapArguments(output_dir="unused", use_cpu=True, **options)
    assert args.bf16 is expected


def weights(folder):
    return AutoModelForImageClassification.from_pretrained(folder).state_dict()


def card_in(folder) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def pixels_of(trainer) -> torch.Tensor:
    """Return the normalized views of the first 32 evaluation images."""
    views = torch.stack([trainer.eval_dataset[index]["pixel_values"] for index in range(32)])
    return ImageFormat.from_config(trainer.student.config).normalize(views)


@pytest.fixture(scope="module")
def first(teacher, tmp_path_factory):
    """Train a student for 4 epochs of 8 steps. Return its trainer and its folder."""
    folder = tmp_path_factory.mktemp("first") / "out"
    options = PAPER | {"train_split": "train[:256]", "per_device_train_batch_size": 32, "num_train_epochs": 4}
    return run(folder, teacher=teacher, learning_rate=3e-3, logging_steps=8, **options), folder


def test_student_and_teacher_are_aligned(first):
    own, folder = first
    alignments, losses = logged(own, "eval_alignment"), logged(own, "loss")
    assert alignments[-1] > alignments[0] + 0.05 and losses[-1] < losses[0] - 0.05
    assert own.metrics["alignment"] == max(alignments) and "teacher_accuracy" in own.metrics
    student = AutoModelForImageClassification.from_pretrained(folder).eval()
    assert_equal(student.state_dict(), own.student.state_dict())
    pixels, labels = pixels_of(own), torch.tensor(own.eval_dataset.images["label"])
    with torch.no_grad():
        cosine = F.cosine_similarity(student.base_model(pixels).pooler_output, own.anatomy.embed(pixels)).mean()
        right = (student(pixels).logits.argmax(1) == labels).float().mean()
    assert cosine.item() == pytest.approx(own.metrics["alignment"], abs=1e-5)
    assert right.item() == pytest.approx(own.metrics["accuracy"], abs=1e-6)


def test_the_middle_is_tuned_and_the_end_stays(first, teacher):
    """The student has no copy of the teacher's block 0. Block 1 is tuned, and block 2 is frozen."""
    before, after = weights(teacher), weights(first[1])
    block, same = "layers.{}.mlp.fc1.weight", {"layernorm.weight": "layernorm.weight"}
    for name, theirs in (same | {block.format(0): block.format(1), block.format(1): block.format(2)}).items():
        is_tuned = name == block.format(0)
        assert torch.equal(after[f"sparseformer.{name}"], before[f"vit.{theirs}"]) != is_tuned
    assert torch.equal(after["classifier.weight"], before["classifier.weight"])


@pytest.fixture
def make(teacher, images, tmp_path):
    """Return a function that makes a trainer for two epochs of two steps, by default with a new student."""

    def make(student=None, train_dataset=images, **options):
        model = AutoModelForImageClassification.from_pretrained(teacher)
        torch.manual_seed(0)
        student = student or SparseFormerForImageClassification.from_teacher(model, 4, truncate=1, **STUDENT)
        options = {"num_train_epochs": 2, "per_device_train_batch_size": 16, "use_cpu": True} | options
        args = BootstrapArguments(output_dir=str(tmp_path / "out"), **options)
        processor = AutoImageProcessor.from_pretrained(teacher)
        return BootstrapTrainer(model, student, args, train_dataset, images, processor)

    return make


def test_the_teacher_embeds_repeated_views_once(make):
    options = {"eval_strategy": "no", "load_best_model_at_end": False, "bf16": False}
    trainer = make(views_per_image=2, num_train_epochs=4, token_loss_weight=0, **options)
    embed, kept_embedding = trainer.anatomy.embed, trainer.kept_embedding
    embedded = []

    def counted(pixels):
        embedded.append(len(pixels))
        return embed(pixels)

    def checked(pixel_values, *places):
        kept = kept_embedding(pixel_values, *places)
        torch.testing.assert_close(kept, embed(pixel_values))
        return kept

    trainer.anatomy = dataclasses.replace(trainer.anatomy, embed=counted)
    trainer.kept_embedding = checked
    trainer.train()
    assert sum(embedded) == 2 * len(trainer.train_dataset)


@pytest.mark.parametrize("kind", ["tokens", "placement", "stream"])
def test_views_per_image_needs_final_embeddings_alone(make, images, kind):
    student = None
    if kind == "placement":
        student = PatchSparseFormerForImageClassification.from_teacher(make_vit(num_labels=10), 4, placement="content")
    options = {"train_dataset": images.to_iterable_dataset(), "max_steps": 1} if kind == "stream" else {}
    with pytest.raises(ValueError, match="only the teacher's final embeddings are kept"):
        make(student, views_per_image=1, token_loss_weight=float(kind == "tokens"), **options)


def test_the_schedule_is_a_warm_up_and_half_a_cosine(make):
    """Inherited weights have a learning rate of 0 during the warm-up."""
    own = make(preset="paper", learning_rate=1.0, warmup_steps=4)
    own.create_optimizer()
    scheduler, rates = own.create_scheduler(12), []
    for _ in range(12):
        rates.append(sorted({group["lr"] for group in own.optimizer.param_groups}))
        own.optimizer.step()
        scheduler.step()
    assert [rate[-1] for rate in rates[:5]] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert [rate[0] for rate in rates[:4]] == [0, 0, 0, 0] and rates[4] == pytest.approx([0.1, 1.0])
    # At step 6, a cosine is higher than a straight line. At step 8, the middle of the decay, both are equally high.
    assert rates[6] == pytest.approx([0.0853553, 0.853553]) and rates[8] == pytest.approx([0.05, 0.5])
    decays = {weight: group["weight_decay"] for group in own.optimizer.param_groups for weight in group["params"]}
    assert decays.keys() == {weight for weight in own.student.parameters() if weight.requires_grad}
    assert decays[own.student.sparseformer.latents.initial_rois] == 0


@pytest.mark.parametrize("placement", ["content", "grid_then_content"])
def test_an_inherited_start_has_its_rate_from_the_first_step(make, teacher, placement):
    """The learning rate of inherited weights is 0.02 times that of the new module `placement.forecast`. Training
    changes all weights except the classifier's."""
    model = AutoModelForImageClassification.from_pretrained(teacher)
    student = PatchSparseFormerForImageClassification.from_teacher(teacher, 4, placement=placement)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    own = make(student, learning_rate=1.0, warmup_steps=4)
    assert (own.args.preset, own.args.inherited_lr_factor) == ("inherited", 0.02)
    own.create_optimizer()
    scheduler = own.create_scheduler(12)
    own.optimizer.step()
    scheduler.step()
    rates = {id(weight): group["lr"] for group in own.optimizer.param_groups for weight in group["params"]}
    base = student.base_model
    assert rates[id(next(base.embeddings.placement.forecast.parameters()))] == pytest.approx(0.25)
    assert rates[id(base.layers[0].mlp.fc1.weight)] == pytest.approx(0.005)
    # No parameter group may be empty, because DeepSpeed would drop an empty group.
    assert all(group["params"] for group in own.optimizer.param_groups)
    own = make(student, learning_rate=1e-3)
    own.train()
    still = {name for name, value in own.student.state_dict().items() if torch.equal(before[name], value)}
    assert still == {"classifier.weight", "classifier.bias"}
    # A student without an image format gets the teacher's image format.
    own = make(PatchSparseFormerForImageClassification.from_teacher(model, 16))
    assert own.student.config.image_std == (0.25,) * 3
    with pytest.raises(ValueError, match="inherits its teacher's patches and normalizes otherwise, .*image_processor"):
        make(PatchSparseFormerForImageClassification.from_teacher(model, 16, image_mean=0.4, image_std=0.5))
    config = PatchSparseFormerConfig(num_latent_tokens=16, hidden_size=48, num_attention_heads=4)
    with pytest.raises(ValueError, match="embeddings 48 wide. .* are 32 wide. Build the student by from_teacher"):
        make(PatchSparseFormerVisionModel(config))


# Each preset has its own defaults. For a new focusing stage, the preset depends on the teacher's image size.
INHERITED_DEFAULTS = {"preset": "inherited", "learning_rate": 1e-3, "inherited_lr_factor": 0.02, "warmup_steps": 0.05}
SMALL_DEFAULTS = {"preset": "small", "learning_rate": 6e-3, "num_train_epochs": 20, "token_loss_weight": 4}
PAPER_DEFAULTS = {"preset": "paper", "learning_rate": 2e-4, "token_loss_weight": 0, "per_device_train_batch_size": 128}
CONTINUED = {"num_train_epochs": 5, "warmup_steps": 0}
NEW_AT_32 = ["--focusing", "paper", "--config_overrides", TINY_STUDENT]
STARTS = {
    "inherited": ([], INHERITED_DEFAULTS),
    "new, 32 pixels": (NEW_AT_32, SMALL_DEFAULTS),
    "new, 224 pixels": ([*NEW_AT_32, "--teacher", "large"], PAPER_DEFAULTS),
    "continued inherited": (["--student", "inherited"], INHERITED_DEFAULTS | CONTINUED | {"learning_rate": 2.5e-4}),
    "continued, 32 pixels": (["--student", "new"], PAPER_DEFAULTS | CONTINUED | {"learning_rate": 5e-5}),
    "given": ([*NEW_AT_32, "--preset", "paper", "--warmup_steps", "0"], PAPER_DEFAULTS | {"warmup_steps": 0}),
}


@pytest.fixture(scope="module")
def starts(teacher, tmp_path_factory):
    """Save a teacher for images of 224 x 224 pixels and two students of a smaller teacher. Return their folder."""
    folder = tmp_path_factory.mktemp("starts")
    make_vit(num_labels=10, num_hidden_layers=3, image_size=224, patch_size=32).save_pretrained(folder / "large")
    ViTImageProcessor(size={"height": 224, "width": 224}).save_pretrained(folder / "large")
    SparseFormerForImageClassification.from_teacher(str(teacher), 4, truncate=1, **STUDENT).save_pretrained(
        folder / "new"
    )
    PatchSparseFormerForImageClassification.from_teacher(str(teacher), 4).save_pretrained(folder / "inherited")
    return folder


@pytest.mark.parametrize("start", STARTS)
def test_python_and_command_have_the_same_defaults(start, starts, teacher, images, tmp_path, monkeypatch):
    monkeypatch.chdir(starts)
    words, expected = STARTS[start]
    words = ["--teacher", str(teacher), "--output_dir", str(tmp_path / "out"), "--use_cpu", *words]
    own = make_trainer(*make_parser().parse(words), parts=(images, images))
    assert {name: getattr(own.args, name) for name in expected} == expected
    options, _, args = make_parser().parse(words)
    model, processor = (
        kind.from_pretrained(options.teacher) for kind in (AutoModelForImageClassification, AutoImageProcessor)
    )
    if options.student:
        student = type(own.student).from_pretrained(options.student)
    else:
        student = type(own.student).from_teacher(model, 4, image_processor=processor)
    python = BootstrapTrainer(model, student, args, images, images, processor)
    assert None not in [getattr(python.args, name) for name in PRESETS["paper"]]
    assert values_of([python.args]) == values_of([own.args])


@pytest.fixture(scope="module")
def weights_of_command(teacher, tmp_path_factory):
    """Bootstrap a student on 32 images by the command, and return its weights."""
    folder = tmp_path_factory.mktemp("command") / "out"
    # The command chooses the precision by default, as the call in Python does.
    run(folder, teacher=teacher, **PAPER, train_split="train[:32]", num_train_epochs=1, bf16=None)
    return weights(folder)


@pytest.mark.parametrize("kind", ["names", "PyTorch"])
def test_one_call_gives_what_the_command_gives(
    kind, weights_of_command, images, pictures, teacher, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    if kind == "names":
        given, evaluation = "cifar10-subset", {"train_split": "train[:32]", "eval_split": "test[:32]"}
    else:
        given = Pairs(pictures, images["label"], images.features["label"].names)
        evaluation = {"eval_images": load_images("cifar10-subset", "test[:32]")}
    found = bootstrap(str(teacher), given, output=tmp_path / "out", **ONE_EPOCH, **evaluation).state_dict()
    assert_equal(found, weights(tmp_path / "out"))
    assert_equal(found, weights_of_command)
    card = card_in(tmp_path / "out")
    assert ("uoft-cs/cifar10" in card) == (kind == "names")
    assert "ipykernel" not in card and str(tmp_path) not in card


MULTI_LABEL = {
    "teacher": make_vit(num_labels=10, problem_type="multi_label_classification"),
    "processing_class": ViTImageProcessor(size={"height": 32, "width": 32}),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # The data set is checked before the teacher is loaded.
        ({"teacher": "no/teacher", "images": "nowhere/at/all"}, "'nowhere/at/all'.* is no data set"),
        ({"student": "{teacher}"}, "student is .*, a vit, expected a SparseFormer"),
        (MULTI_LABEL | {"loss": "kl"}, "loss kl or label_loss_weight is for one label an image"),
    ],
)
def test_wrong_arguments_are_exceptions(options, message, teacher, tmp_path):
    """The error is a ValueError, because SystemExit would end a notebook. No model is saved."""
    splits = {"train_split": "train[:32]", "eval_split": "test[:16]"}
    options = {"teacher": str(teacher), "images": "cifar10-subset"} | ONE_EPOCH | splits | options
    options = {name: value.format(teacher=teacher) if name == "student" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        bootstrap(output=tmp_path / "out", **options)
    assert not (tmp_path / "out" / "config.json").exists()


def test_labels_are_the_teachers_by_name_or_left_out(teacher, class_names, tmp_path, capsys):
    """Labels become the teacher's class numbers in all splits. If the teacher lacks a class, labels are left out."""
    trainers, options = {}, PAPER | {"train_split": None, "eval_split": None, "num_train_epochs": 1}
    for folder, names in (("known", class_names[:-4:-1]), ("unknown", ["axolotl", "yak"])):
        for place, part in enumerate(("train", "val", "test")):
            draw_classes(tmp_path / folder / part, 4, names, 20 * place)
        trainers[folder] = run(tmp_path / f"{folder}-out", teacher=teacher, dataset=tmp_path / folder, **options)
    own = trainers["known"]
    assert "They are left out." in capsys.readouterr().out
    assert "accuracy" not in trainers["unknown"].metrics and "alignment" in trainers["unknown"].metrics
    # The class folders are sorted by name, so the order of labels differs from the order of writing.
    assert own.classes == [7, 8, 9] == [class_names.index(name) for name in ("horse", "ship", "truck")]
    for views in (own.train_dataset, own.eval_dataset, own.evaluation_views(str(tmp_path / "known" / "test"))):
        assert [views[index]["labels"] for index in range(12)] == [7] * 4 + [8] * 4 + [9] * 4
    with pytest.raises(ValueError, match="axolotl"):
        run(tmp_path / "out", teacher=teacher, dataset=tmp_path / "unknown", label_loss_weight=1, **options)


def test_maps_are_aligned_and_upsamplers_learn(teacher, tmp_path):
    """An upsampler makes feature maps more similar to the teacher's. A continued run trains the upsampler further."""
    options = INHERITED | {"teacher": teacher, "dense_loss_weight": 1, "num_tokens": [4, 16], "learning_rate": 5e-3}
    plain = logged(run(tmp_path / "plain", **options), "loss")
    upsampled = logged(run(tmp_path / "out", upsampler_hidden_size=16, **options), "loss")
    assert plain[0] > plain[-1] > upsampled[-1] > 0
    assert ".feature_maps" in card_in(tmp_path / "out") and "last_hidden_state" not in card_in(tmp_path / "out")
    options = {"student": tmp_path / "out", "dense_loss_weight": 1, "preset": "inherited", "num_train_epochs": 1}
    run(tmp_path / "on", teacher=teacher, **options)
    students = [frugalvit.PatchSparseFormerBackbone.from_pretrained(tmp_path / name) for name in ("out", "on")]
    trained, continued = (next(iter(each.feature_maps.upsamplers.values())).out_proj.weight for each in students)
    assert trained.any() and continued.any() and not torch.equal(continued, trained)
    assert students[0].config.architectures == ["PatchSparseFormerBackbone"]


def test_one_student_for_several_counts_of_tokens(teacher, tmp_path):
    """During the training, the alignment with the teacher grows for each number of tokens."""
    counts, options = [4, 6, 9, 16], INHERITED | {"learning_rate": 5e-3, "inherited_lr_factor": 1, "teacher": teacher}
    options |= {"num_tokens": [16, 4, 9, 6], "num_train_epochs": 3}
    own = run(tmp_path / "out", **options)
    alignments = {count: logged(own, f"eval_alignment_{count}") for count in counts}
    assert all(values[-1] > values[0] for values in alignments.values())
    assert own.metrics["alignment"] == pytest.approx(sum(own.metrics[f"alignment_{count}"] for count in counts) / 4)
    assert own.metrics["accuracy"] == own.metrics["accuracy_16"]
    card = card_in(tmp_path / "out")
    assert "with 4, 6, 9, 16 latent tokens and [CLS], of which a call chooses" in card and "\n| 9 |" in card
    # A continued run may change the numbers of tokens and the placement.
    on = options | {"student": tmp_path / "out", "train_split": "train[:16]", "num_train_epochs": 1}
    assert "alignment_4" in run(tmp_path / "trees", **on | {"num_tokens": [4, 16], "placement": "content"}).metrics
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "trees")
    assert (student.config.placement, student.config.elastic_token_counts) == ("content", [4, 16])


@pytest.mark.parametrize(("count", "warns"), [(64, False), (81, True)])
def test_more_tokens_than_the_teacher_has_patches(count, warns, monkeypatch):
    warnings = []
    monkeypatch.setattr(students.logger, "warning", warnings.append)
    anatomy = read_anatomy(make_vit(num_labels=3, patch_size=4))
    image_format = ImageFormat.from_processor(ViTImageProcessor(size={"height": 32, "width": 32}))
    students.build_student(students.StudentArguments(teacher="unused", num_tokens=[4, count]), anatomy, image_format)
    assert [text[:36] for text in warnings] == ["num_tokens has 81, more than the tea"] * warns


def test_counts_are_chosen_by_a_sandwich_rule():
    def chosen(counts, step=0):
        config = frugalvit.SparseFormerConfig(num_latent_tokens=49, elastic_token_counts=counts)
        return token_counts_to_train(config, f"0-{step}")

    many = [chosen([9, 16, 25, 36, 49], step) for step in range(50)]
    assert all(len({*counts}) == 4 and (counts[0], counts[-1]) == (49, 9) for counts in many)
    assert len({count for counts in many for count in counts}) == 5 and many[7] == chosen([9, 16, 25, 36, 49], 7)
    assert chosen([9, 49]) == [49, 9] and chosen(None) == [49]


CLASSES = {
    "classifier": SparseFormerForImageClassification,
    "projection": frugalvit.SparseFormerVisionModelWithProjection,
    "num_patches": frugalvit.SparseFormerVisionModel,
}


@pytest.mark.parametrize("kind", ["open_clip", "siglip-vision", "dinov2-registers"])
def test_a_folder_of_any_library_is_a_teacher(kind, pictures, tmp_path):
    """The teacher's outputs determine the student's model class. The saved processor matches `EvalView`."""
    options = {"teacher": save_kind(kind, tmp_path / "teacher"), "output_dir": str(tmp_path / "out")}
    groups, some = make_parser().parse_dict(ONE_EPOCH | options), as_images(pictures[:8])
    own, anatomy = make_trainer(*groups, parts=(some, some)), read_anatomy(KINDS[kind].make())
    assert -1 < own.evaluate()["eval_alignment"] < 1
    loss = own.compute_loss(own.model, next(iter(own.get_train_dataloader())))
    loss.backward()
    assert 0 < loss.item() < 2 and own.student.base_model.stem.convolution.weight.grad.any()
    own.save_model()
    student_class = next(CLASSES[name] for name in CLASSES if getattr(anatomy, name) is not None)
    student = student_class.from_pretrained(tmp_path / "out")
    assert student.config.architectures == [student_class.__name__] and student.config.pooling == anatomy.pooling.mode
    assert student.config.num_register_tokens == anatomy.num_register_tokens
    image_format = ImageFormat.from_config(student.config)
    pixels = image_format.normalize(EvalView(image_format)(pictures[0])["pixel_values"][None])
    expected = AutoImageProcessor.from_pretrained(tmp_path / "out")(pictures[0], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-5)
