"""Map the repository's folders to the installed packages. All other settings are in pyproject.toml."""

from setuptools import setup


PACKAGES = {
    "frugalvit": "frugalvit",
    "frugalvit.evaluation": "frugalvit/evaluation",
    "frugalvit.configuration": "configuration",
    "frugalvit.modeling": "modeling",
    "frugalvit.modeling.hosts": "modeling/hosts",
    "frugalvit.training": "training",
    "frugalvit.checkpoints": "checkpoints",
}

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={
        "frugalvit": ["page/*.html", "py.typed"],
        "frugalvit.training": ["cifar10/*.parquet", "cifar10/README.md", "launch/*.yaml", "recipes/*.yaml"],
        "frugalvit.checkpoints": ["*/*"],
    },
    # Leave these large checkpoints out of the package.
    exclude_package_data={
        "": ["__pycache__/*", "*/__pycache__/*"],
        "frugalvit.checkpoints": ["caltech101-*/*"],
    },
)
