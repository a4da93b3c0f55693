"""Tests of the installed package and of its imports."""

import ast
import compileall
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

import frugalvit
from frugalvit.registry import FAMILIES
from frugalvit.versions import versions


ROOT = Path(__file__).resolve().parents[1]
# A module may import only from its own folder and from the folders before it in this tuple.
ROOMS = ("configuration", "modeling", "training", "frugalvit")


def python(code: str, cwd: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_version_is_the_installed_one():
    assert importlib.metadata.version("frugalvit") == frugalvit.__version__


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone has a commit")
def test_results_note_the_commit_of_a_clone():
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert head.startswith(versions()["commit"].partition(",")[0])


def test_public_names():
    for name in frugalvit.__all__[1:]:
        value = getattr(frugalvit, name)
        assert value.__name__ == name and value.__doc__ and name in dir(frugalvit)


def test_all_families_are_registered():
    files = (ROOT / "modeling").glob("modeling_*.py")
    assert {path.stem.removeprefix("modeling_") for path in files} == {*FAMILIES}


def test_auto_classes_have_all_families():
    for config_class in vars(frugalvit).values():
        if isinstance(config_class, type) and issubclass(config_class, PreTrainedConfig):
            assert type(AutoConfig.for_model(config_class.model_type)) is config_class
            assert config_class in IMAGE_PROCESSOR_MAPPING
    for name in ("SparseFormer", "PatchSparseFormer"):
        assert MODEL_MAPPING[getattr(frugalvit, f"{name}Config")] is getattr(frugalvit, f"{name}Model")


def test_inference_imports_no_library_of_training():
    code = (
        "import sys, frugalvit\nassert len([*frugalvit.Embedder('cifar10-convmixer')(['docs/dog.png'])]) == 1\n"
        "assert not {'datasets', 'pyarrow', 'timm', 'evaluate', 'frugalvit.training.trainer'} & {*sys.modules}"
    )
    result = python(code, ROOT)
    assert not result.returncode, result.stderr


SOURCES = sorted(path for folder in ROOMS for path in (ROOT / folder).rglob("*.py"))


def test_imports_point_one_way():
    for path in SOURCES:
        room, *folders = path.relative_to(ROOT).parent.parts
        package = ".".join(["frugalvit", *([] if room == "frugalvit" else [room]), *folders])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [importlib.util.resolve_name("." * node.level + (node.module or ""), package)]
            for first, target, *_ in ([*module.split("."), ""] for module in modules):
                if first == "frugalvit":
                    target = target if target in ROOMS else "frugalvit"
                    assert ROOMS.index(target) <= ROOMS.index(room), f"{path} imports {ast.unparse(node)}"


def test_wheel_holds_code_data_and_checkpoints(tmp_path):
    for name in (*ROOMS, "checkpoints", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    result = python("from setuptools import build_meta; print(build_meta.build_wheel('.'))", tmp_path)
    assert not result.returncode, result.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    expected = {
        f"frugalvit/{path.relative_to(ROOT) if path.parts[-2] != 'frugalvit' else path.name}"
        for folder in ROOMS
        for path in (ROOT / folder).glob("*.py")
    }
    for folder in ("training/cifar10", "checkpoints/cifar10-vit", "checkpoints/cifar10-sparseformer"):
        expected |= {f"frugalvit/{folder}/{path.name}" for path in (ROOT / folder).iterdir() if path.is_file()}
    assert {*expected, "frugalvit/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests", "benchmarks"))]
    # The models and photographs of Caltech-101 would make the wheel too large.
    assert not [name for name in names if "caltech101" in name]


@pytest.mark.nightly
def test_bytecode_alone_loads_models(tmp_path):
    """Programs made by PyInstaller contain bytecode and no source files."""
    for room in ("", "configuration", "modeling", "training", "checkpoints"):
        ignored = shutil.ignore_patterns("__pycache__", "*.parquet", "caltech101-*", "*-vit*", "*-clip", "*-llava")
        place = tmp_path / "frugalvit" / room
        shutil.copytree(ROOT / (room or "frugalvit"), place, ignore=ignored, dirs_exist_ok=True)
    compileall.compile_dir(tmp_path, legacy=True, quiet=1)
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    code = """import frugalvit
print(frugalvit.SparseFormerForImageClassification.from_pretrained(frugalvit.checkpoint_path("cifar10-sparseformer")))
"""
    assert python(code, cwd=tmp_path).stdout.startswith("SparseFormerForImageClassification(")


def test_a_clone_named_frugalvit_does_not_hide_the_package(tmp_path):
    """`import frugalvit` finds the installed package. If no package is installed, the error gives the pip command."""
    (tmp_path / "frugalvit").symlink_to(ROOT)
    code = "import frugalvit.modeling.hosts, frugalvit.training; print(frugalvit.__version__)"
    assert python(code, tmp_path).stdout == f"{frugalvit.__version__}\n"
    # Python's option `-S` hides installed packages.
    for place in (tmp_path, ROOT):
        ran = python("import frugalvit", place, "-S")
        assert ran.returncode == 1 and "pip install -e ." in ran.stderr.splitlines()[-1]
