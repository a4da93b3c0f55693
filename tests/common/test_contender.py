"""Contenders: a teacher, a student with each count of tokens, what they cost, and speeds in turns."""

import pytest
import torch
from torch import nn
from vision_transformers import KINDS

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification, count_macs, read_anatomy
from frugalvit.common.contender import as_students, as_teacher, measure_speeds


@pytest.fixture(scope="module")
def student():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    focusing = {"stem_channels": 8, "num_sampling_points": 4, "focusing_hidden_size": 32, "num_focusing_iterations": 1}
    counts = {"num_latent_tokens": 9, "elastic_token_counts": [4, 9]}
    return SparseFormerForImageClassification(SparseFormerConfig(image_size=32, **sizes, **focusing, **counts)).eval()


def test_a_student_with_each_count(student):
    small, large = as_students(student, (32, 32))
    assert (small.num_tokens, large.num_tokens) == (4, 9)
    front = student.config.num_prefix_tokens
    assert (small.tokens, large.tokens, small.parameters) == (4 + front, 9 + front, student.num_parameters())
    images = small.noise(2)
    with torch.no_grad():
        assert torch.equal(small.model(images).logits, student(images, num_tokens=4).logits)
        assert torch.equal(large.model(images).logits, student(images).logits)
    assert small.macs < large.macs == count_macs(student, 32).macs_with_attention
    student.set_num_tokens(4)
    expected = count_macs(student, 32).macs_with_attention
    student.set_num_tokens(None)
    assert small.macs == expected


@pytest.mark.parametrize("kind", ["timm-vit", "vit-classifier", "clip"])
def test_a_teacher_at_its_own_and_at_another_size(kind):
    """It is timed as it runs itself; patches are those of its images."""
    anatomy = read_anatomy(KINDS[kind].make())
    teacher, larger = as_teacher(anatomy), as_teacher(anatomy, (32, 48), name="mine")
    images = anatomy.example()
    with torch.no_grad():
        expected = (anatomy.run_classifier or anatomy.run)(images)
        assert torch.equal(teacher.model(images), expected)
        assert torch.equal(teacher.embed(images), anatomy.run(images))
    assert (teacher.name, teacher.num_tokens, larger.name, larger.num_tokens) == ("teacher", 64, "mine", 96)
    assert teacher.tokens - teacher.num_tokens == anatomy.num_prefix_tokens


def test_what_the_meta_device_cannot_run_is_counted_as_it_runs():
    """SigLIP 2 NaFlex reads the shapes of its images. It costs about what the model for one size does."""
    naflex, fixed = (as_teacher(read_anatomy(KINDS[kind].make())) for kind in ("siglip2", "siglip"))
    with pytest.raises(RuntimeError):
        count_macs(naflex.model, 32)
    assert naflex.macs == pytest.approx(fixed.macs, rel=0.01)


def test_each_sees_images_of_its_own_size(student):
    seen = []

    class Sees(nn.Linear):
        def forward(self, pixel_values):
            seen.append((tuple(pixel_values.shape), pixel_values.dtype))

    contenders = as_students(student, (32, 32))
    for contender, size, channels in zip(contenders, ((8, 8), (4, 6)), (3, 1), strict=True):
        contender.model, contender.image_size, contender.num_channels = Sees(1, 1), size, channels
    speeds = measure_speeds(contenders, 5, torch.bfloat16, rounds=1)
    assert len(speeds) == 2 and min(speeds) > 0
    assert seen == [((5, 3, 8, 8), torch.bfloat16), ((5, 1, 4, 6), torch.bfloat16)] * 3
