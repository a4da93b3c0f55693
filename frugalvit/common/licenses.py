"""Licenses as the hub's model cards name them."""

import difflib


# The identifiers that the hub takes (docs/hub/repositories-licenses.md of huggingface/hub-docs, and the list of its
# form for new repositories). No library has them.
LICENSES = frozenset(
    {
        *("afl-3.0", "agpl-3.0", "apache-2.0", "apple-amlr", "apple-ascl", "artistic-2.0", "bigcode-openrail-m"),
        *("bigscience-bloom-rail-1.0", "bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause"),
        *("bsd-3-clause-clear", "bsl-1.0", "c-uda", "cc", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0"),
        *("cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0"),
        *("cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0"),
        *("cdla-permissive-1.0", "cdla-permissive-2.0", "cdla-sharing-1.0", "creativeml-openrail-m"),
        *("deepfloyd-if-license", "ecl-2.0", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1", "eupl-1.2"),
        *("fair-noncommercial-research-license", "gemma", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "grok2-community"),
        *("h-research", "intel-research", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "llama2", "llama3"),
        *("llama3.1", "llama3.2", "llama3.3", "llama4", "lppl-1.3c", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl"),
        *("odc-by", "ofl-1.1", "openmdw-1.0", "openmdw-1.1", "openrail", "openrail++", "osl-3.0", "other", "pddl"),
        *("postgresql", "unknown", "unlicense", "wtfpl", "zlib"),
    }
)


def license_problem(license) -> str | None:
    """The reason why the hub does not take a license, an identifier or a list of several; None if it does."""
    for each in license if isinstance(license, list) else [license]:
        if isinstance(each, str) and each in LICENSES:
            continue
        # Names of other registries are often an identifier in another case (MIT, Apache 2.0).
        close = difflib.get_close_matches(str(each).lower().replace(" ", "-"), sorted(LICENSES), n=1)
        hint = f"did you mean {close[0]}?" if close else 'give "other" for one that it does not list.'
        return f"the hub knows no license {each!r}; {hint}"
    return None


def check_license(license: str):
    """Raise a ValueError if the hub does not take a license that `--license` gives."""
    if problem := license_problem(license):
        raise ValueError(f"--license: {problem}")
